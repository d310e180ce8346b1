"""Splits that keep clusters of similar sequences together, given a table of MMseqs2."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, final

import numpy as np

from protlm.data.records import Record

from .cluster_table import ClusterTable, cluster_rows, member_name, name_hash
from .families import OOD_FAMILY, HeldOutFamilies
from .split import TEST, TRAIN, VALID, HashSplit

UNCLUSTERED = "held out by its own name, because it is missing from the cluster table"
PULLED = "held out because its cluster holds a member of a held-out family"

_SIDES = (TRAIN, VALID, TEST, OOD_FAMILY)
_CODE_MASK = len(_SIDES) - 1


@final
class ClusterSplit:
    """A split rule that assigns whole clusters, by a hash of the representative's name.

    A cluster therefore stays in its split when others are added. A record that the table does not
    list is split by its own name, as a cluster of one. A cluster that contains a member of a
    held-out family goes to `test_ood_family` as a whole: its other members most likely belong to
    the family without being annotated, and would leak the held-out sequences into training.

    Only two kinds of names are kept in memory: the members of held-out clusters, and the members of
    train clusters whose own names would be held out. They are about 4 %, at 8 bytes each.

    Args:
        table: the clusters.
        fractions: fractions of `valid` and `test` among the clusters.
        families: families to hold out as well.
    """

    def __init__(
        self, table: ClusterTable, fractions: HashSplit, families: HeldOutFamilies | None = None
    ) -> None:
        self._table, self._sha256, self._fractions = table.path.name, table.sha256, fractions
        self._members = _held_out_members(table, fractions, families)

    def split_of(self, record: Record, digest: bytes) -> str:
        return self._side_of_member(name_hash(member_name(record.identifier)))

    def notes_of(self, record: Record, split: str) -> Iterable[str]:
        """Notes that a record was held out by its own name, or because of a cluster's family."""
        if split == TRAIN:
            return ()
        if split == OOD_FAMILY:
            return (PULLED,)
        is_listed = self._listed_side(name_hash(member_name(record.identifier))) is not None
        return () if is_listed else (UNCLUSTERED,)

    def describe(self) -> dict[str, Any]:
        return {
            "by": "blake2b-64 of the cluster's representative",
            "valid_fraction": self._fractions.valid_fraction,
            "test_fraction": self._fractions.test_fraction,
            "table": self._table,
            "sha256": self._sha256,
        }

    def _side_of_member(self, hashed: int) -> str:
        return self._listed_side(hashed) or self._fractions.side_of(hashed.to_bytes(8, "big"))

    def _listed_side(self, hashed: int) -> str | None:
        """Returns the split of a member that is kept in memory."""
        key = hashed & ~_CODE_MASK
        index = bisect_left(self._members, key)
        if index < len(self._members) and self._members[index] & ~_CODE_MASK == key:
            return _SIDES[self._members[index] & _CODE_MASK]
        return None


def _held_out_members(
    table: ClusterTable, fractions: HashSplit, families: HeldOutFamilies | None
) -> array:
    """Returns sorted keys: the first 62 bits of a name's hash, and the number of its split.

    For TrEMBL, the probability that any two of its names collide is about one in a thousand.
    """
    pulled = _clusters_of(table, families) if families else np.zeros(0, np.uint64)
    found = []
    for members, clusters in table.rows():
        sides = _sides(clusters, fractions)
        sides[np.isin(clusters, pulled)] = _SIDES.index(OOD_FAMILY)
        train = _SIDES.index(TRAIN)
        kept = (sides != train) | (_sides(members, fractions) != train)
        found.append(members[kept] & ~np.uint64(_CODE_MASK) | sides[kept])
    return array("Q", np.sort(np.concatenate(found)).tobytes())


def _sides(hashes: np.ndarray, fractions: HashSplit) -> np.ndarray:
    """Returns the numbers of the splits of names, uint64."""
    end_of_valid, end_of_test = fractions.ends
    held_out = np.where(hashes < end_of_valid, _SIDES.index(VALID), _SIDES.index(TEST))
    return np.where(hashes >= end_of_test, _SIDES.index(TRAIN), held_out).astype(np.uint64)


def _clusters_of(table: ClusterTable, families: HeldOutFamilies) -> np.ndarray:
    """Returns the clusters that contain a member of the families, uint64."""
    found = {
        representative
        for _, representative, member in cluster_rows(table.path)
        if families.families_of(member)
    }
    return np.array([name_hash(representative) for representative in found], np.uint64)
