"""A header of 2 MB and a line of 10 million residues fit in 300 MB, and are counted."""

import json

PROGRAM = """
import json
splitting.BLOCK_BYTES = 4 << 20
build_options = PrepareOptions(max_reject_rate=1)
prepare([Path(sys.argv[1])], Path(sys.argv[2]), split_rule=HashSplit(0, 0), options=build_options)
report = json.loads((Path(sys.argv[2]) / "report.json").read_text())
print(json.dumps([report["counts"], peak_megabytes()]))
"""


def test_long_lines_are_counted_in_little_memory(run_builder, tmp_path):
    fasta = tmp_path / "long.fasta"
    fasta.write_bytes(
        b">" + b"h" * 2_000_000 + b"\nMKV\n>long\n" + b"MKV" * 3_400_000 + b"\n>last\nMKL\n"
    )
    done = run_builder(PROGRAM, fasta, tmp_path / "data")
    assert done.returncode == 0, done.stderr
    counts, megabytes = json.loads(done.stdout)
    assert counts["records"] == 3
    assert counts["rejected"] == {"longer than 100,000 residues": 1}
    assert counts["changed"] == {"header shortened": 1}
    assert megabytes < 300
