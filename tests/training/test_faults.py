"""What goes wrong in a run is told, and spoils nothing."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.prepare import prepare
from data_prep.split import HashSplit
from protlm.build import build_data, build_network, compose, open_data
from protlm.config import TrainConfig
from protlm.data.batching import BatchStream
from protlm.data.buckets import LengthBuckets
from protlm.data.mixture import SampleOrder
from protlm.errors import ExitCode, InputDataError, TrainingDivergedError, UserError
from protlm.model.checkpoint import latest, load_training
from protlm.training.loggers import CsvFile, read_metrics

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_damaged_newest_checkpoint_is_refused_and_then_written_anew(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    run = train_tiny(tmp_path / "run", "trainer.checkpoint_every=2")
    checkpoints = run / "checkpoints"
    newest = checkpoints / "step-00000004.ckpt"
    whole = load_training(newest)["state_dict"]
    newest.write_bytes(b"garbage")
    with pytest.raises(InputDataError, match=r"step-00000004\.ckpt is damaged"):
        train_tiny(run, "trainer.checkpoint_every=2")
    # The message's advice: use another checkpoint of the run.
    (checkpoints / "latest").write_text("step-00000002.ckpt\n")
    train_tiny(run, "trainer.checkpoint_every=2")
    assert latest(run) == newest
    for name, value in load_training(newest)["state_dict"].items():
        assert torch.equal(value, whole[name]), name


def test_never_fewer_than_two_checkpoints(train_tiny: Callable[..., Path], tmp_path: Path) -> None:
    run = train_tiny(tmp_path / "run", "trainer.checkpoint_every=1", "trainer.keep_checkpoints=1")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "latest",
        "step-00000003.ckpt",
        "step-00000003.ckpt.sha256",
        "step-00000004.ckpt",
        "step-00000004.ckpt.sha256",
    ]


def test_a_gradient_that_is_not_finite_stops_the_run_before_it_is_saved(
    train_tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from protlm.model.transformer import ModelOutput, ProteinLM

    forward, calls = ProteinLM.forward, []

    def poisoned(self: ProteinLM, *args: object, **named: object) -> ModelOutput:
        out = forward(self, *args, **named)
        calls.append(1)
        return ModelOutput(out.logits_BLV * (torch.nan if len(calls) == 3 else 1), out.hidden)

    monkeypatch.setattr(ProteinLM, "forward", poisoned)
    with pytest.raises(TrainingDivergedError, match="step 3 is not finite") as raised:
        train_tiny(tmp_path / "run", "trainer.checkpoint_every=1", "trainer.valid_every=100")
    assert re.search(r"samples \[\d+", str(raised.value))
    newest = latest(tmp_path / "run")
    assert newest is not None and newest.name == "step-00000002.ckpt"
    state = load_training(newest)["state_dict"]
    assert all(value.isfinite().all() for value in state.values())


def test_other_data_do_not_continue_a_run(
    tiny_data: Path, tiny_fasta: Path, train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    run = train_tiny(tmp_path / "run", "trainer.max_steps=2")
    rule = HashSplit(valid_fraction=0.1, test_fraction=0.3)
    prepare([tiny_fasta], tmp_path / "other", split_rule=rule)
    with pytest.raises(UserError, match="trained on other data"):
        train_tiny(run, f"data.dir={tmp_path / 'other'}", "trainer.max_steps=3")
    shutil.copytree(tiny_data, tmp_path / "moved")
    train_tiny(run, f"data.dir={tmp_path / 'moved'}", "trainer.max_steps=3")


def test_the_first_batches_of_validation_are_no_selection_by_length() -> None:
    lengths = np.random.default_rng(0).lognormal(5.8, 0.6, 20_000).astype(np.int64)
    order = SampleOrder([len(lengths)], shuffle=False)
    stream = BatchStream(lengths.take, order, LengthBuckets(16_384, 4_096))
    first = np.array([lengths[row.sample] for plan in islice(stream, 60) for row in plan.rows])
    # Batches hold one length each, so the mean over 60 of them is rough.
    assert 0.75 < first.mean() / lengths.mean() < 1.35


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulated_gradients_are_those_of_all_targets_at_once(
    accumulate: int, train_tiny: Callable[..., Path], tiny_data: Path, tmp_path: Path
) -> None:
    settings = [
        "model=tiny",
        f"data.dir={tiny_data}",
        "data.max_length=128",
        "data.tokens_per_batch=1024",
        "run_dir=unused",
    ]
    config = compose(TrainConfig, settings)
    network = build_network(config.model, config.attention, seed=config.seed)
    loader = build_data(*open_data(config.data), config).train_dataloader()
    nats, count = torch.zeros(()), 0
    for _, batch in zip(range(accumulate), loader, strict=False):
        logits = network(batch.tokens_BL, batch.mask_BL, causal=False).logits_BLV
        chosen = batch.targets_BL >= 0
        nats = nats + torch.nn.functional.cross_entropy(
            logits[chosen], batch.targets_BL[chosen], reduction="sum"
        )
        count += int(chosen.sum())
    (nats / count).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in network.parameters()])
    run = train_tiny(
        tmp_path / "run",
        f"trainer.accumulate={accumulate}",
        "trainer.log_every=1",
        "trainer.max_steps=2",
    )
    first = read_metrics(run / "metrics.csv")[0]
    assert first["gradient_norm"] == pytest.approx(expected.item(), rel=1e-4)
    assert first["train_loss"] == pytest.approx(nats.item() / count, rel=1e-5)


def test_every_step_is_in_one_row_of_the_log(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    settings = ("trainer.max_steps=6", "trainer.valid_every=2")
    fine = train_tiny(tmp_path / "fine", *settings, "trainer.log_every=1")
    coarse = train_tiny(tmp_path / "coarse", *settings, "trainer.log_every=3")

    def losses(run: Path) -> list[float]:
        rows = read_metrics(run / "metrics.csv")
        return [row["train_loss"] for row in rows if "train_loss" in row]

    one, three = losses(fine), losses(coarse)
    assert (len(one), len(three)) == (6, 2)
    for number, value in enumerate(three):
        part = one[3 * number : 3 * number + 3]
        assert min(part) <= value <= max(part)
        assert value == pytest.approx(sum(part) / 3, rel=5e-3)


def test_half_a_row_does_not_hinder_the_next(tmp_path: Path) -> None:
    log = CsvFile(tmp_path, from_step=0)
    log.log_metrics({"train_loss": 0.5}, 1)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("x")
    CsvFile(tmp_path, from_step=1).log_metrics({"train_loss": 0.25}, 2)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.csv")] == [1, 2]


def test_sigterm_to_the_second_rank_stops_both(tiny_data: Path, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "protlm.train", "model=tiny", f"data.dir={tiny_data}"),
        *("run_dir=run", "data.max_length=128", "data.tokens_per_batch=1024"),
        *("trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_steps=100000"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    with log.open("w") as file:
        first = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=file, stdout=file)
    try:
        deadline = time.monotonic() + 120
        while "residues/s" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.2)
        os.kill(_other_rank(first.pid), signal.SIGTERM)
        assert first.wait(timeout=60) == ExitCode.PREEMPTED, log.read_text()
    finally:
        first.kill()
    assert "the same command continues" in log.read_text()
    assert latest(tmp_path / "run") is not None


def _other_rank(parent: int) -> int:
    for entry in Path("/proc").iterdir():
        try:
            is_child = (
                entry.name.isdigit()
                and int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent
            )
            if is_child and b"LOCAL_RANK=1" in (entry / "environ").read_bytes():
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError("the second rank is not running")
