"""Every study and benchmark parses its options and runs its smallest setting.

What it computes has a test only where a number on a page depends on it, and nothing else checks it.
"""

import importlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from packaging.requirements import Requirement

from protlm.analysis.sequence_sums import SequenceSums, write_sums
from studies import twin_tables
from studies.alignments import GAP, Alignment, FactoredAttention
from tests.fixtures.commands import run_here

ROOT = Path(__file__).resolve().parent.parent
MODULES = [f"{path.parent.name}.{path.stem}" for path in sorted(ROOT.glob("[bs]*s/*.py"))]
# The smallest setting of each script that needs no minute, GPU, model or data, and what it prints.
SMALLEST = {
    "benchmarks.attention --quick --lengths 16 --dtypes fp32": "times as fast as SDPA",
    "benchmarks.data --quick": "times as fast as Biopython",
    "benchmarks.embedding --quick --proteins 9 --lengths 40": "times as fast as EsmModel",
    "benchmarks.embedding_t5 --quick --proteins 9": "T5EncoderModel, median",
    "benchmarks.gpu kernels --quick --device cpu": "needs a GPU",
    "benchmarks.gpu speed --quick --device cpu": "| hybrid-6m packed |",
    "benchmarks.mechanisms --quick --lengths 16 --mechanisms softmax hybrid": "hybrid",
    "benchmarks.overhead --quick model=tiny data.max_length=64 schedule.warmup_steps=0": "adds",
    "benchmarks.synthetic_fasta proteins.fasta.gz --records 100": "",
    "benchmarks.training --quick --lengths 32": "packed rows",
    "studies.step_costs --quick --mechanisms softmax alternating": "A training step",
    "studies.training_comparison --quick --mechanisms softmax": "softmax",
}


@pytest.mark.parametrize("name", MODULES)
def test_a_script_answers_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module without a `main` serves others."""
    module = importlib.import_module(name)
    is_named = any(f"{start}{name}" in (module.__doc__ or "") for start in ("python -m ", "`"))
    assert hasattr(module, "main") or not is_named
    if not hasattr(module, "main"):
        return
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        module.main()
    assert "usage" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("command", SMALLEST)
def test_the_smallest_setting_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For the processes that it starts.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    name, *words = command.split()
    with torch.random.fork_rng():
        done = run_here(importlib.import_module(name).main, words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert SMALLEST[command] in done.stdout


def test_peers_are_pinned_and_stay_out_of_the_lock() -> None:
    def requirements(path: Path) -> list[Requirement]:
        lines = path.read_text().splitlines()
        return [Requirement(line) for line in lines if line and not line.startswith("#")]

    peers = requirements(ROOT / "benchmarks" / "requirements.txt")
    assert {str(peer.specifier)[:2] for peer in peers} == {"=="}
    locked = {requirement.name for requirement in requirements(ROOT / "requirements.lock")}
    assert {peer.name for peer in peers} & {*locked, "torch", "triton"} == set()


def test_factored_attention_and_its_loss_are_their_formulas() -> None:
    """Column by column in float64; a gap neither says nor costs anything."""
    generator = np.random.default_rng(0)
    columns_BL = generator.integers(4, size=(9, 5)).astype(np.uint8)
    columns_BL[[0, 3, 3], [2, 0, 1]] = GAP
    alignment, rows = Alignment.of(columns_BL), torch.tensor([0, 3, 3, 7])
    layer = FactoredAttention(5, torch.Generator().manual_seed(0))
    q_HLK, k_HLK, v_HVV = (x.detach().double() for x in (layer.q_HLK, layer.k_HLK, layer.v_HVV))
    logits_HLL = q_HLK @ k_HLK.mT / math.sqrt(32)
    logits_HLL.diagonal(dim1=1, dim2=2).fill_(-math.inf)
    # W_ij has the residue of j first, and half of it is in W_ji, transposed.
    half_LLVV = torch.einsum("hij,hvw->ijvw", logits_HLL.softmax(-1), v_HVV) / 2
    w_LLVV = half_LLVV + half_LLVV.permute(1, 0, 3, 2)
    torch.testing.assert_close(layer.couplings().double(), w_LLVV, rtol=1e-4, atol=1e-6)
    nats, bias_LV = 0.0, torch.randn(5, 20)
    for tokens_L in alignment.tokens_BL[rows].tolist():
        for i in (i for i in range(5) if tokens_L[i] != GAP):
            others = [j for j in range(5) if j != i and tokens_L[j] != GAP]
            logits_V = bias_LV[i] + sum(w_LLVV[i, j, tokens_L[j]] for j in others)
            nats += float(F.cross_entropy(logits_V, torch.tensor(tokens_L[i])))
    pairs = sum(w_LLVV[i, j].square().sum() for i in range(5) for j in range(i))
    expected = nats / 4 + 0.2 * 4 / alignment.weights_B.sum() * pairs
    found = alignment.loss(rows, layer.couplings(), bias_LV)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def test_differences_of_twins_are_of_pairs_and_draw_families_whole_and_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kinases differ by 20 and -20 nats, together by nothing; the second seed by 1 more."""
    monkeypatch.setattr(twin_tables, "_FEWEST_GROUPS", 3)
    targets = np.array([10.0, 20.0, 30.0, 40.0])
    for name, nats in (("a", [1, 2, 1, 1]), ("b", [3, 1, 1, 1]), ("c", [4, 2, 2, 2])):
        (tmp_path / name).mkdir()
        both = [np.array(nats) * targets, 0.1 * targets]
        groups = ["Pkinase", "Pkinase", "RRM_1", "E"]
        sums = SequenceSums(targets, *both, *both, *both)
        write_sums(tmp_path / name / "sums.test.tsv", [*"ABCE"], groups, sums)
    column, seeds = twin_tables.Column("all", "sums.test.tsv"), [*"bc"]
    found = twin_tables.difference([(tmp_path / "a", tmp_path / one) for one in seeds], column)
    assert np.array(found) == pytest.approx(np.array([[0.5, 0], [0, 0], [1, 0]]))
