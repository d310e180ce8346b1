"""A cluster table, sorted on disk, that maps the names of records to clusters."""

import hashlib
import mmap
import re
import shutil
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np

from protlm.system.errors import InputDataError
from protlm.system.paths import complete_file, sha256_of

from .tables import excerpt, read_rows

# Rows sorted at a time; each takes about 80 bytes of memory.
_ROWS = 1 << 21
_ROW_BYTES = 16
# Names looked up between two releases of the table's pages; each loads up to 64 KiB.
_LOOKUPS = 1 << 11
# Members in two clusters that are searched for; the first is enough for the message.
_MOST_CONFLICTS = 1_000
# Names that MMseqs2 shortens when it reads FASTA: "sp|P12345|AATM_RABIT" becomes P12345.
_DATABASE_NAME = re.compile(r"(?:sp|tr|gb|ref|pdb|bbs|lcl|cl)\|([^|\s]+)")


@final
class ClusterTable:
    """The clusters of a table, identified by 64-bit hashes of the representatives' names.

    The table is read once. Hashes of members and their representatives are sorted in runs of two
    million rows, and the runs are merged into an unnamed temporary file of 16 bytes per row, and
    twice as much until it is complete. The file is mapped into memory and shared by forked
    processes.

    Args:
        path: representative and member, separated by a tab, plain or gzip, without a header: the
            `cluster.tsv` of MMseqs2.
        near: folder of the temporary file; by default the system's.
    """

    def __init__(self, path: Path, *, near: Path | None = None) -> None:
        self.path = path
        with tempfile.TemporaryFile(dir=near) as runs:
            sizes = self._write_runs(runs)
            with tempfile.TemporaryFile(dir=near) as sorted_rows:
                with tempfile.TemporaryFile(dir=near) as clusters:
                    self._merge(runs, sizes, sorted_rows, clusters)
                    clusters.seek(0)
                    shutil.copyfileobj(clusters, sorted_rows)
                self._map(sorted_rows)
        self.sha256 = sha256_of(path)
        self._stored: Path | None = None

    def __len__(self) -> int:
        """Returns the number of members of all clusters."""
        return len(self._members)

    def __getstate__(self) -> dict[str, Any]:
        assert self._stored is not None, "only a stored table can be sent to a job"
        return {"path": self.path, "sha256": self.sha256, "_stored": self._stored}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with state["_stored"].open("rb") as file:
            self._map(file)

    def store(self, path: Path) -> None:
        """Writes the sorted rows to a file, from which other machines can open them."""
        with complete_file(path, overwrite=True) as temporary, temporary.open("xb") as out:
            self._pages.seek(0)
            shutil.copyfileobj(self._pages, out)
        self._stored = path.absolute()

    def clusters_of(self, identifiers: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the cluster of each record, uint64, and whether the table lists it, bool.

        A record that the table does not list forms a cluster by itself.
        """
        hashes = np.array([name_hash(member_name(one)) for one in identifiers], np.uint64)
        clusters, is_listed = hashes.copy(), np.zeros(len(hashes), bool)
        # In ascending order, neighbors are on the same pages.
        order = np.argsort(hashes)
        for start in range(0, len(order), _LOOKUPS):
            some = order[start : start + _LOOKUPS]
            places = np.searchsorted(self._members, hashes[some])
            places[places == len(self)] = 0
            is_listed[some] = self._members[places] == hashes[some]
            clusters[some] = np.where(is_listed[some], self._clusters[places], hashes[some])
            self._pages.madvise(mmap.MADV_DONTNEED)
        return clusters, is_listed

    def rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields members and their clusters, uint64, sorted by member, in pieces."""
        for start in range(0, len(self), _ROWS):
            here = slice(start, start + _ROWS)
            yield self._members[here], self._clusters[here]
            self._pages.madvise(mmap.MADV_DONTNEED)

    def _map(self, file: BinaryIO) -> None:
        file.flush()
        self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        numbers = np.frombuffer(self._pages, np.uint64)
        self._members, self._clusters = numbers.reshape(2, -1)

    def _write_runs(self, runs: BinaryIO) -> list[int]:
        """Writes the rows in sorted runs, and returns the number of rows of each run."""
        sizes: list[int] = []
        members, clusters = array("Q"), array("Q")

        def write_run() -> None:
            sizes.append(self._write(runs, runs, np.array(members), np.array(clusters)))
            del members[:], clusters[:]

        last, cluster = "", 0
        for _, representative, member in cluster_rows(self.path):
            if representative != last:
                last, cluster = representative, name_hash(representative)
            members.append(name_hash(member))
            clusters.append(cluster)
            if len(members) == _ROWS:
                write_run()
        if members:
            write_run()
        return sizes

    def _merge(
        self, runs: BinaryIO, sizes: Sequence[int], out: BinaryIO, clusters_out: BinaryIO
    ) -> None:
        """Writes the members of all runs, sorted, and their clusters in the same order."""
        runs.flush()
        pages = mmap.mmap(runs.fileno(), 0, access=mmap.ACCESS_READ)
        starts = np.cumsum([0, *sizes])
        arrays = [
            np.frombuffer(pages, np.uint64, 2 * size, _ROW_BYTES * int(start)).reshape(2, -1)
            for start, size in zip(starts, sizes, strict=False)
        ]
        num_ranges = -(-sum(sizes) // _ROWS)
        edges = [number * 2**64 // num_ranges for number in range(1, num_ranges)]
        cuts = [
            [0, *np.searchsorted(members, np.array(edges, np.uint64)).tolist(), len(members)]
            for members, _ in arrays
        ]
        for number in range(num_ranges):
            parts = [
                both[:, cut[number] : cut[number + 1]]
                for both, cut in zip(arrays, cuts, strict=True)
            ]
            self._write(out, clusters_out, *np.concatenate(parts, axis=1))
            pages.madvise(mmap.MADV_DONTNEED)

    def _write(
        self, out: BinaryIO, clusters_out: BinaryIO, members: np.ndarray, clusters: np.ndarray
    ) -> int:
        """Writes rows sorted by member, each member once, and returns their number."""
        order = np.argsort(members, kind="stable")
        members, clusters = members[order], clusters[order]
        is_new = np.ones(len(members), bool)
        is_new[1:] = members[1:] != members[:-1]
        is_conflict = ~is_new[1:] & (clusters[1:] != clusters[:-1])
        if is_conflict.any():
            self._refuse_conflicts(members[1:][is_conflict])
        out.write(members[is_new].tobytes())
        clusters_out.write(clusters[is_new].tobytes())
        return int(np.count_nonzero(is_new))

    def _refuse_conflicts(self, members: np.ndarray) -> None:
        """Rejects members that are in two clusters, but not two names with the same hash."""
        wanted = set(members[:_MOST_CONFLICTS].tolist())
        first: dict[int, tuple[int, str, str]] = {}
        for number, representative, member in cluster_rows(self.path):
            key = name_hash(member)
            if key not in wanted:
                continue
            other_number, other, name = first.setdefault(key, (number, representative, member))
            if name == member and other != representative:
                raise InputDataError(
                    f"{self.path}, line {number}: {member} is in two clusters, of {representative} "
                    f"here and of {other} in line {other_number}; each identifier may be in one"
                )


def cluster_rows(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yields the line number, the representative and the member of each row."""
    for number, fields in read_rows(path, "a cluster table"):
        if len(fields) != 2 or not all(fields):
            raise InputDataError(
                f"{path}, line {number}: {excerpt(fields)} is not a representative and a member, "
                "separated by a tab (the cluster.tsv of MMseqs2)"
            )
        yield number, member_name(fields[0]), member_name(fields[1])


def member_name(identifier: str) -> str:
    """Returns the name that MMseqs2 gives to a record.

    >>> member_name("sp|P12345|AATM_RABIT"), member_name("P12345")
    ('P12345', 'P12345')
    """
    if "|" in identifier and (match := _DATABASE_NAME.match(identifier)):
        return match[1]
    return identifier


def name_hash(name: str) -> int:
    """Returns the BLAKE2b-64 hash of a name as a big-endian number."""
    encoded = name.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "big")
