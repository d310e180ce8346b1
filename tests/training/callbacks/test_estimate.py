"""Monitoring of the Performers' estimates: values, times and warnings."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.checkpoints.validations import read_metrics
from protlm.data.dataset import Batch
from protlm.model.transformer import ProteinLM, build_network
from protlm.training.callbacks import estimate
from protlm.training.callbacks.estimate import WatchEstimates
from tests.small_models import small_model

Train = Callable[..., Path]

SOUND = ("attention=performer_softmax", "model.qk_norm=true")
UNBOUNDED = ("attention=performer_softmax", "trainer.log_every=1")


def seen(run: Path) -> list[dict[str, float]]:
    """Returns the rows of the log that contain estimates."""
    rows = read_metrics(run / "metrics.csv")
    return [row for row in rows if any("_layer_" in name for name in row)]


def brute_force(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean |q̂ + k̂|² over the real pairs of all sequences, one per head."""
    norms = []
    for row, length in enumerate(mask.sum(1).tolist()):
        pairs = q[row, :, :length, None] + k[row, :, None, :length]
        norms.append(pairs.square().sum(-1).flatten(1) / q.shape[-1] ** 0.5)
    return torch.cat(norms, dim=1).mean(dim=1)


@torch.no_grad()
def test_the_log_has_the_norms_and_errors_of_the_batch(
    train_tiny: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[tuple[ProteinLM, Batch]] = []
    start = WatchEstimates.on_train_batch_start

    def keep(self: WatchEstimates, trainer: Any, pl_module: Any, batch: Batch, index: int) -> None:
        before.append((copy.deepcopy(pl_module.network), batch))
        start(self, trainer, pl_module, batch, index)

    monkeypatch.setattr(WatchEstimates, "on_train_batch_start", keep)
    run = train_tiny(tmp_path / "run", *SOUND, "model.num_layers=3", "trainer.max_steps=5")
    rows = seen(run)
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
    checkpointing: str, train_tiny: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks: dict[str, list[int]] = {"on_train_batch_start": [], "on_train_batch_end": []}
    looks = []
    for event in hooks:
        method = getattr(WatchEstimates, event)

        def note(
            self: WatchEstimates,
            trainer: Any,
            pl_module: Any,
            *rest: Any,
            event: str = event,
            method: Callable[..., None] = method,
        ) -> None:
            method(self, trainer, pl_module, *rest)
            found = (len(module._forward_pre_hooks) for module in pl_module.modules())
            hooks[event].append(sum(found))

        monkeypatch.setattr(WatchEstimates, event, note)
    look = estimate.pair_sums
    monkeypatch.setattr(estimate, "pair_sums", lambda *x, **y: looks.append(1) or look(*x, **y))
    settings = (
        "trainer.accumulate_grad_batches=2",
        f"trainer.activation_checkpointing={checkpointing}",
    )
    train_tiny(tmp_path / "run", *SOUND, *settings, "trainer.valid_every=1")
    assert hooks["on_train_batch_start"] == [0, 0, 0, 2, 0, 0, 0, 2]
    assert hooks["on_train_batch_end"] == [0] * 8
    assert len(looks) == 4


def test_large_norms_cause_one_warning_per_run(
    train_tiny: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inflated(model: Any, attention: dict[str, Any], *, seed: int) -> ProteinLM:
        network = build_network(model, attention, seed=seed)
        for number, factor in ((1, 0.3), (2, 2.0)):
            block: Any = network.blocks[number - 1]
            for linear in (block.attention.query, block.attention.key):
                linear.weight.data *= factor
        return network

    monkeypatch.setattr("protlm.commands.train.build_network", inflated)
    with pytest.warns(UserWarning) as caught:
        run = train_tiny(tmp_path / "run", *UNBOUNDED)
    (message,) = (str(warning.message) for warning in caught)
    first = seen(run)[0]
    assert first["relative_error_layer_1"] < 1 < first["relative_error_layer_2"]
    assert "in layer 2: in head " in message and "of 256 features" in message
    norm = f"{first['square_norm_layer_2']:.3g}"
    assert f"|q+k|²/√K is {norm}, " in message
    assert message.endswith("in a run with another run_dir= model.qk_norm=true bounds the norm")
    # Resumed in a new process; warnings are errors here.
    train_tiny(tmp_path / "run", *UNBOUNDED, "trainer.max_steps=6")
    assert len(seen(run)) == 6


def test_trigonometric_features_are_judged_by_the_difference(
    train_tiny: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"name": "performer_softmax", "estimator": "trigonometric", "denominator_floor": 1e-6}

    def trigonometric(model: Any, attention: dict[str, Any], *, seed: int) -> ProteinLM:
        return build_network(model, options, seed=seed)

    monkeypatch.setattr("protlm.commands.train.build_network", trigonometric)
    with pytest.warns(UserWarning, match=r"layers 1, 2: .*\|q-k\|.* bounds the norm$"):
        train_tiny(tmp_path / "run", *UNBOUNDED, "trainer.max_steps=2")


def test_heads_and_settings_of_a_hybrid_are_named_as_the_model_has_them() -> None:
    hybrid = {"name": "hybrid", "local_heads": 1, "mechanism": "performer_softmax"}
    network = build_network(small_model("softmax").description.model, hybrid, seed=0)
    watch = WatchEstimates(network, every=1)
    worst = {2: estimate._WorstHead(number=1, norm=9.0, error=3.0, square_norm=9.0)}
    with pytest.warns(UserWarning, match=r"in head 2 of layer 2 .*") as warned:
        watch._warn(worst, has_norms=True)
    message = str(warned[0].message)
    assert "attention.options.optimal_for=9 and more attention.options.num_features" in message


def test_a_model_without_a_softmax_performer_is_ignored(tiny_run: Path) -> None:
    header = (tiny_run / "metrics.csv").read_text().splitlines()[0]
    assert "_layer_" not in header
    assert seen(tiny_run) == []
