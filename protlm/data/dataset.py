"""Conversion of planned batches to tensors of tokens and targets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from protlm.bounds import Bounds
from protlm.data.batching.plan import BatchPlan, Row, Sequences
from protlm.data.batching.relatives import FamiliesRow
from protlm.data.masking import IGNORE, MaskingRule, corrupt
from protlm.data.relatives import best_diagonal
from protlm.data.vocabulary import VOCABULARY, Vocabulary

FILLER = -1


@dataclass
class Batch:
    """The rows that a rank computes at a time.

    Attributes:
        targets_BL: tokens to predict, int64; `IGNORE` at all other positions.
        samples_B: the first sample of each row, int64; -1 for filler rows.
        after: epoch, samples and tokens of the progress after the whole batch.
        micro_batch: index of these rows among the micro-batches of the global batch.
        joined_N: the N samples of all rows, int64: more than one of a joined row, none of filler.
        bounds: those of packed proteins; None for other rows.
    """

    tokens_BL: Tensor
    targets_BL: Tensor
    mask_BL: Tensor
    samples_B: Tensor
    after: tuple[int, int, int]
    micro_batch: int = 0
    joined_N: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    bounds: Bounds | None = None

    def pin_memory(self) -> "Batch":
        """Returns the batch in page-locked memory, from which copies to a GPU do not wait."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor | Bounds)}
        return replace(self, **{name: x.pin_memory() for name, x in tensors.items()})


@final
class SequenceDataset(Dataset[Batch]):
    """Creates batches from plans; a row is a pure function of the seed and its data position.

    The targets of `masked` are corrupted residues, those of `causal` the tokens that follow in the
    row. Where rows are of families, `positions` says from where positions count in layers of the
    family: `restart`, `aligned` or `run`.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        objective: str,
        masking: MaskingRule,
        seed: int,
        positions: str | None = None,
    ) -> None:
        self._sequences, self._objective = sequences, objective
        self._masking, self._seed, self._positions = masking, seed, positions

    def __getitem__(self, plan: BatchPlan) -> Batch:
        shape = (len(plan.rows), plan.length)
        tokens_BL = np.full(shape, VOCABULARY.pad, dtype=np.int64)
        targets_BL = np.full(shape, IGNORE, dtype=np.int64)
        mask_BL = np.zeros(shape, dtype=bool)
        rule, spans = self._masking.at(plan.step), list[tuple[int, int]]()
        families: list[int] = []
        for number, row in enumerate(plan.rows):
            families += row.families if isinstance(row, FamiliesRow) else [1]
            end = 0
            for inputs, targets in self._read(row, rule):
                start, end = end, end + len(inputs)
                tokens_BL[number, start:end], targets_BL[number, start:end] = inputs, targets
                mask_BL[number, start:end] = True
                spans.append((number * plan.length + start, number * plan.length + end))
        return Batch(
            torch.from_numpy(tokens_BL),
            torch.from_numpy(targets_BL),
            torch.from_numpy(mask_BL),
            torch.tensor([FILLER if row is None else row.samples[0] for row in plan.rows]),
            (plan.after.epoch, plan.after.samples, plan.after.tokens),
            plan.micro_batch,
            torch.tensor(
                [n for row in plan.rows if row is not None for n in row.samples], dtype=torch.int64
            ),
            self._bounds(plan, spans, families, tokens_BL) if plan.longest else None,
        )

    def _bounds(
        self,
        plan: BatchPlan,
        spans: list[tuple[int, int]],
        families: list[int],
        tokens_BL: np.ndarray,
    ) -> Bounds:
        aligned = None
        assert plan.longest is not None
        if self._positions == "aligned":
            # Without the residues that are hidden, which a shift would tell.
            aligned = aligned_positions(spans, families, tokens_BL.flatten())
        return Bounds.of(
            spans,
            tokens_BL.shape,
            longest=plan.longest,
            families=families if self._positions else None,
            running=self._positions == "run",
            aligned=aligned,
        )

    def _read(self, row: Row | None, rule: MaskingRule) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if row is None:
            yield np.array([VOCABULARY.cls]), np.array([IGNORE])
            return
        for tokens, rng in row.read(self._sequences, seed=self._seed):
            if rng is None:
                yield tokens, np.full(len(tokens), IGNORE)
            elif self._objective == "causal":
                yield tokens, np.append(tokens[1:], IGNORE)
            else:
                yield corrupt(tokens, VOCABULARY.is_residue[tokens], rule, rng)


def aligned_positions(
    spans: Sequence[tuple[int, int]], families: Sequence[int], tokens: np.ndarray
) -> np.ndarray:
    """Returns positions of the proteins of joined rows, int64, of which one shift aligns each.

    Residues of a protein have the positions of those of the first one of its family, by the best
    diagonal. The smallest position of a family is 0, so that none is negative; none is as large as
    the number of the family's tokens.
    """
    positions, before = np.zeros(len(tokens), np.int64), 0
    for size in families:
        here = spans[before : before + size]
        before += size
        # Without the frame, which all have.
        first, *others = (tokens[start + 1 : end - 1] for start, end in here)
        shifts = [0, *(best_diagonal(first, other) for other in others)]
        for (start, end), shift in zip(here, shifts, strict=True):
            positions[start:end] = np.arange(end - start) + shift - min(shifts)
    return positions


def collate(
    sequences: list[np.ndarray], *, vocabulary: Vocabulary = VOCABULARY
) -> tuple[Tensor, Tensor]:
    """Returns tokens_BL, residues in their frame and padded, and mask_BL, false at pads.

    >>> collate([VOCABULARY.encode("MK"), VOCABULARY.encode("M")])[0].tolist()
    [[0, 20, 15, 2], [0, 20, 2, 1]]
    """
    length = max((len(residues) for residues in sequences), default=0) + vocabulary.num_around
    tokens_BL = torch.full((len(sequences), length), vocabulary.pad)
    mask_BL = torch.zeros(len(sequences), length, dtype=torch.bool)
    for row, residues in enumerate(sequences):
        tokens = torch.from_numpy(vocabulary.framed(residues))
        tokens_BL[row, : len(tokens)] = tokens
        mask_BL[row, : len(tokens)] = True
    return tokens_BL, mask_BL
