"""The comparison of trained mechanisms: the same settings for all, and what the table says."""

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
    alike = {
        tuple(
            s for s in settings(name, tmp_path, 5) if not s.startswith(("attention=", "run_dir="))
        )
        for name in names()
    }
    assert len(alike) == 1


def test_the_end_of_a_curve_is_averaged(tmp_path: Path) -> None:
    assert curve(*([9.0] * 10), 1.0, 3.0).final_loss == 2.0
    metrics = tmp_path / "metrics.csv"
    header = "step,train_loss,valid_loss,valid_perplexity,residues_per_second"
    metrics.write_text(f"{header}\n10,3.5,,,900\n20,3.0,,,1100\n20,,2.75,15.6,\n")
    read = Curve.read(metrics)
    assert (read.steps, read.losses, read.rates) == ((10, 20), (3.5, 3.0), (900.0, 1100.0))
    assert (read.valid_loss, read.valid_perplexity) == (2.75, 15.6)


def test_the_table_has_the_best_first_and_says_who_stopped() -> None:
    good = Trained("performer_relu", 1.0, 2_000_000_000, 0)
    bad = Trained("softmax", 1.0, 1_000_000_000, 1)
    table = comparison_table([(bad, curve(3.0)), (good, curve(3.0, 2.0, 1.0))], steps=300)
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["mechanism"] == ["performer_relu", "softmax"]
    assert columns["non-finite steps"] == ["0", "ended after 10 of 300"]
    assert columns["peak memory, GB"] == ["2.00", "1.00"]
    assert len(curves_figure([(bad, curve(3.0)), (good, curve(3.0, 2.0))]).axes[0].lines) == 2


def test_a_finished_run_is_not_repeated_and_a_failed_one_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is no data: the run fails at once.
    with pytest.raises(InputDataError, match=r"the run of softmax failed: see .*softmax\.log"):
        training_comparison.train("softmax", tmp_path, 5)
    assert not (tmp_path / "softmax.json").exists()
    (tmp_path / "softmax.json").write_text(
        '{"name": "softmax", "seconds": 2.0, "peak_bytes": 7, "exit_code": 0}'
    )
    assert training_comparison.train("softmax", tmp_path, 5) == Trained("softmax", 2.0, 7, 0)
