"""What the fault cases share: builders, runs that are killed, and disks that are full."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protlm.checkpoints.format import all_checkpoints, load_training
from protlm.checkpoints.metrics import METRICS, read_metrics
from protlm.data.records import ReadOptions
from protlm.data_prep.prepare import PrepareOptions, prepare
from protlm.data_prep.split import HashSplit
from protlm.errors import ExitCode, InputDataError

ROOT = Path(__file__).resolve().parent.parent.parent


# What is a time, or follows from one, in the log; the rest of a log is the same in every run.
TIMED = re.compile(r".*_per_second.*|seconds|data_wait_fraction|memory_gib|model_flops_utilization")
# In a checkpoint, the seconds since the last log, and of them those that were waited for data.
CLOCKS = re.compile(r"callbacks\.Monitor.*\.(seconds|sums\.8)")

# A launcher's variables would make a process under test believe that it is one rank of a job.
LAUNCHER = re.compile(r"(.*_)?RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|(SLURM|TORCHELASTIC|PL|WANDB)_.*")

# By which a launcher tells a process its rank, the surest first.
RANK_NAMES = ("RANK", "SLURM_PROCID", "LOCAL_RANK")

Run = Callable[..., "subprocess.CompletedProcess[str]"]
SmallDisk = Callable[[Path, str], AbstractContextManager[bool]]


@pytest.fixture(scope="session")
def run_builder() -> Run:
    """Runs a program of builders: `run_builder(PROGRAMS / "build_data_set.py", fasta, "out")`."""

    def run(program: Path, *arguments: object, **named: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error", program, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
            **named,
        )

    return run


@pytest.fixture(scope="session")
def proteins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FASTA file of 3,000 random proteins, some of them twice, and a few that are none."""
    rng = np.random.default_rng(0)
    letters = np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY", np.uint8)
    sequences = [rng.choice(letters, n).tobytes().decode() for n in rng.integers(20, 400, 2_700)]
    sequences += sequences[:300]
    records = [f">P{i} a protein\n{sequence}\n" for i, sequence in enumerate(sequences)]
    records[100:100] = [">bad\nMK-V\n", ">worse\n\n"]
    path = tmp_path_factory.mktemp("proteins") / "proteins.fasta"
    path.write_text("".join(records))
    return path


@pytest.fixture(scope="session")
def small_disk() -> SmallDisk:
    """Mounts a small tmpfs where that is allowed, and tells whether it is."""

    @contextmanager
    def mounted(folder: Path, size: str) -> Iterator[bool]:
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
        is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        try:
            yield is_mounted
        finally:
            if is_mounted:
                subprocess.run(["umount", folder], check=True)

    return mounted


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes]]:
    """The bytes of all files of a folder, by their names in it."""

    def read(folder: Path) -> dict[str, bytes]:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    return read


@pytest.fixture
def prepare_bytes(tmp_path: Path) -> Callable[..., Any]:
    """Prepares bytes as if they were a file, whatever is rejected; returns `report.json`."""

    def run(content: bytes, **options: bool) -> Any:
        source, out = tmp_path / "proteins.fasta", tmp_path / "data"
        source.write_bytes(content)
        reading = PrepareOptions(max_reject_rate=1, reading=ReadOptions(**options))
        prepare([source], out, split_rule=HashSplit(0, 0), options=reading)
        report = json.loads((out / "report.json").read_text())
        shutil.rmtree(out)
        return report

    return run


@pytest.fixture
def refuse_bytes(prepare_bytes: Callable[..., Any], tmp_path: Path) -> Callable[..., str]:
    """Prepares bytes that must be refused as bad input, without a trace; returns the message."""

    def run(content: bytes, **options: bool) -> str:
        with pytest.raises(InputDataError) as caught:
            prepare_bytes(content, **options)
        assert caught.value.exit_code == ExitCode.BAD_INPUT
        assert [path.name for path in tmp_path.iterdir()] == ["proteins.fasta"]
        return str(caught.value)

    return run


@pytest.fixture(scope="session")
def state_of() -> Callable[[Path], dict[str, Any]]:
    """Everything that a checkpoint holds, by dotted names, but for the clocks.

    Tensors come as their types, shapes and bytes, so that two states can be compared by `==`.
    """

    def flatten(value: Any, name: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict | list | tuple):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, inner in items:
                yield from flatten(inner, f"{name}.{key}" if name else str(key))
        elif isinstance(value, torch.Tensor):
            yield name, (value.dtype, value.shape, value.numpy().tobytes())
        else:
            yield name, value

    def read(path: Path) -> dict[str, Any]:
        found = dict(flatten(load_training(path), ""))
        return {name: value for name, value in found.items() if not CLOCKS.fullmatch(name)}

    return read


@pytest.fixture(scope="session")
def log_of() -> Callable[[Path], list[dict[str, float]]]:
    """The rows of a run's log without what is measured with a clock."""

    def read(run: Path) -> list[dict[str, float]]:
        rows = read_metrics(run / METRICS)
        return [
            {key: value for key, value in row.items() if not TIMED.fullmatch(key)} for row in rows
        ]

    return read


TINY = (
    "model=tiny",
    "data.max_length=128",
    "data.tokens_per_batch=1024",
    "schedule.warmup_steps=1",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
)


def free_port() -> int:
    """A port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def tiny_settings(tiny_data: Path) -> list[str]:
    """Settings of a run of the `tiny` model on the tiny data, on a CPU."""
    return [*TINY, f"data.dir={tiny_data}"]


@pytest.fixture(scope="session")
def one_process(tiny_settings: list[str]) -> dict[str, str]:
    """The environment of a process that is to be a run of its own, whatever started the tests."""
    inherited = {key: value for key, value in os.environ.items() if not LAUNCHER.fullmatch(key)}
    return inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


@pytest.fixture(scope="session")
def run_ranks(tiny_settings: list[str], one_process: dict[str, str]) -> Callable[..., list[str]]:
    """Runs a program in two processes, as torchrun would; returns what each printed.

    `run_ranks(folder, program, *arguments)`: the folder is their working directory.
    """

    def run(folder: Path, program: Path, *arguments: object, ranks: int = 2) -> list[str]:
        shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        shared |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "test"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        settings = [*map(str, arguments), *tiny_settings, f"trainer.devices={ranks}"]
        command = [sys.executable, program, *settings]
        started = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (folder / f"rank-{rank}.log").open("w") as log:
                started.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env={**one_process, **shared, **own},
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                    )
                )
        try:
            printed = [process.communicate(timeout=300)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        for rank, process in enumerate(started):
            assert process.returncode == 0, (folder / f"rank-{rank}.log").read_text()
        return printed

    return run


# Long enough to be caught in the middle.
PAIR = (
    "trainer.max_steps=150",
    "trainer.checkpoint_every=5",
    "trainer.valid_every=60",
    "trainer.log_every=1",
    "model.dropout=0.1",
)


@pytest.fixture(scope="session")
def pair_settings(tiny_settings: list[str]) -> list[str]:
    """The settings of `pair_run`, to be given to a launcher with those of its processes."""
    return [*tiny_settings, *PAIR]


@pytest.fixture(scope="session")
def pair_run(run_ranks: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of two ranks, of which the second was started some seconds later."""
    folder = tmp_path_factory.mktemp("pair")
    run_ranks(folder, Path(__file__).parent / "programs" / "start_apart.py", *PAIR)
    return folder / "run"


@pytest.fixture(scope="session")
def assert_same_as_pair(
    pair_run: Path, state_of: Callable[[Path], Any], log_of: Callable[[Path], Any]
) -> Callable[[Path], None]:
    """Compares the log of a run and everything in its last checkpoint with `pair_run`."""

    def compare(run: Path) -> None:
        last, found = max(all_checkpoints(pair_run)), max(all_checkpoints(run))
        assert found.name == last.name
        expected, state = state_of(last), state_of(found)
        assert [key for key in expected if state[key] != expected[key]] == []
        assert log_of(run) == log_of(pair_run)

    return compare


@pytest.fixture(scope="session")
def wait_for_step() -> Callable[..., None]:
    """Waits until the log of a run has a step; fails if a process of it ends before."""

    def wait(run: Path, step: int, *processes: "subprocess.Popen[str]") -> None:
        deadline = time.monotonic() + 200
        while not any(row["step"] >= step for row in read_metrics(run / METRICS)):
            assert all(process.poll() is None for process in processes), "a process has ended"
            assert time.monotonic() < deadline, "the run does not begin"
            time.sleep(0.05)

    return wait


@pytest.fixture(scope="session")
def ranks_below() -> Callable[[int], dict[int, int]]:
    """The processes below another that are ranks of a run: their numbers by rank."""

    def is_trainer(process: Path) -> bool:
        return b"protlm.train" in (process / "cmdline").read_bytes()

    def find(ancestor: int) -> dict[int, int]:
        parents, ranks = {}, {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                found = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                variables = dict(pair.split("=", 1) for pair in found if "=" in pair)
                names = [name for name in RANK_NAMES if name in variables]
                if names and fields[0] != "Z" and is_trainer(entry):
                    ranks[int(entry.name)] = int(variables[names[0]])

        def is_below(pid: int) -> bool:
            return pid in parents and (parents[pid] == ancestor or is_below(parents[pid]))

        return {rank: pid for pid, rank in ranks.items() if is_below(pid)}

    return find
