"""The devices, the precision and the strategy of a run: what is asked for, and what is there."""

import os
import warnings
from datetime import timedelta

import torch
from pytorch_lightning.strategies import DDPStrategy, Strategy

from protlm.config import TrainerConfig
from protlm.system.errors import UserError
from protlm.training.launch import check_launch

PRECISIONS = ("auto", "32-true", "bf16-mixed")
# Sums are float64, which Apple's GPUs do not support.
ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
# Ranks per processor: more than one is useful only to test a launch.
MOST_RANKS = 4


def check_trainer(config: TrainerConfig) -> None:
    """Rejects settings that cannot work, before anything is read."""
    if config.precision not in PRECISIONS:
        raise UserError(
            f"trainer.precision={config.precision} is not one of {', '.join(PRECISIONS)}; "
            "float16 and bfloat16 weights are not precise enough for a Performer's features"
        )
    if config.accelerator not in ACCELERATORS:
        raise UserError(
            f"trainer.accelerator={config.accelerator} is not one of {', '.join(ACCELERATORS)}"
        )
    is_cpu = resolved_accelerator(config.accelerator) == "cpu"
    if not is_cpu and torch.cuda.device_count() < config.devices:
        raise UserError(
            f"trainer.accelerator={config.accelerator} trainer.devices={config.devices}: this "
            f"machine has {torch.cuda.device_count()} GPUs that torch can use; type "
            "trainer.accelerator=cpu, or fewer devices"
        )
    processors = os.cpu_count() or 1
    if is_cpu and config.devices > MOST_RANKS * processors:
        raise UserError(
            f"trainer.devices={config.devices} on the CPU starts as many processes, and this "
            f"machine has {processors} processors; type trainer.devices={processors} or fewer"
        )
    check_launch(config)


def resolved_accelerator(name: str) -> str:
    """Resolves `auto`; Lightning's `auto` would select any type of device."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def strategy(config: TrainerConfig, *, uses_all_parameters: bool) -> Strategy | str:
    """Returns the strategy: a single process, or ranks with a time-out."""
    if config.devices * config.num_nodes == 1:
        return "auto"
    return DDPStrategy(
        timeout=timedelta(minutes=config.timeout_minutes),
        gradient_as_bucket_view=True,
        find_unused_parameters=not uses_all_parameters,
    )


def resolved_precision(name: str, accelerator: str) -> str:
    """Returns the precision to train with; `auto` is bfloat16 if the hardware multiplies it.

    A processor without bfloat16 products emulates them, six times slower than float32. A run that
    resumes on another machine uses the precision of that machine.

    Args:
        name: one of `PRECISIONS`.
        accelerator: `cpu` or a type of GPU.

    >>> resolved_precision("32-true", "cpu")
    '32-true'
    """
    if name == "bf16-mixed" and accelerator == "cpu" and not _cpu_multiplies_bfloat16():
        warnings.warn(
            "trainer.precision=bf16-mixed: this processor has no bfloat16 products and emulates "
            "them, about six times slower than float32; type trainer.precision=auto",
            stacklevel=2,
        )
    if name != "auto":
        return name
    if accelerator == "cpu":
        return "bf16-mixed" if _cpu_multiplies_bfloat16() else "32-true"
    return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"


def _cpu_multiplies_bfloat16() -> bool:
    # torch has no public name for these. A build without them has no bfloat16 kernels.
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
