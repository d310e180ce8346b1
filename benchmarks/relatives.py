"""Measures queries in a context of many relatives, and training on long families.

make bench-relatives, or: python -m benchmarks.relatives [--quick] [...]

Models of the shape of hybrid-6m with random weights and `ordered` relatives, in float32, each in a
process of its own. A context is read in pieces of 4,096 tokens, as `protlm embed` reads it; its
memory is the peak while it and the first query are read, above what the process has with the model.
A training step is without an optimizer, on rows that one family fills each. Softmax, which takes
long, predicts a tenth of the masked residues, and makes one step.
"""

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu_step import random_batch
from benchmarks.harness import (
    QUICK,
    Comparison,
    Pace,
    fact_table,
    in_process,
    median_table,
    options,
    peak,
    report,
    speed_table,
    take_turns,
)
from benchmarks.language_models import mean_loss, random_checkpoint
from protlm.bounds import Bounds
from protlm.config.data import EMBED_TOKENS
from protlm.data.vocabulary import VOCABULARY
from protlm.loading import model_of
from protlm.model.contexts import Relative
from protlm.model.pretrained import PretrainedModel, TokenBatch
from protlm.model.relatives import in_context
from protlm.system.processes import keep_freed_memory

PEER = "softmax"
MODELS = {
    PEER: ("attention=softmax",),
    "performer_relu": ("attention=performer_relu",),
    "hybrid": ("attention=hybrid", "attention.relatives_window=16"),
}
FIRST, PEAK = "a context and a query", "bytes"
FURTHER, MASKED, TRAINING = "a further query", "all masked residues of a query", "a training step"
INSIDE, ALONE = "in the context", "alone"


class Size(NamedTuple):
    """The residues of a protein, the relatives of a query, and the lengths of rows in training."""

    preset: str
    residues: int
    relatives: int
    rows: tuple[int, ...]
    pace: Pace


THOROUGH = Size("medium_8", 350, 100, (2048, 8192, 32_768), Pace(seconds=10, fewest=3, most=15))
SMALL = Size("tiny", 20, 3, (32, 64), QUICK)


def predict(model: PretrainedModel, batch: TokenBatch) -> float:
    """Predicts a batch; returns the seconds of a query."""
    start = time.perf_counter()
    assert model(batch).logits_BLV.isfinite().all()
    return (time.perf_counter() - start) / len(batch)


def use(model: PretrainedModel, size: Size) -> dict[str, Any]:
    """Returns the costs of a context with its first query, and those of further queries."""
    shape, name = (size.relatives + 2, size.residues), model.description.attention
    drawn, columns = (
        np.random.default_rng(0).choice(VOCABULARY.residues, shape),
        np.arange(shape[1]),
    )
    family = [Relative(one, columns) for one in drawn[2:]]
    first, query = (VOCABULARY.decode(one) for one in drawn[:2])
    several = model.batch_of([query] * (shape[1] // (10 if name == PEER else 1)))
    several.tokens_BL.diagonal(1).fill_(VOCABULARY.mask)
    # A first call of functions of the library takes longer.
    predict(in_context(model, family[:1], EMBED_TOKENS), model.batch_of([first]))
    inside = in_context(model, family, EMBED_TOKENS)
    seconds, taken = peak(partial(predict, inside, model.batch_of([first])))
    found: dict[str, Any] = {FIRST: [seconds], PEAK: taken}
    for work, batch in ((FURTHER, model.batch_of([query])), (MASKED, several)):
        runs = {INSIDE: partial(predict, inside, batch), ALONE: partial(predict, model, batch)}
        found[work] = take_turns(name, runs, size.pace)
    return found


def train(model: PretrainedModel, size: Size) -> Comparison:
    """Returns the costs of training steps with equally many tokens, by the length of the rows."""
    total, name = max(size.rows), model.description.attention
    model.network.train()
    longest = size.rows[0] // 8

    def step(row: int) -> float:
        start = time.perf_counter()
        batch = random_batch(total // row, row)
        spans = [(place, place + longest) for place in range(0, total, longest)]
        families = [row // longest] * (total // row)
        bounds = Bounds.of(spans, (total // row, row), longest=longest, families=families)
        mean_loss(model.network, replace(batch, bounds=bounds)).backward()
        model.network.zero_grad()
        return time.perf_counter() - start

    runs = {f"{row:,}": partial(step, row) for row in size.rows}
    if name == PEER:
        return Comparison(name, {row: [run()] for row, run in runs.items()})
    return take_turns(name, runs, size.pace)


def main() -> None:
    """Measures, prints the tables, and writes the figures."""
    parser = options("benchmark_relatives", "queries with many relatives")
    parser.add_argument("--model", choices=MODELS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    size = SMALL if given.quick else THOROUGH
    if given.model:
        # As training does.
        keep_freed_memory()
        typed = f"model={size.preset}", "model.relatives=ordered", *MODELS[given.model]
        model = model_of(random_checkpoint(*typed))
        print(json.dumps(use(model, size) | {TRAINING: train(model, size)}, default=vars))
        return
    quick = ["--quick"] * given.quick
    found = {name: in_process("benchmarks.relatives", "--model", name, *quick) for name in MODELS}
    first = Comparison(FIRST, {name: one[FIRST] for name, one in found.items()})
    first.facts = {name: {PEAK: one[PEAK]} for name, one in found.items()}
    groups = {FIRST: [first]}
    groups |= {
        work: [Comparison(**one[work]) for one in found.values()]
        for work in (FURTHER, MASKED, TRAINING)
    }
    peers = PEER, INSIDE, INSIDE, f"{size.rows[0]:,}"
    tables = [
        table
        for (work, held), peer in zip(groups.items(), peers, strict=True)
        for table in (speed_table(work, held, peer), median_table(f"{work}: ms", held))
    ]
    memory = fact_table(f"{FIRST}: peak memory, MB", [first], PEAK, scale=1e-6)
    report(given.json, groups, peers, *tables, memory)


if __name__ == "__main__":
    main()
