"""Linear probes: planted classes are found, held-out groups choose, intervals cover."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from protlm.analysis.probes import Examples, class_scores, probe
from protlm.errors import InputDataError


def planted(seed: int, *, groups: int = 40, width: int = 6, shift: float = 3.0) -> Examples:
    """Three classes; layer 1 knows them, layer 0 and 2 are noise."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(3, size=groups * 10)
    noise = [generator.normal(size=(len(labels), width)) for _ in range(3)]
    noise[1][np.arange(len(labels)), labels] += shift
    return Examples(noise, labels, np.repeat(np.arange(groups), 10))


def test_the_layer_that_knows_the_classes_is_found() -> None:
    fit, test = planted(0), planted(1)
    found = probe(fit, test)
    assert found.layer == 1
    # The nearest of three Gaussians 3 * sqrt(2) apart is right in about 97 % of the cases.
    assert (found.predicted == test.labels).mean() > 0.93


def test_noise_is_at_chance() -> None:
    fit, test = planted(0, shift=0.0), planted(1, shift=0.0)
    right = (probe(fit, test).predicted == test.labels).sum()
    count = len(test.labels)
    assert abs(right - count / 3) < 4 * np.sqrt(count * 2 / 9)


def test_a_group_is_on_one_side_only() -> None:
    """A layer that names the group helps those that see the group's other examples."""
    generator = np.random.default_rng(0)
    groups = np.repeat(np.arange(60), 5)
    labels = generator.integers(2, size=60)[groups]
    names = np.eye(60)[groups]
    weak = labels[:, None] + generator.normal(size=(len(labels), 1))
    fit = Examples([names, weak], labels, groups)
    test = Examples([np.zeros((8, 60)), np.ones((8, 1))], np.ones(8, int), np.arange(8))
    assert probe(fit, test).layer == 1


def test_sparse_features_are_taken() -> None:
    fit, test = planted(0), planted(1)
    sparse = [Examples([csr_matrix(x.features[1])], x.labels, x.groups) for x in (fit, test)]
    assert (probe(*sparse).predicted == test.labels).mean() > 0.93


@pytest.mark.parametrize(
    "labels, groups", [([0, 0, 0, 0], [0, 0, 1, 1]), ([0, 1, 0, 1], [0, 0, 0, 0])]
)
def test_too_little_to_fit_to_is_refused(labels: list[int], groups: list[int]) -> None:
    examples = Examples([np.zeros((4, 2))], np.array(labels), np.array(groups))
    with pytest.raises(InputDataError, match="two proteins and two classes"):
        probe(examples, examples)


def test_scores_by_hand() -> None:
    labels, predicted = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 0, 2])
    scores = class_scores(predicted, labels, np.arange(6))
    assert scores["accuracy"]["value"] == pytest.approx(4 / 6)
    # F1 of the three classes: 2/3, 1/2 and 1.
    assert scores["macro_f1"]["value"] == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)


def test_groups_are_drawn_as_a_whole() -> None:
    """Ten examples that are right or wrong together say as much as one."""
    generator = np.random.default_rng(0)
    right = generator.random(100) < 0.5
    groups = np.repeat(np.arange(100), 10)
    labels = np.ones(1000, int)
    predicted = np.where(right[groups], 1, 0)
    together = class_scores(predicted, labels, groups)["accuracy"]
    alone = class_scores(predicted, labels, np.arange(1000))["accuracy"]
    widths = [interval["high"] - interval["low"] for interval in (together, alone)]
    assert widths[0] / widths[1] == pytest.approx(np.sqrt(10), rel=0.15)
    assert together["low"] < right.mean() < together["high"]
