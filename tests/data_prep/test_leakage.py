"""`protlm data leakage`: relatives of each split in train."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from protlm.data.shards.data_set import open_split
from protlm.data.shards.manifest import Counts, Manifest
from protlm.data.shards.writer import PackedSequences, write_shard
from protlm.data_prep import leakage as module
from protlm.data_prep.leakage import leakage
from protlm.options.prepare import LeakageOptions
from protlm.system.errors import InputDataError, OutputError, UserError
from tests.data.test_relatives import mutated, random_protein


@pytest.fixture
def make_splits(tmp_path):
    """Writes sequences as a data set of splits, in shards of a hundred sequences."""

    def make(splits: dict[str, list[str]], name="data") -> Path:
        directory = tmp_path / name
        directory.mkdir()
        entries = {}
        for split, sequences in splits.items():
            letters = [one.encode() for one in sequences]
            shards = [letters[start : start + 100] for start in range(0, len(letters), 100)]
            packed = [PackedSequences.pack([""] * len(shard), shard) for shard in shards]
            entries[split] = tuple(
                write_shard(directory, f"{split}/shard-{number:05d}.h5", [some])
                for number, some in enumerate(packed)
            )
        Manifest(entries, (), Counts(), {"by": "hand"}).write(directory)
        return directory

    return make


@pytest.fixture
def planted(make_splits):
    """250 train sequences and, of the first of them, copies at several identities."""
    rng = np.random.default_rng(0)
    train = [random_protein(rng, 300) for _ in range(250)]
    splits = {
        f"at_{percent}": [mutated(rng, one, percent / 100) for one in train[:60]]
        for percent in (95, 80, 30)
    }
    strangers = [random_protein(rng, 300) for _ in range(60)]
    return make_splits({"train": train, **splits, "same": train[:60], "strangers": strangers})


@pytest.mark.parametrize("residues", [1_000, 1 << 20])
def test_copies_are_counted_by_their_identity(planted, monkeypatch, residues):
    """Whatever the size of the batches."""
    monkeypatch.setattr("protlm.data.relatives._BATCH_RESIDUES", residues)
    results = leakage(planted, LeakageOptions())
    assert {split: one.sequences for split, one in results.items()} == dict.fromkeys(results, 60)
    assert [one.compared for one in results.values()] == [60] * 5
    assert results["same"].identical == results["same"].near == 60
    assert results["same"].shared_tenths == (0,) * 9 + (60,)
    assert results["at_95"].identical == 0
    assert results["at_95"].near >= 54
    assert results["at_80"].near <= 3
    assert sum(results["at_80"].shared_tenths[2:]) >= 40
    for split in ("at_30", "strangers"):
        assert results[split].near == results[split].identical == 0
        assert results[split].shared_tenths[0] == 60


def test_identical_sequences_are_those_of_a_dictionary(make_splits):
    """Short sequences collide often, repeat within a split, and may have no k-mer at all."""
    rng = np.random.default_rng(1)

    def draw(number):
        return ["".join(rng.choice(list("LAX"), rng.integers(1, 9))) for _ in range(number)]

    splits = {"train": draw(700), "valid": draw(300), "test": draw(200)}
    in_train = set(splits["train"])
    for split, one in leakage(make_splits(splits), LeakageOptions()).items():
        assert one.identical == sum(sequence in in_train for sequence in splits[split])
        assert 0 < one.identical < one.sequences
        # What has no k-mer cannot be compared.
        with_kmers = [s for s in splits[split] if any(len(p) >= 6 for p in s.split("X"))]
        assert one.compared == len(with_kmers) < one.sequences
    # Fractions are counted by tenths.
    shares = np.array([0, 0.05, 0.1, 0.19, 0.3, 0.5, 0.59, 0.7, 0.9, 0.95, 1])
    held_out: Any = SimpleNamespace(digests=range(20))
    one = module._summary(held_out, 3, shares, np.array([np.nan, 0.3]), LeakageOptions())
    assert one.shared_tenths == (2, 2, 0, 1, 0, 2, 0, 1, 0, 3)
    assert (one.sequences, one.identical, one.compared) == (20, 3, 11)
    assert (one.near, one.homologous) == (6, 1)


def test_a_large_split_is_sampled_and_its_identical_sequences_are_all_counted(planted, monkeypatch):
    monkeypatch.setattr(module, "_MAX_COMPARED", 30)
    # Otherwise every shard would remain mapped.
    _, held_out = module._open(planted)
    assert all(tokens.base is None for one in held_out.values() for tokens in one.compared)
    first, again = (leakage(planted, LeakageOptions()) for _ in range(2))
    assert first == again
    assert first["same"].identical == 60
    assert all(10 < one.compared < 50 for one in first.values())
    assert first["same"].near == first["same"].compared


def test_the_numbers_are_printed_and_written(planted, tmp_path, capsys):
    output = tmp_path / "leakage.json"
    results = leakage(planted, LeakageOptions(0.2, output))
    assert results["at_80"].near >= 40
    fields = json.loads(output.read_text())
    assert (fields["train_sequences"], fields["min_shared"]) == (250, 0.2)
    assert set(fields["splits"]) == set(results)
    same = fields["splits"]["same"]
    assert (same["identical"], same["homologous"]) == (60, None)
    told = capsys.readouterr()
    rows = [line.split() for line in told.out.splitlines()]
    assert ["same", "identical", "60", "60", "100.0%"] in rows
    near = fields["splits"]["at_80"]["near"]
    assert ["6-mers", ">=", "20%", str(near), "60", f"{near / 60:.1%}"] in rows
    assert "--mmseqs" in told.out
    assert "250/250" in told.err


def test_invalid_settings_are_rejected(planted, make_splits, tmp_path, monkeypatch):
    for splits in ({"train": ["MKV"]}, {"valid": ["MKV"], "test": ["MKV"]}):
        directory = make_splits(splits, name="-".join(splits))
        with pytest.raises(UserError, match="has the splits"):
            leakage(directory, LeakageOptions())
    taken = tmp_path / "taken.json"
    taken.touch()
    with pytest.raises(OutputError, match=r"taken\.json"):
        leakage(planted, LeakageOptions(json=taken))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"conda install .* mmseqs2"):
        leakage(tmp_path / "none", LeakageOptions(mmseqs=True))


@pytest.mark.parametrize("split", ["train", "strangers"])
def test_a_letter_changed_on_disk_is_found(planted, split):
    shard = planted / split / "shard-00000.h5"
    content, first = shard.read_bytes(), open_split(planted, split)[0].tobytes()
    shard.write_bytes(content.replace(first, first[::-1]))
    with pytest.raises(InputDataError, match=rf"{split}/shard-00000\.h5.*SHA-256 differs"):
        leakage(planted, LeakageOptions())


FAKE = """#!{python}
# Answers as easy-search does: a query hits what begins with the same ten residues.
import sys

def read(path):
    records = open(path).read().split(">")[1:]
    return [record.split("\\n")[:2] for record in records]

command, queries, targets, hits, folder, *options = sys.argv[1:]
assert command == "easy-search" and options[:2] == ["-e", "0.001"], sys.argv
starts = {{sequence[:10] for _, sequence in read(targets)}}
with open(hits, "w") as file:
    for name, sequence in read(queries):
        if sequence[:10] in starts:
            print(name, 0.3, sep="\\t", file=file)
            print(name, 0.25, sep="\\t", file=file)
"""


def test_hits_of_mmseqs_are_assigned_to_their_split(make_splits, install_mmseqs, capsys):
    """Sequences that are too short to be compared are counted separately."""
    install_mmseqs(FAKE)
    rng = np.random.default_rng(2)
    train = [random_protein(rng) for _ in range(20)]
    strangers = [random_protein(rng) for _ in range(6)]
    # A distant homolog, of which the stub sees the start alone.
    distant = train[8][:10] + random_protein(rng, 290)
    # The sequences of each split, and how many are compared, near and homologous.
    splits = {
        "first": (["MKV", train[0], "MK", *train[1:5]], (5, 5, 5)),
        "second": (["M"], (0, 0, 0)),
        "third": ([*strangers, train[9]], (7, 1, 1)),
        "fourth": ([distant], (1, 0, 1)),
    }
    written = {split: sequences for split, (sequences, _) in splits.items()}
    results = leakage(make_splits({"train": train, **written}), LeakageOptions(mmseqs=True))
    for split, (_, expected) in splits.items():
        one = results[split]
        assert (one.compared, one.near, one.homologous) == expected
    assert "MMseqs2 hit" in capsys.readouterr().out


ENDLESS = """#!{python}
import os, signal, time
from pathlib import Path
Path("{pid}").write_text(str(os.getpid()))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(100)
"""


@pytest.mark.slow
def test_a_terminated_job_leaves_no_copy_of_the_data_set(
    make_splits, install_mmseqs, protlm_command, tmp_path, assert_gone
):
    directory = make_splits({"train": ["MKTAYIAKQRQI"], "valid": ["MKTAYIAKQRWW"]})
    (tmp_path / "scratch").mkdir()
    pid = tmp_path / "pid"
    install_mmseqs(ENDLESS, pid=pid)
    environment = {"TMPDIR": str(tmp_path / "scratch"), "PATH": os.environ["PATH"]}
    typed = ["data", "leakage", directory, "--mmseqs"]
    done = protlm_command(*typed, env=environment, timeout=60, code=130)
    assert done.stderr.splitlines()[-1] == "protlm: interrupted"
    assert not list((tmp_path / "scratch").iterdir())
    assert_gone(int(pid.read_text()))
