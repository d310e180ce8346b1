"""Resolves `trainer.precision=auto` for this machine."""

import warnings

import torch

PRECISIONS = ("auto", "32-true", "bf16-mixed")


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
