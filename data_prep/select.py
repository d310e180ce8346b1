"""Selection of records by length, completeness and organism."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from protlm.data.records import Record, Tally
from protlm.system.errors import UserError

_VIRUS = re.compile(r"\b(bacterio)?phage|virus\b")


@dataclass(frozen=True)
class Selection:
    """Criteria for records to keep; the default keeps all.

    Args:
        min_length: minimum number of residues.
        max_length: maximum number of residues.
        no_fragments: leaves out records that the source marks as fragments; records without such
            information are kept.
        organisms: names, which include strains, or NCBI taxon numbers; a record must match one of
            them. Records without an organism in the source are left out.
    """

    min_length: int | None = None
    max_length: int | None = None
    no_fragments: bool = False
    organisms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        shortest = 1 if self.min_length is None else self.min_length
        longest = self.max_length
        if shortest < 1 or (longest is not None and longest < shortest):
            bounds = {"--min-length": self.min_length, "--max-length": self.max_length}
            given = " ".join(f"{flag} {n}" for flag, n in bounds.items() if n is not None)
            raise UserError(
                f"{given}: no record has such a length; both are numbers of residues, at least 1, "
                "the first not above the second"
            )
        if not all(organism.strip() for organism in self.organisms):
            raise UserError("--organism '' is empty; give a name or a number: 9606")

    @property
    def needs_origins(self) -> bool:
        """Whether the selection depends on organisms or fragments."""
        return self.no_fragments or bool(self.organisms)

    def select(self, records: Iterator[Record], tally: Tally) -> Iterator[Record]:
        """Yields the selected records, and counts the others as filtered."""
        return records if self == Selection() else self._select(records, tally)

    def _select(self, records: Iterator[Record], tally: Tally) -> Iterator[Record]:
        taxa = {int(organism) for organism in self.organisms if organism.isdecimal()}
        names = tuple(o.casefold() for o in self.organisms if not o.isdecimal())
        for record in records:
            length = len(record.sequence)
            if self.min_length is not None and length < self.min_length:
                tally.filter(f"shorter than {self.min_length:,} residues")
            elif self.max_length is not None and length > self.max_length:
                tally.filter(f"longer than {self.max_length:,} residues")
            elif self.no_fragments and record.is_fragment:
                tally.filter("fragment")
            elif self.organisms and not _is_of(record, taxa, names):
                is_known = not (
                    (taxa and record.taxon is None) or (names and record.organism is None)
                )
                tally.filter("other organism" if is_known else "organism missing in the source")
            else:
                if self.no_fragments and record.is_fragment is None:
                    tally.note("fragment status missing in the source")
                yield record

    def describe(self) -> dict[str, Any]:
        """Returns the selection by flag."""
        return {
            "--min-length": self.min_length,
            "--max-length": self.max_length,
            "--no-fragments": self.no_fragments,
            "--organism": self.organisms,
        }


def _is_of(record: Record, taxa: set[int], names: tuple[str, ...]) -> bool:
    """Returns whether the organism is one of these, by number or by name."""
    if record.taxon in taxa:
        return True
    organism = (record.organism or "").casefold()
    # The name is followed by the strain or subspecies and, in flat files, by other names; but
    # phages and viruses of a species are excluded.
    return any(
        organism == name
        or (organism.startswith(f"{name} ") and not _VIRUS.search(organism, len(name)))
        for name in names
    )
