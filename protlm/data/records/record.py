"""A protein of a sequence file, and options for reading the file."""

from dataclasses import dataclass
from typing import NamedTuple


class Feature(NamedTuple):
    """An annotated part of a protein, as UniProt lists it.

    `kind` is that of the source: `BINDING` in flat files, `binding site` in XML. `first` and `last`
    are positions counted from 0, both included; None where the source has no certain position in
    this sequence: it is unknown, uncertain, beyond the end of a fragment, or `on_isoform`, in the
    sequence of another isoform.
    """

    kind: str
    first: int | None
    last: int | None
    on_isoform: bool = False


class Record(NamedTuple):
    """A protein of a sequence file.

    `sequence` consists of the 25 residue letters in upper case; `line` is the line of the record,
    counted from 1. Information that the source lacks is None. `organism` is the name as written in
    the source: the scientific name, in flat files followed by other names in parentheses; `taxon`
    is its NCBI taxon number. `features` are those of flat files and XML, where they were asked for.
    """

    identifier: str
    header: str
    sequence: str
    line: int
    taxon: int | None = None
    is_fragment: bool | None = None
    organism: str | None = None
    features: tuple[Feature, ...] | None = None


@dataclass(frozen=True)
class ReadOptions:
    r"""Deviations from the formats that are accepted.

    Args:
        allow_nucleotides: accepts files that look like DNA or RNA.
        allow_comments: skips lines of a FASTA file that begin with `;`, `#` or `!`.
        allow_gaps: removes the gaps `-`, `.` and `~` of alignments (A2M, A3M), and the lines
            `#A3M#` and `#59\t1` of the MPI toolkit and of ColabFold.
        ignore_trailing_garbage: ignores other data after the gzip data.
        origins: parses taxon, organism and fragment status in FASTA headers, which doubles the
            time for reading.
        features: parses the features of flat files and XML.
    """

    allow_nucleotides: bool = False
    allow_comments: bool = False
    allow_gaps: bool = False
    ignore_trailing_garbage: bool = False
    origins: bool = True
    features: bool = False


STRICT = ReadOptions()
