"""Linear attention by Triton kernels, as an operator of torch; symbols as in the kernels."""

# The decorator hides the type of an operator.
# pyright: reportCallIssue=false, reportFunctionMemberAccess=false

import math
from typing import Any

import torch
from torch import Tensor

from protlm.attention.linearized.case import Attend
from protlm.attention.linearized.features import FeatureMap
from protlm.attention.linearized.fused import bidirectional_kernels, causal_kernels, shared_kernels
from protlm.attention.linearized.fused.blocks import (
    CAUSAL,
    FORWARD,
    GRADIENTS,
    KEY_GRADIENTS,
    BlockTable,
    Grid,
    causal_blocks,
)

_Four = tuple[Tensor, Tensor, Tensor, Tensor]


class _Pass:
    """The arguments of the kernels of a pass, by their names, and their grids."""

    def __init__(self, causal: bool, *given: Any) -> None:
        self.q_BHLK, self.k_BHLK, self.v_BHLC, self.mask_BL, self.starts, *rest = given
        self.w_RK, bias_R, epsilon = rest
        names = {"q": self.q_BHLK, "k": self.k_BHLK, "v": self.v_BHLC}
        self.arguments: dict[str, Any] = {name: _by_position(x) for name, x in names.items()}
        self.arguments["mask"] = self.mask_BL.contiguous().view(torch.uint8)
        self.arguments |= {"w": self.w_RK, "bias": bias_R, "epsilon": epsilon, "CAUSAL": causal}

    def grid(self, table: BlockTable) -> Grid:
        return Grid.of(self.q_BHLK, self.v_BHLC, self.w_RK, table, self.starts)

    def new(self, *names: str) -> list[Tensor]:
        """Allocates O or gradients for the kernels; returns them as BHLK."""
        of = {"out": "v", "dq": "q", "dk": "k", "dv": "v"}
        made = [torch.empty_like(self.arguments[of[name]]) for name in names]
        self.arguments |= dict(zip(names, made, strict=True))
        return [x.transpose(1, 2) for x in made]

    def new_rows(self, name: str) -> Tensor:
        """Allocates a number for each position and head."""
        batch, heads, length, _ = self.q_BHLK.shape
        self.arguments[name] = self.w_RK.new_empty(batch, length, heads)
        return self.arguments[name]

    def sum_chunks(self, kernel: Any, grid: Grid, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns S, in the dtype of a tensor, and z of all chunks, which are the first axis."""
        s, z = grid.sums(like)
        given = {"s": s, "z": z, "states": None, "state_sums": None}
        grid.over_chunks(kernel, self.arguments | given)
        return s, z

    def sum_all(self, kernel: Any, grid: Grid, *, is_log: bool) -> tuple[Tensor, Tensor]:
        """Returns the sums over all positions of a sample, S in the dtype of the values."""
        if grid.num_chunks == 1:
            s, z = self.sum_chunks(kernel, grid, self.v_BHLC)
            return s[0], z[0]
        chunks = self.sum_chunks(kernel, grid, self.w_RK)
        s, z = _joined(*chunks) if is_log else (x.sum(dim=0) for x in chunks)
        return s.to(self.v_BHLC.dtype), z

    def sum_blocks(self, kernel: Any, grid: Grid) -> None:
        """Computes the states, s and z of other kernels, from the sums of chunks side by side."""
        is_one = grid.num_chunks == 1
        # A single chunk begins with no sums of others, and reads nothing: w is in their place.
        s, z = (self.w_RK,) * 2 if is_one else self.sum_chunks(kernel, grid, self.w_RK)
        # Those of the pass before are as large.
        self.arguments |= {"s": None, "z": None}
        states, state_sums = grid.sums(self.v_BHLC, of_blocks=True)
        given = {"s": s, "z": z, "states": states, "state_sums": state_sums}
        grid.over_chunks(kernel, self.arguments | given)
        self.arguments |= {"s": states, "z": state_sums}


def _by_position(x_BHLK: Tensor) -> Tensor:
    """Returns BLHK, contiguous: heads lie between positions in memory, as those of a model do."""
    return x_BHLK.transpose(1, 2).contiguous()


@torch.library.triton_op("protlm::linear_attention", mutates_args=())
def attention(
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    mask_BL: Tensor,
    starts: Tensor | None,
    w_RK: Tensor,
    bias_R: Tensor | None,
    epsilon: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes attention of q, k and v in bfloat16 or float32; `causal` by chunks.

    w_RK are rows; bias_R constants c of positive features, or None for ReLU, whose ε is `epsilon`.
    Samples are those of the batch, or the S proteins of a single row, whose S + 1 bounds are
    `starts`.

    Returns the output, BHLC, in the dtype of the values. For the gradients: D or its logarithm,
    BLH; if bidirectional, S, SHRC, and z, SHR, and if causal, an empty tensor and M, SHR, which is
    empty for ReLU. All but S are in float32. Samples are on axis S.
    """
    with torch.cuda.device_of(q_BHLK):
        run = _Pass(causal, q_BHLK, k_BHLK, v_BHLC, mask_BL, starts, w_RK, bias_R, epsilon)
        return (_causal if causal else _bidirectional)(run)


@torch.library.triton_op("protlm::linear_attention_gradients", mutates_args=())
def _gradients(
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLC: Tensor,
    mask_BL: Tensor,
    starts: Tensor | None,
    w_RK: Tensor,
    bias_R: Tensor | None,
    epsilon: float,
    causal: bool,
    saved: list[Tensor],
    dout_BHLC: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.cuda.device_of(q_BHLK):
        run = _Pass(causal, q_BHLK, k_BHLK, v_BHLC, mask_BL, starts, w_RK, bias_R, epsilon)
        out_BHLC, run.arguments["totals"], *rest = saved
        run.arguments |= {"out": _by_position(out_BHLC), "dout": _by_position(dout_BHLC)}
        dq_BHLK, dk_BHLK, dv_BHLC = run.new("dq", "dk", "dv")
        run.new_rows("along")
        (_causal_gradients if causal else _bidirectional_gradients)(run, *rest)
    return dq_BHLK, dk_BHLK, dv_BHLC


def _bidirectional(run: _Pass) -> _Four:
    grid, run.arguments["references"] = run.grid(FORWARD), None
    is_log = run.arguments["bias"] is not None
    s_SHRC, z_SHR = run.sum_all(shared_kernels.sum_keys, grid, is_log=is_log)
    run.arguments |= {"s": s_SHRC, "z": z_SHR, "references": z_SHR}
    (out_BHLC,), totals_BLH = run.new("out"), run.new_rows("totals")
    grid.over_positions(shared_kernels.attend, run.arguments)
    return out_BHLC, totals_BLH, s_SHRC, z_SHR


def _joined(s: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Joins the softmaxes over chunks of the keys, which are the first axis."""
    highest = log_sums.amax(dim=0)
    weights = (log_sums - highest).exp2()
    total = weights.sum(dim=0)
    return ((weights / total)[..., None] * s).sum(dim=0), highest + total.log2()


def _bidirectional_gradients(run: _Pass, s_SHRC: Tensor, z_SHR: Tensor) -> None:
    grid = run.grid(GRADIENTS)
    run.arguments |= {"s": s_SHRC, "z": z_SHR, "references": z_SHR}
    grid.over_positions(shared_kernels.query_gradients, run.arguments)
    ds_SHRC, dz_SHR = run.sum_all(shared_kernels.sum_queries, grid, is_log=False)
    run.arguments |= {"s": ds_SHRC, "z": dz_SHR}
    run.grid(KEY_GRADIENTS).over_positions(bidirectional_kernels.key_gradients, run.arguments)


def _causal(run: _Pass) -> _Four:
    grid, references = run.grid(CAUSAL), None
    if run.arguments["bias"] is not None:
        references = _first_exponents(*_first_keys(run), run.w_RK)
    run.arguments["references"] = references
    run.sum_blocks(shared_kernels.sum_keys, grid)
    (out_BHLC,), totals_BLH = run.new("out"), run.new_rows("totals")
    grid.over_positions(shared_kernels.attend, run.arguments)
    # The states would take several times the memory of the inputs until the backward pass.
    nothing = run.v_BHLC.new_empty(0)
    references = run.w_RK.new_empty(0) if references is None else references
    return out_BHLC, totals_BLH, nothing, references


def _first_keys(run: _Pass) -> tuple[Tensor, Tensor]:
    """Returns the first key of each sample that is not padding, BHK, and which samples have one."""
    _, heads, length, width = run.k_BHLK.shape
    if run.starts is not None:
        # The last segments may be empty.
        first_S = run.starts[:-1].clamp(max=length - 1)
        return run.k_BHLK[0].index_select(1, first_S).transpose(0, 1), run.mask_BL[0][first_S]
    first_B111 = run.mask_BL.int().argmax(dim=1)[:, None, None, None]
    k_BHK = run.k_BHLK.gather(2, first_B111.expand(-1, heads, 1, width))[:, :, 0]
    return k_BHK, run.mask_BL.any(dim=1)


def _first_exponents(k_BHK: Tensor, has_keys_B: Tensor, w_RK: Tensor) -> Tensor:
    """Returns M, the exponents of the first keys, BHR."""
    # A sample may be all padding, which may be NaN.
    k_BHK = k_BHK.float().masked_fill(~has_keys_B[:, None, None], 0)
    half_square_BH1 = k_BHK.square().sum(dim=-1, keepdim=True) * (0.5 * math.log2(math.e))
    return k_BHK @ w_RK.mT - half_square_BH1 / k_BHK.shape[-1] ** 0.5


def _causal_gradients(run: _Pass, _: Tensor, references: Tensor) -> None:
    grid, back = run.grid(CAUSAL), run.grid(causal_blocks(run.q_BHLK.device))
    run.arguments["references"] = None if run.arguments["bias"] is None else references
    run.sum_blocks(shared_kernels.sum_keys, grid)
    back.over_positions(shared_kernels.query_gradients, run.arguments)
    run.sum_blocks(shared_kernels.sum_queries, grid)
    grid.over_positions(causal_kernels.value_gradients, run.arguments)
    back.over_positions(causal_kernels.key_gradients, run.arguments)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.epsilon, ctx.causal = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, dout_BHLC: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    # q, k, v, the mask, the bounds, the rows and c are the first seven.
    inputs, saved = ctx.saved_tensors[:7], list(ctx.saved_tensors[7:])
    gradients = _gradients(*inputs, ctx.epsilon, ctx.causal, saved, dout_BHLC)
    return *gradients, None, None, None, None, None, None


attention.register_autograd(_backward, setup_context=_save)


def fused_attention(feature_map: FeatureMap, *, causal: bool) -> Attend:
    """Returns attention by fused kernels."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor, starts: Tensor | None = None
    ) -> Tensor:
        return attention(q, k, v, mask, starts, *feature_map.fused_rows(q), causal)[0]

    return attend
