"""Processes of protlm: what they import and keep, and how they report errors and warnings."""

import ctypes
import errno
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from protlm.system import errors, processes
from protlm.system.errors import ExitCode, exit_with_message

PROTLM = Path(sys.executable).with_name("protlm")
BAD = "import os\nos.write(2, b'FOREIGN ' + __name__.encode())\nos._exit(9)\n"


def run(folder: Path, names: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command as its user does, without PYTHONPATH, beside modules of these names."""
    (folder / "protlm").mkdir()
    for name in names.split():
        (folder / f"{name}.py").write_text(BAD)
    without = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SLURM_"))}
    named: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300}
    environment = without | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, check=False, **named)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "evaluate", "protlm.train"])
def test_modules_in_the_working_folder_are_not_imported(name, tmp_path):
    """By hand, Python imports the first modules before it reads a line of protlm."""
    command = [sys.executable, "-m", name] if "." in name else [PROTLM, name]
    first = "" if "." in name else "random inspect threading protlm/__init__"
    done = run(tmp_path, f"yaml torch typer hydra rich {first}", *command, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage: protlm" in done.stdout


# With all its layers, as small as they can be.
PAPER = """
experiment=trembl_performer_softmax_36 run_dir=run trainer.devices=2 trainer.accelerator=cpu
model.num_heads=2 model.model_dim=16 model.feedforward_dim=16 attention.num_features=16
data.num_workers=1 data.tokens_per_batch=2048 trainer.max_steps=1 trainer.valid_batches=1
"""


@pytest.mark.slow
def test_ranks_and_loader_workers_ignore_the_working_folder(tmp_path, tiny_data):
    """Those of an experiment of the paper, whose 36 layers are trained on two ranks."""
    names = "random yaml torch inspect threading protlm/__init__"
    done = run(tmp_path, names, PROTLM, "train", *PAPER.split(), f"data.dir={tiny_data}")
    assert done.returncode == 0, done.stderr
    assert "FOREIGN" not in done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-00000001.ckpt").is_file()


PROGRAM = """
import resource
import sys
import numpy as np
from protlm.system.processes import keep_freed_memory

if sys.argv[1:] == ["keep"]:
    keep_freed_memory()
for turn in range(60):
    if turn == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    # 120 MiB: more than glibc keeps of blocks whose size it has seen.
    blocks = [np.ones(3 << 20) for _ in range(5)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*arguments: str) -> int:
    """Page faults of 50 turns that each need 120 MiB."""
    kept = {name: v for name, v in os.environ.items() if name not in processes._VARIABLES}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    run = subprocess.run(command, env=kept, capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.slow
def test_tensors_take_the_pages_of_earlier_ones():
    assert page_faults("keep") < page_faults() / 10


def test_settings_of_the_user_and_other_c_libraries_are_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    processes.keep_freed_memory()
    processes.return_freed_memory()
    told: list[tuple[int, ...]] = []
    library = SimpleNamespace(mallopt=lambda *values: told.append(values))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    processes.keep_freed_memory()
    assert told == []
    for name in processes._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    processes.keep_freed_memory()
    assert told


def _system(number: int, *name: str) -> OSError:
    return OSError(number, os.strerror(number), *name)


# What Python, torch and the system raise, the exit code, and what the sentence says.
FAULTS: dict[str, tuple[Exception, ExitCode, str]] = {
    "memory": (MemoryError(), ExitCode.USAGE, "memory is full or limited"),
    "memory of torch": (
        RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 256 bytes."
        ),
        ExitCode.USAGE,
        "you tried to allocate 256 bytes",
    ),
    "memory of a card": (RuntimeError("CUDA out of memory."), ExitCode.USAGE, "smaller batches"),
    "memory of a library": (
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        ExitCode.USAGE,
        "ulimit -v",
    ),
    "memory of a child": (_system(errno.ENOMEM), ExitCode.USAGE, "ulimit -v"),
    "threads": (RuntimeError("can't start new thread"), ExitCode.USAGE, "ulimit -u"),
    "processes": (_system(errno.EAGAIN), ExitCode.USAGE, "ulimit -u"),
    "files": (_system(errno.EMFILE, "x"), ExitCode.USAGE, "ulimit -n"),
    "disk": (_system(errno.ENOSPC, "/d/x"), ExitCode.OUTPUT, "/d/x: no space left"),
    "size of files": (_system(errno.EFBIG), ExitCode.OUTPUT, "standard output: no space left"),
    "temporary folder": (
        FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/t']"),
        ExitCode.OUTPUT,
        "set TMPDIR",
    ),
    "current folder": (_system(errno.ENOENT), ExitCode.USAGE, "current folder was removed"),
    "permission": (_system(errno.EACCES, "/d/x"), ExitCode.BAD_INPUT, "/d/x cannot be used"),
    "a long name": (_system(errno.ENAMETOOLONG, "x"), ExitCode.BAD_INPUT, "x cannot be used"),
    "a broken disk": (_system(errno.EIO, "x"), ExitCode.BAD_INPUT, "x cannot be used"),
    "exists": (FileExistsError(errno.EEXIST, "File exists", "out"), ExitCode.OUTPUT, "written"),
    "encoding": (
        UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range(128)"),
        ExitCode.OUTPUT,
        "PYTHONIOENCODING=utf-8",
    ),
}


@pytest.fixture
def said_by(capsys, monkeypatch):
    """Returns the exit code and the words of a command that fails with an error."""
    monkeypatch.setattr("protlm.system.errors._discard_output", lambda: None)
    monkeypatch.setattr("warnings.formatwarning", warnings.formatwarning)

    def run(error: Exception) -> tuple[object, str]:
        def command() -> NoReturn:
            raise error

        with pytest.raises(SystemExit) as end:
            exit_with_message(command)
        return end.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(("error", "code", "words"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_the_system_is_one_sentence(error, code, words, said_by):
    found, said = said_by(error)
    assert (found, len(said.splitlines())) == (code, 1)
    assert words in said


@pytest.mark.parametrize("error", [KeyError("x"), _system(errno.ENOENT, "x"), RuntimeError("x")])
def test_a_fault_of_protlm_shows_its_place(error, said_by):
    code, said = said_by(error)
    assert code == ExitCode.INTERNAL
    assert "Traceback" in said and "please report it" in said


def test_only_the_warnings_of_libraries_contain_their_place(said_by):
    said_by(MemoryError())
    ours, theirs = (
        warnings.formatwarning("odd", UserWarning, file, 12) for file in (errors.__file__, "x.py")
    )
    assert ours == "protlm: warning: odd\n"
    assert theirs.startswith("x.py:12: UserWarning: odd\n")
