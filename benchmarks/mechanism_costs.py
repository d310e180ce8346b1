"""Counts the bytes and operations of every mechanism in PyTorch on a GPU.

Both passes are traced without values (`pretended_cuda`). An operation reads its operands from
memory and writes its results; exact attention is one kernel, as it is on CUDA.
"""

from collections import Counter
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.pretended_cuda import PretendedCuda
from protlm.attention import create
from protlm.attention.linearized import selection
from protlm.system.paths import shipped

WIDTH, NUM_HEADS, POSITIONS = 64, 8, 8192
# These operations allocate, without reading or writing.
_ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")


class Traced(NamedTuple):
    """The bytes and the operations, by dtype, of both passes of a mechanism.

    Both are per position and head.
    """

    num_bytes: float
    operations: Counter[torch.dtype]


class CostCounter(TorchDispatchMode):
    """Counts the bytes and operations of all that runs in its context, without exact attention."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.operations: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if func.is_view or packet.__name__ in _ALLOCATIONS:
            return out
        read = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        written = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.num_bytes += sum(map(_bytes, [*read.values(), *written]))
        if packet in flop_registry:
            # The formula of torch takes the dtype of a result for its shape.
            given = args[:2] if packet is torch.ops.aten.bmm else args
            count = flop_registry[packet](*given, **(kwargs or {}), out_val=out)
            self.operations[read[next(iter(read))].dtype] += count
        return out


class _CudaWithFlash(PretendedCuda):
    """The mode in which exact attention is one kernel for each pass, counted by its formula."""

    def __init__(self, counter: CostCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return super().__torch_function__(func, types, args, kwargs)
        q, k, v = args
        options = kwargs or {}
        leading = q.shape[:-2].numel() * q.shape[-2] * k.shape[-2]
        pairs = leading / (2 if options.get("is_causal") else 1)
        # Two products forward and five backward, half of them with the width of the values.
        widths = q.shape[-1] + v.shape[-1]
        self._counter.operations[q.dtype] += int(pairs * 7 * widths)
        tensors = _bytes(q) + _bytes(k) + _bytes(v)
        mask = options.get("attn_mask")
        read_twice = 2 * tensors + (0 if mask is None else 2 * _bytes(mask))
        out_bytes = q.shape[:-1].numel() * v.shape[-1] * q.itemsize
        self._counter.num_bytes += read_twice + tensors + 3 * out_bytes
        return _Attended.apply(q, k, v)


class _Attended(torch.autograd.Function):
    """A kernel that was counted already."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q.new_empty(*q.shape[:-1], v.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def _bytes(x: Tensor) -> int:
    # Counts only the stored bytes of an expanded tensor.
    return min(x.numel() * x.itemsize, x.untyped_storage().nbytes())


def traced(
    name: str, length: int, *, causal: bool, num_features: int | None = None
) -> Traced | None:
    """Traces both passes in bfloat16; returns None for a mode that the mechanism lacks.

    Args:
        name: the mechanism, with the settings that it ships with.
        length: positions of a sequence, of 8,192 positions in all.
        causal: the mode.
        num_features: random features, if not as many as shipped.
    """
    settings = OmegaConf.to_container(
        OmegaConf.load(shipped("conf") / "attention" / f"{name}.yaml")
    )
    assert isinstance(settings, dict)
    if num_features is not None:
        settings["num_features"] = num_features
    model_dim, batch = NUM_HEADS * WIDTH, POSITIONS // length
    mechanism = create(
        name,
        {str(key): value for key, value in settings.items() if key != "name"},
        num_heads=NUM_HEADS,
        head_dim=WIDTH,
        model_dim=model_dim,
        max_length=length,
    ).to("meta")
    if not (mechanism.supports_causal if causal else mechanism.supports_bidirectional):
        return None
    shape = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    q, k, v = (torch.empty(batch, length, NUM_HEADS, WIDTH, **shape) for _ in range(3))
    hidden_BLD = torch.empty(batch, length, model_dim, **shape)
    mask_BL = torch.empty(batch, length, dtype=torch.bool, device="meta")
    counter = CostCounter()
    with _without_kernels(), _CudaWithFlash(counter), counter:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out = mechanism(*heads, hidden_BLD=hidden_BLD, mask_BL=mask_BL, causal=causal)
        torch.autograd.backward([out], [torch.empty_like(out)])
    number = POSITIONS * NUM_HEADS
    operations = Counter({d: count / number for d, count in counter.operations.items()})
    return Traced(counter.num_bytes / number, operations)  # pyright: ignore[reportArgumentType]


def _without_kernels() -> Any:
    """Pretends that there are no fused kernels."""
    return patch.object(selection, "is_usable", lambda *_: False)
