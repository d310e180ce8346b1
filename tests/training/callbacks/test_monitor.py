"""What is measured during training, in the log and drawn; loggers, which never fail."""

import copy
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import numpy as np
import pytest
import torch
import yaml
from pytorch_lightning.loggers.logger import DummyLogger
from scipy.stats import spearmanr

from protlm.analysis.structures import structure_files
from protlm.checkpoints.validations import METRICS, read_metrics
from protlm.config import LoggerConfig, WandbMode
from protlm.data.dataset import Batch, SequenceDataset
from protlm.downstream.estimators import LogProbabilities, score
from protlm.downstream.training_scores import AssayScores, StructureScores
from protlm.downstream.variants import read_variants
from protlm.loading import load_model
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import ProteinLM, build_network
from protlm.options.score import Estimator
from protlm.plots import loss_curve
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import sample_dir
from protlm.training.callbacks import estimate, monitor
from protlm.training.callbacks.estimate import WatchEstimates
from protlm.training.flops import ModelFlops, peak_tflops
from protlm.training.loggers import COLUMNS, CsvFile, make_loggers
from protlm.training.module import LanguageModeling
from tests.attention.linearized.test_random_features import brute_force
from tests.fixtures.runs import rows_of, weights_of
from tests.small_models import network_of, small_model

CPU = torch.device("cpu")


def test_flops_are_those_of_the_formula_and_linear_for_linear_attention():
    network, length, depth, width = network_of("attention=softmax"), 48, 2, 64
    matrices = sum(p.numel() for p in network.parameters() if p.ndim == 2)
    matrices -= network.embedding.weight.numel()
    # Two for each weight and token, and q·k and the sum over values for each pair of positions.
    forward = 2 * matrices * length + depth * 2 * 2 * length**2 * width
    # On a card, too, where heads could be wider to hide padding.
    for device in (CPU, torch.device("meta")):
        flops = ModelFlops(network.to(device), causal=False)
        assert flops.training(length, device) == 3 * forward
    flops = ModelFlops(network_of("attention=performer_softmax"), causal=False)
    assert flops.training(128, CPU) == 2 * flops.training(64, CPU)


def test_a_run_logs_its_pace_its_memory_and_with_a_known_peak_its_utilization(
    train, tiny_run, capfd
):
    settings = ("data.mode=concatenated", "trainer.accumulate_grad_batches=2")
    run = train("run", *settings, "trainer.log_every=1", "trainer.peak_tflops=0.25")
    of_a_row = ModelFlops(network_of(), causal=False).training(128, CPU)
    rows = rows_of(run, "train_loss")
    assert len(rows) == 4
    for row in rows:
        expected = row["samples_per_second"] * of_a_row / 0.25e12
        assert row["model_flops_utilization"] == pytest.approx(expected, rel=1e-6)
        assert row["residues_per_second_per_device"] == row["residues_per_second"]
        assert 0 <= row["data_wait_fraction"] < 1
        assert 0.1 < row["memory_gib"] < 64
        assert row["gradient_norm"] > 0
    line = capfd.readouterr().err.splitlines()[-2]
    for said in ("loss ", "lr ", "gradient ", "residues/s", "a device", "MFU ", "waiting", "GiB"):
        assert said in line
    assert peak_tflops(CPU) is None
    assert not rows_of(tiny_run, "model_flops_utilization")


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 311.9),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA RTX A4000", None),
    ],
)
def test_the_peak_is_known_by_name(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(torch.device("cuda")) == peak


def test_rates_exclude_the_time_of_validation(train, monkeypatch, look_at):
    # A batch is waited for 3 seconds, trained on for one, validated for 100.
    spent: list[float] = []
    monkeypatch.setattr(monitor, "time", SimpleNamespace(perf_counter=lambda: sum(spent)))
    for of, name, seconds in (
        (SequenceDataset, "__getitem__", 3.0),
        (LanguageModeling, "training_step", 1.0),
        (LanguageModeling, "validation_step", 100.0),
    ):
        look_at(of, name, lambda *_, seconds=seconds: spent.append(seconds))
    settings = ("trainer.valid_every=1", "trainer.valid_batches=1", "data.num_workers=0")
    run = train("run", *settings, "trainer.max_steps=3")
    # The log after step 4 covers two steps; one of them was made before the stop.
    train(run, *settings, "trainer.max_steps=6")
    rows = {row["step"]: row for row in rows_of(run, "samples")}
    for step in (4, 6):
        samples = rows[step]["samples"] - rows[step - 2]["samples"]
        assert samples / rows[step]["samples_per_second"] == pytest.approx(2 * 4), step
        assert rows[step]["data_wait_fraction"] == pytest.approx(0.75), step


@pytest.mark.slow
def test_every_step_is_in_one_row_of_the_log(train):
    settings = ("trainer.max_steps=6", "trainer.valid_every=2")
    runs = [train(every, *settings, f"trainer.log_every={every}") for every in "13"]
    one, three = ([row["train_loss"] for row in rows_of(run, "train_loss")] for run in runs)
    assert (len(one), len(three)) == (6, 2)
    for number, value in enumerate(three):
        part = one[3 * number : 3 * number + 3]
        assert min(part) <= value <= max(part)
        assert value == pytest.approx(sum(part) / 3, rel=5e-3)


def row(step: int) -> str:
    """A row of the log that has only its step."""
    return f"{step}{',' * len(COLUMNS)}\n"


HEADER = f"step,{','.join(COLUMNS)}\n"


@pytest.mark.parametrize(
    ("text", "from_step", "kept"),
    [
        # No gaps and no repeats.
        (HEADER + row(1) + row(2) + row(3), 2, [1, 2]),
        # Truncated where the disk was full, and continued on the same line.
        (HEADER + row(1) + "2,0,8,2.5" + row(3), 5, [1]),
        # Truncated, and after a flipped bit.
        (HEADER + row(1) + "4,0\n" + row(5).replace("\n", "x\n"), 5, [1]),
    ],
)
def test_a_resumed_log_has_every_whole_row_once(text, from_step, kept, tmp_path):
    path = tmp_path / METRICS
    path.write_text(text)
    assert [one["step"] for one in read_metrics(path) if one["step"] <= from_step] == kept
    CsvFile(tmp_path, from_step=from_step).log_metrics({"train_loss": 0.5}, 9)
    rows = read_metrics(path)
    assert [one["step"] for one in rows] == [*kept, 9]
    assert rows[-1] == {"step": 9, "train_loss": 0.5}
    assert rows[0].get("train_loss", 0.1) == 0.1


def test_a_full_disk_leaves_no_truncated_row(tmp_path, monkeypatch):
    log = CsvFile(tmp_path, from_step=0)
    log.log_metrics({"train_loss": 0.1}, 1)

    class Full:
        def __init__(self, file: TextIO, columns: object) -> None:
            self.file = file

        def writerow(self, row: object) -> None:
            self.file.write("2,0,8,2.5")
            self.file.flush()
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="No space left"):
        patch.setattr("csv.DictWriter", Full)
        log.log_metrics({"train_loss": 0.2}, 2)
    log.log_metrics({"train_loss": 0.3}, 3)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.csv")] == [1, 3]


def test_tensorboard_is_written(train):
    run = train("run", "logger=tensorboard")
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    recorded = yaml.safe_load((run / "tensorboard" / "hparams.yaml").read_text())
    assert recorded["model"]["num_layers"] == 2 and len(recorded["data_fingerprint"]) == 64


def test_a_resumed_run_hides_the_repeated_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = LoggerConfig(tensorboard=True)
    for from_step, steps in ((0, (1, 2, 3)), (1, (2, 3))):
        _, tensorboard = make_loggers(config, tmp_path, from_step=from_step)
        for step in steps:
            tensorboard.log_metrics({"train_loss": from_step + step / 10}, step)
        tensorboard.finalize("success")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, round(event.value, 3)) for event in events.Scalars("train_loss")]
    assert found == [(1, 0.1), (2, 1.2), (3, 1.3)]


def test_a_resumed_run_keeps_its_wandb_id(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(
        "pytorch_lightning.loggers.WandbLogger", lambda **named: told.append(named) or DummyLogger()
    )
    (tmp_path / "run").mkdir()
    for folder in ("run", "run", "copy"):
        if folder == "copy":
            shutil.copytree(tmp_path / "run", tmp_path / "copy")
        loggers = make_loggers(LoggerConfig(wandb=WandbMode.online), tmp_path / folder, from_step=0)
        loggers[1].log_metrics({"train_loss": 0.1}, 1)
    first, second, other = (named["id"] for named in told)
    assert first == second != other
    assert all(named["resume"] == "allow" for named in told)


@pytest.mark.slow
def test_wandb_runs_offline(protlm_command, tiny_settings, tmp_path):
    environment = {"HOME": str(tmp_path), "WANDB_SILENT": "true"}
    settings = [*tiny_settings, "run_dir=run", "trainer.max_steps=2", "trainer.log_every=1"]
    done = protlm_command("train", *settings, "logger=wandb", cwd=tmp_path, env=environment)
    assert "wandb failed" not in done.stderr
    logged = list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))
    assert len(logged) == 1 and logged[0].stat().st_size > 0
    assert read_metrics(tmp_path / "run" / "metrics.csv")


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
    found = score(Estimator.masked_marginals, LogProbabilities(model), sequence, variants.variants)
    return spearmanr(variants.measured[:6], found.values[:6]).statistic


@pytest.mark.slow
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
    assert [np.asarray(line.get_ydata())[0] for line in right.lines] == [25.0, 12.5, 50.0]
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
    indels = "mutated_sequence,DMS_score\nMKTAYIA,1\nAKTAYIAK,2\nMKTAYIAR,3\n"
    for text, kind, told in (
        (indels, UserError, "has insertions or deletions"),
        ("mutant,DMS_score\nM1A,1\nM1C,2\nM1D,\n", InputDataError, "2 variants with a DMS_score"),
    ):
        table.write_text(text)
        with pytest.raises(kind, match=told):
            AssayScores(table, "MKTAYIAK", causal=False, max_residues=None)


SOUND = ("attention=performer_softmax", "model.qk_norm=true")
UNBOUNDED = ("attention=performer_softmax", "trainer.log_every=1")


@pytest.mark.slow
@torch.no_grad()
def test_the_log_has_the_norms_and_errors_of_the_batch(train, look_at):
    before: list[tuple[ProteinLM, Batch]] = []
    look_at(
        *(WatchEstimates, "on_train_batch_start"),
        lambda _, __, one, batch, *rest: before.append((copy.deepcopy(one.network), batch)),
    )
    run = train("run", *SOUND, "model.num_layers=3", "trainer.max_steps=5")
    rows = rows_of(run, "relative_error_layer_1")
    assert [row["step"] for row in rows] == [2, 4]
    for row, (network, batch) in zip(rows, before[1::2], strict=False):
        assert len(row) == 1 + 2 * 3
        for number, x in network.attention_inputs(batch.tokens_BL, batch.mask_BL, causal=False):
            norm = brute_force(x.q_BHLK, x.k_BHLK, batch.mask_BL, 1, causal=False).max().item()
            error = math.sqrt(math.expm1(norm) / 256)
            assert row[f"square_norm_layer_{number}"] == pytest.approx(norm, rel=1e-4)
            assert row[f"relative_error_layer_{number}"] == pytest.approx(error, rel=1e-3)


@pytest.mark.slow
def test_layers_that_sum_over_a_family_in_order_are_not_inspected(train, tiny_clusters):
    rows = ("data.batching=relatives", "data.max_length=512", f"data.dir={tiny_clusters}")
    seen = ("model.relatives=ordered", "model.relatives_every=2", "trainer.log_every=1")
    found = rows_of(train("run", *SOUND, *rows, *seen), "relative_error_layer_1")
    assert len(found) == 4 and all("relative_error_layer_2" not in row for row in found)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_only_the_batch_before_a_log_is_inspected_and_once(checkpointing, train, monkeypatch):
    looks, look = [], estimate.pair_sums
    monkeypatch.setattr(estimate, "pair_sums", lambda *x, **y: looks.append(1) or look(*x, **y))
    settings = [*SOUND, "trainer.accumulate_grad_batches=2", "trainer.valid_every=1"]
    train("run", *settings, f"trainer.activation_checkpointing={checkpointing}")
    # Two layers, and two logs of the four steps.
    assert len(looks) == 4


@pytest.mark.slow
def test_large_norms_cause_one_warning_per_run(train, monkeypatch):
    def inflated(model: Any, attention: dict[str, Any], *, seed: int) -> ProteinLM:
        network = build_network(model, attention, seed=seed)
        for number, factor in ((1, 0.3), (2, 2.0)):
            block: Any = network.blocks[number - 1]
            for linear in (block.attention.query, block.attention.key):
                linear.weight.data *= factor
        return network

    monkeypatch.setattr("protlm.build.build_network", inflated)
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


def test_heads_and_settings_of_a_hybrid_are_named_as_the_model_has_them():
    hybrid = {"local_heads": 1, "mechanism": "performer_softmax"}
    model = small_model("alternating", layers=["softmax", "hybrid"], options={"hybrid": hybrid})
    described = replace(model.description, model=replace(model.description.model, qk_norm=True))
    watch = WatchEstimates(model.network, every=1)
    worst = {2: estimate._WorstHead(number=1, norm=9.0, error=3.0, square_norm=9.0)}
    with pytest.warns(UserWarning, match=r"in head 2 of layer 2 .*") as warned:
        watch._warn(worst, described)
    group = "attention.options.hybrid.options"
    assert f"{group}.optimal_for=9 and more {group}.num_features" in str(warned[0].message)


def test_a_model_without_a_softmax_performer_is_ignored(tiny_run):
    assert "_layer_" not in (tiny_run / "metrics.csv").read_text().splitlines()[0]
