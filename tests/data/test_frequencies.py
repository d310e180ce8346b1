"""Baselines by counting: residue frequencies by their definition, 3-mers counted by hand."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from protlm.data.frequencies import Trigram, Unigram, count_residues
from protlm.data.masking import IGNORE, MaskingRule, corrupt, row_rng
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


def test_residues_are_counted_and_frequencies_smoothed(tokens: list[np.ndarray]) -> None:
    counts_V = count_residues(iter(tokens))
    together = "".join(PROTEINS)
    assert counts_V.shape == (len(VOCABULARY),)
    for letter in RESIDUES:
        assert counts_V[VOCABULARY[letter]] == together.count(letter)
    assert counts_V.sum() == len(together)
    assert count_residues([]).sum() == 0
    # Special tokens have no frequency, even where somebody counted them.
    counts_V[[VOCABULARY.pad, VOCABULARY.mask]] = 1000
    frequency_V = Unigram.from_counts(counts_V).frequency_V
    assert frequency_V.sum() == pytest.approx(1.0)
    assert (frequency_V[~VOCABULARY.is_residue] == 0).all()
    for letter in "OL":
        smoothed = (together.count(letter) + 1) / (len(together) + 25)
        assert frequency_V[VOCABULARY[letter]] == pytest.approx(smoothed)


def test_loss_on_its_own_counts_is_their_entropy() -> None:
    # Each count is smoothed by one, so targets that hold one residue of each kind more are
    # distributed as the baseline is.
    counts_V = count_residues([VOCABULARY.encode(sequence) for sequence in PROTEINS])
    unigram = Unigram.from_counts(counts_V)
    targets = np.concatenate([VOCABULARY.encode("".join(PROTEINS)), VOCABULARY.residues])
    nats, _, count = unigram.score(targets)
    p = unigram.frequency_V[VOCABULARY.residues]
    assert nats / count == pytest.approx(-(p * np.log(p)).sum())
    # No other distribution does better on these targets.
    other, _, _ = Unigram.from_counts(counts_V[::-1].copy()).score(targets)
    assert other > nats


def test_the_most_common_residue_is_always_predicted(tokens: list[np.ndarray]) -> None:
    sequence = "LLLLLAAAGGKR"
    targets = VOCABULARY.encode(sequence)
    unigram = Unigram.from_counts(count_residues([targets]))
    nats, correct, count = unigram.score(targets)
    assert (correct, count) == (sequence.count("L"), len(sequence))
    assert isinstance(nats, float) and isinstance(correct, int) and isinstance(count, int)
    assert unigram.score(VOCABULARY.encode("AAGG"))[1] == 0
    assert unigram.score(targets[:0]) == (0.0, 0, 0)
    # Scores add up.
    parts = np.array([unigram.score(part) for part in tokens]).sum(axis=0)
    np.testing.assert_allclose(parts, unigram.score(np.concatenate(tokens)))


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
    unigram = Unigram.from_counts(count_residues(tokens))
    joint_VV = by_counting_cases(unigram.frequency_V, rule)
    seen = np.flatnonzero(joint_VV.sum(1))
    expected = joint_VV[seen] / joint_VV[seen].sum(1, keepdims=True)
    found_VV = unigram.posterior(rule)
    np.testing.assert_allclose(found_VV[seen], expected, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(found_VV.sum(1), 1)
    if rule.mask_prob == 1:
        assert (found_VV == unigram.frequency_V).all()
    assert (unigram.posterior(None) == unigram.frequency_V).all()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_loss_on_a_corrupted_sample_is_the_expected_one(
    rule: MaskingRule, tokens: list[np.ndarray]
) -> None:
    """Residues drawn from f and corrupted as in training: the mean loss is H(target | input)."""
    unigram, rng = Unigram.from_counts(count_residues(tokens)), row_rng(0, 0, 0)
    drawn = rng.choice(len(VOCABULARY), size=400_000, p=unigram.frequency_V)
    inputs, targets = corrupt(drawn, np.ones(len(drawn), bool), rule, rng)
    chosen = targets != IGNORE
    losses = -np.log(unigram.posterior(rule)[inputs[chosen], targets[chosen]])
    joint_VV = by_counting_cases(unigram.frequency_V, rule)
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise_VV = -np.log(joint_VV / joint_VV.sum(1, keepdims=True))
    is_possible_VV = joint_VV > 0
    expected = (joint_VV[is_possible_VV] * surprise_VV[is_possible_VV]).sum()
    z = (losses.mean() - expected) / max(losses.std() / np.sqrt(len(losses)), 1e-12)
    assert abs(z) < 4


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


@pytest.mark.parametrize("causal", [False, True])
def test_residues_are_predicted_from_both_sides_or_from_the_two_before(causal: bool) -> None:
    row = encode("MKVMK")
    if causal:
        before = [CLS, CLS, *row[0, 1:].tolist()]
        contexts = {place: (before[place], before[place + 1]) for place in range(4)}
    else:
        row[0, 2] = row[0, 5] = row[0, 4] = MASK
        contexts = {1: (CLS, MASK), 2: (row[0, 1], row[0, 3]), 4: (row[0, 3], MASK), 5: (MASK, EOS)}
    found_LV = Trigram(TOKENS, causal=causal).probabilities(row)[0]
    for place, (first, second) in contexts.items():
        for letter in "MKVAL":
            value = expected(first, second, VOCABULARY[letter], causal=causal)
            assert found_LV[place, VOCABULARY[letter]] == pytest.approx(value)
    if not causal:
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
    monkeypatch.setattr("protlm.data.frequencies._TOKENS", 4)
    np.testing.assert_array_equal(
        whole, Trigram(TOKENS, causal=False).probabilities(encode("MKVAA"))
    )
