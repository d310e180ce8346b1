"""Masking and cropping: fractions, letters, dependence only on the key."""

import hashlib

import numpy as np
import pytest

from protlm.data.masking import IGNORE, MaskingRule, corrupt, crop, row_rng
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import UserError


def test_random_numbers_are_keyed_to_the_sample():
    # Seed, pass and sample, and a part of it.
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0), (1, 1, 1), (2**40, 5, 2**30)]
    keys += [(0, 0, 0, 1), (0, 0, 1, 1)]
    draws = {tuple(row_rng(*key).random(4)) for key in keys}
    assert len(draws) == len(keys)
    assert row_rng(7, 2, 9).random(3).tolist() == row_rng(7, 2, 9).random(3).tolist()
    streams = [row_rng(0, 0, sample).random(1_000) for sample in range(20)]
    assert len(np.unique(streams)) == 20 * 1_000
    # Adjacent samples are independent.
    draws = np.array([row_rng(0, 0, sample).random(2) for sample in range(5_000)])
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 5 / np.sqrt(5_000)
    assert abs(draws.mean() - 0.5) < 5 / np.sqrt(12 * 10_000)


def test_what_fits_is_not_cropped_and_random_crops_are_uniformly_distributed():
    rng = np.random.default_rng(0)
    for how in ("prefix", "random"):
        for num_residues in (1, 9, 10):
            assert crop(num_residues, 10, how, rng) == slice(0, num_residues)
    assert crop(25, 10, "prefix", rng) == slice(0, 10)
    parts = [crop(12, 10, "random", rng) for _ in range(3_000)]
    assert all(part.stop - part.start == 10 for part in parts)
    counts = np.bincount([part.start for part in parts])
    assert len(counts) == 3
    assert np.abs(counts - 1_000).max() < 5 * np.sqrt(3_000 * 2 / 9)


NAN = float("nan")


@pytest.mark.parametrize(
    "wrong",
    [
        *({"mask_fraction": value} for value in (0, 1.5, NAN)),
        {"mask_prob": -0.1},
        {"random_prob": 2},
        {"mask_prob": 0.8, "random_prob": 0.3},
        *(
            {"mask_fraction_range": pair}
            for pair in ((0.0, 0.5), (0.5, 0.1), (0.5, 1.1), (NAN, 0.5))
        ),
    ],
)
def test_invalid_rules_are_rejected(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        MaskingRule(**wrong)


@pytest.mark.parametrize(
    "rule",
    [
        MaskingRule(),
        MaskingRule(mask_fraction=0.3, mask_prob=1, random_prob=0),
        MaskingRule(mask_fraction=0.5, mask_prob=0, random_prob=1),
        MaskingRule(mask_fraction=1, mask_prob=0.2, random_prob=0.3),
        MaskingRule(mask_fraction=0.2, mask_prob=0, random_prob=0),
    ],
    ids=str,
)
def test_fractions_match_the_rule(rule):
    size = 200_000
    rng = np.random.default_rng(1)
    tokens = rng.choice(VOCABULARY.residues, size).astype(np.int64)
    is_maskable = rng.random(size) < 0.7
    inputs, targets = corrupt(tokens, is_maskable, rule, rng)
    is_target = targets != IGNORE
    # A random residue is the true one in one of 25 draws, which counts as kept.
    is_masked, is_kept = inputs == VOCABULARY.mask, inputs == tokens
    for share, claims in (
        (rule.mask_fraction, is_target[is_maskable]),
        (rule.mask_prob, is_masked[is_target]),
        (rule.random_prob * 24 / 25, (~is_masked & ~is_kept)[is_target]),
    ):
        deviation = np.sqrt(max(share * (1 - share), 0) / len(claims))
        assert abs(claims.mean() - share) <= 5 * deviation
    assert not is_target[~is_maskable].any()
    assert (inputs[~is_target] == tokens[~is_target]).all()
    assert (targets[is_target] == tokens[is_target]).all()


def test_random_replacements_are_residues_each_equally_often():
    size = 100_000
    tokens = np.full(size, VOCABULARY["A"], dtype=np.int64)
    rule = MaskingRule(mask_fraction=1, mask_prob=0, random_prob=1)
    inputs, _ = corrupt(tokens, np.ones(size, bool), rule, np.random.default_rng(0))
    counts = np.bincount(inputs, minlength=len(VOCABULARY))
    assert counts[~VOCABULARY.is_residue].sum() == 0
    expected = size / 25
    assert np.abs(counts[VOCABULARY.is_residue] - expected).max() < 5 * np.sqrt(expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int32])
@pytest.mark.parametrize("rule", [MaskingRule(), MaskingRule(mask_fraction_range=(0.1, 0.9))])
def test_any_integer_type_is_corrupted_alike(rule, dtype):
    tokens = VOCABULARY.encode("MKTAYIAKQRQISFVKSHFSRQ")
    given = tokens.astype(np.int64)
    seen, found = (
        corrupt(x, np.ones(len(x), bool), rule, row_rng(0, 0, 0))
        for x in (given, tokens.astype(dtype))
    )
    for one, other in zip(seen, found, strict=True):
        assert one.dtype == other.dtype == np.int64 and (one == other).all()
    assert (found[1] == IGNORE).any()
    # The input is not changed.
    assert (given == tokens).all()


def test_masks_of_a_seed_do_not_change():
    """A run that is continued by a newer version sees the masks it would have seen."""
    digest = hashlib.sha256()
    tokens = np.resize(VOCABULARY.residues, 500).astype(np.int64)
    for sample in range(20):
        corrupted = corrupt(tokens, np.arange(500) % 7 > 0, MaskingRule(), row_rng(5, 1, sample))
        digest.update(np.stack(corrupted).astype("<i8").tobytes())
    assert digest.hexdigest() == "5cd7a3ea332ef27a821dfb7d829e9bf4b0806c8f5b31bc2f17cc147730401515"


def fractions(rule: MaskingRule, *, rows: int, length: int) -> np.ndarray:
    """The measured mask fraction of each row."""
    tokens = np.resize(VOCABULARY.residues, length).astype(np.int64)
    is_maskable = np.ones(length, dtype=bool)
    drawn = [corrupt(tokens, is_maskable, rule, row_rng(3, 0, row))[1] for row in range(rows)]
    return (np.array(drawn) != IGNORE).mean(1)


@pytest.mark.parametrize("low, high", [(0.1, 0.5), (0.02, 1.0), (0.3, 0.3)])
def test_each_row_draws_its_fraction_uniformly_from_the_range(low, high):
    rows, length = 4_000, 300
    rule = MaskingRule(mask_fraction=0.9, mask_fraction_range=(low, high))
    seen = fractions(rule, rows=rows, length=length)
    assert (fractions(rule, rows=50, length=length) == seen[:50]).all()
    mean, spread = (low + high) / 2, (high - low) ** 2 / 12
    # The variance of a row's share: that of its fraction, and the binomial one around it.
    variance = spread + (mean - mean**2 - spread) / length
    assert abs(seen.mean() - mean) < 5 * np.sqrt(variance / rows)
    assert seen.var() == pytest.approx(variance, rel=0.12)
    if low < high:
        # Uniform: as many rows in each quarter of the range, but for those near its edges.
        counts, _ = np.histogram(np.clip(seen, low, high), 4, (low, high))
        assert np.abs(counts - rows / 4).max() < 5 * np.sqrt(rows * 3 / 16)


NARROWING = MaskingRule(mask_fraction_range=(0.1, 0.5), narrowing=(60, 100))


def test_the_range_narrows_linearly_to_the_fraction():
    for step in (0, 30, 60):
        assert NARROWING.at(step) == NARROWING
    for step in range(60, 100):
        done = (step - 60) / 40
        expected = (0.1 + done * (0.15 - 0.1), 0.5 + done * (0.15 - 0.5))
        assert NARROWING.at(step).mask_fraction_range == pytest.approx(expected, abs=1e-12)
    for step in (100, 5_000):
        assert NARROWING.at(step).mask_fraction_range == (0.15, 0.15)
    # Without steps, or without a range, the rule is the same at every step.
    for rule in (MaskingRule(mask_fraction_range=(0.1, 0.5)), MaskingRule(narrowing=(1, 2))):
        assert all(rule.at(step) == rule for step in (0, 99, 10**9))


@pytest.mark.parametrize("bounds", [(1 / 3, 1 / 3), (0.1, 0.1 + 1e-16), (1e-9, 1.0)])
def test_rounding_does_not_invert_a_range(bounds):
    for fraction in (0.15, 0.3, 1.0):
        rule = MaskingRule(fraction, mask_fraction_range=bounds, narrowing=(0, 997))
        for step in range(0, 1_001):
            # A range that cannot be is refused.
            narrowed = rule.at(step).mask_fraction_range
            assert 0 < narrowed[0] <= narrowed[1] <= 1
