"""Clusters of sequences in memory: the table of MMseqs2, here of a stub, becomes numbers."""

import sys
from pathlib import Path

import pytest

from protlm.data_prep.mmseqs_clusters import cluster_sequences
from protlm.errors import UserError

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
