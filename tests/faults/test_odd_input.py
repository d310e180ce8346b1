"""Odd, damaged and hostile files and names: refused with their place, escaped, or counted."""

import gzip
import io
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from protlm.commands.data import export
from protlm.commands.embed import embed
from protlm.data.records import SequenceFile, Tally
from protlm.data.records.proteins import Proteins
from protlm.data.vocabulary import RESIDUES
from protlm.data_prep.prepare import prepare
from protlm.data_prep.split import HashSplit
from protlm.options.embed import EmbedOptions
from protlm.options.prepare import PrepareOptions, ReadOptions
from protlm.options.shared import Duplicates
from protlm.system.errors import ExitCode, InputDataError
from protlm.system.paths import sample_dir
from tests.marks import slow_but

FIXTURES = Path(__file__).resolve().parents[1] / "data" / "records" / "fixtures"
FASTA, CLEAN = b">a\nMKV\n", b">a one\nMKVLL\nWW\n>b two\nMKL\n"
PACKED = gzip.compress(CLEAN, mtime=0)
TINY = (sample_dir() / "uniprot_tiny.fasta.gz").read_bytes()
FLAT = gzip.decompress(sorted(FIXTURES.glob("*.dat.gz"))[-1].read_bytes())
# Blank, bare, repeated, small, starred, gapped and numbered records.
ODD = b">blank\n>\nMKVLLW\n>twice\nMKVLL\n>twice\nMKVLL\n>small\nmkvll\n>end\nMKVLL*\n"
ODD += b">inside\nMK*VLL\n>gap\nMK-VLL\n>digit\nMK1VLL\n>spaces\nM K V\tL\n>rare\nMBZXUO\n"
ODD += b">leucine\nMJV\n"
ODD_COUNTS = dict.fromkeys(
    (
        "blank sequence",
        "'*' inside the sequence",
        "digit",
        "bare '>' named by its line",
        "lower case raised",
        "terminal '*' removed",
        "J written as X",
        "record with B, O, U, X or Z",
    ),
    1,
)
NUCLEOTIDES = "record of the letters ACGTUN alone"


def random_records(letters: str, number: int) -> bytes:
    rng = np.random.default_rng(0)
    sequences = ("".join(rng.choice(list(letters), 60)) for _ in range(number))
    return b"".join(f">{letters[-1]}{i:04}\n{s}\n".encode() for i, s in enumerate(sequences))


MANY, DNA = random_records("ACDEFGHIKLMNPQRSTVWY", 2_000), random_records("ACGT", 1_100)


@pytest.fixture
def prepare_bytes(tmp_path) -> Callable[..., Any]:
    """Prepares bytes as a file, with any number of rejects; returns `report.json`."""

    def run(content: bytes, **options: bool) -> Any:
        source, out = tmp_path / "proteins.fasta", tmp_path / "data"
        shutil.rmtree(out, ignore_errors=True)
        source.write_bytes(content)
        reading = PrepareOptions(max_reject_rate=1, reading=ReadOptions(**options))
        prepare([source], out, split_rule=HashSplit(0, 0), options=reading)
        return json.loads((out / "report.json").read_text())

    return run


@pytest.fixture
def refuse_bytes(prepare_bytes, tmp_path) -> Callable[..., str]:
    """Prepares bytes that must be refused as bad input without output; returns the message."""

    def run(content: bytes) -> str:
        with pytest.raises(InputDataError) as caught:
            prepare_bytes(content)
        assert caught.value.exit_code == ExitCode.BAD_INPUT
        assert [path.name for path in tmp_path.iterdir()] == ["proteins.fasta"]
        return str(caught.value)

    return run


# One of each kind; those of each format are with its reader.
REFUSED = {
    "no valid record": (b">a\n>b\n", "none of the 2 records can be used: 2 blank sequence"),
    "table": (b"id\tlabel\n", "line 1: this is a table; type protlm probe TABLE for labels"),
    "structure": (b"HEADER    X\n", "this is a structure (PDB), which only protlm contacts"),
    "truncated gzip": (TINY[:1_000], "truncated or damaged near byte"),
    "holes": (CLEAN + b">c\nMK" + bytes(4096) + b"\n", "1 of 3 records contain NUL bytes"),
    "DNA": (DNA, "this looks like DNA or RNA"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_file_of_proteins_is_refused(refuse_bytes, content, message):
    assert message in refuse_bytes(content)


# What is read, with which option, and what the report counts.
COUNTED = {
    "odd": (ODD, "", ODD_COUNTS | {"gap": 1}),
    "allowed gaps": (ODD, "allow_gaps", ODD_COUNTS | {"gaps removed": 1}),
    "byte order mark": (b"\xef\xbb\xbf" + FASTA, "", {"byte order mark removed": 1}),
    "comments": (b"; comment\n" + FASTA, "allow_comments", {}),
    "garbage": (PACKED + b"garbage", "ignore_trailing_garbage", {}),
    "header": (b">\xe9\nMKV\n", "", {"header bytes that are not UTF-8 escaped": 1}),
    "one NUL among thousands": (MANY + b">c\nMK\0V\n", "", {"NUL byte": 1}),
    "allowed DNA": (DNA, "allow_nucleotides", {NUCLEOTIDES: 1_100}),
    "DNA among proteins": (MANY + DNA[: 7 * 67], "", {NUCLEOTIDES: 7}),
    "flat files": (
        FLAT.replace(b"\n//\n", b"\n", 1).replace(b" AA;  ", b"0 AA;  ", 3),
        "",
        {"no '//' at the end": 1, "length differs from the one that the entry declares": 2},
    ),
}


@pytest.mark.parametrize(("content", "option", "expected"), COUNTED.values(), ids=COUNTED)
def test_what_is_odd_is_counted(prepare_bytes, content, option, expected):
    report = prepare_bytes(content, **({option: True} if option else {}))
    counts = report["counts"]
    assert counts["rejected"] | counts["changed"] | counts["noted"] == expected
    kept = counts["records"] - sum(counts["rejected"].values())
    assert report["splits"]["train"]["sequences"] == kept


# The peak of this process's memory: getrusage includes the parent before the fork.
MEASURE = """
import sys
from pathlib import Path
from protlm.cli.main import run
try:
    run(["prepare", sys.argv[1], "--out", "data", "--max-reject-rate", "1"])
finally:
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
    print(line)
"""


def long_lines() -> bytes:
    """A header of 2 MB and a line of 10 million residues."""
    header = b">" + b"h" * 2_000_000 + b"\nMKV\n"
    return header + b">long\n" + b"MKV" * 3_400_000 + b"\n>last\nMKL\n"


def bomb() -> bytes:
    """A record of one line of 60 GB, which gzip compresses a thousandfold."""
    line = gzip.compress(b"M" * (64 << 20), compresslevel=1)
    return gzip.compress(b">bomb\n") + line * 1_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [(long_lines, "rejected: longer than 100,000 residues"), (bomb, "expand more than 200-fold")],
)
def test_endless_lines_need_little_memory(one_process, tmp_path, content, message):
    (tmp_path / "long.fasta").write_bytes(content())
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "long.fasta"],
        cwd=tmp_path,
        env=one_process,
        capture_output=True,
        text=True,
        check=False,
    )
    assert message in done.stdout + done.stderr
    assert int(done.stdout.split()[-2]) < 300_000


SAMPLES = ("multi_ex.fasta.gz", "H2CNN8.dat.gz", "P84001.xml.gz")
SEEDS = [gzip.decompress((FIXTURES / name).read_bytes()) for name in SAMPLES]
PIECES = [b">", b"\n", b"\r", b";", b"@", b"*", b"MKV", b"\0", b"\xff", b" ", b"sp|P1|"]
PIECES += [b"\x1f\x8b", b"\n//\n", b"ID   ", b"\nSQ   ", b"<entry", b"</entry>", b"<!--"]
PIECES += [b"&x;", b"<uniprot>", b"]]>"]


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


@pytest.mark.parametrize(
    ("number", "block_bytes"), slow_but([(600, None), (3_000, None), (2_000, 500)], (600, None))
)
def test_any_bytes_are_correct_records_or_an_error_of_protlm(
    number, block_bytes, tmp_path, monkeypatch
):
    if block_bytes:
        monkeypatch.setattr("protlm.data.records.block.BLOCK_BYTES", block_bytes)
    rng, path = random.Random(number), tmp_path / "fuzz"
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


ESCAPES = ["\x1b[2J", "\x1b]0;title\x07", "\x9b2J", "\u202e", "\r", "\x7f"]
LONG = "x" * 300
# What is typed, with a link to nowhere, and the exit code.
NAMES = [
    ("embed {fasta} -m {run} -o LONG.h5", 4),
    ("embed {fasta} -m {run} -o link/out.h5", 4),
    ("embed LONG -m {run} -o out.h5", 3),
    ("embed {fasta} -m LONG -o out.h5", 3),
    ("embed {fasta} -m {run} -o link", 4),
    ("prepare {fasta} --out LONG", 4),
    (f"prepare {{fasta}} --out {'x' * 252}", 4),
    ("prepare {fasta} --out link", 4),
    ("prepare LONG --out data", 3),
    ("checkpoint export {run} -o link", 4),
    ("checkpoint info LONG", 3),
    ("data info LONG", 3),
    ("train run_dir=LONG data.dir={data} model=tiny", 4),
    ("train run_dir=link data.dir={data} model=tiny", 4),
]


@pytest.mark.slow
def test_names_that_are_impossible_for_a_file(
    protlm_in_process, tiny_run, tiny_data, tiny_fasta, tmp_path
):
    (tmp_path / "link").symlink_to("nowhere")
    for line, code in NAMES:
        typed = line.format(fasta=tiny_fasta, run=tiny_run, data=tiny_data).replace("LONG", LONG)
        done = protlm_in_process(*typed.split(), cwd=tmp_path, code=code)
        assert done.stderr.startswith("protlm: "), (line, done.stderr)
        assert len(done.stderr.splitlines()) == 1, (line, done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_escapes_do_not_reach_the_terminal(protlm_in_process, tiny_run, tmp_path):
    """Neither in what is skipped, nor in an error."""
    fasta = tmp_path / "x.fasta"
    records = [f">P{i}{escape}x\nMK?\n" for i, escape in enumerate(ESCAPES)]
    fasta.write_text("".join([*records, ">Q\nMK\n"]))
    with redirect_stderr(io.StringIO()) as printed:
        Proteins(fasta).report("read")
    assert "\\x1b[2J" in printed.getvalue()
    assert [c for c in printed.getvalue() if not c.isprintable() and c != "\n"] == []
    fasta.write_text(">P\x1b[2J\nMKT\n>P\x1b[2J\nMKT\n")
    typed = ["embed", "x.fasta", "-m", tiny_run, "-o", "out.h5"]
    done = protlm_in_process(*typed, cwd=tmp_path, code=3)
    assert "P\\x1b[2J is repeated" in done.stderr
    assert "\x1b" not in done.stderr


def test_escapes_do_not_reach_the_table_of_rejected_records(prepare_bytes, tmp_path):
    fasta = "".join(f">P{i}{escape}x\nMK?\n" for i, escape in enumerate(ESCAPES)) + ">Q\nMKT\n"
    prepare_bytes(fasta.encode())
    table = (tmp_path / "data" / "rejected.tsv").read_text()
    assert len(table.splitlines()) == 1 + len(ESCAPES)
    assert [c for c in table if not c.isprintable() and c not in "\t\n"] == []


def test_an_identifier_cannot_add_a_record(make_data_set, tmp_path):
    directory = make_data_set([("P1\n>FAKE", "MKT"), ("P2\x1b[2J", "MKV")])
    export(directory, tmp_path / "x.fasta", ())
    lines = (tmp_path / "x.fasta").read_text().splitlines()
    headers = [line for line in lines if line.startswith(">P") or "FAKE" in line]
    assert sorted(headers) == [">P1\\n>FAKE", ">P2\\x1b[2J"]


@pytest.mark.parametrize("how", [Duplicates.suffix, Duplicates.first])
def test_embeddings_have_identifiers_of_any_length_and_letters(how, tiny_run, tmp_path):
    """In the order of the input; what was skipped is listed."""
    odd = ["x" * 300, "y" * 40_000, "a\0b", "\x1b[2J", "é" * 200, "a/b"]
    # HDF5 cannot use some as names, and those of some are the entries of others.
    odd += ["a", "..", ".", "../../x", "<script>", "100%", "%2F"]
    fasta = tmp_path / "x.fasta"
    records = [f">{name}\nMK{'T' * (19 - n)}\n" for n, name in enumerate(odd)]
    fasta.write_text("".join([*records, ">P1\nMKT\n>P1\nMKV\n>bad\nMK?T\n"]))
    embed(fasta, tiny_run, tmp_path / "out.h5", EmbedOptions(duplicates=how))
    with h5py.File(tmp_path / "out.h5") as file:
        came = [(name, file[name].attrs["original_id"]) for name in file]
        skipped = [(row["identifier"], row["reason"]) for row in np.asarray(file.attrs["skipped"])]
    again = [("P1_2", "P1")] if how is Duplicates.suffix else []
    assert [original for _, original in came[: len(odd)]] == [n.replace("\0", "\\x00") for n in odd]
    assert (came[2][0], came[5][0]) == ("a%00b", "a%2Fb")
    assert came[len(odd) :] == [("P1", "P1"), *again]
    bad = [(b"bad", b"character that is not a letter, line 31")]
    assert skipped == (
        bad if again else [*bad, (b"P1", b"repeated at line 29 with another sequence")]
    )
