"""A network that reads each protein after one context: relatives, of which it is the query.

In a model of `ordered` relatives, a context is read once, in pieces of whole proteins, and leaves a
state that all queries share. In one of `full` relatives each query is read with the whole context.
Only what belongs to the query is returned.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from protlm.bounds import Bounds
from protlm.config import Relatives, RelativesPositions
from protlm.model.selfattention import AttentionInputs
from protlm.model.transformer import DecodingState, FamilyState, ProteinLM


class Relative(NamedTuple):
    """The residues of a relative, uint8, and the position in the query of each, from 0, int64."""

    residues: np.ndarray
    columns: np.ndarray


class _Row(NamedTuple):
    """The tokens of proteins that are joined, and their positions in layers of the family."""

    tokens_L: np.ndarray
    position_L: np.ndarray
    lengths: Sequence[int]


@final
class NetworkInContext(ProteinLM):
    """The network of a model, with the same weights, for proteins that follow a context.

    Its rows are queries, which do not see each other.

    Args:
        tokens_per_batch: most tokens that are read at a time, or one protein, or one query with
            all of a context.
    """

    def __init__(
        self, network: ProteinLM, relatives: Sequence[Relative], *, tokens_per_batch: int
    ) -> None:
        assert network.relatives is not None
        nn.Module.__init__(self)
        # The modules are those of the other network.
        vars(self).update(vars(network))
        self._family, self._tokens_per_batch = relatives, tokens_per_batch
        self._states: dict[tuple[torch.dtype, torch.device, bool], FamilyState | None] = {}

    @property
    def num_before(self) -> int:
        """The number of tokens of the context."""
        return sum(len(one.residues) + self.vocabulary.num_around for one in self._family)

    @property
    def is_read_again(self) -> bool:
        """Whether the whole context is read with every query."""
        return self.relatives is Relatives.full

    def hidden_states(
        self,
        tokens_BL: Tensor,
        mask_BL: Tensor,
        *,
        causal: bool,
        layers: Collection[int],
        bounds: Bounds | None = None,
        is_whole: bool = False,
        family: FamilyState | None = None,
    ) -> dict[int, Tensor]:
        """Returns the hidden states of queries alone; of later blocks none are computed."""
        assert bounds is None and family is None, "a context is read for padded rows"
        if self.is_read_again:
            return self._with_context(tokens_BL, mask_BL, causal=causal, layers=layers)
        size, lengths = tokens_BL.shape[1], mask_BL.sum(1).tolist()
        spans = [(row * size, row * size + length) for row, length in enumerate(lengths)]
        shape = len(tokens_BL), size
        single = Bounds.of(spans, shape, longest=size, families=[1] * len(spans))
        return super().hidden_states(
            tokens_BL,
            mask_BL,
            causal=causal,
            layers=layers,
            bounds=single.to(tokens_BL.device),
            family=self._state(causal=causal),
        )

    def attention_inputs(
        self, tokens_BL: Tensor, mask_BL: Tensor, *, causal: bool, bounds: Bounds | None = None
    ) -> Iterator[tuple[int, AttentionInputs]]:
        """Yields, for one query, the inputs of layers of the family with those of its context."""
        assert bounds is None and len(tokens_BL) == 1, "maps are of one query"
        row, given, mask = self._row_of(tokens_BL, mask_BL)
        start = len(row.tokens_L) - tokens_BL.shape[1]
        both = self._bounds([row]).to(given.device)
        for number, x in super().attention_inputs(given, mask, causal=causal, bounds=both):
            own = x.of_last(start) if x.view is None else replace(x, own=start)
            yield number, own

    def initial_state(self, family: FamilyState | None = None) -> DecodingState:
        """Returns the state before the first position of a query."""
        assert family is None
        return super().initial_state(self._state(causal=True))

    def _state(self, *, causal: bool) -> FamilyState | None:
        """Returns what the context leaves; None of an empty one. It is read once."""
        weight = self.embedding.weight
        key = weight.dtype, weight.device, causal
        if key not in self._states:
            state = None
            for row in self._pieces():
                state = self._after(row, state, causal=causal)
            self._states[key] = state
        return self._states[key]

    @torch.inference_mode()
    def _after(self, row: _Row, state: FamilyState | None, *, causal: bool) -> FamilyState:
        tokens_1L = torch.from_numpy(row.tokens_L).to(self.embedding.weight.device)[None]
        bounds = self._bounds([row]).to(tokens_1L.device)
        mask_1L = torch.ones_like(tokens_1L, dtype=torch.bool)
        return self.read(tokens_1L, mask_1L, causal=causal, bounds=bounds, family=state)

    def _pieces(self) -> Iterator[_Row]:
        """Yields the context in pieces of whole proteins."""
        some: list[Relative] = []
        size = 0
        for relative in self._family:
            length = len(relative.residues) + self.vocabulary.num_around
            if some and size + length > self._tokens_per_batch:
                yield self._joined(some)
                some, size = [], 0
            some.append(relative)
            size += length
        if some:
            yield self._joined(some)

    def _joined(self, relatives: Sequence[Relative]) -> _Row:
        words = self.vocabulary
        tokens = [words.framed(one.residues).astype(np.int64) for one in relatives]
        before, after = np.arange(-words.start, 0), np.arange(1, len(words.suffix) + 1)
        places = [
            np.concatenate([one.columns[:1] + before, one.columns, one.columns[-1:] + after])
            for one in relatives
        ]
        # The first residue of the query is after the tokens before it.
        nothing = np.zeros(0, np.int64)
        return _Row(
            np.concatenate([nothing, *tokens]),
            np.concatenate([nothing, *places]) + words.start,
            [*map(len, tokens)],
        )

    def _bounds(self, rows: Sequence[_Row]) -> Bounds:
        """Returns the bounds of rows of one length, each of which is a family."""
        length = len(rows[0].tokens_L)
        cuts = [accumulate(row.lengths, initial=number * length) for number, row in enumerate(rows)]
        is_aligned = self.relatives_positions is RelativesPositions.aligned
        return Bounds.of(
            [span for one in cuts for span in pairwise(one)],
            (len(rows), length),
            longest=max(max(row.lengths) for row in rows),
            families=[len(row.lengths) for row in rows],
            running=self.relatives_positions is RelativesPositions.run,
            aligned=np.concatenate([row.position_L for row in rows]) if is_aligned else None,
        )

    def _with_context(
        self, tokens_BL: Tensor, mask_BL: Tensor, *, causal: bool, layers: Collection[int]
    ) -> dict[int, Tensor]:
        """Reads every query with the whole context before it."""
        batch, size = tokens_BL.shape
        before = self.num_before
        at_once = max(self._tokens_per_batch // (before + size), 1)
        parts: dict[int, list[Tensor]] = {}
        for start in range(0, batch, at_once):
            some = slice(start, start + at_once)
            rows, *given = zip(
                *(
                    self._row_of(tokens_BL[n : n + 1], mask_BL[n : n + 1])
                    for n in range(batch)[some]
                ),
                strict=True,
            )
            hidden = super().hidden_states(
                *map(torch.cat, given),
                causal=causal,
                layers=layers,
                bounds=self._bounds(rows).to(tokens_BL.device),
            )
            for layer, x in hidden.items():
                parts.setdefault(layer, []).append(x[:, before:])
        return {layer: torch.cat(some) for layer, some in parts.items()}

    def _row_of(self, tokens_1L: Tensor, mask_1L: Tensor) -> tuple[_Row, Tensor, Tensor]:
        """Returns the row of the context and one query, its tokens and its mask, both (1, ...)."""
        context = self._joined(self._family)
        own = tokens_1L[0].cpu().numpy()
        row = _Row(
            np.concatenate([context.tokens_L, own]),
            np.concatenate([context.position_L, np.arange(len(own))]),
            [*context.lengths, int(mask_1L.sum())],
        )
        given = torch.from_numpy(row.tokens_L)[None].to(tokens_1L.device)
        return row, given, torch.cat([torch.ones_like(given[:, : -len(own)]).bool(), mask_1L], 1)
