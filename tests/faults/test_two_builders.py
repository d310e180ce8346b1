"""Of two builders of one output one succeeds; the other is rejected and names the first."""

import os
import socket
import subprocess
import sys
import time

import pytest

from protlm.system.lock import LOCK


@pytest.fixture
def start(tmp_path):
    """Starts `protlm prepare` and returns at once; running processes are killed at the end."""
    started = []

    def run(*arguments: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", "protlm", "prepare", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_the_second_names_the_first_which_continues(start, tmp_path, proteins):
    first = start("-", "--out", "data")
    while not (tmp_path / "data.partial" / LOCK).exists():
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.02)
    second = start(proteins, "--out", "data")
    told = second.communicate(timeout=60)[1]
    assert second.returncode == 4, told
    assert f"process {first.pid} on {socket.gethostname()}" in told
    assert "Traceback" not in told
    told = first.communicate(proteins.read_text(), timeout=60)[1]
    assert first.returncode == 0, told
    assert (tmp_path / "data" / "manifest.json").is_file()
    assert not (tmp_path / "data.partial").exists()


def test_of_many_builders_one_succeeds(start, tmp_path, proteins):
    builders = [start(proteins, "--out", "data") for _ in range(4)]
    told = [builder.communicate(timeout=120)[1] for builder in builders]
    assert sorted(builder.returncode for builder in builders) == [0, 4, 4, 4], told
    assert all("Traceback" not in text for text in told)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
