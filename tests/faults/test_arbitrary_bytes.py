"""For any bytes, the reader returns correct records or raises one of protlm's errors."""

import gzip
import random
from pathlib import Path

import pytest

from protlm.data.records import ReadOptions, SequenceFile, Tally
from protlm.data.vocabulary import RESIDUES
from protlm.system.errors import InputDataError

FIXTURES = Path(__file__).resolve().parents[1] / "data" / "records" / "fixtures"
NAMES = ("multi_ex.fasta.gz", "H2CNN8.dat.gz", "P84001.xml.gz")
SEEDS = [gzip.decompress((FIXTURES / name).read_bytes()) for name in NAMES]
PIECES = (
    *(b">", b"\n", b"\r", b";", b"@", b"*", b"MKV", b"\0", b"\xff", b" ", b"sp|P1|", b"\x1f\x8b"),
    *(
        b"\n//\n",
        b"ID   ",
        b"\nSQ   ",
        b"<entry",
        b"</entry>",
        b"<!--",
        b"&x;",
        b"<uniprot>",
        b"]]>",
    ),
)


def arbitrary(rng: random.Random) -> bytes:
    """Noise, fragments of the formats, or a damaged real file."""
    kind = rng.randrange(10)
    if kind == 0:
        return rng.randbytes(rng.randrange(60))
    if kind == 1:
        return b"".join(rng.choices(PIECES, k=rng.randrange(30)))
    content = bytearray(rng.choice(SEEDS))
    for _ in range(rng.randrange(1, 6)):
        place = rng.randrange(len(content))
        match rng.randrange(4):
            case 0:
                content[place] = rng.randrange(256)
            case 1:
                del content[place : place + rng.randrange(200)]
            case 2:
                content[place:place] = rng.choice(PIECES)
            case 3:
                other = rng.randrange(len(content))
                content[place:place] = content[other : other + rng.randrange(200)]
    if rng.random() < 0.1:
        packed = bytearray(gzip.compress(content, mtime=0))
        packed[rng.randrange(len(packed))] ^= 1 << rng.randrange(8)
        return bytes(packed)
    return bytes(content)


def assert_records_or_errors(number: int, seed: int, path: Path) -> None:
    """Reads a number of files and checks the outcome of each."""
    rng = random.Random(seed)
    outcomes = {"records": 0, "error": 0}
    for _ in range(number):
        path.write_bytes(arbitrary(rng))
        flags = [rng.random() < 0.3 for _ in range(4)]
        tally, records = Tally(), []
        try:
            with SequenceFile(path, ReadOptions(*flags)) as file:
                for block in file.blocks():
                    records += block.records(tally)
        except InputDataError as error:
            assert "\n" not in str(error)
            outcomes["error"] += 1
            continue
        outcomes["records"] += 1
        assert len(records) + tally.num_rejected == tally.records
        for record in records:
            assert record.sequence and set(record.sequence) <= set(RESIDUES)
            # Whatever the header was, it can be stored as UTF-8.
            assert len(record.identifier.encode().split()) == 1
            assert b"\n" not in record.header.encode()
        assert all(name.encode() for listed in tally.listed.values() for name, _, _ in listed)
    assert min(outcomes.values()) > number / 10, outcomes


def test_arbitrary_bytes_give_records_or_an_error_of_protlm(tmp_path):
    assert_records_or_errors(600, 0, tmp_path / "fuzz")


@pytest.mark.slow
def test_ten_thousand_arbitrary_files_give_records_or_an_error_of_protlm(tmp_path):
    assert_records_or_errors(10_000, 1, tmp_path / "fuzz")


@pytest.mark.slow
def test_arbitrary_bytes_in_small_blocks_give_records_or_an_error_of_protlm(tmp_path, monkeypatch):
    monkeypatch.setattr("protlm.data.records.block.BLOCK_BYTES", 500)
    assert_records_or_errors(5_000, 2, tmp_path / "fuzz")
