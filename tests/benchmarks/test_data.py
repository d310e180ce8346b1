"""The benchmark of the data: its inputs are what they say, and what it counts is true."""

import sys
from collections import Counter

import numpy as np
import pytest
from Bio import SeqIO, SwissProt

from benchmarks.data import Bar, speed, take_turns
from benchmarks.data_inputs import write_flat_file, write_xml
from benchmarks.synthetic_fasta import SAMPLE, Proteins, write
from benchmarks.watched import watch
from protlm.data.records import Tally, read_records
from protlm.data.records.source import ByteSource
from protlm.errors import UserError


def composition(letters: str) -> np.ndarray:
    counts = Counter(letters)
    return np.array([counts[letter] / len(letters) for letter in "ACDEFGHIKLMNPQRSTVWY"])


def test_synthetic_proteins_are_like_the_real_ones(tmp_path):
    path, tally = tmp_path / "synthetic.fasta.gz", Tally()
    write(path, 3000)
    made = [record.sequence for record in read_records(path, tally)]
    real = [record.sequence for record in read_records(SAMPLE, Tally())]
    assert tally.records == len(made) == 3000
    assert not tally.rejected
    assert len(set(made)) == 3000
    lengths, expected = (np.array([len(s) for s in group]) for group in (made, real))
    # The mean of 3,000 draws, within four of its standard deviations.
    assert abs(lengths.mean() - expected.mean()) < 4 * expected.std() / np.sqrt(3000)
    assert np.abs(composition("".join(made)) - composition("".join(real))).max() < 0.002


def test_synthetic_proteins_depend_on_the_seed_alone():
    draws = [Proteins(SAMPLE, seed=seed).draw(20) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_our_parsers_and_those_of_biopython_read_the_same_entries(tmp_path):
    flat, xml = tmp_path / "entries.dat.gz", tmp_path / "entries.xml.gz"
    write_flat_file(flat, 1)
    write_xml(xml, 1)
    for path in (flat, xml):
        tally = Tally()
        ours = [(record.identifier, record.sequence) for record in read_records(path, tally)]
        assert not tally.rejected
        with ByteSource(path, "a file") as source:
            text = b"".join(source.chunks())
        plain = tmp_path / path.stem
        plain.write_bytes(text)
        if path == flat:
            with plain.open() as file:
                theirs = [(r.accessions[0], r.sequence) for r in SwissProt.parse(file)]
        else:
            with plain.open("rb") as file:
                theirs = [(r.id, str(r.seq)) for r in SeqIO.parse(file, "uniprot-xml")]
        assert ours == theirs
        assert len(ours) > 5


def test_contenders_take_turns_and_the_first_turn_is_not_counted():
    calls = []
    seconds = take_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
    assert calls == ["a", "b"] * 4
    assert [len(s) for s in seconds.values()] == [3, 3]


def test_speed_is_the_median_of_the_turns():
    assert speed({"ours": [1.0, 2.0, 1.0], "peer": [3.0, 4.0, 30.0]}, "ours", "peer") == 3.0


@pytest.mark.parametrize(("measured", "at_most", "met"), [(2, False, True), (2, True, False)])
def test_a_bar_is_met_from_its_side(measured, at_most, met):
    assert Bar("x", 1.0, measured, at_most=at_most).met is met


def test_the_memory_of_a_command_and_its_children_is_seen():
    hold = "x = bytearray(60 << 20)"
    child = f"import time; {hold}; time.sleep(1)"
    run_child = f"subprocess.run([sys.executable, '-c', {child!r}])"
    parent = f"import subprocess, sys; {hold}; {run_child}"
    found = watch([sys.executable, "-c", parent])
    assert 120 << 20 < found.peak_bytes < 200 << 20
    assert found.seconds > 1


def test_a_command_that_fails_is_an_error():
    with pytest.raises(UserError, match="ended with 3"):
        watch([sys.executable, "-c", "raise SystemExit(3)"])
