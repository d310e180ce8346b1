"""The comparison of trained mechanisms: the same settings for all, and what the table says."""

from dataclasses import asdict
from json import dumps
from math import inf
from pathlib import Path

import pytest

from benchmarks import training_comparison
from benchmarks.training_comparison import Curve, Trained, comparison_table, curves_figure, settings
from protlm.attention import names
from protlm.errors import InputDataError


def curve(*losses: float) -> Curve:
    steps = tuple(range(10, 10 * len(losses) + 1, 10))
    return Curve(steps, losses, (100.0,) * len(losses), valid_loss=2.5, valid_perplexity=12.2)


def test_only_attention_and_folder_differ(tmp_path: Path) -> None:
    own = ("attention=", "attention.", "run_dir=")
    alike = {
        tuple(s for s in settings(name, tmp_path, 5) if not s.startswith(own)) for name in names()
    }
    assert len(alike) == 1
    assert "attention.window=64" in settings("longformer", tmp_path, 5)


def test_the_end_of_a_curve_is_averaged(tmp_path: Path) -> None:
    assert curve(*([9.0] * 10), 1.0, 3.0).final_loss == 2.0
    metrics = tmp_path / "metrics.csv"
    header = "step,train_loss,valid_loss,valid_perplexity,residues_per_second"
    metrics.write_text(f"{header}\n10,3.5,,,900\n20,3.0,,,1100\n20,,2.75,15.6,\n")
    read = Curve.read(metrics)
    assert (read.steps, read.losses, read.rates) == ((10, 20), (3.5, 3.0), (900.0, 1100.0))
    assert (read.valid_loss, read.valid_perplexity) == (2.75, 15.6)
    metrics.write_text(f"{header}\n")
    assert Curve.read(metrics).final_loss == inf


def test_the_table_has_the_best_first_and_says_who_stopped() -> None:
    good = Trained("longformer", 300, 2_000_000_000, 0)
    bad = Trained("softmax", 300, 1_000_000_000, 1)
    at_once = Trained("linear", 300, 1_000_000_000, 1)
    nothing = Curve((), (), (), valid_loss=None, valid_perplexity=None)
    runs = [(at_once, nothing), (bad, curve(3.0)), (good, curve(3.0, 2.0, 1.0))]
    columns = {str(c.header): list(c.cells) for c in comparison_table(runs).columns}
    assert columns["mechanism"] == ["longformer window=64", "softmax", "linear"]
    assert columns["training loss"] == ["1.000", "3.000", "inf"]
    assert columns["residues/s"] == ["100", "100", ""]
    ended = ["0", "ended after 10 of 300", "ended after 0 of 300"]
    assert columns["non-finite steps"] == ended
    assert columns["peak memory, GB"] == ["2.00", "1.00", "1.00"]
    assert len(curves_figure(runs).axes[0].lines) == 3


@pytest.mark.slow
def test_a_finished_run_is_not_repeated_and_a_failed_one_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is no data: the run fails at once.
    with pytest.raises(InputDataError, match=r"the run of softmax failed: see .*softmax-5\.log"):
        training_comparison.train("softmax", tmp_path, 5)
    assert not (tmp_path / "softmax-5.json").exists()
    done = Trained("softmax", 5, 7, 0)
    (tmp_path / "softmax-5.json").write_text(dumps(asdict(done)))
    assert training_comparison.train("softmax", tmp_path, 5) == done
    with pytest.raises(InputDataError, match=r"softmax-6\.log"):
        training_comparison.train("softmax", tmp_path, 6)
