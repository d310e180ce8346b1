"""The options of `protlm generate`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from protlm.config.fields import ANYTHING, Checked, above, at_least, flag
from protlm.options import shared
from protlm.options.relatives import RelativesOptions


@final
@dataclass(frozen=True)
class Sampling(Checked):
    """Settings that determine how a token is drawn from logits.

    Args:
        temperature: divisor of the logits; 0 takes the most probable token.
        top_k: only this many of the most probable tokens; None takes all.
        top_p: only the smallest set of the most probable tokens with at least this probability,
            after `top_k`; None takes all.
    """

    temperature: float = flag(
        "Below 1 favors probable residues; 0 takes the most probable.", 1.0, allowed=at_least(0)
    )
    top_k: int | None = flag("Sample from the K most probable residues.", None, allowed=at_least(1))
    top_p: float | None = flag(
        "Sample from the most probable residues, up to this probability.",
        None,
        allowed=above(0, at_most=1),
    )


@final
@dataclass(frozen=True)
class Sweeps(Checked):
    """How sequences are sampled from a masked model.

    `mask_fraction` of the residues are masked, and drawn, at a time. The forward passes of a sweep
    are its inverse, or one for each residue if that is less.
    """

    number: int = flag(
        "With --start: how often each residue is drawn.", 10, "--sweeps", allowed=at_least(1)
    )
    mask_fraction: float = flag(
        "With --start: fraction of residues masked at a time.", 0.1, allowed=above(0, at_most=1)
    )


@dataclass(frozen=True)
class GenerateOptions(Checked):
    """The settings of `protlm generate`; lengths count residues, including the prefix.

    `start` is a sequence file, from whose sequences a masked model samples by `sweeps`.
    """

    prefix: str = flag("Residues at the start of every sequence.", "", words=ANYTHING)
    number: int | None = flag(
        "Number of sequences; default: 10, or one for each of --start.",
        None,
        allowed=at_least(1, at_most=10**8),
    )
    start: Path | None = flag("Sequences that a masked model starts from.", None)
    sweeps: Sweeps | None = None
    max_length: int | None = flag(
        "Maximum number of residues, including the prefix; default: as in training.",
        None,
        allowed=at_least(1),
    )
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = shared.seed("Seed: the same seed makes the same file.")
    batch_size: int = flag("Sequences per batch.", 32, allowed=at_least(1))
    device: str = shared.device()
    relatives: RelativesOptions = field(default_factory=RelativesOptions)
