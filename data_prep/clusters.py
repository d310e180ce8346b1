"""Clusters of similar sequences: the table of MMseqs2, and splits that keep them together."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, final

import numpy as np

from protlm.data.records.record import Record, accession
from protlm.data.tables import read_clusters
from protlm.system.errors import InputDataError
from protlm.system.paths import complete_file, sha256_of

from .families import OOD_FAMILY, HeldOutFamilies
from .split import TRAIN, HashSplit, SplitRule

UNCLUSTERED = "missing from the cluster table; its split was chosen from its own name"
PULLED = "held out because its cluster holds a member of a held-out family"

_BITS = 16
# Members in two clusters that are searched for; the first is enough for the message.
_MOST_CONFLICTS = 1_000


@final
class ClusterTable:
    """The clusters of a table, identified by 64-bit hashes of the representatives' names.

    Hashes of members and their representatives are sorted in memory: 16 bytes for each row, and
    about 40 while they are sorted. Forked processes share them.

    Args:
        path: representative and member, separated by a tab, plain or gzip, without a header: the
            `cluster.tsv` of MMseqs2.
        version: of MMseqs2, if protlm ran it.
    """

    def __init__(self, path: Path, version: str | None = None) -> None:
        self.path, self.version, self._stored = path, version, Path()
        members, clusters = array("Q"), array("Q")
        last, cluster = "", 0
        for _, representative, member in read_clusters(path):
            if representative != last:
                last, cluster = representative, name_hash(representative)
            members.append(name_hash(member))
            clusters.append(cluster)
        self._sort(np.frombuffer(members, np.uint64), np.frombuffer(clusters, np.uint64))
        self.sha256 = sha256_of(path)

    def __len__(self) -> int:
        return len(self._members)

    def __getstate__(self) -> dict[str, Any]:
        assert self._stored.is_file(), "only a stored table can be sent to another process"
        return {name: getattr(self, name) for name in ("path", "version", "sha256", "_stored")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._keep(*np.memmap(self._stored, np.uint64, "r").reshape(2, -1))

    def store(self, path: Path) -> None:
        """Writes the sorted rows to a file, which other processes and machines map into memory."""
        with complete_file(path, overwrite=True) as temporary, temporary.open("xb") as out:
            out.write(self._members.data)
            out.write(self._clusters.data)
        self._stored = path.absolute()

    def cluster_of(self, hashed: int) -> int | None:
        """Returns the cluster of the name with this hash; None if the table does not list it."""
        members, first = self._members.data, hashed >> (64 - _BITS)
        place = bisect_left(members, hashed, self._starts[first], self._starts[first + 1])
        if place == len(members) or members[place] != hashed:
            return None
        return int(self._clusters[place])

    def clusters_of(self, identifiers: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the cluster of each record, uint64, and whether the table lists it, bool.

        A record that the table does not list forms a cluster by itself.
        """
        hashes = np.array([name_hash(one) for one in identifiers], np.uint64)
        places = np.searchsorted(self._members, hashes)
        places[places == len(self)] = 0
        is_listed = self._members[places] == hashes
        return np.where(is_listed, self._clusters[places], hashes), is_listed

    def _sort(self, members: np.ndarray, clusters: np.ndarray) -> None:
        order = np.argsort(members, kind="stable")
        members, clusters = members[order], clusters[order]
        is_new = np.append(True, members[1:] != members[:-1])
        is_conflict = ~is_new[1:] & (clusters[1:] != clusters[:-1])
        if is_conflict.any():
            self._refuse_conflicts(members[1:][is_conflict])
        if not is_new.all():
            members, clusters = members[is_new], clusters[is_new]
        self._keep(members, clusters)

    def _keep(self, members: np.ndarray, clusters: np.ndarray) -> None:
        self._members, self._clusters = members, clusters
        # The first row of each value of the highest bits, which shortens a search in memory.
        values = np.arange(1 << _BITS, dtype=np.uint64) << np.uint64(64 - _BITS)
        self._starts = [*np.searchsorted(members, values).tolist(), len(members)]

    def _refuse_conflicts(self, members: np.ndarray) -> None:
        """Rejects members that are in two clusters, but not two names with the same hash."""
        wanted = set(members[:_MOST_CONFLICTS].tolist())
        first: dict[int, tuple[int, str, str]] = {}
        for number, *names in read_clusters(self.path):
            representative, member = map(accession, names)
            key = name_hash(member)
            if key not in wanted:
                continue
            other_number, other, name = first.setdefault(key, (number, representative, member))
            if name == member and other != representative:
                raise InputDataError(
                    f"{self.path}, line {number}: {member} is in two clusters, of {representative} "
                    f"here and of {other} in line {other_number}; each identifier may be in one"
                )


def name_hash(identifier: str) -> int:
    """Returns the BLAKE2b-64 hash of MMseqs2's name of a record as a big-endian number."""
    encoded = accession(identifier).encode("utf-8", "surrogateescape")
    return int.from_bytes(blake2b(encoded, digest_size=8).digest(), "big")


@final
class ClusterSplit(SplitRule):
    """A split rule that assigns whole clusters, by a hash of the representative's name.

    A cluster therefore stays in its split when others are added. A record that the table does not
    list is split by its own name, as a cluster of one. A cluster that contains a member of a
    held-out family goes to `test_ood_family` as a whole: its other members most likely belong to
    the family without being annotated, and would leak the held-out sequences into training.
    """

    def __init__(
        self, table: ClusterTable, fractions: HashSplit, families: HeldOutFamilies | None = None
    ) -> None:
        self._table, self._fractions = table, fractions
        self._pulled: set[int] = set()
        if families is not None:
            self._pulled.update(
                name_hash(representative)
                for _, representative, member in read_clusters(table.path)
                if families.families_of(accession(member))
            )

    def split_of(self, record: Record, digest: bytes) -> str:
        hashed = name_hash(record.identifier)
        cluster = self._table.cluster_of(hashed)
        if cluster in self._pulled:
            return OOD_FAMILY
        return self._fractions.side_of((hashed if cluster is None else cluster).to_bytes(8, "big"))

    def notes_of(self, record: Record, split: str) -> Iterable[str]:
        """Notes that a record was held out by its own name, or because of a cluster's family."""
        if split == TRAIN:
            return ()
        if split == OOD_FAMILY:
            return (PULLED,)
        is_listed = self._table.cluster_of(name_hash(record.identifier)) is not None
        return () if is_listed else (UNCLUSTERED,)

    def describe(self) -> dict[str, Any]:
        return {
            "by": "blake2b-64 of the cluster's representative",
            "valid_fraction": self._fractions.valid_fraction,
            "test_fraction": self._fractions.test_fraction,
            "table": self._table.path.name,
            "sha256": self._table.sha256,
            **({"mmseqs2": version} if (version := self._table.version) else {}),
        }
