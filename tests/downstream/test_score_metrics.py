"""Metrics: ProteinGym's numbers, other implementations on values with ties, and averages."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import matthews_corrcoef, ndcg_score, roc_auc_score

from protlm.downstream.metrics import (
    METRICS,
    _resamples,
    agreement,
    auc,
    averages,
    correlation,
    metrics,
    ndcg,
    positions_of,
    spearman,
    top_recall,
)
from protlm.downstream.variants import Assay, Variant, parse_mutant

MEASURED = np.array(
    [
        *(0.1, -1.2, 0.5, 0.5, 2.0, -0.3, 1.1, 0.0, -2.5, 0.8),
        *(1.7, -0.9, 0.3, 0.5, -1.6, 2.2, 0.9, -0.1, 1.4, -0.7),
    ]
)
PREDICTED = np.array(
    [
        *(0.4, -0.8, 0.2, 0.9, 1.5, -0.6, 0.7, 0.1, -2.0, 1.2),
        *(0.6, -0.2, -0.4, 0.3, -1.1, 1.9, 1.0, 0.05, 2.1, -1.3),
    ]
)


def test_proteingyms_own_functions_give_the_same() -> None:
    expected = (0.9156636890153327, 0.98, 0.8, 0.9106250677764092, 0.5)
    found = metrics(MEASURED, PREDICTED, MEASURED >= 0.5)
    assert found == pytest.approx(dict(zip(METRICS, expected, strict=True)), abs=1e-12)
    assert ndcg(MEASURED, PREDICTED, top=0.25) == pytest.approx(0.9323768990463199, abs=1e-12)
    assert top_recall(MEASURED, PREDICTED, top=0.25) == pytest.approx(0.6)


def test_other_implementations_agree_on_ties() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        measured, predicted = generator.integers(0, 9, (2, 50)).astype(float)
        is_fit = measured > 4
        chosen = (predicted >= np.median(predicted)).astype(float)
        assert spearman(measured, predicted) == pytest.approx(spearmanr(measured, predicted)[0])
        assert auc(is_fit, predicted) == pytest.approx(roc_auc_score(is_fit, predicted))
        found = correlation(is_fit.astype(float), chosen)
        assert found == pytest.approx(matthews_corrcoef(is_fit, chosen))


def test_the_gain_of_all_variants_is_that_of_sklearn() -> None:
    generator = np.random.default_rng(1)
    measured, predicted = generator.normal(size=(2, 30))
    gains = measured - measured.min()
    expected = ndcg_score(gains[None], predicted[None])
    assert ndcg(measured, predicted, top=1.0) == pytest.approx(expected)


def test_what_is_not_defined_is_nan() -> None:
    same, other = np.ones(5), np.arange(5.0)
    everything = np.ones(5, dtype=bool)
    for value in (
        spearman(same, other),
        auc(everything, other),
        correlation(same, other),
        correlation(other, same),
        ndcg(other, other),
        top_recall(same, other),
    ):
        assert math.isnan(value)


def singles(positions: np.ndarray) -> np.ndarray:
    """The positions of single mutants, as `positions_of` returns them."""
    return positions[:, None]


def test_an_interval_is_as_wide_as_theory_says() -> None:
    """The standard error of Bonett and Wright 2000, equation 3, at a true correlation."""
    generator = np.random.default_rng(2)
    number, widths = 100, []
    # Spearman's correlation of a normal distribution with Pearson's 0.6.
    true = 6 / math.pi * math.asin(0.3)
    for seed in range(4):
        sample = generator.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], size=number)
        found = agreement(sample[:, 0], sample[:, 1], None, singles(np.arange(number)), seed=seed)
        assert found is not None
        low, high = found.interval("Spearman")
        assert low <= found.values["Spearman"] <= high
        widths.append(high - low)
    # Of Fisher's z; the derivative of tanh at z is 1 - true².
    error = math.sqrt((1 + true**2 / 2) / (number - 3)) * (1 - true**2)
    assert np.mean(widths) == pytest.approx(2 * 1.96 * error, rel=0.3)


POSITIONS, PER_POSITION = 40, 19


def shared_effects(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Measured and predicted scores of an assay whose positions explain most of the variance."""
    positions = generator.multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]], size=POSITIONS)
    noise = generator.normal(scale=0.5, size=(POSITIONS, PER_POSITION, 2))
    measured, predicted = (positions[:, None] + noise).reshape(-1, 2).T
    return measured, predicted


def test_an_interval_covers_the_variation_between_positions() -> None:
    """Spearman's correlation varies between such assays as the interval of one of them says."""
    generator = np.random.default_rng(3)
    spread = np.std([spearman(*shared_effects(generator)) for _ in range(300)])
    together = np.repeat(np.arange(POSITIONS), PER_POSITION)
    widths = []
    for positions in (together, np.arange(len(together))):
        for _ in range(3):
            found = agreement(*shared_effects(generator), None, singles(positions))
            assert found is not None
            low, high = found.interval("Spearman")
            widths.append((high - low) / (2 * 1.96 * spread))
    assert np.mean(widths[:3]) == pytest.approx(1, rel=0.3)
    assert np.mean(widths[3:]) < 0.5


def doubles(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions, measured and predicted scores of double mutants, sums over their positions."""
    pairs = np.array(list(itertools.combinations(range(POSITIONS), 2)))
    positions = generator.permutation(pairs)[:400]
    effects = generator.multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]], size=POSITIONS)
    scores = effects[positions].sum(axis=1) + generator.normal(scale=0.5, size=(400, 2))
    return positions, *scores.T


def test_an_interval_of_double_mutants_covers_the_variation_between_positions() -> None:
    """A pair of positions as the unit would give intervals of 0.4 times the width."""
    generator = np.random.default_rng(5)
    spread = np.std([spearman(*doubles(generator)[1:]) for _ in range(300)])
    deviations = []
    for _ in range(6):
        positions, measured, predicted = doubles(generator)
        drawn = itertools.islice(_resamples(positions, seed=0), 200)
        deviations.append(np.std([spearman(measured[r], predicted[r]) for r in drawn]))
    assert 1 / 1.6 < np.mean(deviations) / spread < 1.6


def test_positions_are_resampled_whole() -> None:
    """All rows of a position are drawn equally often, whatever its size and the order of rows."""
    generator = np.random.default_rng(4)
    sizes = [1, 3, 2, 5]
    positions = generator.permutation(np.repeat([7, 0, 3, 5], sizes))
    for rows in itertools.islice(_resamples(singles(positions), seed=0), 20):
        counts = np.bincount(rows, minlength=len(positions))
        drawn = [set(counts[positions == position]) for position in np.unique(positions)]
        assert all(len(one) == 1 for one in drawn)
        assert sum(one.pop() for one in drawn) == len(sizes)


def test_a_multiple_mutant_is_drawn_as_often_as_the_product_of_its_positions() -> None:
    positions = np.array([[0, -1, -1], [1, -1, -1], [2, -1, -1], [0, 2, -1], [2, 0, 1]])
    seen = set()
    for rows in itertools.islice(_resamples(positions, seed=0), 50):
        first, second, third, *multiple = np.bincount(rows, minlength=5).tolist()
        assert first + second + third == 3
        assert multiple == [first * third, first * second * third]
        seen.add(tuple(multiple))
    assert len(seen) > 2


def test_single_mutants_have_the_intervals_of_the_cluster_bootstrap() -> None:
    """The rows of the drawn positions one after the other, as often as each was drawn."""
    positions = np.arange(20) // 3
    generator = np.random.default_rng(0)
    values = []
    for _ in range(1000):
        drawn = generator.integers(7, size=7)
        rows = np.concatenate([np.flatnonzero(positions == one) for one in drawn])
        some = metrics(MEASURED[rows], PREDICTED[rows], MEASURED[rows] >= 0.5)
        values.append(list(some.values()))
    found = agreement(MEASURED, PREDICTED, MEASURED >= 0.5, singles(positions))
    assert found is not None
    expected = np.nanquantile(values, [0.025, 0.975], axis=0).T
    np.testing.assert_allclose(list(map(found.interval, METRICS)), expected, rtol=1e-12)


def test_one_position_has_no_interval() -> None:
    found = agreement(MEASURED, PREDICTED, None, singles(np.zeros(20, dtype=int)))
    assert found is not None and found.values["Spearman"] > 0.9
    assert np.isnan(list(map(found.interval, METRICS))).all()


def test_the_positions_of_variants_are_numbered() -> None:
    texts = ["M1A", "M1A:K2R", "M1C", "K2T:M1W", "T3S"]
    variants = [parse_mutant(text, "MKT") for text in texts]
    variants += [Variant(), Variant(indel="MKKT"), Variant(indel="MKKT"), Variant()]
    found = positions_of(variants)
    assert found[:, 0].tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 3]
    assert found[:, 1].tolist() == [-1, 1, -1, 0, -1, -1, -1, -1, -1]
    assert positions_of([]).shape == (0, 1)


def test_variants_without_a_measured_score_are_left_out() -> None:
    measured = np.append(MEASURED, [np.nan, np.nan])
    predicted = np.append(PREDICTED, [9.0, -9.0])
    found = agreement(
        measured, predicted, np.append(MEASURED >= 0.5, [True, True]), singles(np.arange(22))
    )
    assert found is not None and found.num_variants == 20
    assert found.values == metrics(MEASURED, PREDICTED, MEASURED >= 0.5)
    # The median of the measured scores is 0.4, which divides them as 0.5 does.
    divided = agreement(MEASURED, PREDICTED, None, singles(np.arange(20)))
    assert divided is not None
    assert divided.values == found.values
    np.testing.assert_array_equal(divided.resampled, found.resampled)
    assert (found.classes, divided.classes) == ("bins", "median")
    assert agreement(np.full(3, np.nan), np.ones(3), None, singles(np.arange(3))) is None


def test_averages_weight_proteins_and_selection_types() -> None:
    assays = {
        "a": Assay("M", "P1", "Activity"),
        "b": Assay("M", "P1", "Activity"),
        "c": Assay("M", "P2", "Activity"),
        "d": Assay("M", "P3", "Stability"),
        "unused": Assay("M", "P4", "Binding"),
    }
    found = averages({"a": 0.2, "b": 0.4, "c": 0.5, "d": 0.0}, assays)
    assert found == pytest.approx({"Activity": 0.4, "Stability": 0.0, "mean of types": 0.2})
