"""Blank, bare, repeated, small, starred, gapped and numbered records: the golden counts."""

CONTENT = b""">blank
>
MKVLLW
>twice
MKVLL
>twice
MKVLL
>small
mkvll
>end
MKVLL*
>inside
MK*VLL
>gap
MK-VLL
>digit
MK1VLL
>spaces
M K V\tL
>rare
MBZXUO
>leucine
MJV
"""


def test_the_report_counts_every_kind(prepare_bytes):
    report = prepare_bytes(CONTENT)
    assert report["counts"] == {
        "records": 12,
        "rejected": {
            "blank sequence": 1,
            "'*' inside the sequence": 1,
            "gap": 1,
            "digit": 1,
        },
        "filtered": {},
        "changed": {
            "bare '>' named by its line": 1,
            "lower case raised": 1,
            "terminal '*' removed": 1,
            "J written as X": 1,
        },
        "noted": {"record with B, O, U, X or Z": 1},
    }
    assert report["splits"]["train"]["sequences"] == 8


def test_gaps_are_removed_by_option(prepare_bytes):
    counts = prepare_bytes(CONTENT, allow_gaps=True)["counts"]
    assert counts["changed"]["gaps removed"] == 1
    assert "gap" not in counts["rejected"]
