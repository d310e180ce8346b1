"""Terminal output: escaped text, tables as wide as the terminal, and progress of long jobs."""

import re
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from datetime import timedelta
from typing import Self, TypeVar

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table

# C0 and C1 controls, line and paragraph separators, the marks that reverse text, and surrogates.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Wider than any row; rows are not padded to it.
_UNBOUNDED = 1 << 20
# Of tables in a pipe or a file; longer cells continue in the next line.
_PIPE_WIDTH = 100
_PLAIN_SECONDS = 5.0
# A table of at most this number of lines becomes one of columns if it is too wide.
_FEW = 4
T = TypeVar("T")


def printable(text: str) -> str:
    r"""Escapes control characters, which could move the cursor or start a new line.

    >>> printable("P1\x1b[2J\n>P2")
    'P1\\x1b[2J\\n>P2'
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str) -> str:
    r"""Escapes control characters other than line feeds.

    >>> printable_lines("one\ntwo\a")
    'one\ntwo\\x07'
    """
    return "\n".join(printable(line) for line in text.split("\n"))


class _Console(Console):
    """A console whose broken pipe is that of the command; rich would redirect the output first."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(*, stderr: bool = False, pipe_width: int = _UNBOUNDED) -> Console:
    """Returns a console on standard output or standard error.

    Output to a file or a pipe has unlimited width, unless it is given: rich would truncate names
    at 80 columns.
    """
    stream = sys.stderr if stderr else sys.stdout
    is_terminal = stream is not None and stream.isatty()
    return _Console(stderr=stderr, width=None if is_terminal else pipe_width)


def print_table(
    columns: Iterable[str], rows: Iterable[Iterable[str]], notes: Iterable[str] = ()
) -> None:
    """Prints a table on standard output, and lines below it."""
    out = console(pipe_width=_PIPE_WIDTH)
    table = [[*columns], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    if sum(widths) + 2 * len(widths) > out.width and len(table) <= _FEW:
        table = [list(cells) for cells in zip(*table, strict=True)]
    # No name is cut, however narrow a terminal is; those of rows are not divided, either.
    kept = [Column(escape(name), overflow="fold") for name in table[0]]
    kept[0].no_wrap = max(len(row[0]) for row in table) < out.width // 2
    shown = Table(*kept, box=SIMPLE, collapse_padding=True)
    for row in table[1:]:
        shown.add_row(*map(escape, row))
    out.print(shown)
    for note in notes:
        out.print(printable(note), highlight=False, markup=False, soft_wrap=not out.is_terminal)


class JobProgress:
    """Reports the progress of a job on standard error; a quiet one prints nothing.

    The amount of work may be unknown, and some of it may be done before.
    """

    def __init__(self, what: str, total: int | None, *, done: int = 0, quiet: bool = False) -> None:
        self._what, self._total, self._done, self._quiet = what, total, done, quiet
        self._bar: Progress | None = None
        self._first, self._start = done, time.monotonic()
        # The work that was done, and when, after its first piece.
        self._warm: tuple[int, float] | None = None
        self._last_line = 0.0
        self._note = ""
        self._printed = -1

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            total = "/{task.total:,}" if self._total else ""
            out = Console(stderr=True)
            texts = ("{task.completed:,}" + total, "{task.fields[rate]}", "{task.fields[left]}")
            self._bar = Progress(
                TextColumn("{task.description}", table_column=Column(no_wrap=True)),
                BarColumn(bar_width=max(min(40, out.width // 8), 1)),
                *(TextColumn(text, table_column=Column(no_wrap=True)) for text in texts),
                # It has the room that is left.
                TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, ratio=1)),
                console=out,
                expand=True,
            )
            self._bar.add_task(
                self._what, total=self._total, completed=self._done, note="", rate="", left=""
            )
            self._bar.start()
        return self

    def update(self, done: int, note: str = "") -> None:
        """Sets the total amount of work done; `note` is shown beside it."""
        self._done, self._note = done, printable(note) or self._note
        if self._warm is None and done > self._first:
            self._warm = done, time.monotonic()
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0],
                completed=done,
                note=escape(self._note),
                rate=self._rate(),
                left=self._time_left(),
            )
        elif not self._quiet and time.monotonic() - self._last_line >= _PLAIN_SECONDS:
            self._print_line()

    def advance(self, work: int) -> None:
        self.update(self._done + work)

    def print(self, text: str) -> None:
        """Prints a separate line, above the progress bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(escape(text), highlight=False)
        elif not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif not self._quiet and kind is None and self._done != self._printed:
            self._print_line()

    def _print_line(self) -> None:
        self._last_line = time.monotonic()
        self._printed = self._done
        total = f"/{self._total:,}" if self._total else ""
        notes = [note for note in (self._rate(), self._note, self._time_left()) if note]
        line = "  ".join([f"{self._what} {self._done:,}{total}", *notes])
        print(line, file=sys.stderr, flush=True)

    def _rate(self) -> str:
        done, seconds = self._done - self._first, time.monotonic() - self._start
        if done <= 0 or seconds <= 0:
            return ""
        rate = done / seconds
        return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"

    def _time_left(self) -> str:
        # The first piece of the work, which starts everything, takes longer.
        first, start = self._warm or (self._done, 0.0)
        done, left = self._done - first, (self._total or 0) - self._done
        if done <= 0 or left <= 0:
            return ""
        seconds = (time.monotonic() - start) * left / done
        return f"{timedelta(seconds=round(seconds))} left"


def watched(
    what: str, items: Iterable[T], *, total: int | None = None, quiet: bool = False
) -> Iterator[T]:
    """Yields the items of a job, and reports how many of them, or of a total, are done."""
    number = len(items) if isinstance(items, Sized) else total
    with JobProgress(what, number, quiet=quiet) as progress:
        for done, item in enumerate(items, start=1):
            yield item
            progress.update(done)
