"""Measures training beside its peers: forward, backward and optimizer step.

make bench-training, or: python -m benchmarks.training [--fasta FILE] [--quick] [...]

All models have six layers, D = 512, 8 heads, F = 1,024, rotary positions, LayerNorm, GELU, no
dropout and one AdamW. They train on the same batches with the same padding, in bf16 autocast, or in
float32 where the processor emulates bfloat16. Costs are seconds per token without padding. At the
end, each of protlm's models trains on padded and on packed rows of real lengths in turns.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from rich.table import Table
from torch import nn

from benchmarks.harness import (
    CPU,
    QUICK,
    Comparison,
    Forecast,
    Pace,
    UnavailableError,
    emulates_bfloat16,
    fact_table,
    median_table,
    options,
    report,
    speed_table,
    take_turns,
)
from benchmarks.language_models import (
    ESM,
    OURS,
    PERFORMER_LM_64,
    PERFORMER_LM_256,
    Sizes,
    models,
    training_step,
)
from benchmarks.synthetic_fasta import SAMPLE
from benchmarks.training_batches import Proteins, batches
from protlm.data.batching.plan import BatchingStrategy
from protlm.data.batching.strategies import Concatenation, LengthBuckets, WholeProteins
from protlm.data.dataset import Batch
from protlm.system.errors import exit_with_message
from protlm.system.processes import keep_freed_memory

LENGTHS, QUICK_LENGTHS = (512, 1024, 4096, 16_384), (64, 128)
TOKENS, QUICK_TOKENS = 4096, 512
REAL, REAL_LENGTH = "real lengths", 1024
PADDED, PACKED = "padded rows", "packed rows"
# Batches of a turn; the padded ones are evenly spaced in the lengths of an epoch.
_BATCHES = 5
PEERS = (ESM, PERFORMER_LM_256, PERFORMER_LM_64)
THOROUGH = Pace(seconds=150.0, fewest=3, most=7)
# A model that would take longer for a step is left out.
MOST_SECONDS = 60.0


@dataclass(frozen=True)
class Workload:
    """A rule for the batches, and the number of their tokens in a turn.

    `length` is the length of all rows, or None if rows differ in length.
    """

    label: str
    rule: BatchingStrategy
    tokens: int
    length: int | None


class Training:
    """A model with an optimizer and an endless supply of batches."""

    def __init__(self, model: nn.Module, supply: Iterator[Batch]) -> None:
        self.model, self._batches = model.train(), supply
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self._is_mixed = not emulates_bfloat16(CPU)

    def seconds_per_token(self, least_tokens: int) -> float:
        """Trains on at least `least_tokens` tokens and returns the seconds per token."""
        tokens, seconds = 0, 0.0
        while tokens < least_tokens:
            batch = next(self._batches)
            start = time.perf_counter()
            loss = partial(self.model, batch)
            training_step(loss, self.model, self._optimizer, device=CPU, is_mixed=self._is_mixed)
            seconds += time.perf_counter() - start
            tokens += int(batch.mask_BL.sum())
        return seconds / tokens


def workloads(lengths: Sequence[int], tokens: int) -> list[Workload]:
    """Returns the workloads: full rows of each length, then real lengths in buckets.

    Args:
        lengths: the lengths of the full rows.
        tokens: the tokens of a batch of full rows; a longer row is a batch by itself.
    """
    rows = [
        Workload(f"L={length:,}", Concatenation(max(tokens, length), length), 1, length)
        for length in sorted(lengths)
    ]
    buckets = LengthBuckets(2 * tokens, min(2 * tokens, REAL_LENGTH))
    return [*rows, Workload(REAL, buckets, 7 * tokens, None)]


def compare(
    sizes: Sizes, proteins: Proteins, workload: Workload, forecast: Forecast, pace: Pace
) -> Comparison:
    """Compares the training of all models on one workload."""
    trainings, left_out = dict[str, Training](), dict[str, str]()
    for name, make in models(sizes).items():
        try:
            if workload.length:
                forecast.check(name, workload.length)
            trainings[name] = Training(make(), batches(proteins, workload.rule))
        except UnavailableError as error:
            left_out[name] = str(error)
    runs = {
        name: lambda each=each: each.seconds_per_token(workload.tokens)
        for name, each in trainings.items()
    }
    comparison = take_turns(workload.label, runs, pace)
    comparison.left_out |= left_out
    for name in comparison.costs:
        parameters = sum(p.numel() for p in trainings[name].model.parameters() if p.requires_grad)
        comparison.facts[name] = {"parameters": parameters}
        if workload.length:
            step = (comparison.median(name) or 0.0) * max(TOKENS, workload.length)
            forecast.learn(name, workload.length, seconds=step)
    return comparison


def compare_packed(
    sizes: Sizes, proteins: Proteins, attention: str, tokens: int, pace: Pace
) -> Comparison:
    """Compares padded and packed batches of `tokens` tokens, of the lengths of an epoch each."""
    longest, model = min(tokens, REAL_LENGTH), models(sizes)[attention]
    supply, epoch = batches(proteins, LengthBuckets(tokens, longest)), list[Batch]()
    while not epoch or epoch[-1].after[0] == 0:
        epoch.append(next(supply))
    epoch.sort(key=lambda batch: batch.tokens_BL.shape[1])
    packed = islice(batches(proteins, WholeProteins(tokens, longest, row=tokens)), _BATCHES)
    held = {
        PADDED: [epoch[(2 * i + 1) * len(epoch) // (2 * _BATCHES)] for i in range(_BATCHES)],
        PACKED: list(packed),
    }
    trainings = {name: Training(model(), cycle(held[name])) for name in held}
    useful = {name: sum(int(batch.mask_BL.sum()) for batch in held[name]) for name in held}
    runs = {name: partial(trainings[name].seconds_per_token, useful[name]) for name in held}
    return take_turns(attention, runs, pace)


def tables(held: Sequence[Comparison], packed: Sequence[Comparison]) -> list[Table]:
    """Returns the tables."""
    precision = "float32" if emulates_bfloat16(CPU) else "bf16 autocast"
    ratios = [
        speed_table(precision, held, peer, but=[other for other in PEERS if other != peer])
        for peer in PEERS
        if any(peer in each.costs for each in held)
    ]
    return [
        *ratios,
        median_table("Microseconds per token without padding", held, scale=1e6),
        fact_table("Parameters, in millions", held[:1], "parameters", scale=1e-6),
        speed_table(f"{precision}, {REAL}", packed, PADDED),
    ]


def main() -> None:
    """Measures, prints the tables, and writes the JSON file.

    Raises:
        InputDataError: the sequence file cannot be used.
        OutputError: the JSON file cannot be written.
    """
    parser = options("benchmark_training", "training beside its peers")
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--fasta", type=Path, default=SAMPLE, help="default: the shipped sample")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    # As training does.
    keep_freed_memory()
    proteins, forecast = Proteins(arguments.fasta), Forecast(MOST_SECONDS)
    small = Sizes(num_layers=1, model_dim=64, num_heads=1, feedforward_dim=128, max_length=1024)
    sizes, pace = (small, QUICK) if arguments.quick else (Sizes(), THOROUGH)
    usual, tokens = (QUICK_LENGTHS, QUICK_TOKENS) if arguments.quick else (LENGTHS, TOKENS)
    held = [
        compare(sizes, proteins, workload, forecast, pace)
        for workload in workloads(arguments.lengths or usual, tokens)
    ]
    tokens = QUICK_TOKENS if arguments.quick else 4 * TOKENS
    packed = [compare_packed(sizes, proteins, attention, tokens, pace) for attention in OURS]
    groups = {"training": held, "packed": packed}
    report(arguments.json, groups, (*PEERS, *OURS, PADDED), *tables(held, packed))


if __name__ == "__main__":
    exit_with_message(main)
