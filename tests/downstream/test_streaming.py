"""Heads of residues: linear ones against scikit-learn, convolutions against their formula."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from protlm.downstream import convolution, linear, streaming
from protlm.downstream.convolution import convolutions, convolved, fit_convolutions
from protlm.downstream.linear import fit, probabilities
from protlm.downstream.streaming import fit_residues
from protlm.downstream.tasks import Targets
from protlm.options.labels import Task


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_BLOCK", 37)
    monkeypatch.setattr(streaming, "_CACHED", 29)
    monkeypatch.setattr(linear, "_BLOCK", 41)


def features_of(numbers: np.random.Generator, size: int = 300) -> np.ndarray:
    """Correlated features on scales from 0.01 to 100, far from 0, and a constant."""
    x = numbers.normal(size=(size, 6)) @ numbers.normal(size=(6, 6))
    return np.column_stack([(x + 9) * np.logspace(-2, 2, 6), np.full(size, 7.0)])


def targets_of(values: np.ndarray, num_classes: int = 0) -> Targets:
    task = Task.residue_classes if num_classes else Task.residue_numbers
    names = list("abcdef"[:num_classes])
    return Targets(task, names, values, np.arange(len(values)), [np.arange(1)] * len(values))


def test_ridge_is_that_of_scikit_learn() -> None:
    numbers = np.random.default_rng(0)
    x, y, rows = features_of(numbers), numbers.normal(size=300), np.arange(0, 300, 2)
    for penalty in (1.0, 100.0):
        (found,) = fit_residues(x, targets_of(y), rows, [penalty])
        known = fit(x[rows], y[rows], Task.number, num_classes=0, penalty=penalty)
        assert found.outputs(x) == pytest.approx(known.outputs(x), rel=1e-7)


@pytest.mark.parametrize(("seen", "penalty"), [(2, 0.01), (2, 1.0), (3, 0.01), (4, 1.0)])
def test_classes_are_at_the_optimum_of_scikit_learn(seen: int, penalty: float) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    numbers = np.random.default_rng(seen)
    x, rows = features_of(numbers), np.arange(0, 300, 2)
    # Classes are rare or common, depend on the features, and the last has no example.
    noisy = (x[:, 0] - x[:, 0].mean()) / x[:, 0].std() + numbers.normal(size=300)
    y = np.digitize(noisy, [1.0, 1.5, 2.0][: seen - 1])
    z = StandardScaler().fit(x[rows])
    known = LogisticRegression(C=penalty, tol=1e-10, max_iter=10_000)
    known.fit(z.transform(x[rows]), y[rows])
    *_, found = fit_residues(x, targets_of(y, seen + 1), rows, [10.0, penalty])
    p = probabilities(found.outputs(x), Task.one_class)
    assert p[:, :seen] == pytest.approx(known.predict_proba(z.transform(x)), abs=1e-3)
    assert p[:, seen].max() == 0


def test_the_least_squares_of_classes_are_ridge_regressions_of_each() -> None:
    numbers = np.random.default_rng(1)
    x, y, rows = features_of(numbers), numbers.integers(3, size=300), np.arange(200)
    targets = replace(targets_of(y, 3), task=Task.residue_numbers)
    (found,) = fit_residues(x, targets, rows, [10.0])
    for number in range(3):
        (one,) = fit_residues(x, targets_of((y == number).astype(float)), rows, [10.0])
        assert found.outputs(x)[:, number] == pytest.approx(one.outputs(x)[:, 0])


@pytest.mark.parametrize("dtype", [np.float16, np.uint8])
def test_features_of_files_and_letters(dtype: type) -> None:
    numbers = np.random.default_rng(2)
    x = numbers.integers(3, size=(200, 4)).astype(dtype)
    y = numbers.integers(3, size=200)
    one, other = (fit_residues(z, targets_of(y, 3), np.arange(200), [0.1])[0] for z in (x, x * 1.0))
    assert one.outputs(x) == pytest.approx(other.outputs(x), abs=1e-3)


@pytest.mark.parametrize("classes", [0, 3])
def test_sparse_rows_have_the_weights_of_dense_ones(classes: int) -> None:
    numbers = np.random.default_rng(3)
    x = numbers.random((200, 6)) * (numbers.random((200, 6)) < 0.2) * [1, 1, 1, 1, 1, 0]
    y, rows = numbers.integers(classes or 9, size=200), np.arange(150)
    targets = targets_of(y if classes else y * 1.0, classes)
    one, other = (fit_residues(z, targets, rows, [1.0])[0] for z in (x, csr_array(x)))
    assert one.outputs(x) == pytest.approx(other.outputs(csr_array(x)), abs=1e-5)


def test_convolutions_are_their_formula() -> None:
    """Each output sees 13 residues, and zeros beyond the ends, also of the hidden channels."""
    torch.manual_seed(0)
    head, x = convolutions(5, 2), np.random.default_rng(0).normal(size=(9, 5))
    (w, b), (v, c) = (
        (one.weight.detach().double().numpy(), one.bias.detach().double().numpy())
        for one in (head[0], head[2])
    )

    def slow(x: np.ndarray, weights: np.ndarray, bias: np.ndarray) -> np.ndarray:
        rows = []
        for place in range(len(x)):
            near = [n for n in range(-3, 4) if 0 <= place + n < len(x)]
            rows.append(bias + sum(weights[:, :, n + 3] @ x[place + n] for n in near))
        return np.array(rows)

    known = slow(np.maximum(slow(x, w, b), 0), v, c)
    found = convolved(head, [x[:1], x, x[:4]]).detach().numpy()[1:10]
    assert found == pytest.approx(known, abs=1e-5)


def test_convolutions_learn_what_is_beside_a_residue(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a residue alone its label is not known; masked ones, and the test, do not count."""
    monkeypatch.setattr(convolution, "_RATE", 1e-2)
    monkeypatch.setattr(convolution, "_EPOCHS", 40)
    numbers = np.random.default_rng(3)
    proteins = [np.eye(4, dtype=np.uint8)[numbers.integers(4, size=40)] for _ in range(80)]
    places = [np.arange(numbers.integers(3), 40) for _ in proteins]
    after = [np.roll(one[:, 0], -1) for one in proteins]
    values = np.concatenate([one[own] for one, own in zip(after, places, strict=True)])
    groups = np.repeat(np.arange(80), [*map(len, places)])
    fit_to, held_out = np.arange(60), np.arange(60, 70)
    classes = Targets(Task.residue_classes, ["a", "b"], values.astype(int), groups, places)
    numbers_ = Targets(Task.residue_numbers, [], 2.0 * values, groups, places)
    for targets in (classes, numbers_):
        head, _ = fit_convolutions(proteins, targets, fit_to, held_out, seed=0)
        outputs = torch.cat([convolved(head, [proteins[x]])[places[x]] for x in range(70, 80)])
        outputs = outputs.detach().numpy()
        known = targets.values[groups >= 70]
        found = outputs.argmax(1) if targets.classes else np.round(outputs[:, 0] / 2) * 2
        assert np.mean(found == known) > 0.93
    monkeypatch.setattr(convolution, "_EPOCHS", 2)
    some = (proteins, classes, fit_to, held_out)
    (one, loss), (same, again), (other, _) = (fit_convolutions(*some, seed=x) for x in (0, 0, 1))
    assert loss == again and bool((one[0].weight == same[0].weight).all())
    assert bool((one[0].weight != other[0].weight).any())
