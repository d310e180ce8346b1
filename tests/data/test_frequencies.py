"""Baselines by counting: residue frequencies by their definition, 3-mers counted by hand."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from protlm.data.frequencies import Trigram, count_residues, frequencies, posterior
from protlm.data.masking import MaskingRule
from protlm.data.vocabulary import RESIDUES, VOCABULARY

PROTEINS = [
    "MKMSRLCLSVALLVLLGTLAASTPGCDTSNQAKAQRPDFCLEPPYTGPCKARIIRYFYNAKAGLCQTFVYGGCRAKRNNFKSAEDCMRTCGGAIGPWENL",
    "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG",
]
SEQUENCES = ["MKVMKVAAA", "KVM", "A", "MKKKVLLLMKVV"]
TOKENS = [VOCABULARY.encode(sequence) for sequence in SEQUENCES]
CLS, EOS, MASK = VOCABULARY.cls, VOCABULARY.eos, VOCABULARY.mask


@pytest.fixture
def tokens() -> list[np.ndarray]:
    return [VOCABULARY.encode(sequence) for sequence in PROTEINS]


def test_residues_are_counted(tokens: list[np.ndarray]) -> None:
    counts_V = count_residues(iter(tokens))
    together = "".join(PROTEINS)
    assert counts_V.shape == (len(VOCABULARY),)
    assert counts_V[VOCABULARY.residues].tolist() == [*map(together.count, RESIDUES)]
    assert counts_V.sum() == len(together)
    assert count_residues([]).sum() == 0


def test_frequencies_are_smoothed_and_sum_to_one(tokens: list[np.ndarray]) -> None:
    counts_V = count_residues(tokens)
    # Special tokens have no frequency, even where somebody counted them.
    counts_V[[VOCABULARY.pad, VOCABULARY.mask]] = 1000
    frequency_V = frequencies(counts_V)
    assert frequency_V.sum() == pytest.approx(1.0)
    assert (frequency_V[~VOCABULARY.is_residue] == 0).all()
    total = sum(map(len, PROTEINS)) + 25
    assert frequency_V[VOCABULARY["O"]] == pytest.approx(1 / total)
    leucines = "".join(PROTEINS).count("L")
    assert frequency_V[VOCABULARY["L"]] == pytest.approx((leucines + 1) / total)


RULES = [
    MaskingRule(),
    MaskingRule(mask_prob=1, random_prob=0),
    MaskingRule(mask_prob=0.5, random_prob=0.5),
    MaskingRule(mask_prob=0.2, random_prob=0),
    MaskingRule(mask_prob=0, random_prob=0.7),
]


def by_counting_cases(frequency_V: np.ndarray, rule: MaskingRule) -> np.ndarray:
    """P(target | input), from the probability of every way a target can come to its input."""
    joint_VV = np.zeros((len(VOCABULARY), len(VOCABULARY)))
    mask, random = (Fraction(str(share)) for share in (rule.mask_prob, rule.random_prob))
    for target in VOCABULARY.residues.tolist():
        p = frequency_V[target]
        joint_VV[VOCABULARY.mask, target] += p * float(mask)
        joint_VV[target, target] += p * float(1 - mask - random)
        for drawn in VOCABULARY.residues.tolist():
            joint_VV[drawn, target] += p * float(random) / 25
    return joint_VV


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_posterior_is_bayes(rule: MaskingRule, tokens: list[np.ndarray]) -> None:
    frequency_V = frequencies(count_residues(tokens))
    joint_VV = by_counting_cases(frequency_V, rule)
    seen = np.flatnonzero(joint_VV.sum(1))
    expected = joint_VV[seen] / joint_VV[seen].sum(1, keepdims=True)
    found_VV = posterior(frequency_V, rule)
    np.testing.assert_allclose(found_VV[seen], expected, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(found_VV.sum(1), 1)


def test_the_posterior_of_a_mask_alone_is_the_frequencies(tokens: list[np.ndarray]) -> None:
    frequency_V = frequencies(count_residues(tokens))
    for rule in (None, MaskingRule(mask_prob=1, random_prob=0)):
        assert (posterior(frequency_V, rule) == frequency_V).all()


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
    frequency_V = frequencies(count_residues(TOKENS))
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


M, V = VOCABULARY["M"], VOCABULARY["V"]
# Of each place, the two tokens that it is predicted from: those on both sides, or before it.
SIDES = {1: (CLS, MASK), 2: (M, V), 4: (V, MASK), 5: (MASK, EOS)}
BEFORE = {0: (CLS, CLS), 1: (CLS, M), 2: (M, MASK), 3: (MASK, V)}


@pytest.mark.parametrize(("causal", "contexts"), [(False, SIDES), (True, BEFORE)])
def test_residues_are_predicted_from_two_others(
    causal: bool, contexts: dict[int, tuple[int, int]]
) -> None:
    row = encode("MKVMK")
    row[0, [2, 4, 5]] = MASK
    found_LV = Trigram(TOKENS, causal=causal).probabilities(row)[0]
    for place, (first, second) in contexts.items():
        for letter in "MKVAL":
            value = expected(first, second, VOCABULARY[letter], causal=causal)
            assert found_LV[place, VOCABULARY[letter]] == pytest.approx(value)
    np.testing.assert_allclose(found_LV.sum(axis=-1), 1.0, rtol=1e-12)


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
    monkeypatch.setattr("protlm.data.relatives._BATCH_RESIDUES", 4)
    np.testing.assert_array_equal(
        whole, Trigram(TOKENS, causal=False).probabilities(encode("MKVAA"))
    )
