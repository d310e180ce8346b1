"""Every study and benchmark parses its options and runs its smallest setting."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from tests.fixtures.commands import ROOT, ended, run_here

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
    "benchmarks.relatives --quick": "times as fast as in the context",
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
        done = ended(run_here(importlib.import_module(name).main, words, tmp_path), 0)
    assert SMALLEST[command] in done.stdout


def test_peers_are_pinned_and_stay_out_of_the_lock() -> None:
    def requirements(path: Path) -> list[Requirement]:
        lines = path.read_text().splitlines()
        return [Requirement(line) for line in lines if line and not line.startswith("#")]

    peers = requirements(ROOT / "benchmarks" / "requirements.txt")
    assert {str(peer.specifier)[:2] for peer in peers} == {"=="}
    locked = {requirement.name for requirement in requirements(ROOT / "requirements.lock")}
    assert {peer.name for peer in peers} & {*locked, "torch", "triton"} == set()
