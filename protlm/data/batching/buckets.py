"""Length-bucketed batches: one sequence per row, within a token budget."""

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from protlm.data.batching.plan import (
    SPECIALS,
    BatchingStrategy,
    GlobalBatch,
    Progress,
    SampleWindow,
    Sequences,
)
from protlm.data.masking import CROPS, crop, row_rng
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import UserError, one_of

_FIRST_EDGE = 64
_EDGES_PER_DOUBLING = 16


@final
@dataclass(frozen=True)
class SequenceRow:
    """`<cls>`, residues of one sequence, `<eos>`: at most `max_length` tokens.

    A cropped sequence has `<eos>` only if the crop includes the end of the sequence. Crop and masks
    differ between repeats of a sample.
    """

    sample: int
    repeat: int
    max_length: int
    crop: str

    @property
    def samples(self) -> tuple[int, ...]:
        return (self.sample,)

    def read(self, sequences: Sequences, *, seed: int) -> tuple[np.ndarray, np.random.Generator]:
        rng = row_rng(seed, self.repeat, self.sample)
        residues = sequences[self.sample]
        part = crop(len(residues), self.max_length - SPECIALS, self.crop, rng)
        end = [VOCABULARY.eos] * (part.stop == len(residues))
        parts = ([VOCABULARY.cls], residues[part], end)
        # An empty list would convert them to floating-point numbers.
        return np.concatenate(parts, dtype=np.int64, casting="unsafe"), rng


@final
@dataclass(frozen=True)
class LengthBuckets(BatchingStrategy):
    """Sorts the samples of a window by length, cuts them into batches, and shuffles the batches.

    No sample is dropped or repeated. `crop` is the part that is kept of samples that are longer
    than `max_length`; the default of the padded lengths, `bucket_edges`, is sixteen per doubling.
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
                f"bucket_edges={self.bucket_edges} must be ascending and reach "
                f"max_length={self.max_length}"
            )

    @cached_property
    def edges(self) -> np.ndarray:
        if self.bucket_edges is not None:
            return np.array(self.bucket_edges or [0], dtype=np.int64)
        edges = [min(_FIRST_EDGE, self.max_length)]
        while edges[-1] < self.max_length:
            doubling = 1 << (edges[-1].bit_length() - 1)
            edges.append(min(edges[-1] + doubling // _EDGES_PER_DOUBLING, self.max_length))
        return np.array(edges, dtype=np.int64)

    def batches(self, window: SampleWindow) -> list[GlobalBatch]:
        cuts, num_tokens = self._cuts(window), self._num_tokens(window)
        epoch, consumed = window.start.epoch, window.start.samples
        # Batches are shuffled in any case, so that the first batches sample all lengths.
        rng = np.random.default_rng([window.seed % 2**64, epoch, consumed])
        batches = []
        for number in rng.permutation(len(cuts)):
            places, length = cuts[number]
            consumed += len(places)
            rows, useful = self._rows(window, places), int(num_tokens[places].sum())
            batches.append(GlobalBatch(rows, length, useful, Progress(epoch, consumed)))
        return batches

    def num_batches(self, window: SampleWindow) -> int:
        """Creates no rows, since a validation split may have millions."""
        return len(self._cuts(window))

    def left_out(self, num_residues: np.ndarray, row_length: int) -> np.ndarray:
        return np.maximum(num_residues + SPECIALS - row_length, 0)

    def _cuts(self, window: SampleWindow) -> list[tuple[np.ndarray, int]]:
        """Returns the positions in the window of each batch, and the padded length of its rows."""
        # In descending order, only the last batch of a window can be far below the budget.
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

    def _num_tokens(self, window: SampleWindow) -> np.ndarray:
        return np.minimum(window.num_residues + SPECIALS, window.max_length)

    def _rows(self, window: SampleWindow, places: np.ndarray) -> list[SequenceRow]:
        drawn = zip(window.samples[places].tolist(), window.passes[places].tolist(), strict=True)
        return [
            SequenceRow(sample, repeat, window.max_length, self.crop) for sample, repeat in drawn
        ]
