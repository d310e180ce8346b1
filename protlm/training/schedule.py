"""The schedule of the learning rate: its warm-up and its decay."""

import math

from protlm.config import DecayShape, Schedule, ScheduleConfig
from protlm.system.errors import UserError


def rate_factor(step: int, config: ScheduleConfig, *, max_steps: int) -> float:
    """Returns the fraction of the peak learning rate at optimizer step `step`, from 0.

    `cosine` decays from the end of the warm-up (arXiv 1608.03983, equation 5, without restarts).
    `wsd` keeps the peak and decays in the last `decay_fraction` of the run (arXiv 2404.06395,
    equation 1), linearly or as 1 - √ (arXiv 2405.18392, section 4.1). Before the decay it does not
    depend on `max_steps`.

    >>> rate_factor(4, ScheduleConfig(warmup_steps=10), max_steps=100)
    0.5
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.name is Schedule.constant:
        return 1.0
    if config.name is Schedule.cosine:
        done = _fraction(step, config.warmup_steps, max_steps)
        left = 0.5 * (1 + math.cos(math.pi * done))
    else:
        done = _fraction(step, max_steps - decay_steps(config, max_steps=max_steps), max_steps)
        left = 1 - (math.sqrt(done) if config.decay_shape is DecayShape.sqrt else done)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * left


def decay_steps(config: ScheduleConfig, *, max_steps: int) -> int:
    """Returns the number of last optimizer steps in which `wsd` decays; at least one."""
    return max(round(config.decay_fraction * max_steps), 1)


def _fraction(step: int, start: int, end: int) -> float:
    return min(max(step - start, 0) / max(end - start, 1), 1.0)


def check_schedule(config: ScheduleConfig, *, max_steps: int, is_continued: bool = False) -> None:
    """Rejects a warm-up that does not fit into the run; that of a run that continues is fixed."""
    decay = decay_steps(config, max_steps=max_steps) if config.name is Schedule.wsd else 0
    if not 0 <= config.warmup_steps < max_steps or config.warmup_steps + decay > max_steps:
        before = f" less the {decay} steps of the decay" if decay else ""
        fitting = fitting_warmup(config, max_steps=max_steps)
        shorter = "" if is_continued else f"schedule.warmup_steps={fitting}, or "
        raise UserError(
            f"schedule.warmup_steps={config.warmup_steps} must be at least 0 and below "
            f"trainer.max_steps={max_steps}{before}; type {shorter}a larger trainer.max_steps, "
            f"above {config.warmup_steps}"
        )


def fitting_warmup(config: ScheduleConfig, *, max_steps: int) -> int:
    """Returns a tenth of the run, or fewer steps where `wsd` decays for longer than the rest."""
    decay = decay_steps(config, max_steps=max_steps) if config.name is Schedule.wsd else 0
    return min(max_steps // 10, max_steps - decay)
