"""What the fault cases of the preparation share: builders in this process and in others."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.prepare import PrepareOptions, prepare
from data_prep.split import HashSplit
from protlm.data.records import ReadOptions
from protlm.errors import ExitCode, InputDataError

ROOT = Path(__file__).resolve().parent.parent.parent

# Blocks of 16 KiB, so that a small file has many segments.
PROGRAM = """
import sys
from pathlib import Path
from data_prep.prepare import PrepareOptions, prepare
from data_prep.split import HashSplit
from protlm.data.records import cutting
from protlm.errors import exit_with_message

def build(sources, out, **options):
    settings = PrepareOptions(shard_residues=30_000, **options)
    prepare([Path(s) for s in sources], Path(out), split_rule=HashSplit(0.1, 0.1), options=settings)

def peak_megabytes():
    # Not getrusage, which counts what the parent had when it forked.
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
    return int(line.split()[1]) // 1024

cutting.BLOCK_BYTES = 1 << 14
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def run_builder() -> Run:
    """Runs a program after `PROGRAM`: `run_builder("build(sys.argv[1:2], 'out')", fasta)`."""

    def run(program: str, *arguments: object, **named: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", PROGRAM + program, *map(str, arguments)],
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
