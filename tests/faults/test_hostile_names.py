"""Untrusted names and identifiers are refused in a sentence, or escaped."""

import io
from contextlib import redirect_stderr

import h5py
import numpy as np
import pytest

from protlm.commands.data import export
from protlm.commands.embed import embed
from protlm.commands.embedding.job import EmbedOptions
from protlm.data.records.proteins import Duplicates, Proteins

ESCAPES = ["\x1b[2J", "\x1b]0;title\x07", "\x9b2J", "\u202e", "\r", "\x7f"]
LONG = "x" * 300
# What is typed, with a link to nowhere, and the exit code.
NAMES = [
    ("embed {fasta} -m {run} -o LONG.h5", 4),
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


def test_names_that_are_impossible_for_a_file(
    protlm_in_process, tiny_run, tiny_data, tiny_fasta, tmp_path
):
    (tmp_path / "link").symlink_to("nowhere")
    for line, code in NAMES:
        typed = line.format(fasta=tiny_fasta, run=tiny_run, data=tiny_data).replace("LONG", LONG)
        done = protlm_in_process(*typed.split(), cwd=tmp_path)
        assert done.returncode == code, (line, done.stderr)
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
    done = protlm_in_process("embed", "x.fasta", "-m", tiny_run, "-o", "out.h5", cwd=tmp_path)
    assert done.returncode == 3
    assert "P\\x1b[2J is repeated" in done.stderr
    assert "\x1b" not in done.stderr


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
    fasta = tmp_path / "x.fasta"
    records = [f">{name}\nMK{'T' * (9 - n)}\n" for n, name in enumerate(odd)]
    fasta.write_text("".join([*records, ">P1\nMKT\n>P1\nMKV\n>bad\nMK?T\n"]))
    embed(fasta, tiny_run, tmp_path / "out.h5", EmbedOptions(duplicates=how))
    with h5py.File(tmp_path / "out.h5") as file:
        came = [(name, file[name].attrs["original_id"]) for name in file]
        skipped = [(row["identifier"], row["reason"]) for row in np.asarray(file.attrs["skipped"])]
    again = [("P1_2", "P1")] if how is Duplicates.suffix else []
    assert [original for _, original in came[:6]] == [n.replace("\0", "\\x00") for n in odd]
    assert (came[2][0], came[5][0]) == ("a%00b", "a%2Fb")
    assert came[6:] == [("P1", "P1"), *again]
    bad = [(b"bad", b"character that is not a letter, line 17")]
    assert skipped == (bad if again else [*bad, (b"P1", b"repeated at line 15")])
