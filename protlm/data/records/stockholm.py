"""The rows of a Stockholm alignment, as Pfam, HMMER and Infernal write them."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from protlm.data.records.fasta import identifier_of
from protlm.data.records.format_detection import SECOND, refusal
from protlm.data.records.record import Record, Tally, residues
from protlm.data.records.source import text_lines
from protlm.options.prepare import ReadOptions

_WHAT = "an alignment"
_GAPS = ReadOptions(allow_gaps=True)


def is_stockholm(path: Path) -> bool:
    """Returns whether the first line of a file, plain or gzip, is that of a Stockholm alignment."""
    return any(line.startswith("# STOCKHOLM") for line in islice(text_lines(path, _WHAT), 1))


def stockholm_records(path: Path, tally: Tally) -> Iterator[Record]:
    """Yields the rows of the one alignment of a file, in their order, with letters and gaps."""
    # The line of each row, and its letters, which may be wrapped into several paragraphs.
    rows: dict[str, tuple[int, list[str]]] = {}
    number, is_over = 0, False
    for number, line in enumerate(text_lines(path, _WHAT), start=1):
        words = line.split()
        # Lines of annotation: =GF of the file, =GS and =GR of a row, =GC of columns.
        is_row = bool(words) and not line.startswith("#")
        if is_over and words:
            raise refusal(f"{path}, line {number}", SECOND)
        if line.startswith("//"):
            is_over = True
        elif is_row and len(words) != 2:
            raise refusal(f"{path}, line {number}", f"{line!r:.40} is not a name and its letters")
        elif is_row:
            rows.setdefault(words[0], (number, []))[1].append(words[1])
    if not is_over:
        raise refusal(
            f"{path}, line {number}", "the alignment does not end with //; it is truncated"
        )
    tally.records += len(rows)
    for name, (line_of, letters) in rows.items():
        row, identifier = "".join(letters), identifier_of(name, line_of, tally)
        sequence, reason = residues(row, tally, _GAPS)
        if reason:
            tally.reject(reason, identifier, path.name, line_of)
        else:
            yield Record(identifier, name, sequence, line_of, row=row)
