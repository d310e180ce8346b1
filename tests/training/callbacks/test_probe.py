"""Measurements and estimates during training: in the log, drawn, without effect on learning."""

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from protlm.analysis.structures import structure_files
from protlm.data.dataset import Batch
from protlm.downstream.estimators import Estimator, Predictor, score
from protlm.downstream.training_scores import AssayScores, StructureScores
from protlm.downstream.variants import read_variants
from protlm.loading import load_model
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import ProteinLM, build_network
from protlm.plots import loss_curve
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import sample_dir
from protlm.training.callbacks import estimate
from protlm.training.callbacks.estimate import WatchEstimates
from tests.fixtures.runs import rows_of, weights_of
from tests.small_models import small_model

VALUES = {
    "measured_contacts_short": 0.25,
    "measured_contacts_long": 0.125,
    "measured_secondary_structure": 0.5,
}
# Dropout draws random numbers in every step.
SETTINGS = ("model.dropout=0.1", "trainer.checkpoint_every=2")


@pytest.fixture
def disturbing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A measurement that draws random numbers and runs the model; the list counts its calls."""
    calls: list[int] = []

    def measure(self: StructureScores, model: PretrainedModel) -> dict[str, float]:
        assert not any(part.training for part in model.network.modules())
        torch.rand(7)
        model(model.tokenize(["MKTAYIAK"]))
        calls.append(1)
        return VALUES

    monkeypatch.setattr(StructureScores, "__call__", measure)
    return calls


@pytest.fixture
def assay(tmp_path: Path) -> tuple[Path, Path]:
    """Substitutions of a protein of eight residues, and the protein."""
    table, wild_type = tmp_path / "assay.csv", tmp_path / "wild_type.fasta"
    rows = ["M1A,0.3", "K2R,0.9", "T3S,0.7", "A4W:Y5P,-2", "I6L,0.5", "K8D,-1", "K8R,"]
    table.write_text("\n".join(["mutant,DMS_score", *rows]) + "\n")
    wild_type.write_text(">P\nMKTAYIAK\n")
    return table, wild_type


def zero_shot(model: PretrainedModel, table: Path, wild_type: Path) -> float:
    """Spearman's correlation of the six measured variants, by another implementation."""
    sequence = wild_type.read_text().split()[1]
    variants = read_variants(table, sequence)
    assert variants.measured is not None
    found = score(Estimator.masked_marginals, Predictor(model), sequence, variants.variants)
    return spearmanr(variants.measured[:6], found.values[:6]).statistic


def test_training_is_bitwise_the_same_with_measurements(train, disturbing, assay):
    without = weights_of(train("without", *SETTINGS))
    measured = [*SETTINGS, "trainer.measure_every=1", f"trainer.measure_assay={assay[0]}"]
    measured += [f"trainer.measure_wild_type={assay[1]}"]
    first = train("with", *measured)
    assert len(disturbing) == 4
    again = train("resumed", *measured, "trainer.max_steps=2")
    again = train(again, *measured, "trainer.max_steps=4")
    for run in (first, again):
        found = weights_of(run)
        assert found.keys() == without.keys()
        assert all(torch.equal(found[name], x) for name, x in without.items())
        rows = rows_of(run, "measured_contacts_long")
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        assert {name: rows[0][name] for name in VALUES} == VALUES
        assert rows[-1]["measured_zero_shot"] == pytest.approx(zero_shot(load_model(run), *assay))
        assert (run / "loss.png").is_file()


def test_the_scores_measure_a_model(tiny_run):
    scores = StructureScores(num_fit=2, num_test=2, max_residues=110)
    model = load_model(tiny_run)
    found = scores(model)
    assert tuple(found) == scores.columns
    assert all(0 <= value <= 1 for value in found.values())
    assert scores(model) == found


def test_the_scores_leave_the_test_structures_of_evaluations_alone():
    scores = StructureScores()
    used = [structure.identifier for structure in scores._fit + scores._test]
    assert len(scores._fit) == len(scores._test) == 10 and len(set(used)) == 20
    test = {path.name.split(".")[0] for path in structure_files(sample_dir() / "structures/test")}
    assert test and not test & set(used)


def test_measurements_are_drawn_against_the_right_axis():
    rows = [{"step": n, "train_loss": 3.0 - n, **VALUES} for n in (1.0, 2.0)]
    left, right = loss_curve(rows).axes
    assert right.get_ylabel() == "measured (%)"
    drawn = [np.asarray(line.get_ydata())[0] for line in right.lines]
    assert drawn == [25.0, 12.5, 50.0]
    assert right.get_ylim()[0] == 0
    _, right = loss_curve([{**rows[0], "measured_zero_shot": -0.1}]).axes
    assert right.lines[-1].get_label() == "100 × zero-shot Spearman"
    assert np.asarray(right.lines[-1].get_ydata()).tolist() == [-10.0]
    assert right.get_ylim()[0] < -10
    assert len(loss_curve([{"step": 1.0, "train_loss": 3.0}]).axes) == 1
    assert left.get_ylabel().startswith("loss")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("measure_every=1 measure_assay={0}", "give both"),
        ("measure_assay={0} measure_wild_type={1}", "never measured"),
        ("measure_every=1 measure_assay={1} measure_wild_type={1}", "name one of them mutant"),
    ],
)
def test_useless_assays_are_refused_before_training(train, tmp_path, assay, settings, message):
    with pytest.raises((UserError, InputDataError), match=message):
        train("run", *(f"trainer.{one}" for one in settings.format(*assay).split()))
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_assays_that_the_model_cannot_score_are_refused(assay):
    table, _ = assay
    with pytest.raises(UserError, match="has a protein of 8 residues, and the model accepts 7"):
        AssayScores(table, "MKTAYIAK", causal=True, max_residues=7)
    AssayScores(table, "MKTAYIAK", causal=False, max_residues=7)
    table.write_text("mutated_sequence,DMS_score\nMKTAYIA,1\nAKTAYIAK,2\nMKTAYIAR,3\n")
    with pytest.raises(UserError, match="has insertions or deletions"):
        AssayScores(table, "MKTAYIAK", causal=False, max_residues=None)
    table.write_text("mutant,DMS_score\nM1A,1\nM1C,2\nM1D,\n")
    with pytest.raises(InputDataError, match="2 variants with a DMS_score"):
        AssayScores(table, "MKTAYIAK", causal=False, max_residues=None)


SOUND = ("attention=performer_softmax", "model.qk_norm=true")
UNBOUNDED = ("attention=performer_softmax", "trainer.log_every=1")


def brute_force(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean |q̂ + k̂|² over the real pairs of all sequences, one per head."""
    norms = []
    for row, length in enumerate(mask.sum(1).tolist()):
        pairs = q[row, :, :length, None] + k[row, :, None, :length]
        norms.append(pairs.square().sum(-1).flatten(1) / q.shape[-1] ** 0.5)
    return torch.cat(norms, dim=1).mean(dim=1)


@torch.no_grad()
def test_the_log_has_the_norms_and_errors_of_the_batch(train, look_at):
    before: list[tuple[ProteinLM, Batch]] = []

    def keep(_: WatchEstimates, trainer: Any, module: Any, batch: Batch, index: int) -> None:
        before.append((copy.deepcopy(module.network), batch))

    look_at(WatchEstimates, "on_train_batch_start", keep)
    run = train("run", *SOUND, "model.num_layers=3", "trainer.max_steps=5")
    rows = rows_of(run, "relative_error_layer_1")
    assert [row["step"] for row in rows] == [2, 4]
    for row, (network, batch) in zip(rows, before[1::2], strict=False):
        inputs = network.attention_inputs(batch.tokens_BL, batch.mask_BL, causal=False)
        assert len(row) == 1 + 2 * 3
        for number, x in inputs:
            norm = brute_force(x.q_BHLK, x.k_BHLK, batch.mask_BL).max().item()
            error = math.sqrt(math.expm1(norm) / 256)
            assert row[f"square_norm_layer_{number}"] == pytest.approx(norm, rel=1e-4)
            assert row[f"relative_error_layer_{number}"] == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_only_the_batch_before_a_log_is_inspected_and_once(
    checkpointing, train, look_at, monkeypatch
):
    hooks: dict[str, list[int]] = {"on_train_batch_start": [], "on_train_batch_end": []}
    looks = []

    def note(event: str, _: WatchEstimates, trainer: Any, module: Any, *rest: Any) -> None:
        hooks[event].append(sum(len(part._forward_pre_hooks) for part in module.modules()))

    for event in hooks:
        look_at(WatchEstimates, event, partial(note, event), after=True)
    look = estimate.pair_sums
    monkeypatch.setattr(estimate, "pair_sums", lambda *x, **y: looks.append(1) or look(*x, **y))
    settings = [*SOUND, "trainer.accumulate_grad_batches=2", "trainer.valid_every=1"]
    train("run", *settings, f"trainer.activation_checkpointing={checkpointing}")
    assert hooks["on_train_batch_start"] == [0, 0, 0, 2, 0, 0, 0, 2]
    assert hooks["on_train_batch_end"] == [0] * 8
    assert len(looks) == 4


def test_large_norms_cause_one_warning_per_run(train, monkeypatch):
    def inflated(model: Any, attention: dict[str, Any], *, seed: int) -> ProteinLM:
        network = build_network(model, attention, seed=seed)
        for number, factor in ((1, 0.3), (2, 2.0)):
            block: Any = network.blocks[number - 1]
            for linear in (block.attention.query, block.attention.key):
                linear.weight.data *= factor
        return network

    monkeypatch.setattr("protlm.commands.train.build_network", inflated)
    with pytest.warns(UserWarning) as caught:
        run = train("run", *UNBOUNDED)
    (message,) = (str(warning.message) for warning in caught)
    first = rows_of(run, "relative_error_layer_1")[0]
    assert first["relative_error_layer_1"] < 1 < first["relative_error_layer_2"]
    assert "in layer 2: in head " in message and "of 256 features" in message
    norm = f"{first['square_norm_layer_2']:.3g}"
    assert f"|q+k|²/√K is {norm}, " in message
    assert message.endswith("in a run with another run_dir= model.qk_norm=true bounds the norm")
    # Resumed in a new process; warnings are errors here.
    train("run", *UNBOUNDED, "trainer.max_steps=6")
    assert len(rows_of(run, "relative_error_layer_1")) == 6


def test_trigonometric_features_are_judged_by_the_difference(train, monkeypatch):
    options = {"name": "performer_softmax", "estimator": "trigonometric", "denominator_floor": 1e-6}

    def trigonometric(model: Any, attention: dict[str, Any], *, seed: int) -> ProteinLM:
        return build_network(model, options, seed=seed)

    monkeypatch.setattr("protlm.commands.train.build_network", trigonometric)
    with pytest.warns(UserWarning, match=r"layers 1, 2: .*\|q-k\|.* bounds the norm$"):
        train("run", *UNBOUNDED, "trainer.max_steps=2")


def test_heads_and_settings_of_a_hybrid_are_named_as_the_model_has_them():
    hybrid = {"name": "hybrid", "local_heads": 1, "mechanism": "performer_softmax"}
    network = build_network(small_model("softmax").description.model, hybrid, seed=0)
    watch = WatchEstimates(network, every=1)
    worst = {2: estimate._WorstHead(number=1, norm=9.0, error=3.0, square_norm=9.0)}
    with pytest.warns(UserWarning, match=r"in head 2 of layer 2 .*") as warned:
        watch._warn(worst, has_norms=True)
    message = str(warned[0].message)
    assert "attention.options.optimal_for=9 and more attention.options.num_features" in message


def test_a_model_without_a_softmax_performer_is_ignored(tiny_run):
    header = (tiny_run / "metrics.csv").read_text().splitlines()[0]
    assert "_layer_" not in header
