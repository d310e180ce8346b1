"""Precision of predicted contacts: P@L, P@L/2 and P@L/5 by separation in the chain.

As in the contact notebook of ESM (Rao et al. 2020, doi:10.1101/2020.12.15.422761).
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.linalg import toeplitz

from protlm.analysis.bootstrap import MODEL, ratio_interval
from protlm.analysis.intervals import HEADING, in_words, score_cells, shown
from protlm.analysis.structures import Structure, contact_map
from protlm.data.tables import read_labels
from protlm.system.errors import InputDataError

# Half-open ranges of j - i; None means unbounded. Nearer pairs count nowhere.
SEPARATIONS: dict[str, tuple[int, int | None]] = {
    "short": (6, 12),
    "medium": (12, 24),
    "long": (24, None),
}
MIN_SEPARATION = 6
ALL_SEPARATIONS = (MIN_SEPARATION, None)
DIVISORS = {"P@L": 1, "P@L/2": 2, "P@L/5": 5}
METRIC, *_OTHERS = DIVISORS
NEAREST = "nearest_in_sequence"
# The headings of `table_rows`, after that of the predictors.
COLUMNS = ("range", METRIC, HEADING, *_OTHERS, "proteins")
_PERCENT = ".1%"
DEFINITION = (
    "contact: Cβ-Cβ < 8 Å, Cβ imputed where it is missing; separations: short 6 to 11, "
    "medium 12 to 23, long 24 and more; mean over proteins with such pairs, 95 % bootstrap interval"
)

# P@L of each protein by separation and divisor, as `precisions` returns it.
Precisions = Mapping[str, Mapping[str, np.ndarray]]


def top_pairs(
    probabilities_LL: np.ndarray,
    contacts_LL: np.ndarray,
    *,
    separation: tuple[int, int | None],
    divisor: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the floor(L / divisor) most probable pairs (i < j) of a range, in decreasing order.

    L is the number of resolved residues; unresolved pairs are excluded. Ties are broken at random
    with a fixed seed. A range with fewer pairs returns all of them.
    """
    low, high = separation
    rows, columns = np.triu_indices(len(contacts_LL), low)
    allowed = contacts_LL[rows, columns] >= 0
    if high is not None:
        allowed &= columns - rows < high
    # Ties in the order of positions would favor the N-terminus; shuffled, they amount to chance.
    shuffled = np.random.default_rng(0).permutation(np.flatnonzero(allowed))
    rows, columns = rows[shuffled], columns[shuffled]
    order = np.argsort(-probabilities_LL[rows, columns], kind="stable")
    best = order[: _num_resolved(contacts_LL) // divisor]
    return rows[best], columns[best]


def precision(
    probabilities_LL: np.ndarray,
    contacts_LL: np.ndarray,
    *,
    separation: tuple[int, int | None],
    divisor: int = 1,
) -> tuple[int, int]:
    """Returns the contacts among the `top_pairs` and floor(L / divisor), whose ratio is P@L.

    Where a range has fewer pairs, the missing ones count as wrong, as in ESM; where it has none,
    both are 0, and the protein has no P@L.
    """
    rows, columns = top_pairs(probabilities_LL, contacts_LL, separation=separation, divisor=divisor)
    asked = _num_resolved(contacts_LL) // divisor if len(rows) else 0
    return int(contacts_LL[rows, columns].sum()), asked


def precision_at(
    probabilities_LL: np.ndarray,
    contacts_LL: np.ndarray,
    separation: tuple[int, int | None] = ALL_SEPARATIONS,
    divisor: int = 1,
) -> float:
    """Returns the ratio of `precision`, by default P@L of all pairs; NaN without a pair."""
    hits, asked = precision(probabilities_LL, contacts_LL, separation=separation, divisor=divisor)
    return hits / asked if asked else np.nan


def _num_resolved(contacts_LL: np.ndarray) -> int:
    return int((contacts_LL >= 0).any(axis=1).sum())


def precisions(
    proteins: Iterable[tuple[np.ndarray, np.ndarray]],
) -> dict[str, dict[str, np.ndarray]]:
    """Computes the precision of each protein from probabilities and contact maps.

    It is NaN for proteins without a pair in the range, or of fewer than `divisor` residues.
    """
    rows = [
        precision_at(probabilities_LL, contacts_LL, separation, divisor)
        for probabilities_LL, contacts_LL in proteins
        for separation in SEPARATIONS.values()
        for divisor in DIVISORS.values()
    ]
    table = np.array(rows).reshape(-1, len(SEPARATIONS), len(DIVISORS))
    if np.isnan(table).all():
        raise InputDataError("no structure is long enough to be scored; give longer ones")
    return {
        name: {label: table[:, row, column] for column, label in enumerate(DIVISORS)}
        for row, name in enumerate(SEPARATIONS)
    }


def scores(
    proteins: Iterable[tuple[np.ndarray, np.ndarray]], *, seed: int = 0
) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the `mean_precision` of the `precisions`."""
    return _means(precisions(proteins), slice(None), seed)


def _means(found: Precisions, members: np.ndarray | slice, seed: int) -> dict[str, dict[str, Any]]:
    return {
        name: {
            label: mean_precision(values[members], seed=seed)
            for label, values in by_divisor.items()
        }
        for name, by_divisor in found.items()
    }


def mean_precision(values: np.ndarray, *, seed: int = 0) -> dict[str, Any]:
    """Returns the mean over the proteins that have a value, and its `ratio_interval`, or None."""
    defined = values[~np.isnan(values)]
    if not defined.size:
        return {"mean": None, "low": None, "high": None, "count": 0}
    return ratio_interval(defined, seed=seed)


def left_out(number: int, counted: int, separation: str) -> list[str]:
    """Returns a line on the proteins without a pair in a range, if there are any."""
    line = f"left out of P@L, without a pair {separation}: {number - counted} of {number} proteins"
    return [line] if number > counted else []


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
    return [
        (-toeplitz(np.arange(len(one.sequence), dtype=np.float64)), contact_map(one))
        for one in structures
    ]


def group_scores(
    predictors: Mapping[str, Precisions], group_of: list[str] | None, *, seed: int
) -> dict[str, Any]:
    """Returns the scores of each predictor, of all structures and `by_group` where there are any.

    `over_best_baseline` has for each range P@L of the model minus that of the baseline with the
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
    found = {who: _means(one, members, seed) for who, one in predictors.items()}
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
    for suffix, scores in _groups(values):
        for who in predictors:
            for separation, by_divisor in scores[who].items():
                first = by_divisor[METRIC]
                others = (shown(by_divisor[divisor]["mean"], _PERCENT) for divisor in _OTHERS)
                scored = (*score_cells(first, _PERCENT), *others, str(first["count"]))
                rows.append((f"{who}{suffix}", separation, *scored))
    return rows


def caption(values: Mapping[str, Any]) -> str:
    """Returns lines on the model and the best baselines, and on the structures left out."""
    lines = [
        f"{over['metric']} of the model minus that of {over['baseline']}, "
        f"{separation}{suffix}: {in_words(over, '+.1%')}"
        for suffix, scores in _groups(values)
        for separation, over in scores["over_best_baseline"].items()
    ]
    for name, found in values[MODEL].items():
        lines += left_out(values["num_test"], found[METRIC]["count"], f"of {name} range")
    if too_long := values["left_out"]:
        lines.append(
            f"left out, longer than {values['max_residues']} residues: {', '.join(too_long)}"
        )
    return "\n".join(lines)


def _groups(values: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the suffix of names and the scores, of all structures and of each group."""
    groups = values.get("by_group", {})
    return [("", values), *((f", {group}", scores) for group, scores in groups.items())]
