"""What a run's `metrics.csv` says: its rows, and whether a step was validated."""

import csv
from pathlib import Path
from typing import Any

METRICS = "metrics.csv"


def whole_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a `metrics.csv` as they are written; none where there is no file.

    A row that is not whole, because the process was killed or the disk was full, is left out: it
    has no end, or the next one stands in it, so that it has too many fields or too few.
    """
    try:
        lines = path.read_bytes().decode(errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    whole = [line for line in lines if line.endswith("\n")]
    return [row for row in csv.DictReader(whole) if _is_whole(row)]


def _is_whole(row: dict[Any, Any]) -> bool:
    # `None` stands for fields without a column, and for columns without a field.
    if None in row or None in row.values() or not row.get("step", "").isdecimal():
        return False
    try:
        _ = [float(value) for value in row.values() if value]
    except ValueError:
        return False
    return True


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a `metrics.csv`, each with the columns that have a value."""
    return [{key: float(value) for key, value in row.items() if value} for row in whole_rows(path)]


def is_validated(run_dir: Path, step: int) -> bool:
    """Whether the validation after this step is in the log."""
    rows = read_metrics(run_dir / METRICS)
    return any(row["step"] == step and "valid_loss" in row for row in rows)
