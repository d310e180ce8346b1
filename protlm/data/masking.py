"""What is cropped, masked or replaced in a row: pure functions of random numbers keyed to it."""

from dataclasses import dataclass

import numpy as np

from protlm.data.vocabulary import VOCABULARY
from protlm.errors import UserError, one_of

IGNORE = -100
CROPS = ("prefix", "random")


def row_rng(seed: int, epoch: int, sample: int, offset: int = 0) -> np.random.Generator:
    """The random numbers of a row in an epoch, the same wherever they are drawn.

    Philox is counter-based (Salmon et al. 2011): seed and epoch are its key, and each sample, or
    each offset into it, has 2**128 values of its own.
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    counter = np.array([0, 0, offset, sample], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def crop(num_residues: int, max_residues: int, how: str, rng: np.random.Generator) -> slice:
    """Which residues of a sequence are taken: all, the first, or a random stretch.

    Raises:
        UserError: `how` is neither `prefix` nor `random`.

    >>> crop(10, 4, "prefix", np.random.default_rng(0))
    slice(0, 4, None)
    """
    if how not in CROPS:
        raise UserError(f"crop={how} is unknown; choose one of: {one_of(list(CROPS))}")
    start = 0
    if how == "random" and num_residues > max_residues:
        start = int(rng.integers(num_residues - max_residues + 1))
    return slice(start, min(start + max_residues, num_residues))


@dataclass(frozen=True)
class MaskingRule:
    """BERT's corruption (Devlin et al. 2019): which residues become targets, and what of them.

    Args:
        fraction: the probability that a residue is a target.
        mask_share: of the targets, the share that is replaced by `<mask>`.
        random_share: the share that is replaced by a random residue; the rest is kept.

    Raises:
        UserError: a share is no probability, or together they are more than 1.
    """

    fraction: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1

    def __post_init__(self) -> None:
        for name in ("fraction", "mask_share", "random_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}={getattr(self, name)} must be between 0 and 1")
        if self.fraction == 0:
            raise UserError("fraction=0 masks nothing; the usual value is 0.15")
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise UserError(
                f"mask_share={self.mask_share} and random_share={self.random_share} are more "
                "than 1 together; the usual values are 0.8 and 0.1"
            )


def corrupt(
    tokens: np.ndarray, is_maskable: np.ndarray, rule: MaskingRule, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Corrupts a sample for masked language modelling.

    Args:
        tokens: numbers of tokens.
        is_maskable: for each position whether it may become a target.
        rule: how much is masked, replaced and kept.
        rng: of this sample.

    Returns:
        Inputs, and targets: the true token at targets, `IGNORE` elsewhere; both int64.
    """
    is_target = (rng.random(len(tokens)) < rule.fraction) & is_maskable
    fate = rng.random(len(tokens))
    others = VOCABULARY.residues[rng.integers(len(VOCABULARY.residues), size=len(tokens))]
    is_replaced = fate < rule.mask_share + rule.random_share
    inputs = np.where(is_target & is_replaced, others, tokens).astype(np.int64)
    inputs[is_target & (fate < rule.mask_share)] = VOCABULARY.mask
    return inputs, np.where(is_target, tokens, IGNORE).astype(np.int64)
