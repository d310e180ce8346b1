"""Contact precision by group of structures, for instance with and without homologs in training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from protlm.analysis.precision import DIVISORS, SEPARATIONS, left_out, mean_precision, percent
from protlm.analysis.structures import Structure, contact_map
from protlm.data.tables import read_labels
from protlm.system.errors import InputDataError

MODEL, NEAREST = "model", "nearest_in_sequence"
METRIC, *_OTHERS = DIVISORS
# The headings of `table_rows`, after that of the predictors.
COLUMNS = ("range", METRIC, "95 %", *_OTHERS, "proteins")
# The value of `protlm.analysis.precision.precisions`.
Precisions = Mapping[str, Mapping[str, np.ndarray]]


def read_groups(path: Path | None, structures: Sequence[Structure]) -> list[str] | None:
    """Reads the group of each structure from a table; None without a table."""
    if path is None:
        return None
    group_of = read_labels(path, "structure", "group")
    if missing := [s.identifier for s in structures if s.identifier not in group_of]:
        raise InputDataError(
            f"{path} has no group for {missing[0]}, and {len(missing) - 1} more are missing; add a "
            "row for each structure"
        )
    return [group_of[structure.identifier] for structure in structures]


def nearest_in_sequence(structures: Sequence[Structure]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns, without a model, pairs ranked by nearness in the sequence, and their contacts.

    Contacts become rarer with the separation, so of any range the nearest pairs are above chance.
    """
    found = []
    for structure in structures:
        positions = np.arange(len(structure.sequence), dtype=np.float64)
        found.append((-np.abs(positions[:, None] - positions), contact_map(structure)))
    return found


def group_scores(
    predictors: Mapping[str, Precisions], group_of: list[str] | None, *, seed: int
) -> dict[str, Any]:
    """Returns the scores of each predictor, of all structures and `by_group` where there are any.

    `over_best_baseline` has for each range P@L of the model less that of the baseline with the
    highest mean, with a paired 95 % bootstrap interval over proteins. Baselines are the predictors
    that do not use the model's weights, whose names do not begin with `MODEL`.
    """
    result = _scores(predictors, slice(None), seed)
    if group_of is not None:
        names = np.array(group_of)
        result["by_group"] = {
            group: _scores(predictors, names == group, seed) for group in sorted(set(group_of))
        }
    return result


def _scores(
    predictors: Mapping[str, Precisions], members: np.ndarray | slice, seed: int
) -> dict[str, Any]:
    found: dict[str, Any] = {
        who: {
            separation: {
                label: mean_precision(values[members], seed=seed)
                for label, values in by_divisor.items()
            }
            for separation, by_divisor in precisions.items()
        }
        for who, precisions in predictors.items()
    }
    baselines = [who for who in predictors if not who.startswith(MODEL)]
    over = {}
    for separation in SEPARATIONS:
        means = {who: found[who][separation][METRIC]["mean"] for who in baselines}
        best = max(means, key=lambda who: means[who] or 0)
        model, baseline = (predictors[who][separation][METRIC] for who in (MODEL, best))
        compared = mean_precision((model - baseline)[members], seed=seed)
        over[separation] = {"baseline": best, "metric": METRIC, **compared}
    return {**found, "over_best_baseline": over}


def table_rows(values: Mapping[str, Any], predictors: Sequence[str]) -> list[tuple[str, ...]]:
    """Formats the cells of `COLUMNS` after the predictor, for all structures and each group."""
    rows = []
    for suffix, part in _parts(values):
        for who in predictors:
            for separation, by_divisor in part[who].items():
                first, *others = (by_divisor[divisor] for divisor in DIVISORS)
                cells = [percent(one["mean"]) for one in others]
                interval = f"{percent(first['low'])} to {percent(first['high'])}"
                count = str(first["count"])
                rows.append(
                    (f"{who}{suffix}", separation, percent(first["mean"]), interval, *cells, count)
                )
    return rows


def caption(values: Mapping[str, Any]) -> str:
    """Returns lines on the model and the best baselines, and on the structures left out."""
    lines = []
    for suffix, part in _parts(values):
        for separation, over in part["over_best_baseline"].items():
            mean, low, high = (percent(over[name], "+.1%") for name in ("mean", "low", "high"))
            lines.append(
                f"{over['metric']} of the model less that of {over['baseline']}, "
                f"{separation}{suffix}: {mean} ({low} to {high})"
            )
    for name, found in values[MODEL].items():
        lines += left_out(values["num_test"], found[METRIC]["count"], f"of {name} range")
    if too_long := values["left_out"]:
        limit = values["max_residues"]
        lines.append(f"left out, longer than {limit} residues: {', '.join(too_long)}")
    return "\n".join(lines)


def _parts(values: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the suffix of names and the scores, of all structures and of each group."""
    groups = values.get("by_group", {})
    return [("", values), *((f", {group}", part) for group, part in groups.items())]
