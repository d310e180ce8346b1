"""Fixtures of the fault tests: builders in other processes, full disks, and invalid input."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protlm.data.records import ReadOptions
from protlm.data_prep.prepare import PrepareOptions, prepare
from protlm.data_prep.split import HashSplit
from protlm.system.errors import ExitCode, InputDataError

ROOT = Path(__file__).resolve().parent.parent.parent


Run = Callable[..., "subprocess.CompletedProcess[str]"]
SmallDisk = Callable[[Path, str], AbstractContextManager[bool]]


@pytest.fixture(scope="session")
def run_builder() -> Run:
    """Runs a program of builders: `run_builder(PROGRAMS / "build.py", fasta, "out")`."""

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
    """A FASTA file of 3,000 random proteins, some of them repeated, and two invalid records."""
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
    """Mounts a small tmpfs, and yields whether this was allowed."""

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
def prepare_bytes(tmp_path: Path) -> Callable[..., Any]:
    """Prepares bytes as a file, with any number of rejects; returns `report.json`."""

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
    """Prepares bytes that must be refused as bad input without output; returns the message."""

    def run(content: bytes, **options: bool) -> str:
        with pytest.raises(InputDataError) as caught:
            prepare_bytes(content, **options)
        assert caught.value.exit_code == ExitCode.BAD_INPUT
        assert [path.name for path in tmp_path.iterdir()] == ["proteins.fasta"]
        return str(caught.value)

    return run
