"""Probes: linear models and metrics against slow ones, choices, and planted labels."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from scipy.stats import spearmanr

from protlm.analysis.bootstrap import Metrics
from protlm.analysis.structures import read_structure
from protlm.downstream.label_files import Example
from protlm.downstream.linear import (
    PENALTIES,
    constant,
    fit,
    penalties_of,
    probabilities,
    trainable,
)
from protlm.downstream.metrics import LABEL_METRICS, label_scores
from protlm.downstream.probe_results import Probe, comparison, read_probe, scores_of, write_probe
from protlm.downstream.probing import CONSTANT, MODEL, probe, residue_baseline
from protlm.downstream.splits import Split, folds_of
from protlm.downstream.tasks import Targets, state_labels, state_targets
from protlm.model.embedding import embeddings
from protlm.options.labels import Head, ProbeOptions, Task
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import sample_dir
from tests.analysis.test_features import perfect, settings_of

LETTERS = np.array(list("ACDEFGHIKLMNPQRSTVWY"))


@pytest.fixture
def numbers() -> np.random.Generator:
    return np.random.default_rng(0)


def test_ridge_is_its_formula(numbers) -> None:
    x = numbers.normal(size=(50, 4)) * [1, 10, 0.1, 1] + 3
    y = x @ [1, -0.5, 2, 0] + numbers.normal(size=50)
    z = (x - x.mean(0)) / x.std(0)
    w = np.linalg.solve(z.T @ z + 10 * np.eye(4), z.T @ (y - y.mean()))
    found = fit(x, y, Task.number, num_classes=0, penalty=10.0)
    assert found.outputs(x)[:, 0] == pytest.approx(z @ w + y.mean())


@pytest.mark.parametrize("size", [2, 3])
def test_logistic_regression_is_at_its_optimum(numbers, size: int) -> None:
    """The gradient of C · cross-entropy + |w|² / 2 is zero, as is the mean error of each class."""
    x = numbers.normal(size=(60, 3))
    y = numbers.integers(size, size=60)
    found = fit(x, y, Task.one_class, num_classes=size, penalty=0.1)
    errors = probabilities(found.outputs(x), Task.one_class) - np.eye(size)[y]
    assert np.abs(errors.mean(0)).max() < 1e-3
    z = (x - x.mean(0)) / x.std(0)
    weights = found.weights * x.std(0)[:, None]
    gradient = 0.1 * z.T @ errors + weights
    # Of two classes, one logit has all of the weight.
    checked = gradient[:, 1:] if size == 2 else gradient
    assert np.abs(checked).max() < 2e-2


def test_classes_without_examples_have_no_probability(numbers) -> None:
    x, y = numbers.normal(size=(20, 3)), np.repeat([0, 2], 10)
    found = fit(x, y, Task.one_class, num_classes=4, penalty=1.0)
    assert probabilities(found.outputs(x), Task.one_class)[:, [1, 3]].max() == 0
    several = np.stack([y == 0, y < 0, y >= 0], axis=1)
    found = fit(x, several, Task.several_classes, num_classes=3, penalty=1.0)
    assert probabilities(found.outputs(x), Task.several_classes)[0, 1:].tolist() == [0, 1]


def test_a_model_to_be_trained_is_certain_of_no_class(numbers) -> None:
    x, y = numbers.normal(size=(20, 3)), np.repeat([0, 2], 10)
    several = np.stack([y == 0, y < 0, y >= 0], axis=1)
    for task, values, unsure in (
        (Task.one_class, y, {1: np.log(0.5 / 21), 3: np.log(0.5 / 21)}),
        (Task.several_classes, several, {1: np.log(0.5 / 20.5), 2: np.log(20.5 / 0.5)}),
    ):
        found = fit(x, values, task, num_classes=4, penalty=1.0)
        start = trainable(found, values, task, num_classes=4)
        for place, logit in enumerate(start.bias):
            assert logit == pytest.approx(unsure.get(place, found.bias[place]))
        assert start.weights is found.weights
    number = fit(x, x[:, 0], Task.number, num_classes=0, penalty=1.0)
    assert trainable(number, x[:, 0], Task.number, num_classes=0) is number


def test_the_constant_predicts_the_mean_or_the_most_common_class() -> None:
    assert constant(np.array([1.0, 3.0]), Task.number, num_classes=0, width=2).bias.tolist() == [2]
    classes = constant(np.array([1, 1, 0]), Task.one_class, num_classes=3, width=2)
    assert classes.outputs(np.zeros((1, 2))).argmax() == 1


def test_metrics_of_several_classes_and_numbers_are_those_of_scikit_learn(numbers) -> None:
    from sklearn import metrics

    outputs, groups = numbers.normal(size=(80, 4)), np.repeat(np.arange(20), 4)
    several = numbers.integers(2, size=(80, 3)).astype(bool)
    several[:, 2] = False
    rounded = outputs[:, :3].round(1)
    kept = several[:, :2], rounded[:, :2]
    expected = {
        "AUROC": metrics.roc_auc_score(*kept),
        "AUPRC": metrics.average_precision_score(*kept),
        "Fmax": slow_fmax(rounded, several),
    }
    found = label_scores(rounded, several, np.arange(80), Task.several_classes).values
    assert found == pytest.approx(expected)
    found = label_scores(rounded, several & False, np.arange(80), Task.several_classes).values
    assert np.isnan([*found.values()]).all()
    values = numbers.normal(size=80)
    pairs = zip(values.reshape(20, 4), outputs[:, 0].reshape(20, 4), strict=True)
    expected = {
        "Spearman": spearmanr(values, outputs[:, 0])[0],
        "R2": metrics.r2_score(values, outputs[:, 0]),
        "MAE": metrics.mean_absolute_error(values, outputs[:, 0]),
        "Spearman per protein": np.mean([spearmanr(*pair)[0] for pair in pairs]),
    }
    for task in (Task.number, Task.residue_numbers):
        names = LABEL_METRICS[task]
        found = label_scores(outputs, values, groups, task).values
        assert found == pytest.approx({name: expected[name] for name in names})


def slow_fmax(logits: np.ndarray, labels: np.ndarray) -> float:
    """The definition of CAFA, one threshold and one protein at a time."""
    best = 0.0
    for threshold in np.linspace(0, 1, 101):
        precisions, recalls = [], []
        for row, known in zip(logits, labels, strict=True):
            chosen = 1 / (1 + np.exp(-row)) >= threshold
            if known.any():
                recalls.append((chosen & known).sum() / known.sum())
                if chosen.any():
                    precisions.append((chosen & known).sum() / chosen.sum())
        if precisions:
            p, r = np.mean(precisions), np.mean(recalls)
            best = max(best, 2 * p * r / (p + r) if p + r else 0)
    return float(best)


@pytest.mark.parametrize("num_labels", [2, 3, 5, 6])
def test_metrics_of_classes_are_those_of_scikit_learn(num_labels: int, numbers):
    """Of some classes there are no labels."""
    from sklearn import metrics

    y, outputs = numbers.integers(2, size=30), numbers.normal(size=(30, 2)).round(1)
    found = label_scores(outputs, y, np.arange(30) // 3, Task.residue_classes, resamples=0).values
    margins = outputs[:, 1] - outputs[:, 0]
    assert found["AUROC"] == pytest.approx(metrics.roc_auc_score(y, margins))
    assert found["AUPRC"] == pytest.approx(metrics.average_precision_score(y, margins))
    for _ in range(20):
        y, outputs = numbers.integers(num_labels, size=12), numbers.normal(size=(12, 6))
        y[:2] = 0, 1
        p = outputs.argmax(1)
        expected = {
            "accuracy": metrics.accuracy_score(y, p),
            "macro F1": metrics.f1_score(y, p, average="macro"),
            "MCC": metrics.matthews_corrcoef(y, p),
            "accuracy per protein": np.mean([x.mean() for x in np.split(y == p, [6, 8])]),
        }
        for task in (Task.one_class, Task.residue_classes):
            groups = np.repeat([0, 1, 2], [6, 2, 4])
            found = label_scores(outputs, y, groups, task, resamples=0).values
            assert found == pytest.approx({name: expected[name] for name in LABEL_METRICS[task]})


@pytest.mark.parametrize("task", [Task.one_class, Task.several_classes, Task.number])
@pytest.mark.parametrize("size", [2, 3])
def test_resamples_are_metrics_of_drawn_proteins(numbers, task: Task, size: int, monkeypatch):
    """Weighted metrics equal those of rows that are repeated."""
    monkeypatch.setattr("protlm.downstream.metrics._CELLS", 70)
    values = {
        Task.one_class: numbers.integers(size, size=30),
        Task.several_classes: numbers.integers(2, size=(30, size)).astype(bool),
        Task.number: numbers.normal(size=30),
    }[task]
    outputs = numbers.normal(size=(30, size)).round(1)
    groups = np.repeat(np.arange(15), 2)
    found = label_scores(outputs, values, groups, task, seed=3, resamples=5)
    draws = np.random.default_rng(3).integers(15, size=(5, 15))
    for drawn, row in zip(draws, found.resampled, strict=True):
        rows = np.concatenate([np.flatnonzero(groups == one) for one in drawn])
        again = label_scores(outputs[rows], values[rows], np.arange(30), task, resamples=0)
        assert row.tolist() == pytest.approx(list(again.values.values()))
    each = [groups != one for one in range(15)]
    rest = [label_scores(outputs[x], values[x], groups[x], task, resamples=0).values for x in each]
    assert set(found.left_out) == set(found.values) & {"AUPRC", "Fmax"}
    for name, left_out in found.left_out.items():
        assert np.sort(left_out)[[0, -1]] == pytest.approx(
            [f([x[name] for x in rest]) for f in (min, max)]
        )
        assert np.nansum(left_out) == pytest.approx(
            sum(x[name] for x in rest) + 185 * found.values[name]
        )


def of_population(numbers, size: int, *, resamples: int = 60) -> tuple[Metrics, Metrics]:
    """The scores of two models, of proteins with four classes of 8 to 20 % of them."""
    rates = np.array([0.08, 0.1, 0.15, 0.2])
    labels, noise = numbers.random((size, 4)) < rates, numbers.normal(size=(3, size, 4))
    found = []
    for distance, own in ((3, noise[1]), (2.5, noise[2])):
        margin = distance * (distance * (labels - 0.5) + (noise[0] + own) / np.sqrt(2))
        given = margin + np.log(rates / (1 - rates)), labels, np.arange(size)
        found.append(label_scores(*given, Task.several_classes, resamples=resamples))
    return found[0], found[1]


@pytest.mark.slow
def test_intervals_of_metrics_that_choose_on_labels_hold_the_true_value(numbers) -> None:
    """In 95 % of test sets, and within three deviations in 120; of a difference too."""
    large, covered = of_population(numbers, 20_000, resamples=0), Counter[str]()
    for _ in range(120):
        models = of_population(numbers, 60)
        for name in ("AUPRC", "Fmax"):
            true = [one.values[name] for one in large]
            low, high = models[0].interval(name)
            covered[name] += low <= true[0] <= high
            less = models[0].less(models[1], name)
            least, most = (less[x] or 0 for x in ("low", "high"))
            covered[f"{name} less"] += least <= true[0] - true[1] <= most
    assert min(covered.values()) > 120 * (0.95 - 3 * np.sqrt(0.95 * 0.05 / 120)), covered


def test_intervals_at_the_ends_and_of_undefined_resamples() -> None:
    """A perfect model has 1, a model less itself 0; a lone positive is not in all resamples."""
    labels = np.arange(12)[:, None] % 12 == [0, 1, 5]
    perfect = label_scores(9.0 * labels - 4, labels, np.arange(12), Task.several_classes)
    one = label_scores(1.0 * labels[::-1], labels, np.arange(12), Task.several_classes)
    for name in ("AUPRC", "Fmax"):
        assert perfect.interval(name) == (1, 1)
        assert one.less(one, name) == {"value": 0, "low": 0, "high": 0}
        less = perfect.less(one, name)
        assert -1 <= (less["low"] or 0) <= (less["value"] or 0) <= (less["high"] or 0) <= 1
        low, high = one.interval(name)
        assert 0 < low <= one.values[name] <= high < 1
    none = label_scores(1.0 * labels, labels & False, np.arange(12), Task.several_classes)
    assert np.isnan(none.interval("AUPRC")).all() and np.isnan(none.interval("Fmax")).all()


def test_clusters_are_drawn_whole_and_those_of_all_folds_at_once(numbers) -> None:
    """Also those that a fold lacks, of which some resamples are then undefined."""
    own = [Example(f"{n}", "M" * (n + 1), "1", cluster=f"{n % 8}", fold="a") for n in range(18)]
    examples = [*own[:16], *(replace(one, fold="b") for one in own[16:])]
    is_right, drawn = (
        numbers.integers(2, size=8),
        np.random.default_rng(0).integers(8, size=(50, 8)),
    )
    for split in folds_of(examples, seed=0).values():
        clusters = split.groups[split.test]
        given = np.eye(2)[is_right[clusters]], np.ones(len(clusters), int), split.test
        named = {"clusters": split.clusters_of(split.test), "resamples": 50}
        found = label_scores(*given, Task.one_class, **named).resampled[:, 0]
        kept = [is_right[row[np.isin(row, clusters)]] for row in drawn]
        known = [right.mean() if right.size else np.nan for right in kept]
        assert found == pytest.approx(known, nan_ok=True)
        assert np.isnan(found).any() == (len(clusters) == 2)


def test_sparse_features_are_not_scaled(numbers) -> None:
    """The formula of ridge regression, without deviations; and another grid."""
    x, y = numbers.normal(size=(30, 4)) * [1, 9, 0.1, 1], numbers.normal(size=30)
    centered = x - x.mean(0)
    w = np.linalg.solve(centered.T @ centered + np.eye(4), centered.T @ (y - y.mean()))
    sparse = csr_matrix(x)
    found = fit(sparse, y, Task.number, num_classes=0, penalty=1.0)
    assert found.outputs(sparse)[:, 0] == pytest.approx(centered @ w + y.mean(), abs=1e-3)
    # Small features, as those of TF-IDF: the gradient is zero relative to the weights.
    y = x[:, 0] > 0
    found = fit(sparse / 100, y[:, None], Task.several_classes, num_classes=1, penalty=10.0)
    errors = probabilities(found.outputs(sparse / 100), Task.several_classes)[:, 0] - y
    assert 10 * x.T @ errors / 100 == pytest.approx(-found.weights[:, 0], rel=1e-2, abs=1e-3)
    assert max(penalties_of(sparse, Task.one_class)) == 100
    assert penalties_of(x, Task.one_class) == PENALTIES[Task.one_class]


def planted(numbers, count: int = 60) -> tuple[list[str], np.ndarray]:
    """Sequences of random length, some of them rich in W, and whether they are."""
    is_rich = numbers.integers(2, size=count)
    found = []
    for rich in is_rich:
        letters = LETTERS[numbers.integers(19, size=numbers.integers(15, 40))].tolist()
        letters[:: 3 if rich else 40] = "W" * len(letters[:: 3 if rich else 40])
        found.append("".join(letters))
    return found, is_rich


@pytest.fixture
def split() -> Split:
    rows = np.arange(60)
    return Split(rows[:40], rows[40:40], rows[40:], rows)


def test_planted_labels_are_found(numbers, split: Split, model) -> None:
    sequences, is_rich = planted(numbers)
    targets = Targets(Task.one_class, ["a", "b"], is_rich, np.arange(60))
    found = probe(model, sequences, targets, split, ProbeOptions())
    assert found[MODEL].scores.values["accuracy"] > 0.9
    assert found[MODEL].layer in range(model.num_layers + 1)
    assert set(found[MODEL].by_layer) == set(range(model.num_layers + 1))
    assert found["composition"].scores.values["accuracy"] > 0.9
    assert found[CONSTANT].scores.values["MCC"] == 0
    over = scores_of(found, Task.one_class)["over_best_baseline"]
    values = {name: one.scores.values["accuracy"] for name, one in found.items()}
    assert over["baseline"] != MODEL and over["metric"] == "accuracy"
    assert over["value"] == values[MODEL] - max(values[name] for name in values if name != MODEL)
    assert over["low"] <= over["value"] <= over["high"]
    low, high = found[CONSTANT].scores.interval("accuracy")
    assert 0.2 < low < high < 0.9


@pytest.mark.parametrize(("task", "classes"), [(Task.one_class, ["a", "b"]), (Task.number, [])])
def test_equal_labels_to_fit_to_are_refused(split, model, task: Task, classes) -> None:
    labels = np.zeros(60, dtype=np.int64)
    labels[split.test] = 1
    targets = Targets(task, classes, labels, np.arange(60))
    with pytest.raises(InputDataError, match=r"labels to fit to are [a0]; give two or more"):
        probe(model, ["MKT"] * 60, targets, split, ProbeOptions())


@pytest.mark.slow
def test_nothing_is_fitted_to_the_test_proteins(numbers, split: Split, model) -> None:
    sequences, is_rich = planted(numbers)
    values = is_rich + numbers.normal(size=60)
    other = values.copy()
    other[split.test] = numbers.normal(size=20)
    options = ProbeOptions(layers=(0, 1))
    found = [
        probe(model, sequences, Targets(Task.number, [], y, np.arange(60)), split, options)
        for y in (values, other)
    ]
    for name, one in found[0].items():
        assert one.outputs.tolist() == found[1][name].outputs.tolist()
    assert found[0][MODEL].scores.values != found[1][MODEL].scores.values


def test_test_sets_have_metrics_of_their_own(numbers, split: Split, model) -> None:
    sequences, is_rich = planted(numbers)
    targets = Targets(Task.one_class, ["a", "b"], is_rich, np.arange(60))
    sets = {"test1": split.test[:5], "test2": split.test[5:]}
    options = ProbeOptions(layers=(0,))
    found = probe(model, sequences, targets, replace(split, test_sets=sets), options)
    for name, one in found.items():
        right = one.outputs.argmax(1) == is_rich[split.test]
        parts = [one.by_set[x].values["accuracy"] for x in sets]
        assert parts == [right[:5].mean(), right[5:].mean()], name
    assert not probe(model, sequences, targets, split, options)[MODEL].by_set


def test_the_validation_split_chooses(numbers, model) -> None:
    rows = np.arange(60)
    sequences, is_rich = planted(numbers)
    values = is_rich + numbers.normal(size=60)
    split = Split(rows[:30], rows[30:40], rows[40:], rows)
    options = ProbeOptions(layers=(1,))
    found = probe(model, sequences, Targets(Task.number, [], values, rows), split, options)
    (x,) = embeddings(model, sequences, layers=[1], tokens_per_batch=999)

    def r2(penalty: float) -> float:
        fitted = fit(x[:30], values[:30], Task.number, num_classes=0, penalty=penalty)
        error = values[30:40] - fitted.outputs(x[30:40])[:, 0]
        return 1 - (error**2).sum() / ((values[30:40] - values[30:40].mean()) ** 2).sum()

    chosen = found[MODEL].penalty
    assert chosen == max(PENALTIES[Task.number], key=r2)
    assert found[MODEL].by_layer == {1: pytest.approx(r2(PENALTIES[Task.number][2]), abs=1e-6)}
    # The final probe is fitted to both.
    fitted = fit(x[:40], values[:40], Task.number, num_classes=0, penalty=chosen)
    assert found[MODEL].fitted.weights == pytest.approx(fitted.weights, abs=1e-5)


def test_residue_baselines() -> None:
    alone, around = (residue_baseline(["MKT"], [np.array([0, 2])], flank) for flank in (0, 8))
    assert alone.shape == (2, 25) and alone.sum() == 2
    around = around.reshape(2, 17, 25)
    assert around.sum(axis=(1, 2)).tolist() == [3, 3]
    assert (around[0, 8] == alone[0]).all() and around[1, 6:9].sum() == 3


def planted_residues(numbers) -> tuple[list[str], Targets, Split]:
    """Sequences, of which each W has a label of its own."""
    sequences = planted(numbers, 30)[0]
    values = np.concatenate([[int(x == "W") for x in one] for one in sequences])
    groups = np.repeat(np.arange(30), [len(one) for one in sequences])
    places = [np.arange(len(one)) for one in sequences]
    targets = Targets(Task.residue_classes, ["-", "W"], values, groups, places)
    rows = np.arange(30)
    return sequences, targets, Split(rows[:20], rows[:0], rows[20:], rows)


def test_residue_labels_are_found(numbers, model, monkeypatch: pytest.MonkeyPatch) -> None:
    # In files.
    monkeypatch.setattr("protlm.model.embedding.IN_MEMORY", 10)
    found = probe(model, *planted_residues(numbers), ProbeOptions(layers=(0, 1)))
    assert found[MODEL].scores.values["accuracy"] > 0.99
    assert found["residue"].scores.values["accuracy"] > 0.99
    names = {*LABEL_METRICS[Task.residue_classes], "AUROC", "AUPRC"}
    assert set(found[MODEL].scores.values) == names
    # The layer has the least squared error on the proteins held out.
    by_layer = found[MODEL].by_layer
    assert found[MODEL].layer == max(by_layer, key=lambda x: by_layer[x])


@pytest.mark.slow
def test_sparse_features_are_probed_beside_the_states(numbers, model) -> None:
    """Features that are each component, above and below 0, have what the states have."""
    autoencoder = perfect(64, settings_of(model, 1, latents=128, k=128))
    options = ProbeOptions(layers=(1,), autoencoder=autoencoder)
    sequences, targets, split = planted_residues(numbers)
    found = probe(model, sequences, targets, split, options)
    assert found["sparse_features"].layer == 1
    assert found["sparse_features"].scores.values["accuracy"] > 0.99
    over = scores_of(found, targets.task)
    assert over["over_best_baseline"]["baseline"] != "sparse_features"
    assert re.findall("minus that of ([a-z_]+)", comparison(over))[1:] == ["sparse_features"]
    (states,) = embeddings(model, sequences, layers=[1])
    means = Targets(Task.number, [], states[:, 0].astype(float), np.arange(30))
    fitted = probe(model, sequences, means, split, options)["sparse_features"]
    assert len(fitted.fitted.weights) == 128 and fitted.scores.values["R2"] > 0.5
    with pytest.raises(UserError, match="the head cnn reads hidden states, not features"):
        probe(model, sequences, targets, split, replace(options, head=Head.cnn))


@pytest.mark.slow
def test_convolutions_find_residue_labels(numbers, model, monkeypatch) -> None:
    monkeypatch.setattr("protlm.model.embedding.IN_MEMORY", 10)
    sequences, targets, split = planted_residues(numbers)
    options, rows = ProbeOptions(head=Head.cnn), np.arange(30)
    with pytest.raises(UserError, match="the head cnn needs labels of residues"):
        of_proteins = Targets(Task.one_class, ["a", "b"], rows % 2, rows)
        probe(model, sequences, of_proteins, split, options)
    found = probe(model, sequences, targets, split, options)
    assert [*found] == [MODEL, "random_weights", "residue", CONSTANT]
    assert found[MODEL].layer == model.num_layers and found[MODEL].penalty is None
    assert found["residue"].scores.values["accuracy"] > 0.95


def test_unresolved_residues_have_no_state() -> None:
    path = next((sample_dir() / "structures" / "fit").glob("*.pdb.gz"))
    whole = read_structure(path)
    backbone_L43 = whole.backbone_L43.copy()
    backbone_L43[[0, 7], 3] = np.nan
    labels = state_labels(replace(whole, backbone_L43=backbone_L43))
    assert [place for place, state in enumerate(labels) if state == "?"] == [0, 7]
    sequences, targets, split = state_targets([whole], [replace(whole, backbone_L43=backbone_L43)])
    assert sequences == [whole.sequence] * 2
    assert np.bincount(targets.groups).tolist() == [len(whole), len(whole) - 2]
    assert (split.train.tolist(), split.test.tolist()) == ([0], [1])


@pytest.fixture
def saved(tmp_path: Path, numbers, model) -> Path:
    width = model.description.model.model_dim
    fitted = fit(
        numbers.normal(size=(9, width)), np.arange(9) % 3, Task.one_class, num_classes=3, penalty=1
    )
    folder = tmp_path / "probe"
    folder.mkdir()
    write_probe(folder, Probe(Task.one_class, ["a", "b", "c"], 1, model.identity, fitted, "m"))
    return folder


def test_probes_are_read_as_written(saved: Path, model) -> None:
    found = read_probe(saved)
    found.check_model(model)
    assert (found.task, found.classes, found.layer) == (Task.one_class, ["a", "b", "c"], 1)
    with pytest.raises(
        UserError, match=r"was fitted on a model with other weights .* the same model, or none"
    ):
        found.check_model(model.with_random_weights(0))
    same_weights = model.with_random_weights(0)
    same_weights.network.load_state_dict(model.network.state_dict())
    found.check_model(same_weights)
    same_weights.description = replace(model.description, attention="softmax")
    with pytest.raises(UserError, match=r"other weights or settings"):
        found.check_model(same_weights)


def test_damaged_probes_are_refused(saved: Path, tmp_path: Path) -> None:
    path = saved / "probe.safetensors"
    path.write_bytes(path.read_bytes()[:-8] + b"\0" * 8)
    with pytest.raises(InputDataError, match=r"probe\.safetensors is damaged"):
        read_probe(saved)
    with pytest.raises(InputDataError, match="a folder that protlm probe has written"):
        read_probe(tmp_path)
