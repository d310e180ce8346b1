"""Clusters of sequences in memory: the table of MMseqs2, here of a stub, becomes numbers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from protlm.data_prep.mmseqs_clusters import cluster_sequences
from protlm.system.errors import UserError

FAKE = """#!{python}
import sys

command, fasta, result, folder, *options = sys.argv[1:]
assert command == "easy-cluster" and options[:2] == ["--min-seq-id", "0.3"], sys.argv
records = [one.split() for one in open(fasta).read().split(">")[1:]]
first = {{}}
with open(f"{{result}}_cluster.tsv", "w") as table:
    for name, sequence in records:
        print(first.setdefault(sequence[:3], name), name, sep="\\t", file=table)
"""

# As MMseqs2 does, it starts another process, which runs for long.
SLEEPING = """#!/bin/sh
sleep 600 &
echo $! > {folder}/found
mv {folder}/found {folder}/pid
wait
"""
SEARCH = "from protlm.data_prep.mmseqs import run_mmseqs; run_mmseqs(['search'])"


def _runs(pid: int) -> bool:
    """Returns whether a process runs; one that was killed may remain as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_clusters_are_rows_of_representatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "mmseqs"
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cluster_sequences(["MKTA", "MWWA", "MKTC", "MWWW"]) == [0, 1, 0, 1]


def test_a_missing_program_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="MMseqs2 is not installed"):
        cluster_sequences(["MKTA"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_mmseqs_and_what_it_starts_end_with_protlm(tmp_path: Path, number: signal.Signals) -> None:
    program = tmp_path / "mmseqs"
    program.write_text(SLEEPING.format(folder=tmp_path))
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        [sys.executable, "-c", SEARCH], env={**os.environ, "PATH": path}, stderr=subprocess.DEVNULL
    )
    while not (tmp_path / "pid").exists():
        assert process.poll() is None
        time.sleep(0.01)
    started = int((tmp_path / "pid").read_text())
    assert _runs(started)
    process.send_signal(number)
    assert process.wait(60) != 0
    end = time.monotonic() + 60
    while _runs(started):
        assert time.monotonic() < end
        time.sleep(0.01)
