"""Faults in a run are reported and do not affect its results."""

import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from protlm.build import build_data, open_data
from protlm.checkpoints.validations import read_metrics
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.data.batching.buckets import LengthBuckets
from protlm.data.batching.mixture import SampleOrder
from protlm.data.batching.plan import BatchStream
from protlm.data_prep.prepare import prepare
from protlm.data_prep.split import HashSplit
from protlm.model.transformer import build_network
from protlm.system.errors import UserError
from protlm.training.loggers import CsvFile


def test_a_run_does_not_resume_on_other_data(
    tiny_data: Path, tiny_fasta: Path, train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    run = train_tiny(tmp_path / "run", "trainer.max_steps=2")
    rule = HashSplit(valid_fraction=0.1, test_fraction=0.3)
    prepare([tiny_fasta], tmp_path / "other", split_rule=rule)
    with pytest.raises(UserError, match="trained on other data"):
        train_tiny(run, f"data.dir={tmp_path / 'other'}", "trainer.max_steps=3")
    shutil.copytree(tiny_data, tmp_path / "moved")
    train_tiny(run, f"data.dir={tmp_path / 'moved'}", "trainer.max_steps=3")


def test_the_first_batches_of_validation_are_not_selected_by_length() -> None:
    lengths = np.random.default_rng(0).lognormal(5.8, 0.6, 20_000).astype(np.int64)
    order = SampleOrder([len(lengths)], shuffle=False)
    stream = BatchStream(lengths.take, order, LengthBuckets(16_384, 4_096))
    first = np.array([lengths[row.sample] for plan in islice(stream, 60) for row in plan.rows])
    # All rows of a batch have one length, so the mean over 60 batches is rough.
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
        f"trainer.accumulate_grad_batches={accumulate}",
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


def test_a_truncated_row_does_not_hinder_the_next(tmp_path: Path) -> None:
    log = CsvFile(tmp_path, from_step=0)
    log.log_metrics({"train_loss": 0.5}, 1)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("x")
    CsvFile(tmp_path, from_step=1).log_metrics({"train_loss": 0.25}, 2)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.csv")] == [1, 2]
