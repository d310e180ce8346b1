"""A network that reads each protein after one context: relatives, of which it is the query.

In a model of `ordered` relatives, a context is read once, in pieces of whole proteins, and leaves a
state that all queries share. In one of `full` relatives each query is read with the whole context.
Only what belongs to the query is returned.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from protlm.bounds import Bounds
from protlm.config import Relatives, RelativesPositions
from protlm.model.selfattention import AttentionInputs
from protlm.model.transformer import DecodingState, FamilyState, ProteinLM
from protlm.system.errors import UserError


class Relative(NamedTuple):
    """The residues of a relative, uint8, and the position in the query of each, from 0, int64."""

    residues: np.ndarray
    columns: np.ndarray


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
        self._states: dict[tuple[object, ...], FamilyState | None] = {}

    @property
    def max_length(self) -> None:
        """No limit to cut queries at, since the columns of relatives are those of whole queries."""
        return None

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
        if torch.is_grad_enabled():
            raise UserError(
                "gradients do not reach the relatives of a context; leave gradients=True out, or "
                "the relatives"
            )
        (batch, size), parts = tokens_BL.shape, list[dict[int, Tensor]]()
        before, state, at_once = self._family, None, batch
        if self.is_read_again:
            at_once = max(self._tokens_per_batch // (self.num_before + size), 1)
        else:
            before, state = (), self._state(causal=causal)
        for some in zip(tokens_BL.split(at_once), mask_BL.split(at_once), strict=True):
            *given, both = self._after(before, *some)
            hidden = super().hidden_states(
                *given, causal=causal, layers=layers, bounds=both, family=state
            )
            parts.append({layer: x[:, -size:] for layer, x in hidden.items()})
        return {layer: torch.cat([part[layer] for part in parts]) for layer in parts[0]}

    def attention_inputs(
        self, tokens_BL: Tensor, mask_BL: Tensor, *, causal: bool, bounds: Bounds | None = None
    ) -> Iterator[tuple[int, AttentionInputs]]:
        """Yields, for one query, the inputs of layers of the family with those of its context."""
        assert bounds is None and len(tokens_BL) == 1, "maps are of one query"
        tokens, mask, both = self._after(self._family, tokens_BL, mask_BL)
        for number, x in super().attention_inputs(tokens, mask, causal=causal, bounds=both):
            yield number, x.of_query(self.num_before)

    def initial_state(self, family: FamilyState | None = None) -> DecodingState:
        """Returns the state before the first position of a query."""
        assert family is None
        return super().initial_state(self._state(causal=True))

    @torch.inference_mode()
    def _state(self, *, causal: bool) -> FamilyState | None:
        """Returns what the context leaves; None of an empty one. It is read once, in pieces."""
        weight = self.embedding.weight
        kind = weight.device.type
        rounds = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        key = weight.dtype, weight.device, rounds, causal
        if key not in self._states:
            state, nothing = None, torch.zeros(1, 0, dtype=torch.int64, device=weight.device)
            for piece in self._pieces():
                *given, bounds = self._after(piece, nothing, nothing.bool())
                state = self.read(*given, causal=causal, bounds=bounds, family=state)
            self._states[key] = state
        return self._states[key]

    def _pieces(self) -> Iterator[list[Relative]]:
        """Yields the context in pieces of whole proteins."""
        some, size = list[Relative](), 0
        for relative in self._family:
            length = len(relative.residues) + self.vocabulary.num_around
            if some and size + length > self._tokens_per_batch:
                yield some
                some, size = [], 0
            some.append(relative)
            size += length
        if some:
            yield some

    def _after(
        self, relatives: Sequence[Relative], tokens_BL: Tensor, mask_BL: Tensor
    ) -> tuple[Tensor, Tensor, Bounds]:
        """Returns the tokens, mask and bounds of rows: each a family of relatives and a query."""
        (batch, size), words = tokens_BL.shape, self.vocabulary
        tokens = [torch.from_numpy(words.framed(one.residues).astype(int)) for one in relatives]
        # The residues of the query begin after its first tokens.
        start, end = np.arange(words.start), np.arange(1, len(words.suffix) + 1) + words.start
        places = [
            np.concatenate([x[:1] + start, x + words.start, x[-1:] + end])
            for x in (one.columns for one in relatives)
        ]
        position_M = np.concatenate([*places, np.arange(size)])
        before_P = torch.cat([*tokens, tokens_BL.new_zeros(0, device="cpu")])
        before_BP = before_P.to(tokens_BL.device).expand(batch, -1)
        lengths, spans, families = [*map(len, tokens)], list[tuple[int, int]](), list[int]()
        for row, own in enumerate(mask_BL.sum(1).tolist()):
            proteins = [length for length in (*lengths, own) if length]
            spans += pairwise(accumulate(proteins, initial=row * len(position_M)))
            families.append(len(proteins))
        kind = self.relatives_positions
        bounds = Bounds.of(
            spans,
            (batch, len(position_M)),
            longest=max(size, *lengths, 1),
            families=families,
            running=kind is RelativesPositions.run,
            aligned=np.tile(position_M, batch) if kind is RelativesPositions.aligned else None,
        )
        joined_BM = torch.cat([before_BP, tokens_BL], dim=1)
        mask_BM = torch.cat([torch.ones_like(before_BP).bool(), mask_BL], dim=1)
        return joined_BM, mask_BM, bounds.to(tokens_BL.device)
