"""Mask fractions drawn from a range that narrows in the decay."""

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from protlm.build import build_data, masking_schedule, open_data
from protlm.checkpoints.validations import read_metrics
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.data.batching.plan import BatchPlan
from protlm.data.dataset import Batch, SequenceDataset
from protlm.data.masking import IGNORE, MaskingRule, MaskingSchedule
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import UserError
from protlm.training.datamodule import SequenceData
from protlm.training.module import LanguageModeling

Train = Callable[..., Path]
STEPS = 8
FALLING = (
    "objective.mask_fraction_range=[0.1,0.6]",
    "objective.mask_fraction_decays=true",
    "schedule=wsd",
    "schedule.decay_fraction=0.5",
    "schedule.warmup_steps=1",
    "trainer.accumulate_grad_batches=2",
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=100",
    "trainer.valid_every=4",
    "data.crop=random",
    f"trainer.max_steps={STEPS}",
)


@pytest.mark.slow
def test_plans_have_the_step_that_they_are_trained_in(
    train_tiny: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a skipped step, which counts as a step, and in a resumed run."""
    planned: dict[tuple[int, int, int], int] = {}
    trained: list[tuple[int, int]] = []
    make, work = SequenceDataset.__getitem__, LanguageModeling.training_step

    def make_and_note(self: SequenceDataset, plan: BatchPlan) -> Batch:
        batch = make(self, plan)
        planned[batch.after] = plan.step
        return batch

    def work_and_note(self: LanguageModeling, batch: Batch, index: int) -> Any:
        trained.append((self.trainer.global_step, planned[batch.after]))
        if len(trained) != 6:
            return work(self, batch, index)
        # The second batch of the third step.
        bias = self.network.head.bias
        assert isinstance(bias, Tensor)
        kept = bias.data.clone()
        bias.data.fill_(math.nan)
        out = work(self, batch, index)
        bias.data.copy_(kept)
        return out

    monkeypatch.setattr(SequenceDataset, "__getitem__", make_and_note)
    monkeypatch.setattr(LanguageModeling, "training_step", work_and_note)
    run = tmp_path / "run"
    with pytest.warns(UserWarning, match="step 3 was skipped"):
        train_tiny(run, *FALLING, "trainer.max_steps=5")
    with pytest.warns(UserWarning, match="after step 5 the learning rate goes from"):
        train_tiny(run, *FALLING)
    assert trained == [(step, step) for step in range(STEPS) for _ in range(2)]


def build(tiny_data: Path, *settings: str) -> SequenceData:
    given = [f"data.dir={tiny_data}", "data.max_length=128", "data.tokens_per_batch=1024"]
    config = compose(TrainConfig, [*given, *settings])
    return build_data(*open_data(config.data), config)


def is_target(batch: Batch) -> np.ndarray:
    """Returns whether the residues of a batch are targets."""
    tokens_BL, targets_BL = batch.tokens_BL.numpy(), batch.targets_BL.numpy()
    is_residue_BL = VOCABULARY.is_residue[tokens_BL] | (tokens_BL == VOCABULARY.mask)
    return (targets_BL != IGNORE)[is_residue_BL]


def test_measured_fractions_are_those_of_the_step(tiny_data: Path) -> None:
    """Rows of about 100 residues with varying fractions: the z-score is over rows."""
    data = build(tiny_data, *FALLING, "trainer.max_steps=80")
    rows: dict[int, list[float]] = defaultdict(list)
    batches = iter(data.train_dataloader())
    for number in range(160):
        batch = next(batches)
        for row in range(len(batch.tokens_BL)):
            one = Batch(
                batch.tokens_BL[row : row + 1],
                batch.targets_BL[row : row + 1],
                batch.mask_BL[row : row + 1],
                batch.samples_B[row : row + 1],
                batch.after,
            )
            rows[number // 2].append(float(is_target(one).mean()))
    # The decay begins with step 40 and ends with step 80, at 0.15.
    for first, last, done in ((0, 40, 0.0), (40, 50, 0.1125), (70, 80, 0.8625)):
        shares = np.array([share for step in range(first, last) for share in rows[step]])
        expected = (1 - done) * 0.35 + done * 0.15
        z = (shares.mean() - expected) / (shares.std() / np.sqrt(len(shares)))
        assert abs(z) < 4, (first, z)
        spread = (1 - done) * 0.5 / np.sqrt(12)
        assert shares.std() == pytest.approx(np.hypot(spread, 0.045), rel=0.25)


def test_validation_keeps_the_fraction(tiny_data: Path) -> None:
    batches = [list(build(tiny_data, *extra).val_dataloader()) for extra in ((), FALLING)]
    for plain, falling in zip(*batches, strict=True):
        assert torch.equal(plain.tokens_BL, falling.tokens_BL)
        assert torch.equal(plain.targets_BL, falling.targets_BL)


def test_configs_become_schedules() -> None:
    assert masking_schedule(compose(TrainConfig, [])) == MaskingSchedule(MaskingRule())
    assert masking_schedule(compose(TrainConfig, ["objective=causal"])) is None
    config = compose(TrainConfig, ["objective=mask_only", *FALLING, "trainer.max_steps=100"])
    rule = MaskingRule(0.15, 1.0, 0.0, mask_fraction_range=(0.1, 0.6))
    assert masking_schedule(config) == MaskingSchedule(rule, (50, 100))
    config = compose(TrainConfig, ["schedule=wsd_linear", "trainer.max_steps=10000", *FALLING[:2]])
    schedule = masking_schedule(config)
    assert schedule is not None and schedule.narrowing == (6_000, 10_000)


def test_a_run_is_not_continued_with_another_range(train_tiny: Train, tmp_path: Path) -> None:
    run = train_tiny(tmp_path / "run", *FALLING, "trainer.max_steps=2")
    with pytest.raises(UserError, match=r"objective\.mask_fraction_range"):
        train_tiny(run, *FALLING, "objective.mask_fraction_range=[0.1,0.5]")


def logged(run: Path) -> list[dict[str, float]]:
    return [row for row in read_metrics(run / "metrics.csv") if "valid_loss" in row]


@pytest.mark.parametrize("objective", ["masked", "mask_only", "causal"])
def test_the_log_has_the_unigram_loss(
    objective: str,
    train_tiny: Train,
    tiny_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = train_tiny(tmp_path / "run", f"objective={objective}", "trainer.valid_every=2")
    rows = logged(run)
    data = build(tiny_data, f"objective={objective}")
    # Frequencies from the text of the training sequences, cropped as in validation.
    counts = np.where(VOCABULARY.is_residue, 1.0, 0.0)
    for sample in range(len(data.train)):
        np.add.at(counts, data.train[sample][:126], 1)
    f = counts / counts.sum()
    nats = []
    for batch in data.val_dataloader():
        chosen = (batch.targets_BL != IGNORE) & (batch.targets_BL != VOCABULARY.eos)
        pairs = zip(
            batch.tokens_BL[chosen].tolist(), batch.targets_BL[chosen].tolist(), strict=True
        )
        for seen, target in pairs:
            if objective == "masked" and seen != VOCABULARY.mask:
                joint = 0.1 * f[seen] * (seen == target) + 0.1 * f[target] / 25
                nats.append(-np.log(joint / (0.1 * f[seen] + 0.1 / 25)))
            else:
                nats.append(-np.log(f[target]))
    assert [row["valid_unigram_loss"] for row in rows] == pytest.approx([np.mean(nats)] * 2)
    told = [line for line in capsys.readouterr().err.splitlines() if "validation loss" in line]
    loss, accuracy = rows[1]["valid_loss"], 100 * rows[1]["valid_accuracy"]
    unigram = np.mean(nats)
    assert told[1] == (
        f"step 4: validation loss {loss:.3f}, perplexity {np.exp(loss):.1f}, "
        f"accuracy {accuracy:.1f} % (unigram: loss {unigram:.3f}, perplexity {np.exp(unigram):.1f})"
    )
