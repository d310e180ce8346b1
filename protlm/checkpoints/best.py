"""The best checkpoints of a run, by its validations."""

import math
from pathlib import Path

from protlm.checkpoints.format import all_checkpoints, step_of
from protlm.checkpoints.metrics import METRICS, read_metrics
from protlm.config import BestMetric


def best_checkpoints(run_dir: Path, metric: BestMetric, count: int) -> list[Path]:
    """Returns at most `count` checkpoints of validated steps, best first; ties by step.

    Steps whose validation is NaN are excluded. The validations are read from the log, so that a
    resumed run finds the same checkpoints.
    """
    sign = 1 if metric is BestMetric.valid_loss else -1
    rows = read_metrics(run_dir / METRICS) if count else []
    rows = [row for row in rows if not math.isnan(row.get(metric.value, math.nan))]
    costs = {int(row["step"]): sign * row[metric.value] for row in rows}
    validated = [path for path in all_checkpoints(run_dir) if step_of(path) in costs]
    return sorted(validated, key=lambda path: costs[step_of(path)])[:count]
