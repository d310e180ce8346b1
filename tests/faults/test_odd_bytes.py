"""NUL, tabs, all kinds of line ends, and letters outside ASCII."""

import pytest

CLEAN = b">a one\nMKVLL\nWW\n>b two\nMKL\n"


@pytest.mark.parametrize(
    "content",
    [
        CLEAN.replace(b"\n", b"\r\n"),
        CLEAN.replace(b"\n", b"\r"),
        CLEAN.replace(b"VL", b"V\tL"),
        CLEAN.rstrip(b"\n"),
    ],
    ids=["CRLF", "CR", "tab", "no last line end"],
)
def test_white_space_does_not_matter(prepare_bytes, content):
    expected, report = prepare_bytes(CLEAN), prepare_bytes(content)
    assert report["splits"] == expected["splits"]
    assert report["counts"] == expected["counts"]


def test_letters_that_are_not_ascii_reject_the_record(prepare_bytes):
    counts = prepare_bytes(CLEAN + ">c\nMKÅV\n".encode() + b">d\nMK\xe5V\n")["counts"]
    assert counts["rejected"] == {"letter that is not ASCII": 2}


def test_header_bytes_of_another_alphabet_are_escaped_and_counted(prepare_bytes):
    counts = prepare_bytes(b">caf\xe9 \xe5\nMKV\n" + ">Å\nMKL\n".encode())["counts"]
    assert counts["changed"] == {"header bytes that are not UTF-8 escaped": 1}


def test_a_file_with_holes_is_refused(refuse_bytes):
    message = refuse_bytes(CLEAN + b">c\nMK" + bytes(4096) + b"\n")
    assert "1 of 3 records contain NUL bytes: the file is damaged" in message


def test_a_nul_among_thousands_is_rejected(prepare_bytes):
    many = b"".join(b">p%d\nMKVLLW\n" % number for number in range(2_000))
    assert prepare_bytes(many + b">c\nMK\0V\n")["counts"]["rejected"] == {"NUL byte": 1}


def test_joined_records_are_rejected(prepare_bytes):
    assert prepare_bytes(CLEAN + b">c\nMKV>d\nMKL\n")["counts"]["rejected"] == {
        "'>' inside a line": 1
    }
