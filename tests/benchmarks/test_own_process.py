"""A process of their own for costly passes: it answers, says why it fails, and may be killed."""

import os
import signal

import pytest
import torch
from torch import Tensor

from benchmarks.cases import RETURNS_V, Attend, Case
from benchmarks.contenders import Contender, contenders
from benchmarks.own_process import OwnProcess

CASE = Case(RETURNS_V, None, False, 64)


def test_it_runs_passes_until_the_context_ends() -> None:
    with OwnProcess(contenders()[RETURNS_V], CASE) as passes:
        seconds, taken = passes.measured()
        assert passes.timed().total > 0 < seconds.total
        # The output and three gradients at the most.
        assert taken.peak <= 4 * 64 * 512 * 4
        process = passes._process
        assert process.is_alive()
    assert process.exitcode == 0


def test_a_process_that_is_killed_is_said_to_be() -> None:
    with OwnProcess(contenders()[RETURNS_V], CASE) as passes:
        passes.timed()
        assert passes._process.pid is not None
        os.kill(passes._process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="was killed, probably for want of memory"):
            passes.timed()


def test_what_fails_there_fails_here() -> None:
    with OwnProcess(Contender("broken", False, _broken), CASE) as passes:
        with pytest.raises(RuntimeError, match="no kernel for this dtype"):
            passes.timed()
        with pytest.raises(RuntimeError, match="no kernel"):
            passes.measured()


def _broken(case: Case, device: torch.device) -> Attend:
    def attend(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
        raise RuntimeError("no kernel for this dtype")

    return attend
