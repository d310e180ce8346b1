"""Blocks end between records, by bytes alone, and are bounded; tallies of parts are the whole."""

import pickle
import random

import pytest

from protlm.data.records import MAX_LISTED, Tally
from protlm.data.records.block import cut

MARKERS = [b"\n>", b"\nID   ", b"<entry"]


def pieces_of(content, marker, rng=None, **options):
    """The pieces of a stream that comes in chunks of random sizes, or at once."""
    chunks, place = [], 0
    while place < len(content):
        size = rng.choice([0, 1, 2, 7, 50]) if rng else len(content)
        chunks.append(content[place : place + size])
        place += size
    return list(cut(iter(chunks), marker, **options))


def stream(marker, lengths):
    return marker.lstrip(b"\n") + marker.join(b"x\n" * length for length in lengths)


@pytest.mark.parametrize("marker", MARKERS)
def test_pieces_are_the_stream_and_begin_with_records(marker):
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.randrange(30) for _ in range(rng.randrange(1, 30))]
        content = stream(marker, lengths)
        pieces = pieces_of(content, marker, max_record=1_000, size=40)
        assert b"".join(piece.data for piece in pieces) == content
        assert all(piece.data.startswith(marker.lstrip(b"\n")) for piece in pieces)
        assert all(len(piece.data) >= 39 for piece in pieces[:-1])
        assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert [piece.num_lines for piece in pieces[:-1]] == [
            piece.data.count(b"\n") for piece in pieces[:-1]
        ]
        assert not any(piece.is_cut for piece in pieces)


@pytest.mark.parametrize("marker", MARKERS)
def test_the_sizes_of_chunks_do_not_matter(marker):
    rng = random.Random(1)
    for _ in range(100):
        lengths = [rng.choice([0, 5, 20, 60, 300]) for _ in range(20)]
        content = stream(marker, lengths) + marker[: rng.randrange(len(marker))]
        expected = pieces_of(content, marker, max_record=100, size=40)
        for _ in range(5):
            assert pieces_of(content, marker, rng, max_record=100, size=40) == expected


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("is_last", [False, True])
def test_the_end_of_a_record_that_is_too_long_is_left_out(marker, is_last, monkeypatch):
    monkeypatch.setattr("protlm.data.records.block.BLOCK_BYTES", 16)
    rest = b"" if is_last else marker + b"last\n"
    content = stream(marker, [1, 1_000]) + rest
    pieces = pieces_of(content, marker, max_record=100, size=40)
    assert pieces[0].is_cut and len(pieces[0].data) == 140
    assert pieces[0].is_last == is_last
    if not is_last:
        assert pieces[1].data == rest.lstrip(b"\n")
        before = content[: -len(pieces[1].data)]
        assert pieces[0].num_lines == before.count(b"\n")


def test_memory_is_bounded_for_any_stream(monkeypatch):
    monkeypatch.setattr("protlm.data.records.block.BLOCK_BYTES", 1_000)
    given = 0

    def endless():
        nonlocal given
        while given < 10_000_000:
            given += 1_000
            yield b"M" * 1_000

    (piece,) = cut(endless(), b"\n>", max_record=5_000, size=1_000)
    assert len(piece.data) == 6_000
    assert piece.is_cut and piece.is_last


def test_the_sum_of_parts_is_the_whole():
    """Of what is rejected, the first thousand of all parts are listed."""
    rng = random.Random(0)
    whole, parts = Tally(), [Tally() for _ in range(7)]
    for number, part in enumerate(parts):
        for line in range(rng.randrange(2_000)):
            kind, reason = rng.choice(["reject", "filter", "change", "note"]), rng.choice("ab")
            place = (f"{number}/{line}", "x.fasta", line) if kind == "reject" else ()
            for tally in (whole, part):
                tally.records += 1
                getattr(tally, kind)(reason, *place)
    total = Tally()
    for part in parts:
        total.add(pickle.loads(pickle.dumps(part)))
    assert total == whole
    assert total.num_rejected + total.num_filtered == sum(
        part.num_rejected + part.num_filtered for part in parts
    )
    for reason, listed in total.listed.items():
        everything = [one for part in parts for one in part.listed[reason]]
        assert len(everything) == total.rejected[reason] > MAX_LISTED
        assert listed == everything[:MAX_LISTED]
