"""Kills a command by SIGKILL and runs it again until it is complete: COMMAND HOW INPUT...

HOW is a number of kills at random moments, or `each`: before the first call that changes the disk,
after the second, before the third, and so on. The results are compared with that of a command that
was not disturbed. One process imports everything and forks the commands into the working directory,
so that their time is spent on the work. Prints what was finished at each kill.
"""

import fcntl
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from protlm.data.records import block
from protlm.data_prep import prepare, split
from protlm.data_prep.clusters import ClusterTable  # pyright: ignore[reportMissingImports]
from protlm.system.errors import ExitCode, exit_with_message

command, how, *inputs = sys.argv[1:]
# How the command is killed that is started next.
way = "all"
is_each = how == "each"
# Blocks of 16 KiB, so that a small file has many segments.
block.BLOCK_BYTES = 1 << 14
CALLS = [(os, name) for name in ("replace", "rename", "link", "mkdir", "unlink", "rmdir", "fsync")]
CALLS += [(Path, "write_text"), (fcntl, "flock")]


def build(out: Path) -> None:
    """Prepares INPUT..., a file of proteins and a table of their clusters."""
    source, table = map(Path, inputs)
    options = prepare.PrepareOptions(
        shard_residues=30_000,
        deduplicate=not is_each,
        workers=2 if way == "worker" else 1 if is_each else random.choice([1, 2]),
    )
    rule, clusters = split.HashSplit(0.1, 0.1), ClusterTable(table)
    prepare.prepare([source], out, split_rule=rule, clusters=clusters, options=options)
    assert (out / "train" / "clusters.h5").is_file()


def embed_all(out: Path) -> None:
    """Embeds INPUT..., a file of proteins and a run."""
    from protlm.commands.embed import embed
    from protlm.commands.embedding import plan
    from protlm.options.embed import EmbedOptions, Pooling

    # Small blocks, so that a small file has many.
    plan._SEQUENCES, plan._BLOCK_RESIDUES = 32, 1 << 11
    options = EmbedOptions(include=(Pooling.mean, Pooling.max), tokens_per_batch=1_024)
    embed(Path(inputs[0]), Path(inputs[1]), out, options)


def train_tiny(out: Path) -> None:
    """Trains on INPUT, a data set."""
    from protlm.commands.train import train
    from protlm.config import TrainConfig
    from protlm.config.composition import compose
    from tests.fixtures.ranks import TINY

    settings = ["trainer.max_steps=16", "trainer.checkpoint_every=1", "trainer.valid_every=5"]
    settings += ["trainer.log_every=1", "model.dropout=0.1", "data.num_workers=0"]
    settings += [*TINY, f"data.dir={inputs[0]}", f"run_dir={out}"]
    train(compose(TrainConfig, settings))


def finetune(out: Path) -> None:
    """Trains on INPUT..., labels and a model."""
    from protlm.commands.finetune import finetune_labels
    from protlm.options.labels import FinetuneOptions, FinetuneSettings, LabelOptions

    options = FinetuneOptions(FinetuneSettings(epochs=4, patience=9, batch_size=8))
    finetune_labels(Path(inputs[0]), Path(inputs[1]), out, options, LabelOptions())


def save(out: Path) -> None:
    """Saves a checkpoint of each step, and removes the old ones at the end."""
    import torch

    from protlm.checkpoints import format as checkpoints

    (out / checkpoints.CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    checkpoints.sweep(out)
    for step in range(latest_step(out) + 1, 3):
        weights = {"network.w": torch.full((20_000,), float(step))}
        path = out / checkpoints.CHECKPOINTS / checkpoints.checkpoint_name(step)
        checkpoints.save_training({"global_step": step, "state_dict": weights}, path)
    for old in checkpoints.all_checkpoints(out)[:-2]:
        checkpoints.remove(old)


def last_step(out: Path) -> int:
    """Returns the step of the last checkpoint, which may be unfinished."""
    from protlm.checkpoints import format as checkpoints

    return max(map(checkpoints.step_of, checkpoints.all_checkpoints(out)), default=0)


def latest_step(out: Path) -> int:
    """Returns the step of the latest checkpoint, which is the last intact one; 0 without any."""
    from protlm.checkpoints import format as checkpoints

    if not (out / checkpoints.CHECKPOINTS / checkpoints.LATEST).exists():
        assert last_step(out) <= 1
        return 0
    newest = checkpoints.latest(out)
    assert newest is not None and checkpoints.newest_whole(out) == (newest, [])
    return checkpoints.step_of(newest)


def contents(out: Path) -> dict[Path, bytes]:
    """Returns the bytes of a file, or of all files of a folder, by relative path."""
    files = (path for path in [out, *out.rglob("*")] if path.is_file())
    return {path.relative_to(out): path.read_bytes() for path in files}


def run_of(out: Path) -> dict[str, Any]:
    """Returns the log and the last checkpoint of a run, and its other results.

    Those before it depend on where a run was stopped, which saves one more.
    """
    from protlm.checkpoints.format import all_checkpoints
    from tests.fixtures.ranks import read_log, read_state

    assert not list(out.rglob("*.part"))
    last = max(all_checkpoints(out))
    found: dict[str, Any] = {last.name: read_state(last)}
    for name in ("model", "probe"):
        found |= {f"{name}/{path}": content for path, content in contents(out / name).items()}
    return {**found, "log": read_log(out)}


class Command(NamedTuple):
    """A command: its work and output, what is finished of it and intact after a kill."""

    work: Callable[[Path], None]
    output: str
    finished: Callable[[Path], int]
    check: Callable[[Path], object] = bool
    result: Callable[[Path], dict[Any, Any]] = contents
    ways: tuple[str, ...] = ("all",)


def parts(pattern: str) -> Callable[[Path], int]:
    """Returns what counts the finished parts of a command."""
    return lambda out: len(list(out.with_name(f"{out.name}.partial").glob(pattern)))


COMMANDS = {
    "prepare": Command(
        build, "data", parts("journal/segment-*.json"), ways=("all", "parent", "worker")
    ),
    "embed": Command(embed_all, "out.h5", parts("*.vectors")),
    "train": Command(train_tiny, "run", last_step, latest_step, run_of, ("all", "after SIGUSR1")),
    "finetune": Command(finetune, "run", last_step, latest_step, run_of, ("all", "after SIGUSR1")),
    "save": Command(save, "run", last_step, latest_step, run_of),
}
# How a command may end that is killed in this way, other than complete or by the kill.
ENDS = {"worker": (1,), "after SIGUSR1": (ExitCode.PREEMPTED, -signal.SIGUSR1)}
COMPLETE = (ExitCode.OK, ExitCode.OUTPUT)


def start(work: Callable[..., Any], *arguments: Any) -> int:
    """Forks a child with a process group of its own, which does the work; returns its ID."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        try:
            exit_with_message(lambda: work(*arguments))
        except SystemExit as end:
            os._exit(int(end.code or 0))
        os._exit(0)
    return pid


def exit_code_of(pid: int) -> int:
    """Waits for a child."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(pid: int) -> None:
    """Kills a command and its workers, or one process of it, perhaps soon after a signal."""
    if way == "after SIGUSR1":
        os.kill(pid, signal.SIGUSR1)
        time.sleep(random.uniform(0, 0.08))
    workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    with suppress(ProcessLookupError):
        if way == "worker" and workers:
            os.kill(int(workers[0]), signal.SIGKILL)
        elif way == "parent":
            os.kill(pid, signal.SIGKILL)
        else:
            os.killpg(pid, signal.SIGKILL)


def killed_at_random(this: Command, out: Path, kills: int, seconds: float) -> Iterator[int]:
    """Kills a command that takes some seconds; yields what was finished at each kill."""
    global way
    turns = count()
    while kills:
        turn, before = next(turns), this.finished(out)
        way = this.ways[turn % len(this.ways)]
        pid = start(this.work, out)
        # Every other command finishes some parts, however slow the machine is.
        wanted = before + turn % 2 * random.choice([1, 3])
        while this.finished(out) < wanted:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.2 * seconds))
        kill(pid)
        code = exit_code_of(pid)
        assert code in (-signal.SIGKILL, *ENDS.get(way, ()), *COMPLETE), (way, code)
        if code in COMPLETE:
            yield -1
        else:
            kills -= 1
            this.check(out)
            yield this.finished(out)


def killed_at_each_call(this: Command, out: Path) -> Iterator[int]:
    """Kills a command at each call, until a command ends first; yields what was finished."""
    for number in count(1):
        code = exit_code_of(start(die_at, number, this.work, out))
        assert code in (0, -signal.SIGKILL), code
        this.check(out)
        yield this.finished(out)
        if code == 0:
            return


def die_at(number: int, work: Callable[[Path], None], out: Path) -> None:
    """Does the work up to a call, before which this process is killed, or after it."""
    numbers = count(1)

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_die(*given: Any, **named: Any) -> Any:
            this = next(numbers)
            if this == number and number % 2 == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*given, **named)
            finally:
                if this == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call_and_die

    for owner, name in CALLS:
        setattr(owner, name, counted(getattr(owner, name)))
    work(out)


def main() -> None:
    """Kills the command, repeats it, and compares each complete result."""
    if command != "prepare":
        # Before the forks, which share it.
        import protlm.commands.finetune
        import protlm.commands.train  # noqa: F401
    random.seed(len(how + command))
    this = COMMANDS[command]
    whole, out = Path("whole") / this.output, Path("killed") / this.output
    for path in (whole, out):
        path.parent.mkdir()
    began = time.monotonic()
    assert exit_code_of(start(this.work, whole)) == 0
    expected, kept = this.result(whole), []
    seconds = time.monotonic() - began

    def complete() -> None:
        """Completes the command, compares its result, and removes it."""
        global way
        way = "all"
        code = exit_code_of(start(this.work, out))
        assert code in COMPLETE, code
        result = this.result(out)
        assert result.keys() == expected.keys(), kept
        assert [key for key in expected if result[key] != expected[key]] == [], kept
        assert [path.name for path in out.parent.iterdir()] == [out.name]
        shutil.rmtree(out) if out.is_dir() else out.unlink()

    kills = (
        killed_at_each_call(this, out)
        if is_each
        else killed_at_random(this, out, int(how), seconds)
    )
    for finished in kills:
        if finished >= 0:
            kept.append(finished)
        if is_each or finished < 0:
            complete()
    complete()
    print(json.dumps(kept))


if __name__ == "__main__":
    main()
