"""Counts of rejected, filtered, changed and noted records, by reason."""

import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

MAX_LISTED = 1_000


@dataclass
class Tally:
    """Counts of records by reason.

    `records` counts all records that were read, `rejected` those that cannot be used, `filtered`
    those that were not selected, `changed` those kept with a change, `noted` those kept unchanged
    but worth reporting. For every reason for rejection, the first `max_listed` records are listed
    as (identifier, name of the file, line).
    """

    records: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    listed: dict[str, list[tuple[str, str, int]]] = field(default_factory=dict)
    max_listed: int = field(default=MAX_LISTED, init=False)

    def reject(self, reason: str, identifier: str, file: str, line: int) -> None:
        """Counts a record that cannot be used, and lists it."""
        self.rejected[reason] += 1
        listed = self.listed.setdefault(reason, [])
        if len(listed) < self.max_listed:
            listed.append((identifier, file, line))

    def filter(self, reason: str) -> None:
        """Counts a record that was not selected."""
        self.filtered[reason] += 1

    def change(self, reason: str) -> None:
        """Counts a record, or a file, that is kept with a change."""
        self.changed[reason] += 1

    def note(self, what: str) -> None:
        """Counts a record that is kept unchanged and worth reporting."""
        self.noted[what] += 1

    def add(self, other: "Tally") -> None:
        """Adds the counts of records that come after those of this tally."""
        self.records += other.records
        self.rejected.update(other.rejected)
        self.filtered.update(other.filtered)
        self.changed.update(other.changed)
        self.noted.update(other.noted)
        for reason, listed in other.listed.items():
            mine = self.listed.setdefault(reason, [])
            mine += listed[: self.max_listed - len(mine)]

    def warn_of_rejected(self, path: Path) -> None:
        """Warns in one line of the records of a file that cannot be used, if there are any."""
        if self.rejected:
            reasons = ", ".join(f"{n:,} {reason}" for reason, n in sorted(self.rejected.items()))
            warnings.warn(
                f"{path}: {self.num_rejected:,} of {self.records:,} records rejected: {reasons}",
                stacklevel=2,
            )

    @property
    def num_rejected(self) -> int:
        """Number of records that cannot be used."""
        return self.rejected.total()

    @property
    def num_filtered(self) -> int:
        """Number of records that were not selected."""
        return self.filtered.total()
