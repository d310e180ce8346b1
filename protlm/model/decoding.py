"""Sampling from a causal model, one residue after the other, with the mechanisms' states.

Temperature; top-k (Fan et al., arXiv 1805.04833); top-p (Holtzman et al., arXiv 1904.09751).
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import final

import numpy as np
import torch
from torch import Tensor

from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.errors import UserError
from protlm.model.objective import perplexity
from protlm.model.transformer import DecodingState, ProteinLM


@final
@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits.

    Args:
        temperature: what logits are divided by; 0 takes the most probable token.
        top_k: only this many of the most probable tokens; None takes all.
        top_p: of what `top_k` leaves, only the smallest set of the most probable tokens that has
            this much of the probability; None takes all.

    Raises:
        UserError: a value out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature {self.temperature} must be 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k {self.top_k} must be at least 1; leave it out to keep all")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p} must be above 0 and at most 1")

    def probabilities(self, logits_BV: Tensor) -> Tensor:
        """The distribution a token is drawn from, BV; tokens with a logit of -inf have none."""
        # Differences first: a tiny temperature would make infinities of the logits themselves.
        logits_BV = logits_BV - logits_BV.amax(dim=-1, keepdim=True)
        probable_BV = (logits_BV / (self.temperature or 1.0)).softmax(dim=-1)
        probable_BV, order_BV = probable_BV.sort(dim=-1, descending=True, stable=True)
        top_k = self.top_k if self.temperature else 1
        if top_k is not None:
            probable_BV[:, top_k:] = 0
            probable_BV /= probable_BV.sum(dim=-1, keepdim=True)
        if self.top_p is not None:
            mass_before_BV = probable_BV.cumsum(dim=-1) - probable_BV
            probable_BV = probable_BV.masked_fill(mass_before_BV >= self.top_p, 0)
            probable_BV /= probable_BV.sum(dim=-1, keepdim=True)
        return torch.zeros_like(probable_BV).scatter(-1, order_BV, probable_BV)


class Ended(StrEnum):
    """Why a sequence has no more residues: the model ended it, or it is as long as allowed."""

    eos = "eos"
    length = "length"


@final
@dataclass(frozen=True)
class GeneratedSequence:
    """A sampled sequence, its prefix included.

    Attributes:
        number: from 1.
        sequence: residues.
        ended: why there are no more of them.
        num_sampled: residues after the prefix.
        nats: the sum of -log p over these, p being the model's own probability of a residue, which
            knows no temperature and is spread over the whole vocabulary.
    """

    number: int
    sequence: str
    ended: Ended
    num_sampled: int
    nats: float

    @property
    def perplexity(self) -> float:
        """exp(nats / sampled residues); NaN where there are none."""
        return perplexity(self.nats, self.num_sampled) if self.num_sampled else math.nan


@torch.inference_mode()
def generate(
    network: ProteinLM,
    prefix: np.ndarray,
    sampling: Sampling,
    *,
    number: int,
    max_residues: int,
    seed: int,
    batch_size: int,
) -> Iterator[GeneratedSequence]:
    """Samples sequences number 1 to `number` in batches, and yields them as they end.

    What a sequence becomes depends on its number and the seed, not on the others in its batch. Only
    the 20 standard amino acids and `<eos>` are drawn: no special tokens, no ambiguity codes (X, B,
    Z), and neither U nor O, which a genome encodes by more than their codon. `<eos>` is not drawn
    before the first residue.

    Args:
        network: a causal model of `Recurrent` mechanisms.
        prefix: tokens of the residues that all sequences begin with.
        sampling: how tokens are drawn.
        number: how many sequences.
        max_residues: the most residues of a sequence, those of the prefix included.
        seed: of the random numbers.
        batch_size: sequences at a time.
    """
    # A row of a matrix product depends in its last digit on the number of rows. In float64 that is
    # far below what a draw can tell apart, so that the batch size does not change the sequences.
    network = copy.deepcopy(network).double().eval()
    state, logits_1V = _read(network, [VOCABULARY.cls, *prefix.tolist()])
    for first in range(1, number + 1, batch_size):
        numbers = range(first, min(first + batch_size, number + 1))
        batch = [_Sequence(n, seed, prefix, max_residues) for n in numbers]
        rows_B = torch.zeros(len(batch), dtype=torch.int64, device=logits_1V.device)
        yield from _generate_batch(network, batch, sampling, state[rows_B], logits_1V[rows_B])


def _read(network: ProteinLM, tokens: list[int]) -> tuple[DecodingState, Tensor]:
    """The state after tokens that all sequences begin with, and the logits of the next one, 1V.

    They are read one after the other, once for all sequences: that costs as much as to generate
    them, and spares each mechanism a second form that turns a whole sequence into a state.
    """
    device = network.head.weight.device
    state = network.initial_state()
    for token in tokens[:-1]:
        state, _ = network.step(state, torch.tensor([token], device=device))
    return network.step(state, torch.tensor(tokens[-1:], device=device))


def _generate_batch(
    network: ProteinLM,
    batch: list["_Sequence"],
    sampling: Sampling,
    state: DecodingState,
    logits_BV: Tensor,
) -> Iterator[GeneratedSequence]:
    """Samples until all have ended; those that have leave the batch."""
    while True:
        tokens_B = _extend(batch, logits_BV.cpu(), sampling)
        yield from (s.generated() for s in batch if s.ended)
        going = [row for row, sequence in enumerate(batch) if not sequence.ended]
        if not going:
            return
        if len(going) < len(batch):
            batch = [batch[row] for row in going]
            state, tokens_B = state[torch.tensor(going, device=logits_BV.device)], tokens_B[going]
        state, logits_BV = network.step(state, tokens_B.to(logits_BV.device))


class _Sequence:
    """A sequence that grows."""

    def __init__(self, number: int, seed: int, prefix: np.ndarray, max_residues: int) -> None:
        self.number = number
        # Independent streams for all pairs of a seed and a number.
        self.rng = np.random.default_rng([seed, number])
        self.tokens: list[int] = prefix.tolist()
        self.ended: Ended | None = None
        self.nats = 0.0
        self._num_given, self._max_residues = len(prefix), max_residues

    def append(self, token: int, nats: float) -> None:
        """Takes what was drawn."""
        if token == VOCABULARY.eos:
            self.ended = Ended.eos
            return
        self.tokens.append(token)
        self.nats += nats
        if len(self.tokens) == self._max_residues:
            self.ended = Ended.length

    def generated(self) -> GeneratedSequence:
        """The sequence that has ended."""
        assert self.ended is not None
        sequence = VOCABULARY.decode(np.array(self.tokens))
        num_sampled = len(self.tokens) - self._num_given
        return GeneratedSequence(self.number, sequence, self.ended, num_sampled, self.nats)


def _extend(batch: list[_Sequence], logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Draws the next token of each sequence, from its own random numbers, and appends it."""
    is_allowed_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
    is_allowed_BV[:, [VOCABULARY[letter] for letter in STANDARD]] = True
    is_allowed_BV[:, VOCABULARY.eos] = torch.tensor([bool(s.tokens) for s in batch])
    probable_BV = sampling.probabilities(logits_BV.masked_fill(~is_allowed_BV, -torch.inf))
    uniform_B1 = torch.tensor([[sequence.rng.random()] for sequence in batch], dtype=torch.float64)
    cumulative_BV = probable_BV.cumsum(dim=-1)
    # The first token whose cumulative probability is above the random number: never one without.
    tokens_B1 = torch.searchsorted(cumulative_BV, uniform_B1 * cumulative_BV[:, -1:], right=True)
    nats_B1 = -logits_BV.log_softmax(dim=-1).gather(-1, tokens_B1)
    tokens_B = tokens_B1.squeeze(1)
    for sequence, token, nats in zip(
        batch, tokens_B.tolist(), nats_B1.flatten().tolist(), strict=True
    ):
        sequence.append(token, nats)
    return tokens_B
