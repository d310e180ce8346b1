"""Masking and cropping: shares, letters, independence of all but the key."""

import numpy as np
import pytest

from protlm.data.masking import IGNORE, MaskingRule, corrupt, crop, row_rng
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import UserError


def test_random_numbers_are_those_of_the_sample():
    keys = [
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (0, 0, 1),
        (-1, 0, 0),
        (1, 1, 1),
        (2**40, 5, 2**30),
        (0, 0, 0, 1),
        (0, 0, 1, 1),
    ]
    draws = {tuple(row_rng(*key).random(4)) for key in keys}
    assert len(draws) == len(keys)
    assert row_rng(7, 2, 9).random(3).tolist() == row_rng(7, 2, 9).random(3).tolist()


def test_neighbouring_samples_are_independent():
    draws = np.array([row_rng(0, 0, sample).random(2) for sample in range(5_000)])
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 5 / np.sqrt(5_000)
    assert abs(draws.mean() - 0.5) < 5 / np.sqrt(12 * 10_000)


def test_no_sample_goes_on_where_another_begins():
    draws = [row_rng(0, 0, sample).random(1_000) for sample in range(20)]
    assert len(np.unique(draws)) == 20 * 1_000


@pytest.mark.parametrize("how", ["prefix", "random"])
@pytest.mark.parametrize("num_residues", [1, 9, 10])
def test_what_fits_is_not_cropped(how, num_residues):
    assert crop(num_residues, 10, how, np.random.default_rng(0)) == slice(0, num_residues)


def test_prefix_takes_the_start():
    assert crop(25, 10, "prefix", np.random.default_rng(0)) == slice(0, 10)


def test_random_crops_are_everywhere_equally_often():
    rng = np.random.default_rng(0)
    parts = [crop(12, 10, "random", rng) for _ in range(3_000)]
    assert all(part.stop - part.start == 10 for part in parts)
    counts = np.bincount([part.start for part in parts])
    assert len(counts) == 3
    assert np.abs(counts - 1_000).max() < 5 * np.sqrt(3_000 * 2 / 9)


def test_an_unknown_crop_is_refused():
    with pytest.raises(UserError, match="prefix, random"):
        crop(5, 10, "middle", np.random.default_rng(0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"fraction": 0},
        {"fraction": 1.5},
        {"fraction": float("nan")},
        {"mask_share": -0.1},
        {"random_share": 2},
        {"mask_share": 0.8, "random_share": 0.3},
    ],
)
def test_impossible_rules_are_refused(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        MaskingRule(**wrong)


RULES = [
    MaskingRule(),
    MaskingRule(fraction=0.3, mask_share=1, random_share=0),
    MaskingRule(fraction=0.5, mask_share=0, random_share=1),
    MaskingRule(fraction=1, mask_share=0.2, random_share=0.3),
    MaskingRule(fraction=0.2, mask_share=0, random_share=0),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_shares_are_those_of_the_rule(rule):
    size = 200_000
    rng = np.random.default_rng(1)
    tokens = rng.choice(VOCABULARY.residues, size).astype(np.int64)
    is_maskable = rng.random(size) < 0.7
    inputs, targets = corrupt(tokens, is_maskable, rule, rng)
    is_target = targets != IGNORE
    # A random residue is the true one in one of 25 draws, which counts as kept.
    is_masked, is_kept = inputs == VOCABULARY.mask, inputs == tokens
    seen = {
        rule.fraction: is_target[is_maskable],
        rule.mask_share: is_masked[is_target],
        rule.random_share * 24 / 25: (~is_masked & ~is_kept)[is_target],
    }
    for share, claims in seen.items():
        deviation = np.sqrt(max(share * (1 - share), 0) / len(claims))
        assert abs(claims.mean() - share) <= 5 * deviation
    assert not is_target[~is_maskable].any()
    assert (inputs[~is_target] == tokens[~is_target]).all()
    assert (targets[is_target] == tokens[is_target]).all()


def test_random_replacements_are_residues_each_equally_often():
    size = 100_000
    tokens = np.full(size, VOCABULARY["A"], dtype=np.int64)
    rule = MaskingRule(fraction=1, mask_share=0, random_share=1)
    inputs, _ = corrupt(tokens, np.ones(size, bool), rule, np.random.default_rng(0))
    counts = np.bincount(inputs, minlength=len(VOCABULARY))
    assert counts[~VOCABULARY.is_residue].sum() == 0
    expected = size / 25
    assert np.abs(counts[VOCABULARY.is_residue] - expected).max() < 5 * np.sqrt(expected)


def test_what_came_is_not_changed():
    tokens = VOCABULARY.encode("MKVLLA").astype(np.int64)
    before = tokens.copy()
    corrupt(tokens, np.ones(6, bool), MaskingRule(fraction=1), np.random.default_rng(0))
    assert (tokens == before).all()
