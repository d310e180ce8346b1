"""Several ranks resume exactly, also on other numbers of ranks and after a full disk."""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from protlm.checkpoints.format import all_checkpoints, checkpoint_name, set_latest, step_of
from protlm.checkpoints.metrics import METRICS, read_metrics
from protlm.system.errors import ExitCode

STEPS = 10
COMMON = (
    "attention=performer_softmax",
    "attention.num_features=32",
    "attention.redraw_every=3",
    "model.qk_norm=true",
    "data.crop=random",
    "trainer.valid_every=4",
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=100",
    f"trainer.max_steps={STEPS}",
)
# The run crosses the end of an epoch.
HARD = (
    *COMMON,
    "model.dropout=0.3",
    "trainer.accumulate_grad_batches=2",
    "trainer.activation_checkpointing=true",
    "trainer.ema_decay=0.9",
    "trainer.log_every=5",
)
# Without dropout, which differs between ranks.
PLAIN = (*COMMON, "trainer.log_every=1")
MOVED_AT = 5

Read = Callable[[Path], Any]


class Runs(NamedTuple):
    """The folder of the runs, what two ranks returned, and the log of rank 0."""

    folder: Path
    told: list[Any]
    log: str


def copy_at(run: Path, step: int, target: Path) -> None:
    """Copies a run as a process killed after a step would have left it."""
    shutil.copytree(run, target)
    for path in all_checkpoints(target):
        if step_of(path) > step:
            path.unlink()
    set_latest(target / "checkpoints" / checkpoint_name(step))


@pytest.fixture(scope="module")
def runs(
    run_ranks: Callable[..., list[Any]],
    train_tiny: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    """Runs of one rank in this process, and of two and four ranks in other processes."""
    folder = tmp_path_factory.mktemp("ranks")
    train_tiny(folder / "one", *PLAIN)
    copy_at(folder / "one", MOVED_AT, folder / "one-to-two")
    told = run_ranks(folder, "interruptions", arguments=[STEPS, MOVED_AT, HARD, PLAIN])
    log = (folder / "rank-0.log").read_text()
    for target in ("two-to-one", "two-to-four"):
        shutil.copytree(folder / "two-to-others", folder / target)
    train_tiny(folder / "two-to-one", *PLAIN)
    run_ranks(folder, "resume-two-to-four", *PLAIN, ranks=4)
    return Runs(folder, told, log)


pytestmark = pytest.mark.slow


def test_two_ranks_killed_after_every_step(runs: Runs, state_of: Read, log_of: Read) -> None:
    whole, killed = runs.folder / "whole", runs.folder / "killed"
    names = [path.name for path in all_checkpoints(whole)]
    assert len(names) == STEPS
    assert [path.name for path in all_checkpoints(killed)] == names
    for name in names:
        found, expected = (state_of(run / "checkpoints" / name) for run in (killed, whole))
        assert found.keys() == expected.keys()
        assert [key for key in expected if found[key] != expected[key]] == [], name
    assert log_of(killed) == log_of(whole)
    assert {row.get("epoch", 0) for row in log_of(whole)} == {0, 1}


@pytest.mark.parametrize("moved", ["one-to-two", "two-to-one", "two-to-four"])
def test_on_another_number_of_ranks(moved: str, runs: Runs, log_of: Read) -> None:
    """The global batches are the same; losses differ by the rounding of sums in another order."""
    one, other = log_of(runs.folder / "one"), log_of(runs.folder / moved)
    assert [row["step"] for row in other] == [row["step"] for row in one]
    for expected, found in zip(one, other, strict=True):
        assert found.keys() == expected.keys()
        for name in expected.keys() & {"epoch", "samples", "learning_rate"}:
            assert found[name] == expected[name]
        for name in expected.keys() & {"train_loss", "valid_loss"}:
            assert found[name] == pytest.approx(expected[name], abs=1e-5)
        for name in expected.keys() & {
            "gradient_norm",
            "square_norm_layer_1",
        }:
            assert found[name] == pytest.approx(expected[name], rel=1e-3)
    ranks = {"one-to-two": 2, "two-to-one": 1, "two-to-four": 4}[moved]
    timed = read_metrics(runs.folder / moved / METRICS)
    last = [row for row in timed if "residues_per_second" in row][-1]
    assert last["residues_per_second_per_device"] * ranks == pytest.approx(
        last["residues_per_second"]
    )


def samples(runs: Runs, name: str) -> dict[tuple[int, ...], list[int]]:
    """Returns the samples of each global batch of a run, by the position after it."""
    found = defaultdict(list)
    for path in runs.folder.glob(f"samples-{name}-*.jsonl"):
        for line in path.read_text().splitlines():
            after, numbers = json.loads(line)
            found[tuple(after)] += [number for number in numbers if number >= 0]
    return {after: sorted(numbers) for after, numbers in found.items()}


def test_the_same_samples_in_every_batch(runs: Runs) -> None:
    two, four = samples(runs, "two-to-others"), samples(runs, "two-to-four")
    assert len(two) == MOVED_AT and len(four) == STEPS - MOVED_AT
    continued = samples(runs, "one-to-two")
    assert continued == four
    assert not two.keys() & four.keys()
    hard, killed = samples(runs, "whole"), samples(runs, "killed")
    assert hard == killed
    assert all(hard[after] == numbers for after, numbers in (two | four).items())


def test_a_disk_that_is_full_for_the_rank_that_saves(runs: Runs) -> None:
    first, second = runs.told
    assert first == second
    warned, stopped, at_the_end = first
    assert warned == [4, ExitCode.OK]
    for (message, code), last in ((stopped, "step 1"), (at_the_end, "step 3")):
        assert code == ExitCode.OUTPUT
        assert "no space left" in message and f"the last checkpoint is {last}" in message
    assert runs.log.count("training continues") == 1
    kept = {name: all_checkpoints(runs.folder / name) for name in ("warned", "stopped")}
    assert [step_of(path) for path in kept["warned"]] == [1, 3, 4]
    assert [step_of(path) for path in kept["stopped"]] == [1]
    assert not list(runs.folder.rglob("*.part"))
