"""What every test stands on: no network, one thread, the command line, and shapes that are true."""

import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from protlm.data.shards.cluster_writer import write_cluster_index
from protlm.data.shards.manifest import (
    MANIFEST,
    MANIFEST_SHA256,
    Clusters,
    Counts,
    Manifest,
    ShardEntry,
)
from protlm.data.shards.writer import PackedSequences, write_shard
from protlm.data.vocabulary import RESIDUES
from protlm.paths import sha256_of

ROOT = Path(__file__).resolve().parent.parent

# Programs that tests run in other processes: importing one, as for its doctests, may start it.
collect_ignore_glob = ["*/programs/*"]

# Tests run side by side: a second thread in each would only take the cores from the others. Nor
# does a shell's OMP_NUM_THREADS count: what is compared to the bit has one thread on both sides,
# and the commands below have one. Only `make test-portable` asks for more.
torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))

# A launcher's variables would make a command under test believe that it is one rank of a job.
LAUNCHER = re.compile(r"(.*_)?RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|(SLURM|TORCHELASTIC|PL|WANDB)_.*")

# The terminal of a command under test.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "WANDB_MODE": "offline",
    # A message is compared as it was written, not as a narrow terminal would break it.
    "COLUMNS": "200",
    "NO_COLOR": "1",
    "TERM": "dumb",
}

# `q_BHLK`: a name in small letters, and after the last underscore one character for each axis.
SUFFIX = re.compile(r"[a-z]\w*_([A-Z0-9]*[A-Z][A-Z0-9]*)")


def _is_local(address: Any) -> bool:
    host = address[0] if isinstance(address, tuple) else address
    if isinstance(host, bytes):
        host = host.decode()
    if host in {None, "", "localhost", socket.gethostname()}:
        return True
    try:
        return ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Fails whatever looks beyond this machine: a test passes with the cable pulled."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex
    sendto, getaddrinfo = socket.socket.sendto, socket.getaddrinfo

    def refuse_foreign(family: int, address: Any) -> None:
        if family in {socket.AF_INET, socket.AF_INET6} and not _is_local(address):
            # Not an OSError: a library that copes with a missing network would hide it.
            pytest.fail(f"a test reaches for the network: {address}")

    def local_connect(self: socket.socket, address: Any) -> None:
        refuse_foreign(self.family, address)
        connect(self, address)

    def local_connect_ex(self: socket.socket, address: Any) -> int:
        refuse_foreign(self.family, address)
        return connect_ex(self, address)

    def local_sendto(self: socket.socket, data: Any, *rest: Any) -> int:
        refuse_foreign(self.family, rest[-1])
        return sendto(self, data, *rest)

    def local_getaddrinfo(host: Any, *rest: Any, **named: Any) -> Any:
        refuse_foreign(socket.AF_INET, (host,))
        return getaddrinfo(host, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", local_connect)
        patch.setattr(socket.socket, "connect_ex", local_connect_ex)
        patch.setattr(socket.socket, "sendto", local_sendto)
        patch.setattr(socket, "getaddrinfo", local_getaddrinfo)
        yield


@pytest.fixture(scope="session")
def tiny_fasta() -> Path:
    """A few dozen real UniProt records, gzipped."""
    return ROOT / "data_prep" / "sample" / "uniprot_tiny.fasta.gz"


@pytest.fixture(scope="session")
def protlm_command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `protlm ARGUMENTS...` as a person would, in a process of its own.

    Called as `protlm_command("data", "verify", folder, cwd=tmp_path)`. Further variables of the
    environment go in `env`, what is typed at standard input in `stdin`.
    """
    inherited = {key: value for key, value in os.environ.items() if not LAUNCHER.fullmatch(key)}
    fixed = {"PYTHONPATH": str(ROOT), **ENVIRONMENT}

    def run(
        *arguments: str | Path,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        stdin: str = "",
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "protlm", *map(str, arguments)],
            cwd=cwd,
            env={**inherited, **fixed, **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


class _ReplacedError(BaseException):
    """Raised by `os.execv`: the command continues as another module, with these arguments."""


@contextmanager
def _process_state(arguments: Sequence[str], folder: Path) -> Iterator[None]:
    """Lets a command have this process as if it had just begun, and restores what it changes."""
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    environment = dict(os.environ)

    def replace(_: str, command: Sequence[str]) -> None:
        raise _ReplacedError(*command[2:])

    def show(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        for name in [name for name in os.environ if LAUNCHER.fullmatch(name)]:
            patch.delenv(name)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["protlm", *arguments])
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True))
        patch.setattr(os, "execv", replace)
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", UserWarning)
        patch.setattr(warnings, "showwarning", show)
        try:
            yield
        finally:
            for number, handler in signals.items():
                signal.signal(number, handler)
    # A command may set further variables.
    os.environ.clear()
    os.environ.update(environment)


def _exit_code(main: Callable[[], object]) -> int:
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture(scope="session")
def protlm_in_process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `protlm ARGUMENTS...` in this process, in a second less than `protlm_command` takes.

    For commands that end at once. It returns what `protlm_command` does.
    """
    from protlm import cli

    def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        words = [str(argument) for argument in arguments]
        with _process_state(words, cwd):
            try:
                code = _exit_code(cli.main)
            except _ReplacedError as replaced:
                module, *rest = replaced.args
                sys.argv[:] = [module, *rest]
                code = _exit_code(import_module(module).main)
            texts = (stream.buffer.getvalue().decode() for stream in (sys.stdout, sys.stderr))
            return subprocess.CompletedProcess(words, code, *texts)

    return run


def _disagreements(names: dict[str, Any]) -> Iterator[str]:
    """What is wrong in one function's locals: ranks, literal sizes, a letter with two sizes."""
    seen: dict[str, tuple[int, str]] = {}
    for name, value in names.items():
        suffix = SUFFIX.fullmatch(name)
        if suffix is None or not isinstance(value, torch.Tensor | np.ndarray):
            continue
        axes, shape = suffix[1], tuple(value.shape)
        if len(axes) != len(shape):
            yield f"{name} has the shape {shape}"
            continue
        for axis, size in zip(axes, shape, strict=True):
            if axis.isdigit() and int(axis) != size:
                yield f"{name} has the shape {shape}"
            elif not axis.isdigit() and seen.setdefault(axis, (size, name))[0] != size:
                yield f"{axis} is {size} in {name} and {seen[axis][0]} in {seen[axis][1]}"


@contextmanager
def _watch_shapes() -> Iterator[list[str]]:
    wrong: list[str] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event != "return":
            return
        module = frame.f_globals.get("__name__", "")
        if module == "protlm" or module.startswith("protlm."):
            where = f"{module}.{frame.f_code.co_qualname}"
            wrong.extend(f"{where}: {what}" for what in _disagreements(frame.f_locals))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield wrong
    finally:
        sys.setprofile(before)


@pytest.fixture
def checked_shapes() -> Iterator[list[str]]:
    """Fails the test if, in any function of protlm that it ran, a suffix told an untruth.

    Looks at the locals when a function returns, so it sees what a name held last. Not for code
    under `torch.compile`, whose frames are not Python's.
    """
    with _watch_shapes() as wrong:
        yield wrong
    if wrong:
        pytest.fail("shape suffixes that are not true:\n" + "\n".join(dict.fromkeys(wrong)))


@pytest.fixture(autouse=True)
def _shapes_of_the_mathematics(request: pytest.FixtureRequest) -> None:
    """Checks the suffixes in all tests of the attention and of the model."""
    if {"attention", "model"} & set(request.path.relative_to(ROOT).parts[:-1]):
        request.getfixturevalue("checked_shapes")


@pytest.fixture(scope="session")
def tiny_data(tiny_fasta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny sample as shards: train, valid and test by a hash of the sequence."""
    from protlm.data_prep.prepare import prepare
    from protlm.data_prep.split import HashSplit

    folder = tmp_path_factory.mktemp("data") / "tiny"
    prepare([tiny_fasta], folder, split_rule=HashSplit(valid_fraction=0.1, test_fraction=0.2))
    return folder


@pytest.fixture(scope="session")
def tiny_clusters(tiny_fasta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny sample as shards with clusters of one to six sequences."""
    from protlm.data.records import Tally, read_records
    from protlm.data_prep.cluster_table import ClusterTable
    from protlm.data_prep.prepare import prepare
    from protlm.data_prep.split import HashSplit

    folder = tmp_path_factory.mktemp("data")
    names = [record.identifier for record in read_records(tiny_fasta, Tally())]
    table = folder / "cluster.tsv"
    sizes = np.tile(np.arange(1, 7), len(names))
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    rows = [(names[start], name) for start, name in zip(starts, names, strict=False)]
    table.write_text("".join(f"{one}\t{other}\n" for one, other in rows))
    split = HashSplit(valid_fraction=0.1, test_fraction=0.2)
    prepare(
        [tiny_fasta], folder / "tiny", split_rule=split, clusters=ClusterTable(table, near=folder)
    )
    return folder / "tiny"


@pytest.fixture(scope="session")
def train_tiny(tiny_data: Path) -> Callable[..., Path]:
    """Trains the `tiny` model in this process: `train_tiny(run_dir, "trainer.max_steps=4")`."""
    from protlm.commands.train import train
    from protlm.composition import compose
    from protlm.config import TrainConfig

    def run(run_dir: Path, *overrides: str) -> Path:
        settings = [
            "model=tiny",
            f"data.dir={tiny_data}",
            f"run_dir={run_dir}",
            "data.max_length=128",
            "data.tokens_per_batch=1024",
            "schedule.warmup_steps=1",
            "trainer.accelerator=cpu",
            "trainer.precision=32-true",
            "trainer.max_steps=4",
            "trainer.log_every=2",
        ]
        given = {override.partition("=")[0] for override in overrides}
        kept = [setting for setting in settings if setting.partition("=")[0] not in given]
        train(compose(TrainConfig, [*kept, *overrides]))
        return run_dir

    return run


@pytest.fixture(scope="session")
def tiny_run(train_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the `tiny` model, four steps long."""
    return train_tiny(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture
def workplace(tmp_path: Path, tiny_run: Path, tiny_data: Path) -> Path:
    """A folder with a FASTA file, links to a run and to shards, and a damaged run."""
    (tmp_path / "x.fasta").write_text(">P1\nMKTAYIAKQRQISFVKSHFSRQ\n")
    (tmp_path / "run").symlink_to(tiny_run)
    (tmp_path / "data").symlink_to(tiny_data)
    shutil.copytree(tiny_run, tmp_path / "broken")
    checkpoint = next((tmp_path / "broken" / "checkpoints").glob("*.ckpt"))
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    return tmp_path


class Killed(BaseException):
    """Stands for a process that is killed: nothing that follows is done."""


@pytest.fixture
def killed_after(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[int], AbstractContextManager[None]]:
    """Ends the run within when the optimiser step of this number is done and, if due, saved."""
    from protlm.training.callbacks.save_checkpoints import SaveCheckpoints

    @contextmanager
    def killed(step: int) -> Iterator[None]:
        save = SaveCheckpoints.on_train_batch_end

        def save_and_end(self: SaveCheckpoints, trainer: Any, *rest: Any) -> None:
            save(self, trainer, *rest)
            if trainer.global_step == step:
                raise Killed

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(SaveCheckpoints, "on_train_batch_end", save_and_end)
            yield

    return killed


@pytest.fixture
def proteins() -> list[tuple[str, str]]:
    """Identifiers and sequences of 40 proteins of 1 to 200 residues."""
    return _random_proteins()


def _random_proteins() -> list[tuple[str, str]]:
    rng = np.random.default_rng(0)
    letters = np.array(list(RESIDUES))
    lengths = [1, 2, 200, *rng.integers(3, 200, 37)]
    return [(f"P{i}β", "".join(rng.choice(letters, n))) for i, n in enumerate(lengths)]


@pytest.fixture
def make_data_set(tmp_path: Path) -> Callable[..., Path]:
    """Writes proteins as the split `train`, a few to each shard, and a small split `valid`.

    `clusters` has the hash of each protein's cluster; without it the data set has no clusters.
    """

    def make(
        proteins: Sequence[tuple[str, str]],
        name: str = "data",
        clusters: Sequence[int] | None = None,
    ) -> Path:
        directory = tmp_path / name
        directory.mkdir()

        def shard(
            file: str, some: Sequence[tuple[str, str]], hashes: Sequence[int] | None
        ) -> ShardEntry:
            identifiers, sequences = zip(*some, strict=True)
            letters = [sequence.encode() for sequence in sequences]
            numbers = None if hashes is None else np.array(hashes, np.uint64)
            return write_shard(
                directory, file, [PackedSequences.pack(identifiers, letters, numbers)]
            )

        train = []
        for number, first in enumerate(range(0, len(proteins), 16)):
            here = slice(first, first + 16)
            hashes = None if clusters is None else clusters[here]
            train.append(shard(f"train/shard-{number:05d}.h5", proteins[here], hashes))
        valid = shard("valid/shard-00000.h5", [("V", "MKV")], None if clusters is None else [0])
        splits = {"train": tuple(train), "valid": (valid,)}
        found = None
        if clusters is not None:
            indexes = {name: write_cluster_index(directory, name, splits[name]) for name in splits}
            found = Clusters("cluster.tsv", "0" * 64, indexes)
        counts = Counts(len(proteins) + 1)
        Manifest(splits, (), counts, {"by": "hand"}, found).write(directory)
        return directory

    return make


@pytest.fixture
def data_set(make_data_set: Callable[..., Path]) -> Path:
    """A data set of the 40 `proteins` in three shards."""
    return make_data_set(_random_proteins())


@pytest.fixture
def write_manifest() -> Callable[[Path, str], None]:
    """Writes a text as the manifest of a data set, with its SHA-256."""

    def write(directory: Path, text: str) -> None:
        (directory / MANIFEST).write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        (directory / MANIFEST_SHA256).write_text(f"{digest}  {MANIFEST}\n")

    return write


@pytest.fixture
def trust(write_manifest: Callable[[Path, str], None]) -> Callable[[Path, str], None]:
    """Makes the manifest agree with a shard of the split `train`, whatever it is by now."""

    def trusted(directory: Path, shard: str) -> None:
        fields = json.loads((directory / MANIFEST).read_text())
        path = directory / shard
        for entry in fields["splits"]["train"]:
            if entry["file"] == shard:
                entry.update(bytes=path.stat().st_size, sha256=sha256_of(path))
        write_manifest(directory, json.dumps(fields))

    return trusted


@pytest.fixture(scope="session")
def assert_gone() -> Callable[[int], None]:
    """Fails if a process does not end within some seconds; it may remain a zombie."""

    def is_running(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    def check(pid: int) -> None:
        deadline = time.monotonic() + 20
        while is_running(pid):
            assert time.monotonic() < deadline, f"process {pid} is still there"
            time.sleep(0.05)

    return check
