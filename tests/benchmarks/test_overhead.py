"""The measure of the trainer's overhead: the bare loop does what the trainer does, in its turns."""

from pathlib import Path

import pytest
import torch

from benchmarks import overhead
from benchmarks.overhead import BareLoop, Stretches, measure
from protlm.build import build_module, build_network, compose
from protlm.config import TrainConfig


def test_the_overhead_is_the_median_over_pairs() -> None:
    bare = BareLoop.__new__(BareLoop)
    stretches = Stretches(bare, [1.1, 2.4, 4.4], [1.0, 2.0, 4.0])
    assert stretches.overhead == pytest.approx(0.1)


def test_the_bare_loop_makes_the_same_steps(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "STEPS_OF_A_STRETCH", 2)
    config = compose(
        TrainConfig,
        [
            "model=tiny",
            f"data.dir={tiny_data}",
            f"run_dir={tmp_path / 'run'}",
            "data.max_length=128",
            "data.tokens_per_batch=512",
            "trainer.accelerator=cpu",
            "trainer.max_steps=6",
            "trainer.valid_batches=1",
            "schedule.warmup_steps=0",
            # Else the sign of a gradient that is nearly 0 is a whole step of Adam.
            "optimizer.eps=0.01",
        ],
    )
    module = build_module(build_network(config.model, config.attention, seed=0), config)
    stretches = measure(module, config)
    assert len(stretches.trainer_seconds) == len(stretches.bare_seconds) == 2
    parameters = (module.parameters(), stretches.bare.module.parameters())
    for trained, bare in zip(*parameters, strict=True):
        torch.testing.assert_close(trained, bare, rtol=1e-4, atol=1e-5)
