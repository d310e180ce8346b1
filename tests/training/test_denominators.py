"""The smallest denominator of the Performers: what it is, when it is looked at, over all ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protlm.attention import create
from protlm.attention.performer.base import Performer
from protlm.data.dataset import Batch
from protlm.training.denominators import COLUMN, WatchDenominators
from protlm.training.metrics import read_metrics

Train = Callable[..., Path]

MECHANISMS = {
    "relu": ("performer_relu", {}),
    "softmax": ("performer_softmax", {"num_features": 16}),
    "exp": ("performer_generalized", {"kernel": "exp", "num_features": 16}),
    "linear": ("linear", {}),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", MECHANISMS)
def test_denominators_are_the_sums_of_the_weights(case: str, causal: bool) -> None:
    name, options = MECHANISMS[case]
    mechanism = create(name, options, num_heads=2, head_dim=8, model_dim=16, max_length=256)
    assert isinstance(mechanism, Performer) and mechanism.has_denominators
    generator = torch.Generator().manual_seed(0)
    q_BHLK, k_BHLK = torch.randn(2, 3, 2, 130, 8, generator=generator, dtype=torch.float64)
    mask_BL = torch.arange(130) < torch.tensor([130, 70, 1])[:, None]
    weights_BHLL = mechanism.query_features(q_BHLK) @ mechanism.key_features(k_BHLK).mT
    weights_BHLL = weights_BHLL * mask_BL[:, None, None] * mask_BL[:, None, :, None]
    if causal:
        weights_BHLL = weights_BHLL.tril()
    found_BHL1 = mechanism.denominators(q_BHLK, k_BHLK, mask_BL=mask_BL, causal=causal)
    torch.testing.assert_close(found_BHL1[..., 0], weights_BHLL.sum(-1))
    assert not found_BHL1.requires_grad


def rows(run: Path) -> dict[int, float]:
    found = read_metrics(run / "metrics.csv")
    return {int(row["step"]): row[COLUMN] for row in found if COLUMN in row}


@pytest.mark.parametrize("settings", [(), ("objective=causal",)], ids=["masked", "causal"])
def test_the_log_has_the_smallest_of_the_first_sequences(
    settings: tuple[str, ...],
    train_tiny: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected: list[float] = []
    start = WatchDenominators.on_train_batch_start

    def look(self: WatchDenominators, trainer: Any, module: Any, batch: Batch, index: int) -> None:
        smallest = []
        # As many sequences as have 256 positions, or one that is longer.
        some = max(256 // batch.mask_BL.shape[1], 1)
        network, mask_BL = module.network, batch.mask_BL[:some]
        inputs = network.attention_inputs(batch.tokens_BL[:some], mask_BL, causal=module.causal)
        for number, x in inputs:
            sums_BHL1 = network.mechanism(number).denominators(
                x.q_BHLK, x.k_BHLK, mask_BL=mask_BL, causal=module.causal
            )
            smallest.append(float(sums_BHL1.transpose(1, 2)[mask_BL].min()))
        expected.append(min(smallest))
        start(self, trainer, module, batch, index)

    monkeypatch.setattr(WatchDenominators, "on_train_batch_start", look)
    monkeypatch.setattr("protlm.training.denominators._POSITIONS", 256)
    run = train_tiny(tmp_path / "run", *settings, "trainer.log_every=2")
    assert rows(run) == {2: pytest.approx(expected[1]), 4: pytest.approx(expected[3])}
    assert min(expected) > 0


@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_only_the_batch_before_a_log_is_looked_at(
    checkpointing: str, train_tiny: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    denominators = Performer.denominators

    def count(self: Performer, *inputs: Any, **named: Any) -> Any:
        looks.append(1)
        return denominators(self, *inputs, **named)

    monkeypatch.setattr(Performer, "denominators", count)
    settings = ("trainer.accumulate=2", f"trainer.activation_checkpointing={checkpointing}")
    run = train_tiny(tmp_path / "run", *settings)
    assert (len(looks), list(rows(run))) == (4, [2, 4])


@pytest.mark.parametrize(
    "settings",
    [("attention=softmax",), ("attention=performer_softmax", "attention.normalizer=rmsnorm")],
)
def test_where_nothing_is_divided_nothing_is_logged(
    settings: tuple[str, ...], train_tiny: Train, tmp_path: Path
) -> None:
    run = train_tiny(tmp_path / "run", *settings, "model.qk_norm=true", "trainer.max_steps=2")
    assert COLUMN not in (run / "metrics.csv").read_text()
