"""Relatives by shared 5-mers, against sets."""

import numpy as np
import pytest

from protlm.analysis.relatives import MIN_SHARED, highest_shared_fractions, unrelated


def random_sequences(number: int, length: int = 60) -> list[str]:
    letters = np.array(list("ACDEFGHIKLMNPQRSTVWY"))
    drawn = np.random.default_rng(0).integers(20, size=(number, length))
    return ["".join(row) for row in letters[drawn]]


def test_a_fragment_is_found_in_a_longer_protein() -> None:
    whole, other = random_sequences(2, 400)
    assert highest_shared_fractions([whole, other], [whole[100:140]]).tolist() == [1, 0]
    # One 5-mer shared by a peptide is not a relative.
    assert highest_shared_fractions([whole], [whole[100:105] + other[:3]])[0] < 0.1


def test_shared_5_mers_against_sets() -> None:
    sequences = [*random_sequences(300, 40), "MK", "AAAAAAAA"]
    sequences[7] = sequences[3][:25] + sequences[5][:15]

    def kmers(one: str) -> set[str]:
        return {one[n : n + 5] for n in range(len(one) - 4)}

    queries, others = sequences[:299], [*sequences[5:20], "AAAAAA"]
    found = highest_shared_fractions([*queries, "MK", "AAAAAAAA"], others)
    expected = [
        max(len(kmers(q) & kmers(o)) / max(min(len(kmers(q)), len(kmers(o))), 20) for o in others)
        for q in [*queries, "MK", "AAAAAAAA"]
    ]
    assert found.tolist() == pytest.approx(expected)
    assert highest_shared_fractions(["MKTAY"], ["MK"]).tolist() == [0]


def test_what_is_taken_has_no_relatives_and_what_is_left_out_has_one() -> None:
    one, two, *others = random_sequences(60)
    # They share n - 4 of 56 5-mers with `one`, a tenth from n = 10 on.
    parts = [one[:n] + other[n:] for n, other in zip(range(3, 43, 2), others[5:25], strict=True)]
    short = ["MKTA", "MKTA", "MKTAYI", "MKTAYI"]
    sequences = [one, *others[:5], *parts, two, one, two[10:30], *short]
    taken = unrelated(sequences, limit=len(sequences))
    expected: list[int] = []
    for place, sequence in enumerate(sequences):
        before = [sequences[n] for n in expected]
        if sequence not in before and highest_shared_fractions([sequence], before)[0] < MIN_SHARED:
            expected.append(place)
    assert taken == expected
    assert [sequences[place] for place in taken] == [
        *sequences[:6],
        *parts[:4],
        two,
        "MKTA",
        "MKTAYI",
    ]
    # Those beyond the limit are not read.
    endless = (sequences[place] if place < 10 else pytest.fail() for place in range(11))
    assert unrelated(endless, limit=5) == expected[:5]
