"""How a long job tells where it is: a bar in a terminal, a line every few seconds elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_PLAIN_SECONDS = 5.0


class JobProgress:
    """Reports on standard error how much of a job is done.

    Args:
        what: names the job, for instance "training".
        total: how much there is to do, or None when nobody knows.
        done: how much was done before.
        quiet: reports nothing, for ranks other than 0.
    """

    def __init__(self, what: str, total: int | None, *, done: int = 0, quiet: bool = False) -> None:
        self._what, self._total, self._done, self._quiet = what, total, done, quiet
        self._bar: Progress | None = None
        self._last_line = 0.0
        self._note = ""
        self._printed = -1

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn(
                    "{task.completed:,}/{task.total:,}" if self._total else "{task.completed:,}"
                ),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
            )
            self._bar.add_task(self._what, total=self._total, completed=self._done, note="")
            self._bar.start()
        return self

    def update(self, done: int, note: str = "") -> None:
        """Reports that `done` is done in all; `note` says how it goes."""
        self._done, self._note = done, note or self._note
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, note=escape(self._note))
        elif not self._quiet and time.monotonic() - self._last_line >= _PLAIN_SECONDS:
            self._print_line()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif not self._quiet and kind is None and self._done != self._printed:
            self._print_line()

    def _print_line(self) -> None:
        self._last_line = time.monotonic()
        self._printed = self._done
        total = f"/{self._total:,}" if self._total else ""
        note = f"  {self._note}" if self._note else ""
        print(f"{self._what} {self._done:,}{total}{note}", file=sys.stderr, flush=True)
