"""A header of 2 MB and a line of 10 million residues fit in 300 MB, and are counted."""

import json
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"


def test_long_lines_are_counted_in_little_memory(run_builder, tmp_path):
    fasta = tmp_path / "long.fasta"
    fasta.write_bytes(
        b">" + b"h" * 2_000_000 + b"\nMKV\n>long\n" + b"MKV" * 3_400_000 + b"\n>last\nMKL\n"
    )
    done = run_builder(PROGRAMS / "prepare_and_measure.py", fasta, tmp_path / "data", 1)
    assert done.returncode == 0, done.stderr
    counts = json.loads((tmp_path / "data" / "report.json").read_text())["counts"]
    assert counts["records"] == 3
    assert counts["rejected"] == {"longer than 100,000 residues": 1}
    assert counts["changed"] == {"header shortened": 1}
    assert int(done.stdout) < 300
