"""The choice of the backend, with attention that stands in for fused kernels."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention import create
from protlm.attention.linearized import selection
from protlm.attention.linearized.function import LinearAttention, Weighting
from protlm.attention.linearized.normalization import Denominator
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.system.errors import UserError

SIZES = {"num_heads": 2, "head_dim": 8, "model_dim": 16, "max_length": 64}
BOTH = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def torch_attention(feature_map: Any, *, causal: bool) -> Callable[..., Any]:
    """Attention in PyTorch, in place of fused kernels."""
    weighting = Weighting(feature_map, Denominator(), causal)
    return lambda *inputs: LinearAttention.apply(*inputs, weighting)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Replaces fused kernels, and pretends that the device is a card."""

    def replace(fused: Any) -> None:
        monkeypatch.setattr(selection, "fused_attention", fused)
        monkeypatch.setattr(selection, "_is_card", lambda device: True)
        monkeypatch.setattr(selection, "_HAS_TRITON", True)
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # there need not be a card

    monkeypatch.setattr(selection, "_reasons", {})
    return replace


def run(
    name_or_module: Any,
    options: Any = None,
    dtype: torch.dtype = torch.float32,
    *,
    causal: bool = False,
    **sizes: int,
) -> Tensor:
    """The output of a mechanism, or of a new one with its name, for random inputs."""
    chosen = SIZES | sizes
    module = name_or_module
    if isinstance(module, str):
        module = create(module, options or {}, **chosen)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 9, chosen["head_dim"], generator=generator).to(dtype)
    mask_BL = torch.ones(2, 9, dtype=torch.bool)
    return module(q, k, v, hidden_BLD=None, mask_BL=mask_BL, causal=causal)


@pytest.mark.parametrize("name", ["performer_softmax", "performer_relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@BOTH
def test_kernels_that_agree_are_used(
    name: str, dtype: torch.dtype, causal: bool, stand_in: Any
) -> None:
    calls = []

    def fused(feature_map: Any, *, causal: bool) -> Any:
        calls.append(causal)
        return torch_attention(feature_map, causal=causal)

    stand_in(fused)
    mechanism = create(name, {}, **SIZES)
    expected = run(name, {"backend": "torch"}, dtype, causal=causal)
    assert torch.equal(run(mechanism, None, dtype, causal=causal), expected)
    assert calls == [causal] * 4, "three lengths of the check, one for the output"
    run(mechanism, None, dtype, causal=causal)
    assert len(calls) == 5, "the check is made once"
    run(mechanism, None, dtype, causal=not causal)
    assert len(calls) == 9, "each mode has a check"


def does_not_compile(feature_map: Any, *, causal: bool) -> Any:
    """Attention whose kernels do not compile."""
    raise RuntimeError("PassManager::run failed\nand more")


def wrong(change: Callable[..., Any]) -> Callable[..., Any]:
    """Attention with another output, or of other queries."""

    def fused(feature_map: Any, *, causal: bool) -> Any:
        attend = torch_attention(feature_map, causal=causal)
        return lambda q, *others: change(attend, q, *others)

    return fused


WRONG = {
    "too large": (wrong(lambda attend, *x: 1.05 * attend(*x)), "relative errors of 5"),
    "without a part of the gradient": (
        wrong(lambda attend, q, *x: attend(q.detach() + 0 * q, *x)),
        "relative errors of",
    ),
    "where the second block has one position": (
        wrong(lambda attend, q, *x: attend(q, *x) * (1 + 0.05 * (q.shape[2] == 65))),
        "relative errors of 5",
    ),
    "not a number": (wrong(lambda attend, *x: torch.nan * attend(*x)), "nan"),
    "not compiled": (does_not_compile, "RuntimeError: PassManager::run failed;"),
}


@pytest.mark.parametrize("fault", WRONG)
@BOTH
def test_kernels_that_fail_are_replaced_with_one_warning_or_refused(
    fault: str, causal: bool, stand_in: Any
) -> None:
    fused, reason = WRONG[fault]
    stand_in(fused)
    mechanism = create("performer_softmax", {}, **SIZES)
    expected = run("performer_softmax", {"backend": "torch"}, causal=causal)
    with pytest.warns(UserWarning, match=reason):
        assert torch.equal(run(mechanism, causal=causal), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run(mechanism, causal=causal), expected)
    with pytest.raises(UserError, match=rf"attention\.backend=triton .*{reason}"):
        run("performer_softmax", {"backend": "triton"}, causal=causal)


@pytest.mark.parametrize("num_features, is_used", [(None, False), (23, False), (24, True)])
def test_causal_kernels_of_few_features_are_not_used_on_hopper_cards(
    num_features: int | None, is_used: bool, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 alone, and not in bidirectional attention."""
    stand_in(torch_attention)
    monkeypatch.setattr(selection, "is_hopper", lambda device: True)
    name, options = "performer_relu", {"num_features": num_features}
    asked = create(name, {"backend": "triton", **options}, **SIZES)
    run(asked, None, torch.bfloat16)
    run(asked, None, torch.float32, causal=True)
    if is_used:
        run(asked, None, torch.bfloat16, causal=True)
        return
    reason = f"needs 24 features or more on this card, and has {num_features or 8}"
    with pytest.raises(UserError, match=f"backend=triton .*{reason}; set attention.backend=auto"):
        run(asked, None, torch.bfloat16, causal=True)
    monkeypatch.setattr(selection, "_reasons", {})
    with pytest.warns(UserWarning, match=reason):
        run(name, options, torch.bfloat16, causal=True)


@pytest.mark.parametrize(
    "capability, narrowest", [((8, 0), 16), ((8, 9), 16), ((9, 0), 64), ((10, 0), 16)]
)
def test_blocks_of_causal_gradients_are_those_of_the_card(
    capability: tuple[int, int], narrowest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from protlm.attention.linearized.fused.blocks import CAUSAL_GRADIENTS, causal_blocks

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    card = causal_blocks(torch.device("cuda:1"))
    assert card[torch.bfloat16, True] == (64, narrowest, 4)
    assert card[torch.float32, True] == CAUSAL_GRADIENTS[torch.float32, True]
    assert causal_blocks(torch.device("cpu")) == CAUSAL_GRADIENTS


@pytest.mark.parametrize(
    "options",
    [
        {"estimator": "trigonometric", "denominator_floor": 0.1},
        {"normalizer": "rmsnorm"},
    ],
)
def test_features_without_kernels_run_in_pytorch(options: dict[str, Any], stand_in: Any) -> None:
    stand_in(does_not_compile)
    run("performer_softmax", options)
    with pytest.raises(UserError, match=r"attention\.backend=auto"):
        create("performer_softmax", options | {"backend": "triton"}, **SIZES)


def test_causal_maps_need_no_kernel(stand_in: Any) -> None:
    stand_in(does_not_compile)
    mechanism = create("performer_softmax", {"backend": "triton"}, **SIZES)
    q, k = torch.randn(2, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Any]
    inputs = {"hidden_BLD": torch.zeros(1, 9, 16), "mask_BL": torch.ones(1, 9, dtype=torch.bool)}
    rows_BHLL = mechanism.attention_map(q, k, **inputs, causal=True)
    torch.testing.assert_close(rows_BHLL.sum(-1), torch.ones(1, 2, 9))


def test_what_cannot_run_in_kernels_is_refused() -> None:
    asked = "performer_relu", {"backend": "triton"}
    with pytest.raises(UserError, match="backend=triton cannot be used on cpu"):
        run(*asked)
    with pytest.raises(UserError, match="16 in float32 in causal attention, not 64"):
        run(*asked, causal=True, head_dim=64, model_dim=128)
    with pytest.raises(UserError, match=r"attention\.backend=cuda"):
        create("performer_relu", {"backend": "cuda"}, **SIZES)


def test_the_former_name_is_refused_with_the_new_one() -> None:
    with pytest.raises(UserError, match=r"now called attention\.backend; .*backend=torch$"):
        create("performer_relu", {"kernel": "torch"}, **SIZES)
    nested = {"options": {"kernel": "torch"}}
    with pytest.raises(UserError, match=r"now called attention\.options\.backend"):
        create("hybrid", nested, **SIZES)
    with pytest.raises(UserError, match=r"now called attention\.backend; type"):
        compose(TrainConfig, ["attention=performer_softmax", "attention.kernel=torch"])
    with pytest.raises(UserError, match="kernel=triton does not exist; there are: abs, cos"):
        create("performer_generalized", {"kernel": "triton"}, **SIZES)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_the_choice_does_not_break_a_graph(
    backend: str, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(lambda feature_map, *, causal: lambda q, k, v, mask: v + 1)
    monkeypatch.setattr(selection, "failure", lambda case: "")
    mechanism = create("performer_softmax", {"backend": backend}, **SIZES)
    compiled = torch.compile(mechanism, backend="eager", fullgraph=True)
    assert torch.equal(run(compiled), run(mechanism))


def test_a_missing_triton_and_wide_heads_are_said(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(torch_attention)
    monkeypatch.setattr(selection, "_HAS_TRITON", False)
    with pytest.warns(UserWarning, match="the package triton is missing"):
        run("performer_relu")
    monkeypatch.setattr(selection, "_HAS_TRITON", True)
    with pytest.warns(UserWarning, match=r"not 8 in torch\.float64"):
        run("performer_relu", None, torch.float64)


def test_a_full_memory_is_no_reason(stand_in: Any) -> None:
    def full(feature_map: Any, *, causal: bool) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    stand_in(full)
    with pytest.raises(torch.OutOfMemoryError):
        run("performer_relu")
    stand_in(torch_attention)
    run("performer_relu")
