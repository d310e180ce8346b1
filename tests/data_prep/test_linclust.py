"""MMseqs2 as an external program, here a stub; and clusters of sources by linclust."""

import gzip
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from protlm.data.records import Tally, read_records
from protlm.data_prep.mmseqs import Clustering, cluster_sequences, cluster_sources, run_mmseqs
from protlm.options.prepare import ReadOptions
from protlm.system.errors import InputDataError, OutputError, UserError
from protlm.system.paths import sample_dir
from protlm.system.work_folder import BEGUN

TINY = sample_dir() / "uniprot_tiny.fasta.gz"

FAKE = """#!{python}
import sys
from pathlib import Path

if sys.argv[1] == "version":
    sys.exit(print("14"))
Path(sys.argv[0]).with_name("calls").open("a").write("\\t".join(sys.argv[1:]) + "\\n")
command, *arguments = sys.argv[1:]
assert command == "easy-linclust", sys.argv
fasta, result, folder = arguments[: arguments.index("--min-seq-id")]
representatives = {{}}
with open(f"{{result}}_cluster.tsv", "w") as table:
    for record in Path(fasta).read_text().split(">")[1:]:
        header, sequence = record.split("\\n")[:2]
        name = header.split()[0]
        print(representatives.setdefault(sequence[:10], name), name, sep="\\t", file=table)
Path(f"{{result}}_all_seqs.fasta").touch()
"""

# As MMseqs2 does, it starts another process, which runs for long.
SLEEPING = """#!/bin/sh
sleep 600 &
echo $! > {folder}/found
mv {folder}/found {folder}/pid
wait
"""

# The lock of a process on another machine.
ELSEWHERE = '{"host": "elsewhere", "pid": 1, "since": ""}'

SEARCH = "from protlm.data_prep.mmseqs import run_mmseqs; run_mmseqs(['search'])"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "one.fasta"
    path.write_text(">a\nMKTAYIAKQRQI\n")
    return path


def members_of(table):
    rows = [line.split("\t") for line in table.read_text().splitlines()]
    clusters = {}
    for representative, member in rows:
        clusters.setdefault(representative, set()).add(member)
    return clusters


def test_all_records_are_clustered_under_their_identifiers(install_mmseqs, out):
    calls = install_mmseqs(FAKE) / "calls"
    table = cluster_sources([TINY], out, Clustering(identity=0.3, coverage=0.9))[0]
    by_start = {}
    for record in read_records(TINY, Tally()):
        by_start.setdefault(record.sequence[:10], set()).add(record.identifier)
    assert sorted(map(sorted, members_of(table).values())) == sorted(map(sorted, by_start.values()))
    assert list(out.parent.iterdir()) == [table]
    (call,) = calls.read_text().splitlines()
    assert call.endswith("--min-seq-id\t0.3\t-c\t0.9\t--cov-mode\t1\t-v\t1")


def test_every_format_and_several_sources(install_mmseqs, out, tmp_path):
    install_mmseqs(FAKE)
    flat = tmp_path / "-one entry.dat"
    flat.write_text(
        "ID   A_B                     Reviewed;          12 AA.\nAC   P00001;\n"
        "SQ   SEQUENCE   12 AA;  1400 MW;  0000000000000000 CRC64;\n     MKTAYIAKQR QI\n//\n"
    )
    fasta = tmp_path / "two.fasta.gz"
    fasta.write_bytes(gzip.compress(b"# note\n>sp|P00002|X_Y a\nmktayiakqrww\n>bad\nMK1\n"))
    reading = ReadOptions(allow_comments=True)
    table = cluster_sources([flat, fasta], out, Clustering(reading=reading))[0]
    assert members_of(table) == {"P00001": {"P00001", "P00002"}}


def test_the_same_sources_are_clustered_once(install_mmseqs, out, source, capsys):
    calls = install_mmseqs(FAKE) / "calls"
    first = cluster_sources([source], out, Clustering())
    assert cluster_sources([source], out, Clustering()) == first
    assert str(first[0]) in capsys.readouterr().err
    assert len(calls.read_text().splitlines()) == 1
    other = cluster_sources([source], out, Clustering(identity=0.9))
    source.write_text(">a\nMKTAYIAKQRQI\n>b\nMKTAYIAKQR\n")
    longer = cluster_sources([source], out, Clustering())[0]
    assert members_of(longer) == {"a": {"a", "b"}}
    source.write_text(">a\nMKTAYIAKQRQI\n>b\nMKTAYIWWWW\n")
    os.utime(source, ns=(0, 1))
    newer = cluster_sources([source], out, Clustering())[0]
    assert members_of(newer) == {"a": {"a"}, "b": {"b"}}
    newest = cluster_sources([source], out, Clustering(coverage=0.5))[0]
    assert len({first[0], other[0], longer, newer, newest}) == 5


def test_files_of_a_process_that_was_killed_on_another_machine_are_removed(install_mmseqs, out):
    install_mmseqs(FAKE)
    table = cluster_sources([TINY], out, Clustering())[0]
    content = table.read_text()
    table.unlink()
    left = out.with_name(f"{table.name}.partial")
    (left / "tmp").mkdir(parents=True)
    for name in ("tmp/half", "linclust_cluster.tsv", "sources.fasta"):
        (left / name).write_text("half\n")
    (left / BEGUN).write_text("{}")
    (left / "lock.json").write_text(ELSEWHERE)
    with pytest.raises(OutputError, match=r"process 1 on elsewhere.*--break-lock"):
        cluster_sources([TINY], out, Clustering())
    found = cluster_sources([TINY], out, Clustering(break_lock=True))
    assert found[0].read_text() == content
    assert list(out.parent.iterdir()) == [table]


FAILING = FAKE + "print('Input reads.fasta\\n\\nsomething happened')\nsys.exit('Error: {reason}')\n"

GROWING = FAKE + "open({reason!r}, 'a').write('>b\\nMKTAYIAKQRQ\\n')\n"

# What mmseqs does, where {reason} is the source or a sentence; and what is said of it.
FAULTS = {
    "bad input": (FAILING, InputDataError, "ended with 1: .*happened; Error: bad input"),
    "No space left on device": (FAILING, OutputError, "ended with 1: .*Error: No space left"),
    # Clustering takes hours; records added since would be split without their relatives.
    "": (GROWING, InputDataError, "a source changed while MMseqs2 ran"),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_a_failure_is_reported_and_leaves_nothing(install_mmseqs, out, source, reason):
    program, kind, told = FAULTS[reason]
    install_mmseqs(program, reason=reason or str(source))
    with pytest.raises(kind, match=told):
        cluster_sources([source], out, Clustering())
    assert list(out.parent.iterdir()) == []
    source.write_bytes(TINY.read_bytes()[:-100])
    with pytest.raises(InputDataError, match="truncated"):
        cluster_sources([source], out, Clustering())
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("other", ["a", "sp|a|A_B"])
def test_duplicate_names_are_rejected_before_clustering(install_mmseqs, out, tmp_path, other):
    calls = install_mmseqs(FAKE) / "calls"
    one, two = tmp_path / "one.fasta", tmp_path / "two.fasta"
    one.write_text(">a\nMKTAYIAKQRQI\n>b\nMKT\n>a\nMKTAYIAKQRQI\n")
    two.write_text(f">c\nMKTAYIAKQRQI\n\n>{other}\nMKTAYIAKQRQL\n")
    assert members_of(cluster_sources([one], out, Clustering())[0]).keys() == {"a", "b"}
    calls.unlink()
    with pytest.raises(InputDataError, match=r"two\.fasta, line 4: 'a' is the name of another"):
        cluster_sources([one, two], out, Clustering())
    assert not calls.exists()


def test_invalid_clusterings_are_rejected(out, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="standard input"):
        cluster_sources([TINY, Path("-")], out, Clustering())
    with pytest.raises(InputDataError, match=r"none\.fasta"):
        cluster_sources([tmp_path / "none.fasta"], out, Clustering())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"not installed.*conda install .* apt install mmseqs2"):
        cluster_sources([TINY], out, Clustering())
    assert not out.parent.exists()


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


def test_a_broken_lock_leaves_everything_to_the_other_process(install_mmseqs, out):
    taking = FAKE + "Path(folder).with_name('lock.json').write_text({lock!r})\n"
    install_mmseqs(taking, lock=ELSEWHERE)
    with pytest.raises(OutputError, match=r"now belongs to process 1 on elsewhere.*took it over"):
        cluster_sources([TINY], out, Clustering())
    (folder,) = out.parent.iterdir()
    left = {path.name for path in folder.iterdir()}
    assert {"lock.json", "sources.fasta", "linclust_cluster.tsv"} <= left


def test_clusters_are_rows_of_representatives(install_mmseqs):
    calls = install_mmseqs(FAKE.replace("easy-linclust", "easy-cluster")) / "calls"
    first, second = "MKTAYIAKQR", "MWTAYIAKQR"
    assert cluster_sequences([f"{first}A", f"{second}A", first, second]) == [0, 1, 0, 1]
    assert "--min-seq-id\t0.3\t" in calls.read_text()
