"""Who takes part: every mechanism in every number of features, and peers that may be missing."""

import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from benchmarks.cases import HEAD_DIM, MODEL_DIM, NUM_HEADS, SDPA, Case
from benchmarks.contenders import contenders, grid
from benchmarks.passes import standard_normal_inputs
from benchmarks.peers import PEERS, UnavailableError
from protlm.attention import create, names

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def output(case: Case) -> torch.Tensor:
    *vectors, _ = standard_normal_inputs(case.length, case.dtype, CPU)
    return contenders()[case.contender].prepare(case, CPU)(*vectors)


def test_every_mechanism_and_every_peer_takes_part() -> None:
    assert list(contenders()) == [*PEERS, *names()]


def test_the_grid_has_features_for_whom_they_are() -> None:
    entrants = contenders()
    cases = grid(
        [entrants[SDPA], entrants["performer_softmax"]],
        causal=True,
        length=512,
        features=(64, 128),
        dtypes=("fp32", "bf16"),
    )
    assert [(case.contender, case.features) for case in cases[:3]] == [
        (SDPA, None),
        ("performer_softmax", 64),
        ("performer_softmax", 128),
    ]
    assert [case.dtype for case in cases] == ["fp32"] * 3 + ["bf16"] * 3
    assert {(case.causal, case.length) for case in cases} == {(True, 512)}


@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_is_exact_attention(causal: bool) -> None:
    exact = output(Case(SDPA, None, causal, 33))
    torch.testing.assert_close(output(Case("softmax", None, causal, 33)), exact)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "features", "num_features"),
    [
        ("performer_softmax", 64, 64),
        ("performer_softmax", 256, 256),
        # The ReLU kernel ships without a projection, which is 64 features for a head of 64.
        ("performer_relu", 64, None),
        ("performer_relu", 128, 128),
    ],
)
def test_ours_has_the_features_it_is_listed_with(
    name: str, features: int, num_features: int | None, dtype: str
) -> None:
    case = Case(name, features, False, 33, dtype)
    mechanism = create(
        name,
        {"num_features": num_features},
        num_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        model_dim=MODEL_DIM,
        max_length=33,
    )
    q_BHLK, k_BHLK, v_BHLC, _ = standard_normal_inputs(33, dtype, CPU)
    expected = mechanism(
        q_BHLK,
        k_BHLK,
        v_BHLC,
        hidden_BLD=torch.zeros(1, 33, MODEL_DIM),
        mask_BL=torch.ones(1, 33, dtype=torch.bool),
        causal=False,
    )
    assert torch.equal(output(case), expected)


def test_a_missing_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules is how Python itself marks a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "performer_pytorch", None)
    with pytest.raises(UnavailableError, match=r"performer_pytorch.*make bench-attention"):
        output(Case("performer-pytorch", 64, False, 16))


@pytest.mark.parametrize("name", ["cuDNN", "fla-core"])
def test_what_needs_a_gpu_says_so(name: str) -> None:
    with pytest.raises(UnavailableError, match="needs a CUDA device"):
        output(Case(name, None, True, 16))


def test_peers_are_pinned_and_stay_out_of_the_product() -> None:
    def requirements(path: Path) -> list[Requirement]:
        lines = path.read_text().splitlines()
        return [Requirement(line) for line in lines if line and not line.startswith("#")]

    peers = requirements(ROOT / "benchmarks" / "requirements.txt")
    assert {str(peer.specifier)[:2] for peer in peers} == {"=="}
    locked = {requirement.name for requirement in requirements(ROOT / "requirements.lock")}
    assert {peer.name for peer in peers} & {*locked, "torch", "triton"} == set()
