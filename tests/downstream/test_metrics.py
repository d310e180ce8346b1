"""Metrics: ProteinGym's numbers, other implementations on values with ties, and averages."""

import itertools

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import matthews_corrcoef, roc_auc_score

from protlm.downstream.metrics import (
    METRICS,
    _resamples,
    agreement,
    averages,
    correlation,
    metrics,
    ndcg,
    positions_of,
    spearman,
    top_recall,
)
from protlm.downstream.probe_results import few_in_test
from protlm.downstream.tasks import Targets, Task
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
        found = metrics(measured, predicted, is_fit)["AUC"]
        assert found == pytest.approx(roc_auc_score(is_fit, predicted))
        found = correlation(is_fit.astype(float), chosen)
        assert found == pytest.approx(matthews_corrcoef(is_fit, chosen))


def test_what_is_not_defined_is_nan() -> None:
    same, other = np.ones(5), np.arange(5.0)
    found = [
        spearman(same, other),
        metrics(same, other, same > 0)["AUC"],
        correlation(same, other),
        correlation(other, same),
        ndcg(other, other),
        top_recall(same, other),
    ]
    assert np.isnan(found).all()


def test_a_multiple_mutant_is_drawn_as_often_as_the_product_of_its_positions() -> None:
    positions = np.array([[0, -1, -1], [1, -1, -1], [2, -1, -1], [0, 2, -1], [2, 0, 1]])
    seen = set()
    for rows in itertools.islice(_resamples(positions, seed=0), 50):
        first, second, third, *multiple = np.bincount(rows, minlength=5).tolist()
        assert first + second + third == 3
        assert multiple == [first * third, first * second * third]
        seen.add(tuple(multiple))
    assert len(seen) > 2


@pytest.mark.slow
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
    found = agreement(MEASURED, PREDICTED, MEASURED >= 0.5, positions[:, None])
    expected = np.nanquantile(values, [0.025, 0.975], axis=0).T
    np.testing.assert_allclose(list(map(found.interval, METRICS)), expected, rtol=1e-12)


def test_one_position_has_no_interval() -> None:
    found = agreement(MEASURED, PREDICTED, None, np.zeros(20, dtype=int)[:, None])
    assert found.values["Spearman"] > 0.9
    assert np.isnan(list(map(found.interval, METRICS))).all()


def test_the_positions_of_variants_are_numbered() -> None:
    texts = ["M1A", "M1A:K2R", "M1C", "K2T:M1W", "T3S"]
    variants = [parse_mutant(text, "MKT") for text in texts]
    variants += [Variant(), Variant(indel="MKKT"), Variant(indel="MKKT"), Variant()]
    found = positions_of(variants)
    assert found[:, 0].tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 3]
    assert found[:, 1].tolist() == [-1, 1, -1, 0, -1, -1, -1, -1, -1]
    assert positions_of([]).shape == (0, 1)


@pytest.mark.slow
def test_variants_without_a_measured_score_are_left_out() -> None:
    measured = np.append(MEASURED, [np.nan, np.nan])
    predicted = np.append(PREDICTED, [9.0, -9.0])
    found = agreement(
        measured, predicted, np.append(MEASURED >= 0.5, [True, True]), np.arange(22)[:, None]
    )
    assert found.num_variants == 20
    assert found.values == metrics(MEASURED, PREDICTED, MEASURED >= 0.5)
    # The median of the measured scores is 0.4, which divides them as 0.5 does.
    divided = agreement(MEASURED, PREDICTED, None, np.arange(20)[:, None])
    assert divided.values == found.values
    np.testing.assert_array_equal(divided.resampled, found.resampled)
    assert (found.classes, divided.classes) == ("bins", "median")
    assert agreement(np.full(3, np.nan), np.ones(3), None, np.arange(3)[:, None]) is None


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


@pytest.mark.parametrize("task", [Task.one_class, Task.several_classes, Task.residue_classes])
@pytest.mark.parametrize(("size", "few"), [(9, True), (10, False), (20, False), (21, True)])
def test_few_test_proteins_with_or_without_a_class_are_noted(task: Task, size: int, few: bool):
    """Of 30; residues are of their proteins."""
    groups = np.repeat(np.arange(60), 5 if task is Task.residue_classes else 1)
    values = np.stack([groups < 15, groups < size], axis=1)
    values = values if task is Task.several_classes else 1 * values[:, 1]
    targets = Targets(task, ["a", "b"], values, groups)
    assert len(few_in_test(targets, np.arange(30))) == few
