"""Runs of several processes of which one fails: all end, nothing is left, the restart resumes."""

import os
import signal
import socket
import sys
import time
from shutil import copytree

import pytest

from protlm.checkpoints.format import checkpoint_name, newest_whole
from protlm.system.errors import ExitCode
from protlm.system.lock import LOCK
from tests.fixtures.ranks import (
    RANKS,
    assert_same_checkpoint,
    descendants,
    ranks_below,
    read_log,
    wait_for_step,
)

ENDLESS = ("trainer.log_every=1", "trainer.max_steps=1000000")

pytestmark = pytest.mark.slow


def test_a_killed_rank_ends_the_run_and_a_restart_resumes_it(
    start, pair_settings, tmp_path, assert_gone, assert_same_as_pair
):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "protlm.train", *pair_settings, "trainer.devices=2"]
    first = start(*command)
    wait_for_step(tmp_path / "run", 12, first)
    ranks = ranks_below(first.pid)
    assert set(ranks) == {0, 1}
    os.kill(ranks[1], signal.SIGKILL)
    assert first.wait(timeout=60) != 0
    assert_gone(*ranks.values())
    assert start(*command).wait(timeout=250) == 0, (tmp_path / "log").read_text()
    assert_same_as_pair(tmp_path / "run")


def test_a_stalled_rank_ends_all_after_the_time_out(start, tiny_settings, tmp_path, assert_gone):
    """Under Lightning's launcher, where rank 0 starts rank 1; the log has the stack of each."""
    settings = [*tiny_settings, "trainer.devices=2", "trainer.timeout_minutes=0.2"]
    command = [sys.executable, RANKS, *settings, "trainer.max_steps=100"]
    # Either rank, in two runs at the same time.
    runs = [
        start(*command, f"run_dir=run-{stalled}", log=f"log-{stalled}", STALLED=str(stalled))
        for stalled in (0, 1)
    ]
    for stalled, run in enumerate(runs):
        assert run.wait(timeout=280) != 0
        told = (tmp_path / f"log-{stalled}").read_text()
        assert "in stall" in told
        assert "in all_reduce" in told or "_engine_run_backward" in told
        assert f"rank {1 - stalled} has lost another rank" in told
        assert "trainer.timeout_minutes=0.2" in told
        assert "internal error" not in told
        assert_gone(int((tmp_path / f"stalled-{stalled}").read_text()))


def test_ranks_that_see_other_checkpoints_are_refused(run_ranks, tmp_path):
    """Nodes that do not see the same run directory would resume from different steps."""
    one, other = run_ranks(tmp_path, "change-directory")
    assert one == other
    assert "rank 0 resumes from step 2, rank 1 from step 0" in one
    assert "on a file system that all nodes see" in one


@pytest.mark.parametrize("redraw", ["null", "2"])
def test_all_ranks_have_the_projections_of_rank_0(redraw, run_ranks, tmp_path):
    """Draws may differ in their last bits between processors; here they differ by more."""
    printed = run_ranks(tmp_path, "differing-projections", f"attention.redraw_every={redraw}")
    (before, after), (before_1, after_1) = printed
    assert before != before_1
    assert after == after_1
    assert (after == before) == (redraw == "null")


def test_a_validation_shard_that_goes_away_ends_the_run(tiny_data, start_training, tmp_path):
    """With one sentence and its exit code; not even an idle worker is waited for."""
    data = copytree(tiny_data, tmp_path / "data")
    settings = (f"data.dir={data}", "data.num_workers=1", "trainer.valid_every=5")
    run = start_training(*ENDLESS, *settings, "trainer.devices=2")
    wait_for_step(tmp_path / "run", 1, run)
    shard = next((data / "valid").iterdir())
    shard.rename(tmp_path / "elsewhere.h5")
    code, said = run.wait(timeout=120), (tmp_path / "log").read_text()
    assert code == ExitCode.BAD_INPUT, said
    assert f"protlm: the shard {shard} is missing" in said
    assert "Traceback" not in said


def test_loader_workers_end_with_a_killed_run(start_training, tmp_path, assert_gone):
    """SIGKILL leaves the run no time to end its workers, and the server that forks them."""
    run = start_training(*ENDLESS, "data.num_workers=1")
    wait_for_step(tmp_path / "run", 2, run)
    started = descendants(run.pid)
    # The fork server, torch's worker for training, and Python's resource tracker.
    assert len(started) >= 3, (tmp_path / "log").read_text()
    run.kill()
    run.wait()
    assert_gone(*started)


def test_both_ranks_stop_after_the_same_step_and_resume(run_ranks, tmp_path):
    """After a signal to one rank, to the other, or to both."""
    turns = 6
    one, other = run_ranks(tmp_path, "signals-at-random", arguments=[turns])
    assert one == other
    ended, whole = one
    assert [code for _, code in ended] == [ExitCode.PREEMPTED] * turns
    steps = [step for step, _ in ended]
    assert steps == sorted(set(steps)) and whole == [steps[-1], ExitCode.OK]
    last = f"checkpoints/{checkpoint_name(steps[-1])}"
    assert_same_checkpoint(tmp_path / "run" / last, tmp_path / "whole" / last)
    # The uninterrupted run also validates after its last step.
    rows = read_log(tmp_path / "run")
    assert rows == [row for row in read_log(tmp_path / "whole") if row in rows]


def test_a_signal_to_one_rank_before_the_first_step(run_ranks, tmp_path):
    """While the loaders start, Lightning's handler would wait for the other rank."""
    assert run_ranks(tmp_path, "signal-while-starting") == [[1, 75]] * 2


def test_the_command_with_two_ranks_refuses_a_second_and_ends_with_75(
    start_training, tmp_path, assert_gone
):
    """Lightning's launcher starts rank 1, which receives the signal; nothing is left running."""
    run, settings = tmp_path / "run", (*ENDLESS, "trainer.devices=2")
    first = start_training(*settings)
    wait_for_step(run, 1, first)
    assert start_training(*settings).wait(timeout=120) == ExitCode.OUTPUT
    told = (tmp_path / "log").read_text()
    assert f"process {first.pid} on {socket.gethostname()}" in told
    second = ranks_below(first.pid)[1]
    os.kill(second, signal.SIGTERM)
    assert first.wait(timeout=100) == ExitCode.PREEMPTED, (tmp_path / "log").read_text()
    told = (tmp_path / "log").read_text()
    assert "the same command continues" in told and "Traceback" not in told
    assert_gone(second)
    newest, faults = newest_whole(run)
    assert newest is not None and faults == []
    assert not (run / LOCK).exists()


def test_a_signal_to_a_starting_rank_ends_the_run_with_its_exit_code(
    start_training, tmp_path, assert_gone
):
    """Rank 1 is still importing modules, and rank 0 waits for it."""
    first, deadline = start_training("trainer.devices=2"), time.monotonic() + 200
    while not (found := ranks_below(first.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(found) == {1}, (tmp_path / "log").read_text()
    os.kill(found[1], signal.SIGTERM)
    assert first.wait(timeout=100) == 128 + signal.SIGTERM, (tmp_path / "log").read_text()
    assert "rank 1 ended with exit code 143" in (tmp_path / "log").read_text()
    assert_gone(found[1])
