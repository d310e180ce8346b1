"""The optimiser and the learning rate as a function of the optimiser step."""

import math

import torch
from torch import nn

from protlm.config import OptimizerConfig, Schedule, ScheduleConfig
from protlm.errors import UserError


def adamw(network: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) with decay on matrices only, not on biases, norms and scales."""
    trained = [p for p in network.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


def rate_factor(step: int, config: ScheduleConfig, *, max_steps: int) -> float:
    """The share of the peak learning rate used for optimiser step `step`, from 0.

    >>> rate_factor(4, ScheduleConfig(warmup_steps=10), max_steps=100)
    0.5
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.name is Schedule.constant:
        return 1.0
    length = max(max_steps - config.warmup_steps, 1)
    done = min((step - config.warmup_steps) / length, 1.0)
    return config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * done))


def check_schedule(config: ScheduleConfig, *, max_steps: int) -> None:
    """Refuses a warm-up that would never end.

    Raises:
        UserError: the warm-up is as long as the run.
    """
    if not 0 <= config.warmup_steps < max_steps:
        raise UserError(
            f"schedule.warmup_steps={config.warmup_steps} must be at least 0 and below "
            f"trainer.max_steps={max_steps}; type schedule.warmup_steps={max_steps // 10}"
        )
