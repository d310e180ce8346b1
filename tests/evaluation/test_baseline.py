"""The empirical baseline on real sequences, against what its definition promises."""

import numpy as np
import pytest

from protlm.data.vocabulary import RESIDUES, VOCABULARY
from protlm.evaluation.baseline import Unigram, count_residues

PROTEINS = [
    "MKMSRLCLSVALLVLLGTLAASTPGCDTSNQAKAQRPDFCLEPPYTGPCKARIIRYFYNAKAGLCQTFVYGGCRAKRNNFKSAEDCMRTCGGAIGPWENL",
    "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG",
]


@pytest.fixture
def tokens() -> list[np.ndarray]:
    return [VOCABULARY.encode(sequence) for sequence in PROTEINS]


def test_residues_are_counted(tokens: list[np.ndarray]) -> None:
    counts_V = count_residues(iter(tokens))
    together = "".join(PROTEINS)
    assert counts_V.shape == (len(VOCABULARY),)
    for letter in RESIDUES:
        assert counts_V[VOCABULARY[letter]] == together.count(letter)
    assert counts_V.sum() == len(together)
    assert count_residues([]).sum() == 0


def test_frequencies_are_smoothed_and_sum_to_one(tokens: list[np.ndarray]) -> None:
    counts_V = count_residues(tokens)
    # Special tokens have no frequency, even where somebody counted them.
    counts_V[[VOCABULARY.pad, VOCABULARY.mask]] = 1000
    frequency_V = Unigram.from_counts(counts_V).frequency_V
    assert frequency_V.sum() == pytest.approx(1.0)
    assert (frequency_V[~VOCABULARY.is_residue] == 0).all()
    total = sum(map(len, PROTEINS)) + 25
    assert frequency_V[VOCABULARY["O"]] == pytest.approx(1 / total)
    leucines = "".join(PROTEINS).count("L")
    assert frequency_V[VOCABULARY["L"]] == pytest.approx((leucines + 1) / total)


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


def test_the_commonest_residue_is_always_predicted() -> None:
    sequence = "LLLLLAAAGGKR"
    targets = VOCABULARY.encode(sequence)
    unigram = Unigram.from_counts(count_residues([targets]))
    nats, correct, count = unigram.score(targets)
    assert (correct, count) == (sequence.count("L"), len(sequence))
    assert isinstance(nats, float) and isinstance(correct, int) and isinstance(count, int)
    assert unigram.score(VOCABULARY.encode("AAGG"))[1] == 0
    assert unigram.score(targets[:0]) == (0.0, 0, 0)


def test_scores_add_up(tokens: list[np.ndarray]) -> None:
    unigram = Unigram.from_counts(count_residues(tokens))
    parts = np.array([unigram.score(part) for part in tokens]).sum(axis=0)
    np.testing.assert_allclose(parts, unigram.score(np.concatenate(tokens)))
