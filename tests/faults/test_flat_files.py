"""Flat files are prepared as Bio.SwissProt reads them; invalid entries are listed by name.

That mutated entries are rejected or read alike is tested with the scanner itself.
"""

import gzip
import io
import shutil
from pathlib import Path

from Bio import SwissProt

from protlm.data.shards.data_set import open_split
from protlm.data.vocabulary import VOCABULARY
from protlm.data_prep.prepare import prepare
from protlm.data_prep.split import HashSplit

FIXTURES = sorted((Path(__file__).resolve().parents[1] / "data/records/fixtures").glob("*.dat.gz"))


def test_shards_hold_what_biopython_reads(tmp_path):
    (tmp_path / "dat").mkdir()
    for path in FIXTURES:
        shutil.copy(path, tmp_path / "dat")
    prepare([tmp_path / "dat"], tmp_path / "data", split_rule=HashSplit(0, 0))
    reader = open_split(tmp_path / "data", "train")
    found = [(reader.identifier(i), VOCABULARY.decode(reader[i])) for i in range(len(reader))]
    content = b"".join(gzip.decompress(path.read_bytes()) for path in FIXTURES).decode()
    entries = SwissProt.parse(io.StringIO(content))
    assert found == [(entry.accessions[0], entry.sequence) for entry in entries]
    assert len(found) > 150


def test_entries_without_end_or_with_a_wrong_length_are_counted(prepare_bytes):
    content = gzip.decompress(FIXTURES[-1].read_bytes())
    broken = content.replace(b"\n//\n", b"\n", 1).replace(b" AA;  ", b"0 AA;  ", 3)
    assert prepare_bytes(broken)["counts"]["rejected"] == {
        "no '//' at the end": 1,
        "length differs from the one that the entry declares": 2,
    }
