"""One sequence to a row: batches of similar length within a budget of tokens."""

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from protlm.data.batching import SPECIALS, BatchRule, GlobalBatch, Progress, Sequences, Window
from protlm.data.masking import CROPS, crop, row_rng
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import UserError, one_of

_FIRST_EDGE = 64
_EDGES_PER_DOUBLING = 16


@final
@dataclass(frozen=True)
class SequenceRow:
    """`<cls>`, residues of one sequence, `<eos>`.

    Of a cropped sequence `<eos>` stands only where the sequence truly ends.

    Attributes:
        sample: the number of the sequence.
        pass_: how often it was drawn before; every pass has another crop and other masks.
        max_length: tokens at most, special ones included.
        crop: `prefix` or `random`, what is taken of a longer sequence.
    """

    sample: int
    pass_: int
    max_length: int
    crop: str

    def read(self, sequences: Sequences, *, seed: int) -> tuple[np.ndarray, np.random.Generator]:
        """See `Row`."""
        rng = row_rng(seed, self.pass_, self.sample)
        residues = sequences[self.sample]
        part = crop(len(residues), self.max_length - SPECIALS, self.crop, rng)
        end = [VOCABULARY.eos] * (part.stop == len(residues))
        parts = ([VOCABULARY.cls], residues[part], end)
        # An empty list would make them floating-point numbers.
        return np.concatenate(parts, dtype=np.int64, casting="unsafe"), rng


@final
@dataclass(frozen=True)
class LengthBuckets(BatchRule):
    """Sorts the samples of a window by length, cuts them into batches, and shuffles these.

    No sample is dropped or repeated.

    Args:
        crop: what is taken of samples that are longer than `max_length`: `prefix` or `random`.
        bucket_edges: the padded lengths; None takes sixteen to each doubling.

    Raises:
        UserError: a setting that cannot be.
    """

    crop: str = "prefix"
    bucket_edges: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crop not in CROPS:
            raise UserError(f"crop={self.crop} is unknown; choose one of: {one_of(list(CROPS))}")
        edges = self.edges
        if np.any(np.diff(edges) <= 0) or edges[-1] < self.max_length:
            raise UserError(
                f"bucket_edges={self.bucket_edges} must ascend and reach "
                f"max_length={self.max_length}"
            )

    @cached_property
    def edges(self) -> np.ndarray:
        """The padded lengths, ascending."""
        if self.bucket_edges is not None:
            return np.array(self.bucket_edges or [0], dtype=np.int64)
        edges = [min(_FIRST_EDGE, self.max_length)]
        while edges[-1] < self.max_length:
            doubling = 1 << (edges[-1].bit_length() - 1)
            edges.append(min(edges[-1] + doubling // _EDGES_PER_DOUBLING, self.max_length))
        return np.array(edges, dtype=np.int64)

    def batches(self, window: Window) -> list[GlobalBatch]:
        """See `BatchRule`."""
        cuts, num_tokens = self._cuts(window), self._num_tokens(window)
        epoch, consumed = window.start.epoch, window.start.samples
        # Also where samples are not shuffled: the first batches are then a sample of all lengths.
        rng = np.random.default_rng([window.seed % 2**64, epoch, consumed])
        batches = []
        for number in rng.permutation(len(cuts)):
            places, length = cuts[number]
            consumed += len(places)
            rows, useful = self._rows(window, places), int(num_tokens[places].sum())
            batches.append(GlobalBatch(rows, length, useful, Progress(epoch, consumed)))
        return batches

    def num_batches(self, window: Window) -> int:
        """See `BatchRule`; makes no rows, since a validation split may have millions."""
        return len(self._cuts(window))

    def left_out(self, num_residues: np.ndarray, row_length: int) -> np.ndarray:
        """See `BatchRule`."""
        return np.maximum(num_residues + SPECIALS - row_length, 0)

    def _cuts(self, window: Window) -> list[tuple[np.ndarray, int]]:
        """Which places of the window each batch takes, and the length its rows are padded to."""
        # From long to short: only a window's last batch is ever far below the budget.
        longest_first = np.argsort(-window.num_residues, kind="stable")
        num_tokens = self._num_tokens(window)
        padded = np.minimum(self.edges[np.searchsorted(self.edges, num_tokens)], window.max_length)
        cuts: list[tuple[np.ndarray, int]] = []
        position = 0
        while position < len(longest_first):
            length = int(padded[longest_first[position]])
            num_rows = max(self.tokens_per_batch // length, 1)
            cuts.append((longest_first[position : position + num_rows], length))
            position += num_rows
        return cuts

    def _num_tokens(self, window: Window) -> np.ndarray:
        return np.minimum(window.num_residues + SPECIALS, window.max_length)

    def _rows(self, window: Window, places: np.ndarray) -> list[SequenceRow]:
        drawn = zip(window.samples[places].tolist(), window.passes[places].tolist(), strict=True)
        return [SequenceRow(sample, pass_, window.max_length, self.crop) for sample, pass_ in drawn]
