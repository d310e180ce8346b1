"""Splits that keep clusters of similar sequences together, by a table of MMseqs2."""

import hashlib
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, final

import numpy as np

from data_prep.families import OOD_FAMILY, HeldOutFamilies
from data_prep.split import TEST, TRAIN, VALID, HashSplit
from data_prep.tables import excerpt, read_rows
from protlm.data.records import Record
from protlm.errors import InputDataError
from protlm.paths import sha256_of

UNCLUSTERED = "held out by its own name, because the cluster table lacks it"
PULLED = "held out because its cluster holds a member of a held-out family"

_SIDES = (TRAIN, VALID, TEST, OOD_FAMILY)
_CODE_MASK = len(_SIDES) - 1
# Names that MMseqs2 takes apart when it reads FASTA: "sp|P12345|AATM_RABIT" becomes P12345.
_DATABASE_NAME = re.compile(r"(?:sp|tr|gb|ref|pdb|bbs|lcl|cl)\|([^|\s]+)")


@final
class ClusterSplit:
    """Sends whole clusters to one side, which the name of the representative alone decides.

    So clusters stay where they are when others are added. A record that the table lacks goes by
    its own name, as if it were a cluster of one. A cluster that holds a member of a held-out
    family goes to `test_ood_family` as a whole: what resembles a family so much is most likely of
    it too, without saying so, and would give the held-out sequences away to training.

    In memory are only the members of held-out clusters, and those members of train clusters whose
    own name would be held out: some 4 %, at 8 bytes each. Every other name is of train.

    Args:
        path: representative and member, separated by a tab, plain or gzip, without a header: the
            `cluster.tsv` of MMseqs2.
        fractions: the shares of `valid` and `test` among the clusters.
        families: families that are held out besides.

    Raises:
        InputDataError: the table is missing or damaged, or a member is in clusters of two sides.
    """

    def __init__(
        self, path: Path, fractions: HashSplit, families: HeldOutFamilies | None = None
    ) -> None:
        self._path, self._fractions = path, fractions
        pulled = _representatives_of(path, families) if families else frozenset()
        self._members = _held_out_members(_sided_rows(path, fractions, pulled), fractions)
        for number, member, side in _sided_rows(path, fractions, pulled):
            if (other := self._side_of_member(_hash(member))) != side:
                raise InputDataError(
                    f"{path}, line {number}: {member} is in two clusters, which go to {side} and "
                    f"to {other}; each identifier may be in one"
                )

    def split_of(self, record: Record, digest: bytes) -> str:
        """See `SplitRule.split_of`."""
        return self._side_of_member(_hash(member_name(record.identifier)))

    def notes_of(self, record: Record, split: str) -> Iterable[str]:
        """Whether a held-out record is there by its own name, or for the sake of its cluster."""
        if split == TRAIN:
            return ()
        if split == OOD_FAMILY:
            return (PULLED,)
        is_listed = self._listed_side(_hash(member_name(record.identifier))) is not None
        return () if is_listed else (UNCLUSTERED,)

    def describe(self) -> dict[str, Any]:
        """See `SplitRule.describe`."""
        return {
            "by": "blake2b-64 of the cluster's representative",
            "valid_fraction": self._fractions.valid_fraction,
            "test_fraction": self._fractions.test_fraction,
            "table": self._path.name,
            "sha256": sha256_of(self._path),
        }

    def _side_of_member(self, name_hash: bytes) -> str:
        return self._listed_side(name_hash) or self._fractions.side_of(name_hash)

    def _listed_side(self, name_hash: bytes) -> str | None:
        """The side of a member that is in memory."""
        key = _key(name_hash)
        index = bisect_left(self._members, key)
        if index < len(self._members) and self._members[index] & ~_CODE_MASK == key:
            return _SIDES[self._members[index] & _CODE_MASK]
        return None


def _held_out_members(rows: Iterable[tuple[int, str, str]], fractions: HashSplit) -> array:
    """Sorted keys: the first 62 bits of a name's hash, and the number of its side.

    For TrEMBL the chance is one in some thousand that one of its names is taken for another.
    """
    keys = array("Q")
    for _, member, side in rows:
        name_hash = _hash(member)
        if side != TRAIN or fractions.side_of(name_hash) != TRAIN:
            keys.append(_key(name_hash) | _SIDES.index(side))
    return array("Q", np.sort(np.array(keys)).tobytes())


def _sided_rows(
    path: Path, fractions: HashSplit, pulled: frozenset[str]
) -> Iterator[tuple[int, str, str]]:
    """The line, the member and its cluster's side of each row."""
    last, side = "", TRAIN
    for number, representative, member in _rows(path):
        if representative != last:
            is_pulled = representative in pulled
            last = representative
            side = OOD_FAMILY if is_pulled else fractions.side_of(_hash(representative))
        yield number, member, side


def _representatives_of(path: Path, families: HeldOutFamilies) -> frozenset[str]:
    """The clusters that hold a member of the families."""
    return frozenset(
        representative for _, representative, member in _rows(path) if families.families_of(member)
    )


def _rows(path: Path) -> Iterator[tuple[int, str, str]]:
    """The line, the representative and the member of each row."""
    for number, fields in read_rows(path, "a cluster table"):
        if len(fields) != 2 or not all(fields):
            raise InputDataError(
                f"{path}, line {number}: {excerpt(fields)} is not a representative and a member, "
                "separated by a tab (the cluster.tsv of MMseqs2)"
            )
        yield number, member_name(fields[0]), member_name(fields[1])


def member_name(identifier: str) -> str:
    """What MMseqs2 calls a record.

    >>> member_name("sp|P12345|AATM_RABIT"), member_name("P12345")
    ('P12345', 'P12345')
    """
    if "|" in identifier and (match := _DATABASE_NAME.match(identifier)):
        return match[1]
    return identifier


def _hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()


def _key(name_hash: bytes) -> int:
    return int.from_bytes(name_hash, "big") & ~_CODE_MASK
