"""Precision of predicted contacts: P@L, P@L/2 and P@L/5 by separation in the chain.

As in the contact notebook of ESM (Rao et al. 2020, doi:10.1101/2020.12.15.422761).
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from protlm.analysis.bootstrap import ratio_interval
from protlm.system.errors import InputDataError

# Half-open ranges of j - i; None means unbounded.
SEPARATIONS: dict[str, tuple[int, int | None]] = {
    "short": (6, 12),
    "medium": (12, 24),
    "long": (24, None),
}
DIVISORS = {"P@L": 1, "P@L/2": 2, "P@L/5": 5}
DEFINITION = (
    "contact: Cβ-Cβ < 8 Å, Cβ imputed where it is missing; separations: short 6 to 11, "
    "medium 12 to 23, long 24 and more; mean over proteins with such pairs, 95 % bootstrap interval"
)


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

    Args:
        separation: j - i is at least the first and, unless it is None, less than the second.
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
    divisor: int,
) -> tuple[int, int]:
    """Returns the contacts among the `top_pairs` and floor(L / divisor), whose ratio is P@L.

    Where a range has fewer pairs, the missing ones count as wrong, as in ESM; where it has none,
    both are 0, and the protein has no P@L.
    """
    rows, columns = top_pairs(probabilities_LL, contacts_LL, separation=separation, divisor=divisor)
    asked = _num_resolved(contacts_LL) // divisor if len(rows) else 0
    return int(contacts_LL[rows, columns].sum()), asked


def _num_resolved(contacts_LL: np.ndarray) -> int:
    return int((contacts_LL >= 0).any(axis=1).sum())


def precisions(
    proteins: Iterable[tuple[np.ndarray, np.ndarray]],
) -> dict[str, dict[str, np.ndarray]]:
    """Computes the precision of each protein from probabilities and contact maps.

    Returns:
        {"short" | "medium" | "long": {"P@L" | "P@L/2" | "P@L/5": float64 [proteins]}}; NaN for
        proteins without a pair in the range, or of fewer than `divisor` residues.
    """
    rows = []
    for probabilities_LL, contacts_LL in proteins:
        for separation in SEPARATIONS.values():
            for divisor in DIVISORS.values():
                hits, count = precision(
                    probabilities_LL, contacts_LL, separation=separation, divisor=divisor
                )
                rows.append(hits / count if count else np.nan)
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
    """Computes precision by range and number of pairs from probabilities and contact maps.

    Returns:
        {"short" | "medium" | "long": {"P@L" | "P@L/2" | "P@L/5": {"mean", "low", "high",
        "count"}}}: as `mean_precision` of the `precisions`.
    """
    return {
        name: {label: mean_precision(values, seed=seed) for label, values in by_divisor.items()}
        for name, by_divisor in precisions(proteins).items()
    }


def mean_precision(values: np.ndarray, *, seed: int = 0) -> dict[str, Any]:
    """Returns the mean over the proteins that have a value, and its `ratio_interval`, or None."""
    defined = values[~np.isnan(values)]
    if not defined.size:
        return {"mean": None, "low": None, "high": None, "count": 0}
    return ratio_interval(defined, seed=seed)


def percent(value: float | None, style: str = ".1%") -> str:
    """Formats a mean precision; a dash for None."""
    return "–" if value is None else f"{value:{style}}"


def left_out(number: int, counted: int, separation: str) -> list[str]:
    """Returns a line on the proteins without a pair in a range, if there are any."""
    line = f"left out of P@L, without a pair {separation}: {number - counted} of {number} proteins"
    return [line] if number > counted else []
