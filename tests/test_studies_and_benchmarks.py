"""Every study and benchmark parses its options and runs its smallest setting.

What it computes has a test only where a number on a page depends on it, and nothing else checks it.
"""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from safetensors.torch import load_file

from benchmarks import gpu_product, roofline
from benchmarks.mechanism_costs import traced
from protlm.attention import names
from tests.fixtures.commands import run_here

ROOT = Path(__file__).resolve().parent.parent
GPU_PAGE = ROOT / "docs" / "gpu.md"
MODULES = [f"{path.parent.name}.{path.stem}" for path in sorted(ROOT.glob("[bs]*s/*.py"))]
# The smallest setting of each script that ends within a minute, and what it prints. Others take
# longer, or need a GPU, a trained model or data that is not shipped.
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
    "benchmarks.training --quick --lengths 32": "times as fast as",
    "studies.approximation --quick": "Relative error of the output",
    "studies.training_comparison --quick --mechanisms softmax": "softmax",
    "studies.two_flash --quick": "two flash calls",
}


@pytest.mark.parametrize("name", MODULES)
def test_a_script_answers_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module without a `main` serves others."""
    module = importlib.import_module(name)
    is_named = any(f"{start}{name}" in (module.__doc__ or "") for start in ("python -m ", "`"))
    assert hasattr(module, "main") or not is_named
    if not hasattr(module, "main") or name == "benchmarks.roofline":
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


def test_shards_of_weights_are_small_and_make_the_model_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_product, "MOST_BYTES", 1000)
    weights = {str(n): torch.full((50,), n, dtype=torch.bfloat16) for n in range(9)}
    parts = tmp_path / "parts"
    parts.mkdir()
    gpu_product.shard(weights, parts)
    files = sorted(parts.glob("*.safetensors"))
    assert len(files) == 3 and all(file.stat().st_size < 1000 for file in files)
    gpu_product.join(parts, tmp_path / "model")
    found = load_file(tmp_path / "model" / gpu_product.WEIGHTS)
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    files[1].unlink()
    with pytest.raises(FileNotFoundError):
        gpu_product.join(parts, tmp_path / "other")


def test_peers_are_pinned_and_stay_out_of_the_lock() -> None:
    def requirements(path: Path) -> list[Requirement]:
        lines = path.read_text().splitlines()
        return [Requirement(line) for line in lines if line and not line.startswith("#")]

    peers = requirements(ROOT / "benchmarks" / "requirements.txt")
    assert {str(peer.specifier)[:2] for peer in peers} == {"=="}
    locked = {requirement.name for requirement in requirements(ROOT / "requirements.lock")}
    assert {peer.name for peer in peers} & {*locked, "torch", "triton"} == set()


def test_operations_are_those_of_the_formulas() -> None:
    exact = traced("softmax", 1024, causal=False)
    # Two products of the length forward, five backward; the mask is a coordinate, padded to 72.
    assert exact is not None and exact.operations == {torch.bfloat16: 2 * 7 * 1024 * 72}
    linear = traced("performer_softmax", 1024, causal=False, num_features=128)
    # Six products with the rows, six of features and values of a further column of ones.
    assert linear is not None and linear.operations[torch.float32] == 2 * 6 * 128 * 64
    assert linear.operations[torch.bfloat16] == pytest.approx(2 * 6 * 128 * 65, rel=0.02)


def test_the_page_has_the_predictions_of_causal_attention_and_softmax() -> None:
    page = GPU_PAGE.read_text()
    assert roofline.table(roofline.CAUSAL_TITLES, roofline.causal_predictions()) in page
    for row in roofline.mechanism_rows(["softmax"]):
        assert f"| {' | '.join(row)} |" in page


@pytest.mark.slow
def test_the_page_has_all_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    page = GPU_PAGE.read_text()
    titles = roofline.table(roofline.TITLES_OF_MECHANISMS, [])
    rows = list(roofline.mechanism_rows([name for name in names() if name != "aft_full"]))
    # At the longer length it takes twice as long as all others together.
    monkeypatch.setattr(roofline, "LENGTHS", roofline.LENGTHS[:1])
    rows += roofline.mechanism_rows(["aft_full"])
    lines = (f"\n| {' | '.join(row)} |" for row in rows)
    for text in (roofline.table(roofline.TITLES, roofline.predictions()), titles, *lines):
        assert text in page, "type: python -m benchmarks.roofline; copy its tables"
