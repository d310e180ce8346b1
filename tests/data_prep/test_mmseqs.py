"""MMseqs2 as an external program, here a stub: its clusters become numbers, and it ends with us."""

import os
import signal
import subprocess
import sys
import time

import pytest

from protlm.data_prep.mmseqs import cluster_sequences, run_mmseqs
from protlm.system.errors import InputDataError, UserError

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


def test_clusters_are_rows_of_representatives(install_mmseqs):
    install_mmseqs(FAKE)
    assert cluster_sequences(["MKTA", "MWWA", "MKTC", "MWWW"]) == [0, 1, 0, 1]


def test_a_missing_program_is_explained(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="MMseqs2 is not installed"):
        cluster_sequences(["MKTA"])


def test_arguments_never_reach_a_shell(install_mmseqs, tmp_path):
    install_mmseqs("#!{python}\nimport sys\nsys.exit(repr(sys.argv[1:]))\n")
    arguments = ["version; touch canary", tmp_path / "$(touch canary)"]
    with pytest.raises(InputDataError) as caught:
        run_mmseqs(arguments)
    assert repr([*map(str, arguments), "-v", "1"]) in str(caught.value)
    assert not list(tmp_path.rglob("canary"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_mmseqs_and_what_it_starts_end_with_protlm(install_mmseqs, tmp_path, number, assert_gone):
    install_mmseqs(SLEEPING, folder=tmp_path)
    process = subprocess.Popen([sys.executable, "-c", SEARCH], stderr=subprocess.DEVNULL)
    while not (tmp_path / "pid").exists():
        assert process.poll() is None
        time.sleep(0.01)
    started = int((tmp_path / "pid").read_text())
    os.kill(started, 0)
    process.send_signal(number)
    assert process.wait(60) != 0
    assert_gone(started)
