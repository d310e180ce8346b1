"""Text without a header, FASTQ and UTF-16 are refused with their line; a BOM is removed."""

import pytest

FASTA = b">a\nMKV\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"MKV\n", "line 1: 'MKV' precedes the first header"),
        (b"id\tlabel\n", "line 1: this is a table; type protlm probe TABLE for labels"),
        (b"HEADER    X\n", "this is a structure (PDB), which protlm contacts and"),
        (b"\n\njunk\n" + FASTA, "line 3: 'junk' precedes the first header"),
        (b"; comment\n" + FASTA, "line 1: this is a comment"),
        (b"@read\nACGT\n+\nIIII\n", "line 1: this is FASTQ"),
        (FASTA.decode().encode("utf-16"), "line 1: the text is UTF-16"),
    ],
)
def test_other_formats_are_refused_with_their_line(refuse_bytes, content, message):
    assert message in refuse_bytes(content)


def test_a_byte_order_mark_is_removed_and_counted(prepare_bytes):
    counts = prepare_bytes(b"\xef\xbb\xbf" + FASTA)["counts"]
    assert counts["changed"] == {"byte order mark removed": 1}
    assert counts["records"] == 1


def test_comments_are_skipped_by_option(prepare_bytes):
    assert prepare_bytes(b"; comment\n" + FASTA, allow_comments=True)["counts"]["records"] == 1
