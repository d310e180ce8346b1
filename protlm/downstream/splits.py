"""Training and test proteins: given splits, or whole clusters; and what is on both sides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from protlm.data.records.record import Names
from protlm.data.relatives import MIN_SHARED, K, highest_shared_fractions
from protlm.downstream.label_files import FITTED, TEST, TRAIN, VALID, Example
from protlm.system.errors import InputDataError

TEST_FRACTION = 0.2


@dataclass(frozen=True)
class Split:
    """The rows of each split, int64, and the group of every row: clusters, or equal sequences.

    `test` has the rows of all test sets; that of a fold has clusters that are in other folds, too.
    """

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    groups: np.ndarray
    has_clusters: bool = False
    test_sets: Mapping[str, np.ndarray] = field(default_factory=dict)
    is_fold: bool = False

    def sides(self) -> dict[str, int]:
        """Returns the number of proteins of each split."""
        return {TRAIN: len(self.train), VALID: len(self.valid), TEST: len(self.test)}

    def clusters_of(self, proteins: np.ndarray) -> np.ndarray | None:
        """Returns the cluster of each protein, which the bootstrap draws whole; None if unknown."""
        # And those of other folds, so that all folds have the same draws.
        others = self.train if self.is_fold else self.train[:0]
        return self.groups[np.append(proteins, others)] if self.has_clusters else None


@dataclass(frozen=True)
class Leakage:
    """Counts of the test proteins that have a relative in train or valid.

    The similar ones share 6 % of the 6-mers of the shorter one.
    """

    identical: int
    same_cluster: int | None
    similar: int

    def describe(self, num_test: int) -> str | None:
        """Returns a sentence on what leaks, or None."""
        similar = f"share {MIN_SHARED:.0%} or more of the {K}-mers of the shorter one with one"
        counts = {
            "have the sequence of one": self.identical,
            "are in the cluster of one": self.same_cluster,
            similar: self.similar,
        }
        parts = [f"{number:,} {what}" for what, number in counts.items() if number]
        if not parts:
            return None
        return (
            f"the split leaks: of {num_test:,} test proteins, {', '.join(parts)} to fit to; the "
            "metrics overestimate what holds for new families"
        )


def split_of(examples: Sequence[Example], *, seed: int) -> Split:
    """Returns the given splits; or assigns whole clusters, about a fifth of proteins to test."""
    names = cluster_names(examples)
    named = names or [one.sequence for one in examples]
    groups = np.unique(np.array(named), return_inverse=True)[1].reshape(-1)
    given = np.array([one.split for one in examples])
    if not given.any():
        if names is None:
            raise InputDataError(
                "the labels have neither splits nor clusters, and a random split would have "
                "homologs on both sides; add a column split or cluster, or have clusters given or "
                "made by MMseqs2",
                {"cluster_table": "TABLE.tsv", "cluster": True},
            )
        given = np.where(held_out(groups, TEST_FRACTION, seed=seed), TEST, TRAIN)
    train, valid = (np.flatnonzero(given == name) for name in (TRAIN, VALID))
    test = np.flatnonzero(~np.isin(given, FITTED))
    sets = {str(name): np.flatnonzero(given == name) for name in np.unique(given[test])}
    for name, rows in ((TRAIN, train), (TEST, test)):
        if not rows.size:
            raise InputDataError(
                f"no protein is in the split {name}; correct the column split, or give a file of "
                "each split",
                {"splits": f"{name}=FILE"},
            )
    return Split(train, valid, test, groups, names is not None, sets)


def folds_of(examples: Sequence[Example], *, seed: int) -> dict[str, Split]:
    """Returns a split for each fold, which is its test set."""
    names = sorted({one.fold for one in examples})
    if len(names) < 2:
        raise InputDataError(f"all proteins are in the fold {names[0]}; give two or more folds")
    found = {}
    for name in names:
        rows = [replace(one, split=TEST if one.fold == name else TRAIN) for one in examples]
        found[name] = replace(split_of(rows, seed=seed), is_fold=True)
    return found


def leakage(examples: Sequence[Example], split: Split) -> Leakage:
    """Counts the test proteins with a relative in train or valid."""
    fit = np.concatenate([split.train, split.valid])
    sides = [[examples[row].sequence for row in rows] for rows in (fit, split.test)]
    known = set(sides[0])
    shared = int(np.isin(split.groups[split.test], split.groups[fit]).sum())
    shares = highest_shared_fractions(sides[1], sides[0], enough=MIN_SHARED)
    return Leakage(
        identical=sum(sequence in known for sequence in sides[1]),
        same_cluster=shared if split.has_clusters else None,
        similar=int((shares >= MIN_SHARED).sum()),
    )


def cluster_names(examples: Sequence[Example]) -> list[str] | None:
    """Returns the cluster of each example, perhaps its own; None if no cluster is known."""
    # Of several clusters, the first.
    of_sequence = {one.sequence: one.cluster for one in reversed(examples) if one.cluster}
    if not of_sequence:
        return None
    return [of_sequence.setdefault(one.sequence, f"only {one.identifier}") for one in examples]


def with_clusters(examples: Sequence[Example], clusters: Mapping[str, str]) -> list[Example]:
    """Returns the examples with the clusters of a table, or "" where it has none.

    MMseqs2 shortens sp|P12345|NAME to P12345.
    """
    members = Names(clusters, "the cluster table")
    names = [clusters.get(members.find(one.identifier) or "", "") for one in examples]
    if not any(names):
        raise InputDataError(
            f"the cluster table has none of the {len(examples):,} proteins; give the table made "
            f"from these sequences: its second column must have identifiers like "
            f"{examples[0].identifier}, which is that of the first protein"
        )
    return [replace(one, cluster=name) for one, name in zip(examples, names, strict=True)]


def held_out(groups: np.ndarray, fraction: float, *, seed: int) -> np.ndarray:
    """Returns whether each row is held out: whole groups, at most this fraction of the rows."""
    _, group_of, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if len(sizes) < 2:
        raise InputDataError(
            "proteins must be held out for the test and to choose the penalty, and those that are "
            f"left to divide ({len(groups):,}) are in one cluster, or have one sequence; give more "
            "proteins, of three or more clusters"
        )
    allowed = max(round(fraction * len(groups)), 1)
    is_out, total = np.zeros(len(sizes), dtype=bool), 0
    for group in np.random.default_rng(seed).permutation(len(sizes)):
        if total + sizes[group] <= allowed:
            is_out[group] = True
            total += int(sizes[group])
    is_out[sizes.argmin()] |= not total
    return is_out[group_of.reshape(-1)]
