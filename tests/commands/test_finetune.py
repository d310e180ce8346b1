"""`protlm finetune`: all weights and LoRA, resuming, the merged model, and mistakes."""

import csv
import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import protlm
from protlm.checkpoints.format import all_checkpoints, load_training
from protlm.commands.finetune import FinetuneOptions, finetune_labels, run_folder
from protlm.commands.probe import predict
from protlm.downstream.examples import LabelOptions
from protlm.system.errors import OutputError, UserError
from protlm.system.lock import LOCK
from protlm.training.finetuning import ReportEpochs
from protlm.training.labels import FinetuneSettings

Command = Callable[..., "subprocess.CompletedProcess[str]"]
SETTINGS = FinetuneSettings(epochs=4, patience=9, learning_rate=3e-3, batch_size=8)
LETTERS = "ACDEFGHIKLMNPQRSTVY"


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    """Classes by the order of two letters, which no composition has."""
    numbers = np.random.default_rng(0)
    table = ["identifier\tsequence\tlabel\tsplit"]
    for number in range(60):
        label = number % 2
        letters = [LETTERS[n] for n in numbers.integers(len(LETTERS), size=20)]
        letters[4:12] = "WWWWCCCC" if label else "WCWCWCWC"
        split = ("train", "train", "train", "valid", "test", "test")[number % 6]
        table.append(f"P{number}\t{''.join(letters)}\tc{label}\t{split}")
    path = tmp_path / "labels.tsv"
    path.write_text("\n".join([*table, ""]))
    fasta = "".join(">{}\n{}\n".format(*row.split("\t")) for row in table[1:])
    (tmp_path / "proteins.fasta").write_text(fasta)
    return path


@pytest.fixture
def residues(tmp_path: Path) -> Path:
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
    (tmp_path / "proteins.fasta").write_text("".join(fasta))
    path = tmp_path / "residues.fasta"
    path.write_text("".join(labels))
    return path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(protlm.load(folder).network.state_dict())


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


def predicted(run: Path, folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    """The predictions of all proteins, with the merged model and the head, by place."""
    predict(folder / "proteins.fasta", run / "probe", run / "model", folder / "all.tsv")
    return {(row["identifier"], row.get("position", "")): row for row in rows(folder / "all.tsv")}


def check_predictions(run: Path, folder: Path, column: str, count: int) -> None:
    """`predict` with the merged model and the head gives the predictions of the run."""
    found, own = predicted(run, folder), rows(run / "probe" / "predictions.tsv")
    assert len(own) == count
    for row in own:
        again = found[row["identifier"], row.get("position", "")]
        assert float(again[column]) == pytest.approx(float(row[column]), abs=2e-3)


def check_other_data(labels: Path, model: Path, folder: Path, options: FinetuneOptions) -> None:
    """Other labels, sequences or clusters of the same file do not continue the run `cut`."""
    run = folder / "cut"
    with pytest.raises(UserError, match="begun with the values of the labels"):
        finetune_labels(labels, model, run, options, LabelOptions(column="split"))
    changed = folder / "changed.fasta"
    changed.write_text((folder / "proteins.fasta").read_text().replace("WWWW", "WWWA"))
    with pytest.raises(UserError, match="begun with the sequences"):
        finetune_labels(labels, model, run, options, LabelOptions(sequences=changed))
    clusters = folder / "clusters.tsv"
    clusters.write_text("".join(f"P{n // 2}\tP{n}\n" for n in range(60)))
    with pytest.raises(UserError, match="begun with the split"):
        finetune_labels(labels, model, run, options, LabelOptions(cluster_table=clusters))


def test_two_processes_do_not_share_a_folder(labels: Path, tiny_run: Path, tmp_path: Path) -> None:
    run, told = tmp_path / "run", r"is being trained by process.*another --output"
    with run_folder(run, {}, break_lock=False), pytest.raises(OutputError, match=told):
        finetune_labels(labels, tiny_run, run, FinetuneOptions(SETTINGS), LabelOptions())


def test_a_run_that_lost_its_lock_stops(labels: Path, tiny_run: Path, tmp_path: Path) -> None:
    run, begin = tmp_path / "run", ReportEpochs.on_train_batch_start

    def interfere(self: ReportEpochs, *given: Any) -> None:
        (run / LOCK).unlink(missing_ok=True)
        begin(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReportEpochs, "on_train_batch_start", interfere)
        with pytest.raises(OutputError, match=r"lock.json is gone"):
            finetune_labels(labels, tiny_run, run, FinetuneOptions(SETTINGS), LabelOptions())
    assert [path.name for path in all_checkpoints(run)] == ["step-00000000.ckpt"]


def test_all_weights_are_trained_and_resumed(
    labels: Path,
    tiny_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = FinetuneOptions(SETTINGS)
    result = finetune_labels(labels, tiny_run, tmp_path / "run", options, LabelOptions())
    assert result is not None
    before, after = weights(tiny_run), weights(tmp_path / "run" / "model")
    changed = [n for n in before if not torch.equal(before[n], after[n])]
    assert any("attention.query" in name for name in changed) and "embedding.weight" in changed
    values = {n: p.scores.values["accuracy"] for n, p in result.predictors.items()}
    assert values["model"] >= values["frozen"]
    check_predictions(tmp_path / "run", tmp_path, "p(c1)", 20)
    results = json.loads((tmp_path / "run" / "probe" / "results.json").read_text())
    assert {"model", "frozen", "random_weights"} <= set(results["predictors"])
    # Stopped in the middle of the third epoch and continued: the same weights.
    start = ReportEpochs.on_train_batch_start

    def stopped(self, trainer, *given) -> None:
        start(self, trainer, *given)
        if trainer.global_step == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(ReportEpochs, "on_train_batch_start", stopped)
        finetune_labels(labels, tiny_run, tmp_path / "cut", options, LabelOptions())
    assert end.value.code == 75
    assert "the same command continues" in capsys.readouterr().err
    assert all_checkpoints(tmp_path / "cut")[-1].name == "step-00000010.ckpt"
    other = replace(options, training=replace(SETTINGS, learning_rate=1e-2))
    with pytest.raises(UserError, match=r"begun with --learning-rate 0\.003, not 0\.01: "):
        finetune_labels(labels, tiny_run, tmp_path / "cut", other, LabelOptions())
    check_other_data(labels, tiny_run, tmp_path, options)
    finetune_labels(labels, tiny_run, tmp_path / "cut", options, LabelOptions())
    again = weights(tmp_path / "cut" / "model")
    assert all(torch.equal(after[name], again[name]) for name in after)
    log, continued = (tmp_path / name / "metrics.csv" for name in ("run", "cut"))
    assert log.read_bytes() == continued.read_bytes()
    with pytest.raises(OutputError, match="is complete"):
        finetune_labels(labels, tiny_run, tmp_path / "cut", options, LabelOptions())


def test_a_validation_of_the_start_that_is_cut_off_has_no_result(
    labels: Path, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        finetune_labels(labels, tiny_run, tmp_path / "run", options, LabelOptions())
    assert end.value.code == 75
    assert not (tmp_path / "run" / "metrics.csv").exists()
    finetune_labels(labels, tiny_run, tmp_path / "run", options, LabelOptions())
    assert [row["epoch"] for row in rows(tmp_path / "run" / "metrics.csv")] == ["0", "1"]


def test_adapters_are_trained_saved_and_merged(
    labels: Path, tiny_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = FinetuneOptions(SETTINGS, rank=2, targets=("query", "value"))
    finetune_labels(labels, tiny_run, run, options, LabelOptions())
    before, after = weights(tiny_run), weights(run / "model")
    assert before.keys() == after.keys()
    changed = {n.rpartition(".")[0] for n in before if not torch.equal(before[n], after[n])}
    assert {name.rpartition(".")[2] for name in changed} == {"query", "value"}
    check_predictions(run, tmp_path, "p(c1)", 20)
    stored = load_file(run / "adapter" / "adapter.safetensors")
    assert len(stored) == 2 * len(changed)
    for name in changed:
        expected = before[f"{name}.weight"] + 2 * stored[f"{name}.B"] @ stored[f"{name}.A"]
        assert torch.allclose(after[f"{name}.weight"], expected, atol=1e-6)
    with pytest.raises(UserError, match="no layer is named 'nothing'; there are: "):
        other = replace(options, targets=("nothing",))
        finetune_labels(labels, tiny_run, tmp_path / "x", other, LabelOptions())
    assert not (tmp_path / "x").exists()


def test_residues_are_learned(
    residues: Path, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The outputs of the merged model are those of the run, residue by residue."""
    run, reading = tmp_path / "run", LabelOptions(sequences=tmp_path / "proteins.fasta")
    result = finetune_labels(residues, tiny_run, run, FinetuneOptions(SETTINGS), reading)
    assert result is not None
    assert {"model", "frozen", "residues_around"} <= set(result.predictors)
    printed = capsys.readouterr().err
    assert "epoch 4 of 4 at most: training loss" in printed
    epochs = rows(run / "metrics.csv")
    assert [row["valid_loss"] for row in epochs] and len(epochs) == 5
    assert [row["epoch"] for row in epochs] == ["0", "1", "2", "3", "4"]
    assert not epochs[0]["train_loss"]
    start = float(epochs[0]["valid_accuracy"])
    assert f"epoch 0, before training: validation accuracy {start:.3f}, loss" in printed
    assert f"validation accuracy {float(epochs[-1]['valid_accuracy']):.3f}, loss" in printed
    assert float(epochs[-1]["train_loss"]) < float(epochs[1]["train_loss"])
    # Of the ten test proteins, without the first and the last residue.
    check_predictions(run, tmp_path, "p(H)", sum(14 + n % 5 for n in range(3, 40, 4)))


@pytest.mark.slow
def test_two_devices_learn_what_one_learns(
    residues: Path, tiny_run: Path, tmp_path: Path, protlm_command: Command
) -> None:
    """Up to rounding: processes add gradients in another order. The last batch has one protein."""
    for count in ("1", "2"):
        options = ["--epochs", "2", "--batch-size", "19", "--learning-rate", "1e-3"]
        options += ["--sequences", tmp_path / "proteins.fasta", "--device", "cpu"]
        done = protlm_command(
            *("finetune", residues, "-m", tiny_run, "-o", tmp_path / count, "--devices", count),
            *options,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("epoch 2 of 2") == 1 and done.stdout.count("labels by") == 1
    # Of the last epoch, whether it is the best or not.
    folders = (tmp_path / count for count in ("1", "2"))
    one, two = (load_training(all_checkpoints(one)[-1])["state_dict"] for one in folders)
    before = {f"network.{name}": value for name, value in weights(tiny_run).items()}
    for name, value in one.items():
        assert torch.allclose(value, two[name], rtol=1e-3, atol=2e-5), name
    moved = max(float((one[name] - value).abs().max()) for name, value in before.items())
    assert moved > 1e-3
    for mine, its in zip(*(rows(tmp_path / n / "metrics.csv") for n in ("1", "2")), strict=True):
        cells = [[float(cell or 0) for cell in row.values()] for row in (mine, its)]
        assert cells[0] == pytest.approx(cells[1], abs=1e-4)


def test_training_stops_early(labels: Path, tiny_run: Path, tmp_path: Path) -> None:
    """With a large rate the loss soon rises, and the best weights are those of an early epoch."""
    settings = replace(SETTINGS, epochs=30, patience=1, learning_rate=0.5)
    run = tmp_path / "run"
    finetune_labels(labels, tiny_run, run, FinetuneOptions(settings), LabelOptions())
    losses = [float(row["valid_loss"]) for row in rows(run / "metrics.csv")]
    assert len(losses) < 30 and losses[-1] > min(losses)
    # Those of the epoch with the lowest loss, which a shorter run ends with.
    shorter = replace(settings, epochs=int(np.argmin(losses)) + 1)
    finetune_labels(labels, tiny_run, tmp_path / "x", FinetuneOptions(shorter), LabelOptions())
    until_best = weights(tmp_path / "x" / "model")
    assert all(torch.equal(w, until_best[n]) for n, w in weights(run / "model").items())


@pytest.mark.parametrize("rank", [None, 2])
def test_the_start_is_the_result_if_no_epoch_is_better(
    rank: int | None,
    residues: Path,
    tiny_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a rate that destroys the model, it is the original with the probe that was fitted."""
    settings, run = replace(SETTINGS, patience=2, learning_rate=0.5), tmp_path / "run"
    reading = LabelOptions(sequences=tmp_path / "proteins.fasta")
    finetune_labels(residues, tiny_run, run, FinetuneOptions(settings, rank=rank), reading)
    epochs = rows(run / "metrics.csv")
    losses = [float(row["valid_loss"]) for row in epochs]
    assert len(losses) == 3 and losses[0] < min(losses[1:])
    before, after = weights(tiny_run), weights(run / "model")
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert "no epoch has a lower validation loss than the start" in capsys.readouterr().err
    # The head, too: with the original it has the validation accuracy of the start.
    found = predicted(run, tmp_path)
    lines, right = residues.read_text().splitlines(), []
    for name, states in zip(lines[::2], lines[1::2], strict=True):
        for position, state in enumerate(states, start=1):
            if name.endswith("SET=valid") and state != "?":
                row = found[name[1:].split()[0], str(position)]
                right.append((float(row["p(H)"]) > 0.5) == (state == "H"))
    assert np.mean(right) == pytest.approx(float(epochs[0]["valid_accuracy"]), abs=1e-6)
