"""What was killed resumes as if uninterrupted: runs on any number of ranks, and all commands."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from protlm.checkpoints.format import all_checkpoints, step_of
from protlm.checkpoints.validations import METRICS, read_metrics
from protlm.system.errors import ExitCode
from protlm.training.module import LanguageModeling
from tests.fixtures.calls import looked_at
from tests.fixtures.ranks import assert_same_checkpoint, assert_same_run, go_back

pytestmark = pytest.mark.slow

STEPS, MOVED_AT = 12, 5
# Without dropout, which differs between ranks.
PLAIN = (
    "attention=performer_softmax",
    "attention.num_features=32",
    "attention.redraw_every=3",
    # With them 32 features do for an estimate, and the run does not warn.
    "model.qk_norm=true",
    "data.crop=random",
    "trainer.valid_every=4",
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=100",
    f"trainer.max_steps={STEPS}",
    "trainer.log_every=1",
)
# 150 sequences in batches of 1,024 tokens are about 17 batches: with accumulation the run crosses
# the end of an epoch. The steps of logs, validations, redraws and the end of the epoch differ.
HARD = (
    *PLAIN[:-1],
    "trainer.log_every=5",
    "model.dropout=0.3",
    "trainer.accumulate_grad_batches=2",
    "trainer.activation_checkpointing=true",
    "trainer.ema_decay=0.9",
    "schedule=cosine",
    "schedule.warmup_steps=2",
)


@pytest.fixture(scope="module")
def uninterrupted(train_tiny, tmp_path_factory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("runs") / "whole", *HARD)


def test_killed_after_every_step(uninterrupted, train_tiny, killed_after, tmp_path):
    """One run that is killed after each of its steps: each start makes one step and is compared.

    As step k + 1 is exact when begun from the checkpoint of step k, and that checkpoint is exact,
    a run continued from any step is exact to its end.
    """
    run = tmp_path / "run"
    for step in range(1, STEPS + 1):
        with killed_after(step):
            train_tiny(run, *HARD)
    train_tiny(run, *HARD)
    assert_same_run(run, uninterrupted)


@pytest.mark.parametrize(("step", "every"), [(8, 3), (STEPS, 1)])
def test_killed_during_a_validation(step, every, train, uninterrupted, log_of):
    """No row is repeated or missing, wherever the run resumes, also at the last step."""
    settings = [*HARD, f"trainer.checkpoint_every={every}"]

    def die(module: LanguageModeling, batch: Any, batch_index: int) -> None:
        if module.trainer.global_step == step and batch_index == 1:
            raise SystemError("killed")

    with looked_at(LanguageModeling, "validation_step", die), pytest.raises(SystemError):
        train("run", *settings)
    run = train("run", *settings)
    assert log_of(run) == log_of(uninterrupted)
    for path in all_checkpoints(run):
        assert_same_checkpoint(path, uninterrupted / "checkpoints" / path.name)
    assert (run / "loss.png").is_file()


def test_a_complete_run_is_left_unchanged(uninterrupted, train_tiny):
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*.ckpt*")}
    train_tiny(uninterrupted, *HARD)
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*.ckpt*")} == before


class Runs(NamedTuple):
    """The folder of the runs, what two ranks returned, and the log of rank 0."""

    folder: Path
    told: list[Any]
    log: str


@pytest.fixture(scope="module")
def runs(run_ranks, train_tiny, tmp_path_factory) -> Runs:
    """Runs of one rank in this process, and of two and four ranks in other processes."""
    folder = tmp_path_factory.mktemp("ranks")
    train_tiny(folder / "one", *PLAIN)
    go_back(shutil.copytree(folder / "one", folder / "one-to-two"), MOVED_AT)
    told = run_ranks(folder, "interruptions", arguments=[STEPS, MOVED_AT, HARD, PLAIN])
    log = (folder / "rank-0.log").read_text()
    for target in ("two-to-one", "two-to-four"):
        shutil.copytree(folder / "two-to-others", folder / target)
    train_tiny(folder / "two-to-one", *PLAIN)
    run_ranks(folder, "resume-two-to-four", *PLAIN, ranks=4)
    return Runs(folder, told, log)


def test_two_ranks_killed_after_every_step(runs, log_of):
    assert len(all_checkpoints(runs.folder / "whole")) == STEPS
    assert_same_run(runs.folder / "killed", runs.folder / "whole")
    assert {row.get("epoch", 0) for row in log_of(runs.folder / "whole")} == {0, 1}


@pytest.mark.parametrize("moved", ["one-to-two", "two-to-one", "two-to-four"])
def test_on_another_number_of_ranks(moved, runs, log_of):
    """The global batches are the same; losses differ by the rounding of sums in another order."""
    one, other = log_of(runs.folder / "one"), log_of(runs.folder / moved)
    assert [row["step"] for row in other] == [row["step"] for row in one]
    for expected, found in zip(one, other, strict=True):
        assert found.keys() == expected.keys()
        for name in expected.keys() & {"epoch", "samples", "learning_rate"}:
            assert found[name] == expected[name]
        for name in expected.keys() & {"train_loss", "valid_loss"}:
            assert found[name] == pytest.approx(expected[name], abs=1e-5)
        for name in expected.keys() & {"gradient_norm", "square_norm_layer_1"}:
            assert found[name] == pytest.approx(expected[name], rel=1e-3)
    ranks = {"one-to-two": 2, "two-to-one": 1, "two-to-four": 4}[moved]
    timed = read_metrics(runs.folder / moved / METRICS)
    last = [row for row in timed if "residues_per_second" in row][-1]
    assert last["residues_per_second_per_device"] * ranks == pytest.approx(
        last["residues_per_second"]
    )


def test_a_disk_that_is_full_for_the_rank_that_saves(runs):
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


@pytest.fixture(scope="module")
def inputs(proteins, tiny_run, tiny_data, tmp_path_factory) -> dict[str, list[Path]]:
    """The arguments of each command."""
    folder = tmp_path_factory.mktemp("inputs")
    few, table, labels = (folder / name for name in ("few.fasta", "cluster.tsv", "labels.tsv"))
    few.write_text("".join(f">p{i}\n{'MKVLAW' * (i % 90 + 1)}\n" for i in range(250)))
    table.write_text("".join(f"P{i % 700}\tP{i}\np{i % 9}\tp{i}\n" for i in range(2_900)))
    splits = ("train", "train", "valid", "test")
    rows = [f"P{n}\t{'WC' * (n % 7 + 1)}MK\tc{n % 2}\t{splits[n % 4]}\n" for n in range(60)]
    labels.write_text("".join(["identifier\tsequence\tlabel\tsplit\n", *rows]))
    return {
        "prepare": [proteins, table],
        "prepare few": [few, table],
        "embed": [few, tiny_run],
        "train": [tiny_data],
        "finetune": [labels, tiny_run],
        "save": [],
    }


@pytest.mark.parametrize(
    ("command", "kills"), [("prepare", 15), ("embed", 10), ("train", 12), ("finetune", 10)]
)
def test_a_command_killed_at_random_resumes_to_the_same_result(
    command, kills, inputs, told_by, tmp_path
):
    """All its processes by SIGKILL, one of them, or soon after a signal."""
    kept = told_by("kill.py", command, kills, *inputs[command], cwd=tmp_path)
    assert len(kept) == kills
    # Some had finished parts when they were killed.
    assert max(kept) > 0


@pytest.mark.parametrize(("command", "fewest"), [("prepare few", 40), ("save", 12)])
def test_a_command_killed_at_any_call_resumes_to_the_same_result(
    command, fewest, inputs, told_by, tmp_path
):
    kept = told_by("kill.py", command.split()[0], "each", *inputs[command], cwd=tmp_path)
    assert len(kept) >= fewest
