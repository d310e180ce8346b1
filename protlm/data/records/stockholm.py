"""The rows of a Stockholm alignment, as Pfam, HMMER and Infernal write them."""

from collections.abc import Iterator
from typing import ClassVar, NoReturn, final

from protlm.data.records.block import Block, RecordFormat
from protlm.data.records.fasta import identifier_of, sanitize_header
from protlm.data.records.format_detection import SECOND, refusal
from protlm.data.records.record import Record, Tally, residues

_MARKER = b"# STOCKHOLM"
_MOST_BYTES = 1 << 30
_TRUNCATED = "the alignment does not end with //; it is truncated"
_TOO_LARGE = f"the alignment has over {_MOST_BYTES:,} bytes; give fewer of its rows"


@final
class StockholmBlock(Block):
    """A whole alignment, whose rows may be wrapped into several paragraphs."""

    format: ClassVar[str] = "stockholm"

    def _records(self, data: bytes, tally: Tally) -> Iterator[Record]:
        if not self.is_whole:
            self._refuse(0, _TOO_LARGE if self.is_cut else SECOND)
        lines = data.rstrip().split(b"\n")
        end = next((n for n, line in enumerate(lines) if line.startswith(b"//")), len(lines))
        if end != len(lines) - 1:
            is_cut = end == len(lines)
            self._refuse(end - is_cut, _TRUNCATED if is_cut else SECOND)
        # The line of each row, and its letters.
        rows: dict[bytes, tuple[int, list[bytes]]] = {}
        for number, line in enumerate(lines[:end]):
            words = line.split()
            # Lines of annotation: =GF of the file, =GS and =GR of a row, =GC of columns.
            if not words or line.startswith(b"#"):
                continue
            if len(words) != 2:
                self._refuse(number, f"{line[:40]!r} is not a name and its letters")
            rows.setdefault(words[0], (self.line + number, []))[1].append(words[1])
        for name, (line, letters) in rows.items():
            tally.records += 1
            header = sanitize_header(name.decode("utf-8", "surrogateescape"), tally)
            identifier = identifier_of(header, line, tally)
            row = b"".join(letters).decode("ascii", "surrogateescape")
            sequence, reason = residues(row, tally, self.options)
            if reason:
                self._reject(tally, reason, identifier, line)
            else:
                yield Record(identifier, header, sequence, line, row=row)

    def _identify(self, record: bytes) -> tuple[str, str]:
        return "", ""

    def _refuse(self, number: int, what: str) -> NoReturn:
        raise refusal(f"{self.source}, line {self.line + number}", what)


def stockholm_layout(start: bytes) -> RecordFormat | None:
    """Returns the structure of a Stockholm file, or None if the file has another format."""
    if not start.startswith(_MARKER):
        return None
    return RecordFormat(StockholmBlock, marker=b"\n" + _MARKER, max_record=_MOST_BYTES)
