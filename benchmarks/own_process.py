"""Passes in a process of their own, for who fills a heap that others would have to live with."""

import multiprocessing
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import torch

from benchmarks.cases import Case
from benchmarks.contenders import Contender
from benchmarks.heap import keep_freed_memory, keeps_freed_memory
from benchmarks.passes import Bytes, Passes, Seconds, standard_normal_inputs


class OwnProcess:
    """`Passes` of a case on the CPU, run by a process that ends with the context.

    Args:
        contender: who makes the attention, in the process; a function of a module.
        case: what it is given.
    """

    def __init__(self, contender: Contender, case: Case) -> None:
        # A copy of this process by fork would hang in the threads of torch that are no more.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        given = (contender, case, keeps_freed_memory(), theirs)
        self._process = context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pipe.close()
        self._process.join()

    def timed(self) -> Seconds:
        """Runs one pass.

        Raises:
            RuntimeError: it failed there, or the process was killed.
        """
        return self._ask("timed")

    def measured(self) -> tuple[Seconds, Bytes]:
        """Runs one pass under observation.

        Raises:
            RuntimeError: it failed there, or the process was killed.
        """
        return self._ask("measured")

    def _ask(self, what: str) -> Any:
        try:
            self._pipe.send(what)
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("its process was killed, probably for want of memory") from error
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


def _serve(contender: Contender, case: Case, keeps_memory: bool, pipe: Connection) -> None:
    if keeps_memory:
        keep_freed_memory()
    device = torch.device("cpu")
    passes = Passes(
        contender.prepare(case, device), standard_normal_inputs(case.length, case.dtype, device)
    )
    while True:
        try:
            what = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(passes.timed() if what == "timed" else passes.measured())
        except RuntimeError as error:
            pipe.send(str(error))
