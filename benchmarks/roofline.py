"""Predicts the time of attention on cards from bytes and operations, without a card.

python -m benchmarks.roofline

Forward and backward, per position and head, bfloat16, heads of 64. A kernel takes the longest of
four times: for memory, for the cache (blocks of rows are read again for every block of positions),
for products, and for exponentials. Without fused kernels, the bytes and operations are those
of the calls of PyTorch; launches cost nothing. None of this is measured.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import NamedTuple

import torch

from benchmarks.mechanism_costs import WIDTH, traced
from protlm.attention import names

ROWS = 128, 256
# Features of a block in the forward and the backward pass (`fused.blocks`).
BLOCKS = 64, 32
# Positions of a chunk of causal attention.
CHUNK = 64
# Kernels reach about half of the rates of data sheets.
REACHED = 0.5


class Card(NamedTuple):
    """The rates of a card in data sheets, dense, in 10¹² per second.

    Attributes:
        memory: bytes.
        cache: bytes from the second-level cache: measured by others for A100 and H100, and assumed
            in proportion to the multiprocessors and clocks for others.
        bfloat16: operations of tensor cores.
        tf32: operations of tensor cores.
        float32: operations outside tensor cores.
        exponentials: 16 per cycle and multiprocessor.
    """

    memory: float
    cache: float
    bfloat16: float
    tf32: float
    float32: float
    exponentials: float


CARDS = {
    "A100": Card(2.04, 4.5, 312, 156, 19.5, 2.4),
    "H100": Card(3.35, 5.5, 989, 495, 67, 3.9),
    "H200": Card(4.8, 5.5, 989, 495, 67, 3.9),
    "B200": Card(8.0, 9.0, 2250, 1125, 75, 4.4),
}
# Exact attention by cuDNN on cards of the H200's class, measured by others: ns at two lengths.
FLASH = {1024: 2.6, 8192: 17.0}


@dataclass(frozen=True)
class Cost:
    """The cost of forward and backward, per position and head."""

    memory: float
    cache: float = 0
    bfloat16: float = 0
    tf32: float = 0
    float32: float = 0
    exponentials: float = 0

    def nanoseconds(self, card: Card) -> float:
        """Returns the predicted time."""
        products = self.bfloat16 / card.bfloat16 + self.tf32 / card.tf32
        products += self.float32 / card.float32
        others = self.memory / card.memory, self.cache / card.cache
        return max(products, *others, self.exponentials / card.exponentials) / 1000 / REACHED


def fused(rows: int, *, is_exponential: bool) -> Cost:
    """Returns the cost of the five kernels of `protlm.attention.linearized.fused`.

    Each multiplies by the rows (R·K in TF32), as does the gradient of q and k in bfloat16. q and dO
    are read twice, as are k and v; a block of positions, of 64 or for key gradients of 32, reads
    w (4 bytes) and U or dU (2 bytes). k and v are read again for each block of features of the
    forward pass, and q and dO for each of the backward pass.
    """
    pair = 2 * rows * WIDTH
    vectors = 2 * WIDTH
    # Forward k, v, q, O; backward q, dO, O, dq, then q, dO, then k, v, dk, dv; and sums per row.
    memory = (4 + 4 + 2 + 4) * vectors + 6 * 4
    blocks = 2 / 64 + 1 / 32
    again = sum(2 * vectors * (rows / features - 1) for features in BLOCKS)
    cache = blocks * rows * WIDTH * (4 + 2) + again
    exponentials = 5 * rows if is_exponential else 0
    return Cost(memory, cache, bfloat16=8 * pair, tf32=5 * pair, exponentials=exponentials)


def fused_causal(rows: int, *, is_exponential: bool) -> Cost:
    """Returns the cost of the causal kernels in chunks of 64.

    The states S are written and read by the forward pass, written and read again by the backward
    pass, and their gradients are written once and read twice; z and references likewise, in
    float32. Chunks project queries and keys, each in two bfloat16 products, in four kernels; sums
    over chunks project in TF32, in three. Each kernel of chunks reads w, and blocks of features
    read q, k, v and dO again, in three sums.
    """
    pair = 2 * rows * WIDTH
    vectors = 2 * WIDTH
    # Forward k, v, then q, k, v, O; backward k, v, then q, k, v, O, dO, dq, then q, dO, then q, k,
    # dO, dv, then q, k, v, dO, dk.
    memory = (2 + 4 + 2 + 6 + 2 + 4 + 5) * vectors + 7 * rows * (2 * WIDTH + 4 + 4) / CHUNK
    cache = memory + 4 * rows * WIDTH * 4 / CHUNK + 3 * 2 * vectors * (rows / 32 - 1)
    exponentials = 11 * rows if is_exponential else 0
    return Cost(memory, cache, bfloat16=29 * pair, tf32=3 * pair, exponentials=exponentials)


@cache
def unfused(
    name: str, length: int, *, causal: bool = False, num_features: int | None = None
) -> Cost | None:
    """Returns the cost of a mechanism in PyTorch, or None for a mode that it lacks."""
    found = traced(name, length, causal=causal, num_features=num_features)
    if found is None:
        return None
    in_float32 = found.operations[torch.float32]
    in_bfloat16 = sum(found.operations.values()) - in_float32
    return Cost(memory=found.num_bytes, bfloat16=in_bfloat16, float32=in_float32)


def flash(length: float, card: Card) -> float:
    """Returns the time of exact attention in ns: a line through two measurements.

    Scaled by the rate of tensor cores of a card, relative to the H200.
    """
    (short, fast), (long, slow) = FLASH.items()
    measured = fast + (slow - fast) * (length - short) / (long - short)
    return measured * CARDS["H200"].bfloat16 / card.bfloat16


def passing_length(nanoseconds: float, card: Card, *, causal: bool = False) -> float:
    """Returns the length from which on exact attention is slower; 0 if it always is.

    Causal exact attention takes half the time.
    """
    nanoseconds *= 2 if causal else 1
    start, slope = flash(0, card), flash(1, card) - flash(0, card)
    return max((nanoseconds - start) / slope, 0) if slope else inf


MECHANISMS = [
    *((f"softmax kernel, R={rows}", rows, True) for rows in ROWS),
    *((f"ReLU, R={rows}", rows, False) for rows in (WIDTH, 256)),
]
TITLES = (
    *("card", "mechanism", "fused, ns", "fused is faster from L"),
    *("PyTorch, ns", "PyTorch is faster from L", "exact at 1,024 / 8,192, ns"),
)
LENGTHS, CARD = (1024, 8192), "H200"
TITLES_OF_MECHANISMS = (
    *("mechanism", "mode"),
    *(f"{what}, L={length:,}" for length in LENGTHS for what in ("bytes", "operations", "ns")),
)


def predictions() -> list[tuple[str, ...]]:
    """Returns the rows of the table of fused kernels."""
    rows = []
    for name, card in CARDS.items():
        exact = f"{flash(1024, card):.1f} / {flash(8192, card):.1f}"
        for mechanism, number, is_exponential in MECHANISMS:
            in_torch = unfused(
                "performer_softmax" if is_exponential else "performer_relu",
                8192,
                # Without a projection there are as many features as channels.
                num_features=number if number != WIDTH else None,
            )
            assert in_torch is not None
            cells = []
            for cost in (fused(number, is_exponential=is_exponential), in_torch):
                time = cost.nanoseconds(card)
                cells += [f"{time:.2f}", f"{round(passing_length(time, card), -1):,.0f}"]
            rows.append((name, mechanism, *cells, exact))
    return rows


CAUSAL_TITLES = (
    *("card", "mechanism", "fused, causal, ns", "faster from L"),
    "exact, causal at 1,024 / 8,192, ns",
)


def causal_predictions() -> list[tuple[str, ...]]:
    """Returns the rows of the table of causal attention."""
    rows = []
    for name, card in CARDS.items():
        exact = f"{flash(1024, card) / 2:.1f} / {flash(8192, card) / 2:.1f}"
        for mechanism, number, is_exponential in MECHANISMS:
            time = fused_causal(number, is_exponential=is_exponential).nanoseconds(card)
            length = round(passing_length(time, card, causal=True), -1)
            rows.append((name, mechanism, f"{time:.2f}", f"{length:,.0f}", exact))
    return rows


def mechanism_rows(mechanisms: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields the rows of the table of all mechanisms in PyTorch."""
    for name in mechanisms:
        for causal in (False, True):
            cells: list[str] = []
            for length in LENGTHS:
                if cost := unfused(name, length, causal=causal):
                    operations = cost.bfloat16 + cost.float32
                    time = cost.nanoseconds(CARDS[CARD])
                    cells += [f"{cost.memory:,.0f}", f"{operations:,.0f}", f"{time:.1f}"]
            if cells:
                yield (f"`{name}`", "causal" if causal else "bidirectional", *cells)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Prints the tables."""
    print(table(TITLES, predictions()))
    print(table(CAUSAL_TITLES, causal_predictions()))
    sys.stdout.write(table(TITLES_OF_MECHANISMS, list(mechanism_rows(names()))))


if __name__ == "__main__":
    main()
