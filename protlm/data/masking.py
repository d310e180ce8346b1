"""Cropping and masking of rows: pure functions of random numbers keyed to the row."""

from dataclasses import dataclass, replace

import numpy as np

from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import UserError

IGNORE = -100


def row_rng(seed: int, epoch: int, sample: int, offset: int = 0) -> np.random.Generator:
    """Returns the random number generator of a row in an epoch, the same on every rank.

    Philox is counter-based (Salmon et al. 2011): seed and epoch are its key, and each sample, or
    each offset into it, has a separate range of 2**128 values.
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    counter = np.array([0, 0, offset, sample], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def crop(num_residues: int, max_residues: int, how: str, rng: np.random.Generator) -> slice:
    """Returns the range of residues to keep: all, the first, or a random segment.

    >>> crop(10, 4, "prefix", np.random.default_rng(0))
    slice(0, 4, None)
    """
    most = max(num_residues - max_residues, 0)
    start = int(rng.integers(most + 1)) if how == "random" and most else 0
    return slice(start, min(start + max_residues, num_residues))


@dataclass(frozen=True)
class MaskingRule:
    """Masking as in BERT (Devlin et al. 2019).

    A target is replaced by `<mask>` or by a random residue with the probabilities `mask_prob` and
    `random_prob`. With a range, each row draws its fraction of targets in it, uniformly; between
    the optimizer steps of `narrowing` it narrows to `mask_fraction`, linearly.
    """

    mask_fraction: float = 0.15
    mask_prob: float = 0.8
    random_prob: float = 0.1
    mask_fraction_range: tuple[float, float] | None = None
    narrowing: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("mask_fraction", "mask_prob", "random_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}={getattr(self, name)} must be between 0 and 1")
        if self.mask_fraction == 0:
            raise UserError("mask_fraction=0 masks nothing; the usual value is 0.15")
        if self.mask_prob + self.random_prob > 1 + 1e-9:
            raise UserError(
                f"mask_prob={self.mask_prob} and random_prob={self.random_prob} are more "
                "than 1 together; the usual values are 0.8 and 0.1"
            )
        if self.mask_fraction_range is not None:
            low, high = self.mask_fraction_range
            if not 0 < low <= high <= 1:
                raise UserError(
                    f"mask_fraction_range=[{low},{high}] must have 0 < low <= high <= 1, for "
                    "instance [0.1,0.5]"
                )

    def at(self, step: int) -> "MaskingRule":
        """Returns the rule with the range of an optimizer step, counted from 0.

        >>> rule = MaskingRule(0.25, mask_fraction_range=(0.25, 0.75), narrowing=(10, 20))
        >>> rule.at(15).mask_fraction_range
        (0.25, 0.5)
        """
        if self.narrowing is None or self.mask_fraction_range is None:
            return self
        first, last = self.narrowing
        done = min(max(step - first, 0) / (last - first), 1.0)
        low, high = self.mask_fraction_range
        # In this form rounding cannot put the lower bound above the upper one.
        low, high = ((1 - done) * bound + done * self.mask_fraction for bound in (low, high))
        return replace(self, mask_fraction_range=(low, high))


def corrupt(
    tokens: np.ndarray, is_maskable: np.ndarray, rule: MaskingRule, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns corrupted inputs, and targets: the true token, `IGNORE` elsewhere; both int64."""
    # `IGNORE` would wrap around in the type of stored residues, uint8.
    tokens = tokens.astype(np.int64)
    bounds = rule.mask_fraction_range
    fraction = rule.mask_fraction if bounds is None else rng.uniform(*bounds)
    is_target = (rng.random(len(tokens)) < fraction) & is_maskable
    fate = rng.random(len(tokens))
    others = VOCABULARY.residues[rng.integers(len(VOCABULARY.residues), size=len(tokens))]
    is_replaced = fate < rule.mask_prob + rule.random_prob
    inputs = np.where(is_target & is_replaced, others, tokens)
    inputs[is_target & (fate < rule.mask_prob)] = VOCABULARY.mask
    return inputs, np.where(is_target, tokens, IGNORE)
