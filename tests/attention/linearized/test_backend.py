"""The choice of the backend, and fused kernels in Triton's interpreter, against float64.

Attention in PyTorch stands in for fused kernels where their choice is tested.
"""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from protlm.attention import create
from protlm.attention.base import Context
from protlm.attention.linearized import selection
from protlm.attention.linearized.case import Case
from protlm.attention.linearized.function import LinearAttentionFunction, Weighting
from protlm.attention.linearized.fused import check
from protlm.attention.linearized.normalization import Denominator
from protlm.bounds import Bounds
from protlm.commands.doctor import doctor
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.system.errors import UserError
from tests.attention.cases import MODES, SIZES, Inputs, make_inputs
from tests.fixtures.commands import ROOT, run_python
from tests.fixtures.runs import weights_of


def torch_attention(feature_map: Any, *, causal: bool) -> Callable[..., Any]:
    """Attention in PyTorch, in place of fused kernels."""
    weighting = Weighting(feature_map, Denominator(), causal)
    return lambda *inputs: LinearAttentionFunction.apply(*inputs, weighting)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Replaces fused kernels, and pretends that the device is a card."""

    def replace(fused: Any) -> None:
        # The module itself imports Triton, which need not be there.
        module = ModuleType(f"{check.__package__}.attention")
        module.fused_attention = fused  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(check, "verdict", check.failure)
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
    chosen, module = SIZES | sizes, name_or_module
    if isinstance(module, str):
        module = create(module, options or {}, **chosen)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 9, chosen["head_dim"], generator=generator).to(dtype)
    return Inputs.whole(q, k, v).run(module, causal=causal)


@pytest.mark.parametrize("name", ["performer_softmax", "performer_relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@MODES
def test_kernels_that_agree_are_used(name, dtype, causal, stand_in):
    calls = []

    def fused(feature_map: Any, *, causal: bool) -> Any:
        calls.append(causal)
        return torch_attention(feature_map, causal=causal)

    stand_in(fused)
    mechanism = create(name, {}, **SIZES)
    expected = run(name, {"backend": "torch"}, dtype, causal=causal)
    assert torch.equal(run(mechanism, None, dtype, causal=causal), expected)
    assert calls == [causal] * 5, "four lengths of the check, one for the output"
    run(mechanism, None, dtype, causal=causal)
    assert len(calls) == 6, "the check is made once"
    run(mechanism, None, dtype, causal=not causal)
    assert len(calls) == 11, "each mode has a check"


does_not_compile = Mock(side_effect=RuntimeError("PassManager::run failed\nand more"))


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
    "other in each run": (
        wrong(lambda attend, *x: attend(*x) + 1e-6 * torch.rand(())),
        "results differ between two runs at 64 positions",
    ),
    "not a number": (wrong(lambda attend, *x: torch.nan * attend(*x)), "nan"),
    "not compiled": (does_not_compile, "RuntimeError: PassManager::run failed;"),
}


@pytest.mark.parametrize(("fused", "reason"), WRONG.values(), ids=WRONG)
@MODES
def test_kernels_that_fail_are_replaced_with_one_warning_or_refused(
    fused, reason, causal, stand_in
):
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
    num_features, is_used, stand_in, monkeypatch
):
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


SINES = {"estimator": "trigonometric", "denominator_floor": 0.1}


def test_features_without_kernels_run_in_pytorch(stand_in):
    stand_in(does_not_compile)
    run("performer_softmax", SINES)
    with pytest.raises(UserError, match="; set backend=auto"):
        create("performer_softmax", SINES | {"backend": "triton"}, **SIZES)


def test_causal_maps_need_no_kernel(stand_in):
    stand_in(does_not_compile)
    mechanism = create("performer_softmax", {"backend": "triton"}, **SIZES)
    rows_BHLL = make_inputs(9).without_padding().to(torch.float32).map_of(mechanism, causal=True)
    torch.testing.assert_close(rows_BHLL.sum(-1), torch.ones(3, 2, 9))


TRITON = {"backend": "triton"}
WIDE = {"causal": True, "head_dim": 64, "model_dim": 128}


@pytest.mark.parametrize(
    ("name", "options", "given", "message"),
    [
        ("performer_relu", TRITON, {}, "backend=triton cannot be used on cpu"),
        ("performer_relu", TRITON, WIDE, "16 in float32 in causal attention, not 64"),
        ("performer_relu", {"backend": "cuda"}, {}, "^backend=cuda"),
        ("performer_relu", {"kernel": "torch"}, {}, "kernel is not a setting .* it has: backend"),
        (
            "performer_relu",
            TRITON | {"decay": "learned"},
            {},
            "no kernels for decay=learn",
        ),
        ("hybrid", {"options": {"kernel": "torch"}}, {}, r"^options\.kernel is not a"),
        ("performer_generalized", {"kernel": "triton"}, {}, "does not exist; there are: abs, cos"),
    ],
)
def test_what_cannot_run_in_kernels_is_refused(name, options, given, message):
    with pytest.raises(UserError, match=message):
        run(name, options, **given)


def test_the_former_name_is_refused_with_the_new_one():
    with pytest.raises(UserError, match=r"now called attention\.backend; type"):
        compose(TrainConfig, ["attention=performer_softmax", "attention.kernel=torch"])


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_the_choice_does_not_break_a_graph(backend, stand_in, monkeypatch):
    stand_in(lambda feature_map, *, causal: lambda q, k, v, mask, *starts: v + (1 + len(starts)))
    monkeypatch.setattr(check, "verdict", lambda case: "")
    mechanism = create("performer_softmax", {"backend": backend}, **SIZES)
    compiled = torch.compile(mechanism, backend="eager", fullgraph=True)
    assert torch.equal(run(compiled), run(mechanism))
    heads, hidden_BLD = torch.randn(3, 1, 2, 9, 8), torch.randn(1, 9, 16)
    mask_BL, bounds = torch.ones(1, 9, dtype=torch.bool), Bounds.of([(0, 4)], (1, 9), longest=9)
    out = compiled(*heads, Context(hidden_BLD, mask_BL, causal=False), bounds)
    assert torch.equal(out, heads[2] + 2), "with bounds"


# What kernels cannot compute, with Triton or without, and what is said of it.
@pytest.mark.parametrize(
    ("options", "dtype", "has_triton", "said"),
    [
        ({}, torch.float32, False, "the package triton is missing"),
        ({}, torch.float64, True, r"not 8 in torch\.float64"),
        ({"decay": "learned"}, torch.float32, True, "not used on cpu: they have no decay"),
    ],
)
def test_auto_says_once_why_kernels_are_not_used(
    options, dtype, has_triton, said, stand_in, monkeypatch
):
    stand_in(does_not_compile)
    monkeypatch.setattr(selection, "_HAS_TRITON", has_triton)
    with pytest.warns(UserWarning, match=said) as warned:
        out = [run("performer_relu", options, dtype) for _ in range(2)]
    assert len(warned) == 1 and torch.equal(*out)


def test_a_full_memory_is_no_reason(stand_in):
    stand_in(Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        run("performer_relu")
    stand_in(torch_attention)
    run("performer_relu")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Case:
    """A case whose verdict is kept in the folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = torch.float32, 8, 8, None, False, True
    return Case(torch.device("cpu"), torch.float32, torch.float32, *sizes)


@pytest.mark.slow
def test_a_verdict_of_a_child_is_kept_for_its_card_and_versions(
    checked, monkeypatch, capsys, tmp_path
):
    """Without a card nothing can be launched, which is no fault of the kernels."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert check.verdict(checked).startswith("RuntimeError: ")
    assert Case.read(checked.text) == checked and not list(tmp_path.rglob("*.json"))
    fault = "relative errors of 1.0e+00 at 64 positions"
    monkeypatch.setattr(check, "_ask_child", lambda case: (fault, True))
    assert check.verdict(checked) == fault
    monkeypatch.setattr(check, "_ask_child", lambda case: ("asked", False))
    assert check.verdict(checked) == fault
    doctor(None, None)
    assert f"{checked.label}: {fault}" in " ".join(capsys.readouterr().out.split())
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "2.99.0")
        assert check.verdict(checked) == "asked" and not check.kept_verdicts(checked.device)
    (kept,) = tmp_path.rglob("*.json")
    kept.write_text("{}")
    assert check.verdict(checked) == "asked"


@pytest.mark.slow
def test_a_run_whose_check_is_killed_trains_in_pytorch(checked, train, monkeypatch, tmp_path):
    pytest.importorskip("triton")
    settings = "attention=performer_relu", "attention.backend="
    expected = weights_of(train("torch", *settings[:1], f"{settings[1]}torch"))
    monkeypatch.setattr(selection, "_is_card", lambda device: True)
    monkeypatch.setattr(selection, "_reasons", {})
    # Python imports it when the child starts.
    (tmp_path / "sitecustomize.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning) as warned:
        found = weights_of(train("auto", *settings[:1], f"{settings[1]}auto"))
    (line,) = [str(one.message) for one in warned if "kernels" in str(one.message)]
    assert "their check was killed by signal 9; attention runs in PyTorch" in line
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not check.kept_verdicts(checked.device), "the next process tries again"


@pytest.mark.parametrize("error", [TimeoutExpired("", 1), None])
def test_a_child_that_hangs_or_finds_no_memory_is_no_verdict(error, checked, monkeypatch):
    def run(*_: Any, **__: Any) -> Any:
        if error is not None:
            raise error
        return CompletedProcess([], 1, "", "torch.OutOfMemoryError: CUDA out of memory.")

    monkeypatch.setattr(check.subprocess, "run", run)
    if error is not None:
        assert check._ask_child(checked) == ("their check did not end within 300 s", False)
        return
    with pytest.raises(torch.OutOfMemoryError):
        check._ask_child(checked)


SUMS, STATES = ["s", "z"], ["states", "state_sums"]
# What the kernels of each pass write, by causality.
WRITTEN = {
    False: [[SUMS, ["out", "totals"]], [["dq", "along"], SUMS, ["dk", "dv"]]],
    True: [
        [SUMS, STATES, ["out", "totals"]],
        [SUMS, STATES, ["dq", "along"], SUMS, STATES, ["dv"], ["dk"]],
    ],
}


@pytest.mark.slow
@MODES
@pytest.mark.parametrize("starts", [None, torch.tensor([0, 100, 512], dtype=torch.int32)])
def test_a_compiled_graph_launches_the_kernels_itself(causal, starts, monkeypatch):
    """Each node of the graph is a kernel, of which torch knows what it writes."""
    pytest.importorskip("triton")
    from protlm.attention.linearized.fused.attention import attention
    from tests.fixtures.cards import compiling_for

    graphs: list[list[list[str]]] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes = [n for n in graph.graph.nodes if "tensors_to_clone" in n.kwargs]
        graphs.append([n.kwargs["tensors_to_clone"] for n in nodes])
        assert not any("protlm" in str(n.target) for n in graph.graph.nodes)
        (out,) = graph.graph.find_nodes(op="output")
        values = [None if n is None else n.meta["val"] for n in out.args[0]]

        def zeros(*_: Tensor) -> list[Tensor | None]:
            return [None if v is None else torch.zeros(v.shape) for v in values]

        return make_boxed_func(zeros)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    q, k, v = (torch.randn(1, 4, 512, 64, requires_grad=True) for _ in range(3))
    features = torch.randn(32, 64), torch.randn(32), 0.0
    given = torch.ones(1, 512, dtype=torch.bool), starts, *features, causal
    with compiling_for("sm_90"):
        operator: Any = attention
        compiled = torch.compile(lambda *x: operator(*x, *given)[0], backend=backend)
        compiled(q, k, v).sum().backward()
    # Packed proteins have one chunk, and the states of causal attention no sums before them.
    gone = [SUMS] if causal and starts is not None else []
    assert graphs == [[x for x in written if x not in gone] for written in WRITTEN[causal]]


# Of outputs, and of gradients: their sums over the values cancel in part, so that the roundings of
# the operands weigh more. The second one is the limit of the check at first use.
BUDGETS = {"float32": (1e-5, 1e-5), "bfloat16": (1e-2, 2e-2)}


# What the program runs. Blocks have 32 positions in float32 and 64 in bfloat16: lengths are one,
# a whole block, and several of which the last has one position. Most features fill several blocks.
# A process imports torch and Triton for several runs.
PARTS = 4
RUNS = [
    "performer_softmax float32 cut 16 20 40",
    "performer_softmax float32 bidirectional 24 96 1 32 65",
    "performer_softmax float32 causal 16 48 1 32 97",
    "performer_softmax bfloat16 bidirectional 16 80 1 64 129",
    "performer_softmax bfloat16 causal 24 32 1 64 129",
    "performer_relu float32 bidirectional 24 0 1 32 65",
    "performer_relu float32 causal 16 0 1 32 97",
    "performer_relu bfloat16 bidirectional 24 100 64 129",
    "performer_relu bfloat16 causal 24 40 64 129",
    # Wide heads.
    "performer_softmax bfloat16 bidirectional 128 20 1 65",
    "performer_softmax bfloat16 causal 64 20 1 129",
    # Sums over parts of long sequences.
    "performer_softmax float32 bidirectional 16 16 264",
    "performer_softmax float32 causal 16 20 520",
    # Packed proteins, some of several blocks.
    "performer_softmax float32 packed-bidirectional 24 40 480",
    "performer_softmax float32 packed-causal 16 20 480",
    "performer_relu bfloat16 packed-causal 24 0 480",
]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_are_exact_within_the_dtype(part):
    """Where keys are cut, as exact as PyTorch in float32 is, which cuts them too."""
    pytest.importorskip("triton")
    runs = RUNS[part::PARTS]
    words = ("-m", "tests.attention.linearized.programs.interpret", *runs)
    done = run_python(*words, cwd=ROOT, TRITON_INTERPRET="1")
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    expected = [(run, int(length)) for run in runs for length in run.split()[5:]]
    assert [(report["run"], report["length"]) for report in reports] == expected
    for found in reports:
        _, dtype, mode, *_ = found["run"].split()
        budget, gradient_budget = (1e-4, 1e-4) if mode == "cut" else BUDGETS[dtype]
        output, *gradients = found["errors"]
        assert output <= budget and max(gradients) <= gradient_budget, found
        assert found["is_clear"], found
        assert found.get("is_causal") or found.get("is_alone") or mode == "bidirectional", found


@pytest.mark.slow
@pytest.mark.parametrize("card", ["sm_80", "sm_90", "sm_100"])
# The launches of both passes; causal sums of packed proteins have one chunk.
@pytest.mark.parametrize(
    ("starts", "number"),
    [(None, 70), (torch.tensor([0, 100, 300, 512], dtype=torch.int32), 58)],
    ids=["one", "packed"],
)
def test_kernels_fit_every_card_without_spills(card, starts, number):
    pytest.importorskip("triton")
    from tests.fixtures.cards import SHARED, programs, spilled

    found = programs(card, starts)
    assert len(found) == number
    for program in found:
        assert spilled(program) == 0, program.name
        assert program.metadata.shared <= SHARED[card], program.name
