"""Records of sequence files, and the tally of what was rejected or changed on the way."""

from collections import Counter
from dataclasses import dataclass, field

MAX_LISTED = 1_000


@dataclass(frozen=True)
class Record:
    """One protein of a sequence file.

    `sequence` is in capitals and holds nothing but the 25 residue letters; `line` is the line
    of the header, counted from 1.
    """

    identifier: str
    header: str
    sequence: str
    line: int


@dataclass
class Tally:
    """Counts, by reason, of the records that were rejected, changed, or kept but remarkable.

    `records` counts all that were read. Of every reason for rejection the first 1,000 records
    are listed as (identifier, line).
    """

    records: int = 0
    rejected: dict[str, int] = field(default_factory=Counter)
    changed: dict[str, int] = field(default_factory=Counter)
    noted: dict[str, int] = field(default_factory=Counter)
    listed: dict[str, list[tuple[str, int]]] = field(default_factory=dict)

    def reject(self, reason: str, identifier: str, line: int) -> None:
        """Counts a record that is left out."""
        self.rejected[reason] = self.rejected.get(reason, 0) + 1
        listed = self.listed.setdefault(reason, [])
        if len(listed) < MAX_LISTED:
            listed.append((identifier, line))

    def change(self, reason: str) -> None:
        """Counts a record, or a file, that is kept with a change."""
        self.changed[reason] = self.changed.get(reason, 0) + 1

    def note(self, what: str) -> None:
        """Counts a record that is kept as it is and ought to be known about."""
        self.noted[what] = self.noted.get(what, 0) + 1

    @property
    def num_rejected(self) -> int:
        """How many records were left out."""
        return sum(self.rejected.values())
