"""Tables of queries and members: clusters of MMseqs2, and hits of BLAST or MMseqs2 (m8)."""

from collections import defaultdict
from pathlib import Path

from protlm.data.records.record import Names
from protlm.data.tables import excerpt, number_of, read_rows
from protlm.system.errors import InputDataError

_WHAT = "a table of query and member, as cluster.tsv, or of hits, as m8"
# Names of the first two columns, where a table has a header.
_HEADERS = {("query", "target"), ("qseqid", "sseqid"), ("representative", "member")}


class MemberTable:
    """The members of each query, and their identities to it, where the third column has these.

    A table of two columns has clusters, `representative<TAB>member`: a query is the representative
    or a member, and the others are its relatives. A longer one has hits, `query<TAB>target` and
    then an identity, in percent if one of them is above 1. Lines that begin with # are left out.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.num_rows, self._has_hits = path, 0, False
        self._members: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._owners: defaultdict[str, list[str]] = defaultdict(list)
        for line, fields in read_rows(path, _WHAT):
            if not fields[0].startswith("#") and (fields[0], *fields[1:2]) not in _HEADERS:
                self._add(line, fields)
        identities = [one for members in self._members.values() for one in members.values()]
        self._unit = 0.01 if max(identities, default=0) > 1 else 1.0
        # A query of hits is in the first column.
        queries = self._members if self._has_hits else {**self._members, **self._owners}
        # A cluster of one protein has no relatives.
        is_alone = {one for one, members in self._members.items() if not {*members} - {one}}
        self.names = Names((one for one in queries if one not in is_alone), path)

    def __str__(self) -> str:
        """Says what the table is, and what its identities are."""
        unit = "percent" if self._unit < 1 else "fractions"
        kind = f"hits, identities as {unit}" if self._has_hits else "clusters"
        return f"{self.num_rows:,} rows of {kind}, {len(self._members):,} queries"

    def members(self, name: str) -> dict[str, float | None]:
        """Returns the members that belong to a name in the table, and their identities if any."""
        if self._has_hits:
            hits = self._members[name].items()
            return {member: one * self._unit for member, one in hits if member != name}
        owners = [name] if name in self._members else self._owners[name]
        if len(owners) > 1:
            raise InputDataError(
                f"{self.path}: {name} is a member of {' and of '.join(owners[:2])}, and not in the "
                "first column; leave one of these rows"
            )
        # A cluster has its representative, too.
        return {one: None for one in (owners[0], *self._members[owners[0]]) if one != name}

    def _add(self, line: int, fields: list[str]) -> None:
        """Adds a row; of several hits of one pair, the highest identity counts."""
        identity = number_of(fields[2]) if len(fields) > 2 else 0.0
        has_hits = len(fields) > 2
        is_even = has_hits == self._has_hits or not self.num_rows
        if len(fields) < 2 or not all(fields[:2]) or identity is None or not is_even:
            raise InputDataError(
                f"{self.path}, line {line}: {excerpt(fields)} is not {_WHAT} (query, target and "
                "identity), separated by tabs"
            )
        query, member = fields[:2]
        self._has_hits, self.num_rows = has_hits, self.num_rows + 1
        self._members[query][member] = max(identity, self._members[query].get(member, 0.0))
        if query not in self._owners[member]:
            self._owners[member].append(query)
