"""`protlm finetune`: all weights and LoRA, resuming, the merged model, and mistakes."""

import csv
import errno
import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import protlm
from protlm.checkpoints.format import Checkpoint, all_checkpoints, export, load_training
from protlm.commands.finetune import Result, finetune_labels
from protlm.commands.probe import predict
from protlm.options.labels import FinetuneOptions, FinetuneSettings, Form, LabelOptions
from protlm.system.errors import InputDataError, OutputError, UserError
from protlm.system.lock import LOCK
from protlm.training.finetuning import ReportEpochs
from protlm.training.labels import LabelLearning
from tests.fixtures.calls import looked_at
from tests.fixtures.commands import Command, read_table
from tests.fixtures.runs import RUN
from tests.small_models import small_model

SETTINGS = FinetuneSettings(epochs=4, patience=9, learning_rate=3e-3, batch_size=8)
OPTIONS, ALL = FinetuneOptions(SETTINGS), LabelOptions()
LETTERS = "ACDEFGHIKLMNPQRSTVY"
NEW, PROTEINS = Path("run"), Path("proteins.fasta")
OUTPUTS = {
    "adapter": "protlm.training.lora.save_adapters",
    "probe": "protlm.commands.finetune.write_probe",
    "model": "protlm.commands.finetune.export",
}
pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def labels() -> Path:
    """Classes by the order of two letters, which no composition has."""
    numbers = np.random.default_rng(0)
    table = ["identifier\tsequence\tlabel\tsplit"]
    for number in range(60):
        label = number % 2
        letters = [LETTERS[n] for n in numbers.integers(len(LETTERS), size=20)]
        letters[4:12] = "WWWWCCCC" if label else "WCWCWCWC"
        split = ("train", "train", "train", "valid", "test", "test")[number % 6]
        table.append(f"P{number}\t{''.join(letters)}\tc{label}\t{split}")
    path = Path("labels.tsv")
    path.write_text("\n".join([*table, ""]))
    PROTEINS.write_text("".join(">{}\n{}\n".format(*row.split("\t")) for row in table[1:]))
    return path


@pytest.fixture
def residues() -> Path:
    """A class of each residue that only its left neighbor decides; some are unknown."""
    numbers = np.random.default_rng(0)
    labels, fasta = [], []
    for number in range(40):
        letters = [LETTERS[n] for n in numbers.integers(len(LETTERS), size=16 + number % 5)]
        states = ["H" if left in "ACDEFGHIK" else "E" for left in letters]
        states = ["?", *states[:-2], "?"]
        split = ("train", "train", "valid", "test")[number % 4]
        labels.append(f">P{number} SET={split}\n{''.join(states)}\n")
        fasta.append(f">P{number}\n{''.join(letters)}\n")
    PROTEINS.write_text("".join(fasta))
    path = Path("residues.fasta")
    path.write_text("".join(labels))
    return path


def tune(
    labels: Path, run: str = "run", options: FinetuneOptions = OPTIONS, reading: LabelOptions = ALL
) -> Result | None:
    """Fine-tunes the model on labels into a folder."""
    return finetune_labels(labels, RUN, Path(run), options, reading)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(protlm.load(folder).network.state_dict())


def assert_same_runs(*runs: str) -> None:
    """Two runs have the same log and the same model."""
    assert len({Path(run, "metrics.csv").read_bytes() for run in runs}) == 1
    models = [weights(Path(run, "model")) for run in runs]
    torch.testing.assert_close(*models, rtol=0, atol=0)


def predicted() -> dict[tuple[str, str], dict[str, str]]:
    """The predictions of all proteins, with the merged model and the head, by place."""
    predict(PROTEINS, NEW / "probe", NEW / "model", Path("all.tsv"))
    return {(row["identifier"], row.get("position", "")): row for row in read_table("all.tsv")}


def check_predictions(column: str, count: int) -> None:
    """`predict` with the merged model and the head gives the predictions of the run."""
    found, own = predicted(), read_table(NEW / "probe" / "predictions.tsv")
    assert len(own) == count
    for row in own:
        again = found[row["identifier"], row.get("position", "")]
        assert float(again[column]) == pytest.approx(float(row[column]), abs=2e-3)


@pytest.mark.parametrize(("made", "name"), OUTPUTS.items())
def test_a_run_that_lost_its_lock_writes_no_output(
    made: str, name: str, labels: Path, look_at: Any
) -> None:
    owner, _, function = name.rpartition(".")
    look_at(resolve_name(owner), function, lambda *_, **__: (NEW / LOCK).write_text("{}"))
    with pytest.raises(OutputError, match="took it over"):
        tune(labels, options=FinetuneOptions(replace(SETTINGS, epochs=1), rank=2))
    assert not (NEW / made).exists()


@pytest.mark.slow
def test_all_weights_are_trained_and_resumed(
    labels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tune(labels)
    before, after = weights(RUN), weights(Path("run/model"))
    changed = [n for n in before if not torch.equal(before[n], after[n])]
    assert any("attention.query" in name for name in changed) and "embedding.weight" in changed
    values = {n: p.scores.values["accuracy"] for n, p in result.predictors.items()}
    assert values["model"] >= values["frozen"]
    check_predictions("p(c1)", 20)
    results = json.loads(Path("run/probe/results.json").read_text())
    assert {"model", "frozen", "random_weights"} <= set(results["predictors"])

    # Stopped in the middle of the third epoch and continued: the same weights.
    def stop(_, trainer, *rest) -> None:
        if trainer.global_step == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    with looked_at(ReportEpochs, "on_train_batch_start", stop), pytest.raises(SystemExit) as end:
        tune(labels, "cut")
    assert end.value.code == 75
    assert "the same command continues" in capsys.readouterr().err
    assert all_checkpoints(Path("cut"))[-1].name == "step-00000010.ckpt"
    with pytest.raises(UserError, match=r"begun with --learning-rate 0\.003, not 0\.01: "):
        tune(labels, "cut", FinetuneOptions(replace(SETTINGS, learning_rate=1e-2)))
    # Nor do other labels, sequences or clusters of the same file continue it.
    changed, clusters = Path("changed.fasta"), Path("clusters.tsv")
    changed.write_text(PROTEINS.read_text().replace("WWWW", "WWWA"))
    clusters.write_text("".join(f"P{n // 2}\tP{n}\n" for n in range(60)))
    for reading, words in (
        (LabelOptions(form=Form(column="split")), "the values of the labels"),
        (LabelOptions(sequences=changed), "the sequences"),
        (LabelOptions(cluster_table=clusters), "the split"),
    ):
        with pytest.raises(UserError, match=f"begun with {words}"):
            tune(labels, "cut", reading=reading)
    tune(labels, "cut")
    assert_same_runs("run", "cut")
    with pytest.raises(OutputError, match="is complete"):
        tune(labels, "cut")


@pytest.mark.slow
def test_a_validation_of_the_start_that_is_cut_off_has_no_result(
    labels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A validation ends early after every tenth batch, and each of the 24 is a protein.
    lines = labels.read_text().splitlines()
    more = [line.replace("P", "Q", 1) for line in lines[1:] if line.endswith(("train", "valid"))]
    labels.write_text("\n".join([*lines, *(row.replace("train", "valid") for row in more), ""]))
    options = FinetuneOptions(replace(SETTINGS, epochs=1, batch_size=1))
    count = ReportEpochs.on_validation_batch_end

    def stopped(self, trainer, *given) -> None:
        count(self, trainer, *given)
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(ReportEpochs, "on_validation_batch_end", count)

    monkeypatch.setattr(ReportEpochs, "on_validation_batch_end", stopped)
    with pytest.raises(SystemExit) as end:
        tune(labels, options=options)
    assert end.value.code == 75
    assert Path("run/metrics.csv").read_bytes() == b""
    tune(labels, options=options)
    assert [row["epoch"] for row in read_table(Path("run/metrics.csv"))] == ["0", "1"]


@pytest.mark.slow
def test_a_row_that_cannot_be_written_ends_the_run(labels: Path) -> None:
    """The same command repeats the validation."""
    options = FinetuneOptions(replace(SETTINGS, epochs=2))
    tune(labels, "whole", options)
    for epoch in (0, 1):

        def full(_: Any, row: dict[str, Any], epoch: int = epoch) -> None:
            if row["epoch"] == epoch:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with looked_at(csv.DictWriter, "writerow", full), pytest.raises(OutputError) as end:
            tune(labels, options=options)
        told = "metrics.csv: no space left; .*; the same command continues the run"
        assert re.search(told, str(end.value))
        assert len(read_table(NEW / "metrics.csv")) == epoch
    tune(labels, options=options)
    assert_same_runs("run", "whole")


def rename_first(run: Path) -> None:
    for path in [*run.glob("checkpoints/step-00000000*")]:
        path.rename(path.with_name(path.name.replace("00000000", "00000099")))
    (run / "checkpoints/latest").write_text("step-00000099.ckpt\n")


def change_log(run: Path) -> None:
    (log := run / "metrics.csv").write_text(log.read_text().replace(",0.", ",0.0"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change_log, ""),
        (lambda run: (run / "metrics.csv").unlink(), ""),
        (
            lambda run: (run / "checkpoints/step-00000000.ckpt").unlink(),
            r"step-00000000\.ckpt is missing .* weights of epoch 0, .*; remove damaged to",
        ),
        (
            rename_first,
            r"step-00000099\.ckpt is not of the step .* another version: remove damaged",
        ),
    ],
    ids=["log", "missing log", "best", "renamed"],
)
def test_a_damaged_run_is_continued_as_it_was_or_refused(
    damage: Any, words: str, residues: Path, killed_after: Any
) -> None:
    """With a rate that destroys the model, the start remains the best."""
    options = FinetuneOptions(replace(SETTINGS, epochs=3, learning_rate=0.5))
    reading = LabelOptions(sequences=PROTEINS)
    with killed_after(7):
        tune(residues, "damaged", options, reading)
    damage(Path("damaged"))
    if words:
        with pytest.raises(InputDataError, match=words):
            tune(residues, "damaged", options, reading)
        return
    tune(residues, "damaged", options, reading)
    tune(residues, "whole", options, reading)
    assert_same_runs("damaged", "whole")
    assert len(Path("whole/metrics.csv").read_bytes().splitlines()) == 5


@pytest.mark.slow
def test_a_run_that_is_killed_after_any_validation_is_continued(
    labels: Path, monkeypatch: pytest.MonkeyPatch, killed_after: Any
) -> None:
    """Before the next checkpoint, by whose log another epoch is the best; and before the result."""
    monkeypatch.setattr(
        LabelLearning,
        "valid_scores",
        lambda self: ((2.0, 3.0, 1.0, 4.0, 0.5)[self.trainer.global_step // 4], 0.5),
    )
    tune(labels, "whole")
    for step in range(0, 17, 4):
        with killed_after(step, "on_validation_end"):
            tune(labels)
    tune(labels)
    assert_same_runs("run", "whole")


def test_adapters_are_trained_saved_and_merged(labels: Path) -> None:
    options = FinetuneOptions(SETTINGS, rank=2, targets=("query", "value"))
    tune(labels, options=options)
    before, after = weights(RUN), weights(NEW / "model")
    assert before.keys() == after.keys()
    changed = {n.rpartition(".")[0] for n in before if not torch.equal(before[n], after[n])}
    assert {name.rpartition(".")[2] for name in changed} == {"query", "value"}
    check_predictions("p(c1)", 20)
    stored = load_file(NEW / "adapter" / "adapter.safetensors")
    assert len(stored) == 2 * len(changed)
    for name in changed:
        expected = before[f"{name}.weight"] + 2 * stored[f"{name}.B"] @ stored[f"{name}.A"]
        assert torch.allclose(after[f"{name}.weight"], expected, atol=1e-6)
    with pytest.raises(UserError, match="no layer is named 'nothing'; there are: "):
        tune(labels, "x", replace(options, targets=("nothing",)))
    assert not Path("x").exists()


@pytest.mark.parametrize("rank", [None, 2])
def test_a_model_that_sees_relatives_learns_of_proteins_alone(
    rank: int | None, labels: Path
) -> None:
    model = small_model("performer_relu", relatives="full", relatives_sum="apart")
    export(Checkpoint(NEW, model.description, model.network.state_dict()), Path("related"))
    options = FinetuneOptions(replace(SETTINGS, epochs=1), rank=rank)
    finetune_labels(labels, Path("related"), NEW, options, ALL)
    tuned = protlm.load(NEW / "model")
    assert tuned.description.model == model.description.model and tuned.hash != model.hash


def test_residues_are_learned(residues: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The outputs of the merged model are those of the run, residue by residue."""
    result = tune(residues, reading=LabelOptions(sequences=PROTEINS))
    assert {"model", "frozen", "residues_around"} <= set(result.predictors)
    printed = capsys.readouterr().err
    assert "epoch 4 of 4 at most: training loss" in printed
    epochs = read_table(NEW / "metrics.csv")
    assert [row["epoch"] for row in epochs if row["valid_loss"]] == ["0", "1", "2", "3", "4"]
    assert len(epochs) == 5
    assert not epochs[0]["train_loss"]
    start = float(epochs[0]["valid_accuracy"])
    assert f"epoch 0, before training: validation accuracy {start:.3f}, loss" in printed
    assert f"validation accuracy {float(epochs[-1]['valid_accuracy']):.3f}, loss" in printed
    assert float(epochs[-1]["train_loss"]) < float(epochs[1]["train_loss"])
    # Of the ten test proteins, without the first and the last residue.
    check_predictions("p(H)", sum(14 + n % 5 for n in range(3, 40, 4)))


@pytest.mark.slow
def test_two_devices_learn_what_one_learns(residues: Path, protlm_command: Command) -> None:
    """Up to rounding: processes add gradients in another order. The last batch has one protein."""
    for count in ("1", "2"):
        options = ["--epochs", "2", "--batch-size", "19", "--learning-rate", "1e-3"]
        options += ["--sequences", PROTEINS, "--device", "cpu"]
        typed = ("finetune", residues, "-m", RUN, "-o", count, "--devices", count)
        done = protlm_command(*typed, *options)
        assert done.stderr.count("epoch 2 of 2") == 1 and done.stdout.count("labels by") == 1
    # Of the last epoch, whether it is the best or not.
    one, two = (load_training(all_checkpoints(Path(n))[-1])["state_dict"] for n in "12")
    before = {f"network.{name}": value for name, value in weights(RUN).items()}
    torch.testing.assert_close(one, two, rtol=1e-3, atol=2e-5)
    moved = max(float((one[name] - value).abs().max()) for name, value in before.items())
    assert moved > 1e-3
    for mine, its in zip(*(read_table(Path(n, "metrics.csv")) for n in "12"), strict=True):
        cells = [[float(cell or 0) for cell in row.values()] for row in (mine, its)]
        assert cells[0] == pytest.approx(cells[1], abs=1e-4)


@pytest.mark.slow
def test_training_stops_early(labels: Path) -> None:
    """With a large rate the loss soon rises, and the best weights are those of an early epoch."""
    settings = replace(SETTINGS, epochs=30, patience=1, learning_rate=0.5)
    tune(labels, options=FinetuneOptions(settings))
    losses = [float(row["valid_loss"]) for row in read_table(NEW / "metrics.csv")]
    assert len(losses) < 30 and losses[-1] > min(losses)
    # Those of the epoch with the lowest loss, which a shorter run ends with.
    shorter = replace(settings, epochs=int(np.argmin(losses)) + 1)
    tune(labels, "x", FinetuneOptions(shorter))
    until_best = weights(Path("x/model"))
    assert all(torch.equal(w, until_best[n]) for n, w in weights(NEW / "model").items())


@pytest.mark.parametrize("rank", [None, 2])
def test_the_start_is_the_result_if_no_epoch_is_better(
    rank: int | None, residues: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a rate that destroys the model, it is the original with the probe that was fitted."""
    options = FinetuneOptions(replace(SETTINGS, patience=2, learning_rate=0.5), rank=rank)
    tune(residues, options=options, reading=LabelOptions(sequences=PROTEINS))
    epochs = read_table(NEW / "metrics.csv")
    losses = [float(row["valid_loss"]) for row in epochs]
    assert len(losses) == 3 and losses[0] < min(losses[1:])
    before, after = weights(RUN), weights(NEW / "model")
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert "no epoch has a lower validation loss than the start" in capsys.readouterr().err
    # The head, too: with the original it has the validation accuracy of the start.
    found = predicted()
    lines, right = residues.read_text().splitlines(), []
    for name, states in zip(lines[::2], lines[1::2], strict=True):
        for position, state in enumerate(states, start=1):
            if name.endswith("SET=valid") and state != "?":
                row = found[name[1:].split()[0], str(position)]
                right.append((float(row["p(H)"]) > 0.5) == (state == "H"))
    assert np.mean(right) == pytest.approx(float(epochs[0]["valid_accuracy"]), abs=1e-6)
