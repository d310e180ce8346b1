"""Rounds of training: models take turns on a workload, and rates are compared within a turn."""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import nn

from benchmarks.heap import give_back_freed_memory
from benchmarks.language_models import OURS, Sizes, models
from benchmarks.peers import UnavailableError
from benchmarks.rounds import extrapolate
from benchmarks.same_work import Work, examine
from benchmarks.training_batches import (
    Proteins,
    batches,
    bucketed,
    full_rows,
    padded_to_the_longest,
)
from protlm.data.batching import BatchRule
from protlm.data.dataset import Batch

DTYPE = torch.bfloat16
# A model that is expected to take more than this for one step is left out.
MOST_SECONDS = 60.0
REAL = "real lengths"
# Turns are repeated for about this long.
_SECONDS_OF_A_ROUND = 150.0
_FEWEST_TURNS, _MOST_TURNS = 3, 7
_LEARNING_RATE = 1e-4
_REAL_LENGTH = 1024


@dataclass(frozen=True)
class Workload:
    """What is trained on in a round, and how many tokens of it in a turn."""

    label: str
    ours: BatchRule
    peers: BatchRule
    tokens_per_turn: int

    @property
    def length(self) -> int:
        """Tokens of a row at most."""
        return self.ours.max_length


class Training:
    """A model in training on batches of its own."""

    def __init__(self, model: nn.Module, own: Iterator[Batch]) -> None:
        self.model, self._batches = model.train(), own
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)

    def step(self, batch: Batch) -> None:
        """Forward, backward, optimiser."""
        self._optimizer.zero_grad()
        with torch.autocast("cpu", dtype=DTYPE):
            loss = self.model(batch)
        loss.backward()
        self._optimizer.step()

    def seconds_of_a_step(self) -> float:
        """Trains on one batch."""
        batch = next(self._batches)
        start = time.perf_counter()
        self.step(batch)
        return time.perf_counter() - start

    def tokens_per_second(self, least_tokens: int) -> float:
        """Trains on so many tokens or a few more, after a batch that is not counted.

        It pays for the pages and caches that the others have left cold.
        """
        self.seconds_of_a_step()
        tokens, seconds = 0, 0.0
        while tokens < least_tokens:
            batch = next(self._batches)
            start = time.perf_counter()
            self.step(batch)
            seconds += time.perf_counter() - start
            tokens += int(batch.mask_BL.sum())
        return tokens / seconds


@dataclass
class Round:
    """What was measured on one workload: tokens/s of each model in each turn."""

    workload: Workload
    rates: dict[str, list[float]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def times(self, name: str, peer: str) -> float | None:
        """How many times as fast as a peer: the median over the turns."""
        if name not in self.rates or peer not in self.rates:
            return None
        pairs = zip(self.rates[name], self.rates[peer], strict=True)
        return median(ours / theirs for ours, theirs in pairs)


class Race:
    """Rounds of training: the models take turns on one workload after the other.

    Args:
        sizes: of all models.
        proteins: what they are trained on.
    """

    def __init__(self, sizes: Sizes, proteins: Proteins) -> None:
        self._makers, self._proteins = models(sizes), proteins
        # Seconds of a row by its length, of each model.
        self._costs: dict[str, dict[int, float]] = {name: {} for name in self._makers}

    def hold(self, workload: Workload) -> Round:
        """Lets all models train on a workload in turns."""
        held, entrants = Round(workload), {}
        for name in self._makers:
            try:
                entrants[name] = self._entrant(name, workload)
            except UnavailableError as error:
                held.left_out[name] = str(error)
        seconds = {name: training.seconds_of_a_step() for name, training in entrants.items()}
        if workload.ours is workload.peers:
            for name, taken in seconds.items():
                self._costs[name][workload.length] = taken / _rows(workload)
        turns = round(_SECONDS_OF_A_ROUND / max(sum(seconds.values()), 1e-9))
        for turn in range(min(max(turns, _FEWEST_TURNS), _MOST_TURNS)):
            # Nobody always runs after the one that leaves the caches in disorder.
            for name in random.Random(turn).sample(list(entrants), len(entrants)):
                rate = entrants[name].tokens_per_second(workload.tokens_per_turn)
                held.rates.setdefault(name, []).append(rate)
                give_back_freed_memory()
        return held

    def examine(self, batch: Batch) -> dict[str, Work]:
        """What every model that is here does in a step."""
        found = {}
        for name, make in self._makers.items():
            try:
                found[name] = examine(make(), batch, DTYPE)
            except UnavailableError:
                continue
        return found

    def _entrant(self, name: str, workload: Workload) -> Training:
        costs = self._costs[name]
        if costs and workload.ours is workload.peers:
            seconds = extrapolate(costs, workload.length) * _rows(workload)
            if seconds > MOST_SECONDS:
                raise UnavailableError(f"a step would take about {seconds:.0f} s")
        rule = workload.ours if name in OURS else workload.peers
        return Training(self._makers[name](), batches(self._proteins, rule))


def _rows(workload: Workload) -> int:
    return max(workload.ours.tokens_per_batch // workload.length, 1)


def workloads(lengths: Sequence[int], *, tokens: int) -> list[Workload]:
    """Full rows of each length, then real lengths.

    Args:
        lengths: of the full rows.
        tokens: of a batch of full rows; longer rows are batches of their own.
    """
    found = []
    for length in sorted(lengths):
        rule = full_rows(max(tokens, length), length)
        found.append(Workload(f"L={length:,}", rule, rule, tokens_per_turn=1))
    # As many of the longest rows as the peers have rows fill the budget of protlm's batches.
    budget = 2 * tokens
    ours = bucketed(budget, _REAL_LENGTH)
    peers = padded_to_the_longest(max(budget // _REAL_LENGTH, 1), _REAL_LENGTH)
    return [*found, Workload(REAL, ours, peers, tokens_per_turn=7 * tokens)]
