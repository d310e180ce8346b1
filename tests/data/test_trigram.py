"""The 3-mer baseline against counting by hand."""

from collections import Counter

import numpy as np
import pytest

from protlm.data.frequencies import Trigram, Unigram, count_residues
from protlm.data.vocabulary import VOCABULARY

SEQUENCES = ["MKVMKVAAA", "KVM", "A", "MKKKVLLLMKVV"]
TOKENS = [VOCABULARY.encode(sequence) for sequence in SEQUENCES]
CLS, EOS, MASK = VOCABULARY.cls, VOCABULARY.eos, VOCABULARY.mask


def triples(*, causal: bool) -> Counter[tuple[int, int, int]]:
    counts: Counter[tuple[int, int, int]] = Counter()
    for tokens in TOKENS:
        row = [CLS, CLS, *tokens.tolist(), EOS]
        for place in range(2, len(row) - 1):
            second = row[place - 1] if causal else row[place + 1]
            first = row[place - 2] if causal else row[place - 1]
            counts[first, second, row[place]] += 1
    return counts


def expected(first: int, second: int, target: int, *, causal: bool) -> float:
    """Counts by hand; a masked neighbor matches every token."""
    frequency_V = Unigram.from_counts(count_residues(TOKENS)).frequency_V
    matching = {
        key: count
        for key, count in triples(causal=causal).items()
        if first in (key[0], MASK) and second in (key[1], MASK)
    }
    hits = sum(count for key, count in matching.items() if key[2] == target)
    prior = Trigram.PSEUDOCOUNT
    return (hits + prior * frequency_V[target]) / (sum(matching.values()) + prior)


def encode(text: str) -> np.ndarray:
    return np.array([[CLS, *VOCABULARY.encode(text).astype(np.int64).tolist(), EOS]])


def test_masked_residues_are_predicted_from_both_sides() -> None:
    trigram = Trigram(TOKENS, causal=False)
    row = encode("MKVMK")
    row[0, 2] = row[0, 5] = row[0, 4] = MASK
    found_LV = trigram.probabilities(row)[0]
    contexts = {1: (CLS, MASK), 2: (row[0, 1], row[0, 3]), 4: (row[0, 3], MASK), 5: (MASK, EOS)}
    for place, (left, right) in contexts.items():
        for letter in "MKVAL":
            value = found_LV[place, VOCABULARY[letter]]
            assert value == pytest.approx(expected(left, right, VOCABULARY[letter], causal=False))
    np.testing.assert_allclose(found_LV.sum(axis=-1), 1.0, rtol=1e-12)


def test_causal_residues_are_predicted_from_the_two_before() -> None:
    trigram = Trigram(TOKENS, causal=True)
    row = encode("MKV")
    found_LV = trigram.probabilities(row)[0]
    for place, (first, second) in enumerate(
        [(CLS, CLS), (CLS, row[0, 1]), (row[0, 1], row[0, 2]), (row[0, 2], row[0, 3])]
    ):
        for letter in "MKVAL":
            value = found_LV[place, VOCABULARY[letter]]
            assert value == pytest.approx(expected(first, second, VOCABULARY[letter], causal=True))


@pytest.mark.parametrize("causal", [False, True])
def test_joined_sequences_are_predicted_as_single_ones(causal: bool) -> None:
    trigram = Trigram(TOKENS, causal=causal)
    rows = [encode("MKVAA"), encode("KLMV"), encode("A")]
    for row in rows[:2]:
        row[0, 3] = MASK if not causal else row[0, 3]
    joined = np.concatenate([rows[0], *(row[:, 1:] for row in rows[1:])], axis=1)
    found_LV, end = trigram.probabilities(joined)[0], 0
    for row in rows:
        # Where <eos> is predicted, nothing is counted.
        length = row.shape[1] - 2
        first = end if causal else end + 1
        expected_LV = trigram.probabilities(row)[0][int(not causal) :][:length]
        np.testing.assert_array_equal(found_LV[first : first + length], expected_LV)
        end += length + 1


def test_counting_does_not_depend_on_the_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Trigram(TOKENS, causal=False).probabilities(encode("MKVAA"))
    monkeypatch.setattr("protlm.data.frequencies._TOKENS", 4)
    np.testing.assert_array_equal(
        whole, Trigram(TOKENS, causal=False).probabilities(encode("MKVAA"))
    )
