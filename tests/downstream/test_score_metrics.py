"""Metrics: ProteinGym's numbers, other implementations on values with ties, and averages."""

import math

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import matthews_corrcoef, ndcg_score, roc_auc_score

from protlm.downstream.score_metrics import (
    METRICS,
    agreement,
    auc,
    averages,
    mcc,
    metrics,
    ndcg,
    spearman,
    top_recall,
)
from protlm.downstream.variants import Assay

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
        chosen = predicted >= np.median(predicted)
        assert spearman(measured, predicted) == pytest.approx(spearmanr(measured, predicted)[0])
        assert auc(is_fit, predicted) == pytest.approx(roc_auc_score(is_fit, predicted))
        assert mcc(is_fit, chosen) == pytest.approx(matthews_corrcoef(is_fit, chosen))


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
        mcc(everything, other > 2),
        ndcg(other, other),
        top_recall(same, other),
    ):
        assert math.isnan(value)


def test_an_interval_is_as_wide_as_theory_says() -> None:
    """The standard error of Bonett and Wright 2000, equation 3, at a true correlation."""
    generator = np.random.default_rng(2)
    number, widths = 100, []
    # Spearman's correlation of a normal distribution with Pearson's 0.6.
    true = 6 / math.pi * math.asin(0.3)
    for seed in range(4):
        sample = generator.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], size=number)
        found = agreement(*sample.T, None, seed=seed)
        assert found is not None
        low, high = found.intervals["Spearman"]
        assert low <= found.values["Spearman"] <= high
        widths.append(high - low)
    # Of Fisher's z; the derivative of tanh at z is 1 - true².
    error = math.sqrt((1 + true**2 / 2) / (number - 3)) * (1 - true**2)
    assert np.mean(widths) == pytest.approx(2 * 1.96 * error, rel=0.3)


def test_variants_without_a_measured_score_are_left_out() -> None:
    measured = np.append(MEASURED, [np.nan, np.nan])
    predicted = np.append(PREDICTED, [9.0, -9.0])
    found = agreement(measured, predicted, np.append(MEASURED >= 0.5, [True, True]))
    assert found is not None and found.num_variants == 20
    assert found.values == metrics(MEASURED, PREDICTED, MEASURED >= 0.5)
    # The median of the measured scores is 0.4, which divides them as 0.5 does.
    divided = agreement(MEASURED, PREDICTED, None)
    assert divided is not None
    assert (divided.values, divided.intervals) == (found.values, found.intervals)
    assert (found.classes, divided.classes) == ("bins", "median")
    assert agreement(np.full(3, np.nan), np.ones(3), None) is None


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
