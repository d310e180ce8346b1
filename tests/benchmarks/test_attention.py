"""The benchmark as it is run: the command line, a small run, and the memory of the large model."""

import csv
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import attention, model_memory
from benchmarks.cases import DTYPES
from protlm.attention import names


def test_quick_shortens_what_nobody_asked_for() -> None:
    assert attention.parse([]).lengths == attention.LENGTHS
    assert attention.parse(["--quick"]).lengths == attention.QUICK_LENGTHS
    assert attention.parse(["--quick", "--lengths", "64"]).lengths == [64]
    assert attention.parse(["--modes", "causal"]).modes == ["causal"]


@pytest.mark.slow
def test_a_small_run_prints_and_writes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Whether performer-pytorch is installed here or not, this run goes without.
    monkeypatch.setitem(sys.modules, "performer_pytorch", None)
    table, drawing = tmp_path / "all.csv", tmp_path / "cost.png"
    options = ["--quick", "--lengths", "16", "32", "--features", "64", "--mechanisms", *names()]
    files = ["--csv", str(table), "--figure", str(drawing)]
    monkeypatch.setattr(sys, "argv", ["benchmarks.attention", *options, *files])
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    attention.main()

    printed = capsys.readouterr().out
    for heading in ("times faster than SDPA", "Left out", "Roofline", "Bars", "not measured"):
        assert heading in printed
    assert "import of performer_pytorch halted" in printed
    assert drawing.read_bytes().startswith(b"\x89PNG")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    measured = {row["contender"] for row in rows if row["seconds"]}
    assert set(names()) <= measured
    for name in names():
        cells = {
            (row["mode"], row["dtype"], row["length"]) for row in rows if row["contender"] == name
        }
        assert len(cells) == len(attention.MODES) * len(DTYPES) * 2
    peers = [row for row in rows if row["contender"] == "performer-pytorch"]
    assert peers and all(row["left_out"] and not row["seconds"] for row in peers)


def test_the_peak_of_the_large_model_holds_its_weights_and_gradients() -> None:
    peak = model_memory.measure("performer_relu", length=16, device=torch.device("cpu"))
    assert isinstance(peak, float)
    # 76 million parameters of 4 bytes, as many gradients, and torch itself.
    assert 2 * 76e6 * 4 / 1e9 + 0.15 < peak < 3


def test_a_model_that_cannot_be_measured_says_so() -> None:
    said = model_memory.measure("no_such_mechanism", device=torch.device("cpu"))
    assert isinstance(said, str) and said.startswith("failed with exit code")
