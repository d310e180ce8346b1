"""Sampling from a causal model, one residue at a time, with the states of the mechanisms.

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

from protlm.attention.ops.numerics import in_float64
from protlm.data.vocabulary import STANDARD_TOKENS, VOCABULARY
from protlm.model.objective import perplexity
from protlm.model.transformer import DecodingState, ProteinLM
from protlm.options.generate import Sampling


def probabilities(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Returns the distribution that a token is drawn from, BV."""
    # Subtract the maximum first: a tiny temperature would turn logits into infinities.
    logits_BV = logits_BV - logits_BV.amax(dim=-1, keepdim=True)
    probable_BV = (logits_BV / (sampling.temperature or 1.0)).softmax(dim=-1)
    probable_BV, order_BV = probable_BV.sort(dim=-1, descending=True, stable=True)
    top_k = sampling.top_k if sampling.temperature else 1
    if top_k is not None:
        probable_BV[:, top_k:] = 0
        probable_BV /= probable_BV.sum(dim=-1, keepdim=True)
    if sampling.top_p is not None:
        mass_before_BV = probable_BV.cumsum(dim=-1) - probable_BV
        probable_BV = probable_BV.masked_fill(mass_before_BV >= sampling.top_p, 0)
        probable_BV /= probable_BV.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probable_BV).scatter(-1, order_BV, probable_BV)


class Ended(StrEnum):
    """The reason for the end of a sequence: the model ended it, or the length limit."""

    eos = "eos"
    length = "length"


@final
@dataclass(frozen=True)
class GeneratedSequence:
    """A sampled sequence, including its prefix.

    `nats` is the sum of -log p over the sampled residues, where p is the model's probability over
    the whole vocabulary at temperature 1.
    """

    number: int
    sequence: str
    ended: Ended
    num_sampled: int
    nats: float

    @property
    def perplexity(self) -> float:
        """exp(nats / sampled residues); NaN if there are none."""
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

    A sequence depends on its number and the seed, not on the others in its batch. Only the 20
    standard amino acids and `<eos>`, or what the model has after the last residue, are drawn: no
    other special tokens, no ambiguity codes (X, B, Z), and neither U nor O, which need more than a
    codon in the genome. `<eos>` is not drawn before the first residue.
    """
    # The last digits of a matrix product depend on its number of rows. In float64 this difference
    # is too small to change a draw, so the batch size does not change the sequences.
    network = float64_copy(network)
    words = network.vocabulary
    state, logits_1V = _read(network, [*words.prefix, *prefix.tolist()])
    for first in range(1, number + 1, batch_size):
        numbers = range(first, min(first + batch_size, number + 1))
        batch = [_Sequence(n, seed, prefix, max_residues, words.suffix[:1]) for n in numbers]
        rows_B = torch.zeros(len(batch), dtype=torch.int64, device=logits_1V.device)
        yield from _generate_batch(network, batch, sampling, state[rows_B], logits_1V[rows_B])


def float64_copy(network: ProteinLM) -> ProteinLM:
    """Returns a copy for evaluation in float64, on the CPU if its device lacks it."""
    device = in_float64(network.embedding.weight[:1]).device
    return copy.deepcopy(network).to(device).double().eval()


def _read(network: ProteinLM, tokens: list[int]) -> tuple[DecodingState, Tensor]:
    """Returns the state after the common prefix, and the logits of the next token, 1V.

    The prefix is read one token at a time, once for all sequences. This costs as much as generating
    it, but mechanisms need no second method that converts a whole sequence to a state.
    """
    device = network.embedding.weight.device
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
    while True:
        tokens_B = _extend(batch, logits_BV.cpu(), sampling)
        yield from (s.generated() for s in batch if s.ended)
        open_rows = [row for row, sequence in enumerate(batch) if not sequence.ended]
        if not open_rows:
            return
        if len(open_rows) < len(batch):
            batch = [batch[row] for row in open_rows]
            state = state[torch.tensor(open_rows, device=logits_BV.device)]
            tokens_B = tokens_B[open_rows]
        state, logits_BV = network.step(state, tokens_B.to(logits_BV.device))


class _Sequence:
    """A sequence under construction."""

    def __init__(
        self, number: int, seed: int, prefix: np.ndarray, max_residues: int, end: tuple[int, ...]
    ) -> None:
        self.number = number
        # Independent streams for all pairs of a seed and a number.
        self.rng = np.random.default_rng([seed, number])
        self.tokens: list[int] = prefix.tolist()
        self.ended: Ended | None = None
        self.nats = 0.0
        self._num_given, self._max_residues = len(prefix), max_residues
        # The token after the last residue; some models have none.
        self.end = end

    def append(self, token: int, nats: float) -> None:
        if token in self.end:
            self.ended = Ended.eos
            return
        self.tokens.append(token)
        self.nats += nats
        if len(self.tokens) == self._max_residues:
            self.ended = Ended.length

    def generated(self) -> GeneratedSequence:
        assert self.ended is not None
        sequence = VOCABULARY.decode(np.array(self.tokens))
        num_sampled = len(self.tokens) - self._num_given
        return GeneratedSequence(self.number, sequence, self.ended, num_sampled, self.nats)


def _extend(batch: list[_Sequence], logits_BV: Tensor, sampling: Sampling) -> Tensor:
    is_allowed_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
    is_allowed_BV[:, STANDARD_TOKENS] = True
    for end in batch[0].end:
        is_allowed_BV[:, end] = torch.tensor([bool(s.tokens) for s in batch])
    probable_BV = probabilities(logits_BV.masked_fill(~is_allowed_BV, -torch.inf), sampling)
    uniform_B1 = torch.tensor([[sequence.rng.random()] for sequence in batch], dtype=torch.float64)
    tokens_B1 = draw(probable_BV, uniform_B1)
    nats_B1 = -logits_BV.log_softmax(dim=-1).gather(-1, tokens_B1)
    tokens_B = tokens_B1.squeeze(1)
    for sequence, token, nats in zip(
        batch, tokens_B.tolist(), nats_B1.flatten().tolist(), strict=True
    ):
        sequence.append(token, nats)
    return tokens_B


def draw(probable_BV: Tensor, uniform_B1: Tensor) -> Tensor:
    """Returns the first token whose cumulative probability exceeds the random number, B1."""
    cumulative_BV = probable_BV.cumsum(dim=-1)
    return torch.searchsorted(cumulative_BV, uniform_B1 * cumulative_BV[:, -1:], right=True)
