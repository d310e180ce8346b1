"""Which checkpoints of a run are its best: those of the steps whose validation was."""

import math
from pathlib import Path

from protlm.config import BestMetric
from protlm.model.checkpoint import all_checkpoints, step_of
from protlm.training.metrics import METRICS, read_metrics


def best_checkpoints(run_dir: Path, metric: BestMetric, count: int) -> list[Path]:
    """At most `count` checkpoints of validated steps, the best first; of equals the earlier.

    A step whose validation gave no number is none of them. It is the log that knows the
    validations, so a continued run finds the same.
    """
    sign = 1 if metric is BestMetric.valid_loss else -1
    rows = read_metrics(run_dir / METRICS) if count else []
    rows = [row for row in rows if not math.isnan(row.get(metric.value, math.nan))]
    costs = {int(row["step"]): sign * row[metric.value] for row in rows}
    validated = [path for path in all_checkpoints(run_dir) if step_of(path) in costs]
    return sorted(validated, key=lambda path: costs[step_of(path)])[:count]
