"""One protein of a sequence file, and how the file is to be read."""

from dataclasses import dataclass
from typing import NamedTuple


class Record(NamedTuple):
    """One protein of a sequence file.

    `sequence` is in capitals and holds nothing but the 25 residue letters; `line` is the line
    where the record begins, counted from 1. What the source does not tell is None. `organism` is
    the name as the source writes it: the scientific one first, in flat files with others behind
    it in parentheses; `taxon` is its number at NCBI.
    """

    identifier: str
    header: str
    sequence: str
    line: int
    taxon: int | None = None
    is_fragment: bool | None = None
    organism: str | None = None


@dataclass(frozen=True)
class ReadOptions:
    """What is taken besides what is right.

    Args:
        allow_nucleotides: files that read like DNA or RNA.
        allow_comments: lines of a FASTA file that begin with `;`, `#` or `!`; they are skipped.
        allow_gaps: the gaps `-`, `.` and `~` of alignments (A2M, A3M); they are removed.
        ignore_trailing_garbage: gzip files with something else behind the compressed data.
        origins: taxon, organism and fragments are looked for in the headers of FASTA files, which
            takes as long as the rest of reading them.
    """

    allow_nucleotides: bool = False
    allow_comments: bool = False
    allow_gaps: bool = False
    ignore_trailing_garbage: bool = False
    origins: bool = True


STRICT = ReadOptions()
