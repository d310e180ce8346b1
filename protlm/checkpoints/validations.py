"""The validations of a run in its `metrics.csv`, and its best checkpoints by them."""

import csv
import math
from pathlib import Path
from typing import Any

from protlm.checkpoints.format import all_checkpoints, step_of
from protlm.config import BestMetric

METRICS = "metrics.csv"


def whole_rows(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a `metrics.csv` as text; no rows if there is no file.

    Truncated rows, from a killed process or a full disk, are excluded. They have no line end, or
    the wrong number of fields because the next row follows on the same line.
    """
    try:
        lines = path.read_bytes().decode(errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    whole = [line for line in lines if line.endswith("\n")]
    return [row for row in csv.DictReader(whole) if _is_whole(row)]


def _is_whole(row: dict[Any, Any]) -> bool:
    # `None` is the key of fields without a column, and the value of columns without a field.
    if None in row or None in row.values() or not row.get("step", "").isdecimal():
        return False
    try:
        _ = [float(value) for value in row.values() if value]
    except ValueError:
        return False
    return True


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Returns the rows of a `metrics.csv`, each with the columns that have a value."""
    return [{key: float(value) for key, value in row.items() if value} for row in whole_rows(path)]


def is_validated(run_dir: Path, step: int) -> bool:
    """Returns whether the log has the validation of this step."""
    return any(
        row["step"] == step and "valid_loss" in row for row in read_metrics(run_dir / METRICS)
    )


def best_checkpoints(run_dir: Path, metric: BestMetric, count: int) -> list[Path]:
    """Returns at most `count` checkpoints of validated steps, best first; ties by step.

    Steps whose validation is NaN are excluded. The validations are read from the log, so that a
    resumed run finds the same checkpoints.
    """
    sign = 1 if metric is BestMetric.valid_loss else -1
    rows = read_metrics(run_dir / METRICS) if count else []
    costs = {
        int(row["step"]): sign * row[metric]
        for row in rows
        if not math.isnan(row.get(metric, math.nan))
    }
    validated = [path for path in all_checkpoints(run_dir) if step_of(path) in costs]
    return sorted(validated, key=lambda path: costs[step_of(path)])[:count]
