"""Learning rates, decay groups, and the loss as a total over targets."""

import math

import pytest
import torch
from torch import nn

from protlm.config import OptimizerConfig, Schedule, ScheduleConfig
from protlm.data.masking import IGNORE
from protlm.errors import UserError
from protlm.model.objective import target_sums
from protlm.training.optimization import adamw, check_schedule, rate_factor


def test_decay_acts_on_matrices_only() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    groups = adamw(network, OptimizerConfig(learning_rate=1e-3, weight_decay=0.1)).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(network[0].weight)}
    assert sum(len(group["params"]) for group in groups) == 4


def test_warm_up_rises_to_the_peak_and_cosine_ends_at_its_share() -> None:
    config = ScheduleConfig(name=Schedule.cosine, warmup_steps=10, final_share=0.1)
    factors = [rate_factor(step, config, max_steps=110) for step in range(111)]
    assert factors[9] == 1.0
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[60] == pytest.approx(0.55)
    assert factors[110] == pytest.approx(0.1)
    assert all(rate_factor(s, ScheduleConfig(), max_steps=9) == 1.0 for s in range(9))


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    with pytest.raises(UserError, match="warmup_steps=10"):
        check_schedule(ScheduleConfig(warmup_steps=10), max_steps=10)


def test_loss_is_a_total_over_targets() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_BLV = torch.randn(2, 5, 33, generator=generator, dtype=torch.float64)
    targets_BL = torch.full((2, 5), IGNORE)
    targets_BL[0, 1], targets_BL[1, 4] = 7, 9
    sums = target_sums(logits_BLV, targets_BL)
    by_hand = sum(
        math.log(sum(math.exp(x) for x in logits_BLV[b, i].tolist())) - logits_BLV[b, i, t].item()
        for b, i, t in ((0, 1, 7), (1, 4, 9))
    )
    assert sums.count == 2
    assert sums.nats.item() == pytest.approx(by_hand, rel=1e-6)
    nothing = target_sums(logits_BLV, torch.full((2, 5), IGNORE))
    assert (nothing.nats, nothing.count) == (0, 0)
