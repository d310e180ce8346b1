"""Measures an ESM-2 8M and the linear models that it is converted to, by the length.

make bench-linearized, or: python -m benchmarks.linearized [--quick] [...]

The mean embedding of one random protein, as `protlm embed` computes it, in float32 and with random
weights. All models of a length take turns. The cost is processor time, user and system, of all
threads. The peak memory is that of a process that embeds nothing else (Linux only).
"""

import argparse
import time
from functools import partial

import numpy as np

from benchmarks.harness import (
    QUICK,
    Comparison,
    Forecast,
    Pace,
    fact_table,
    in_process,
    median_table,
    memory,
    options,
    report,
    speed_table,
    take_turns,
)
from benchmarks.language_models import random_checkpoint
from protlm.config import TrainConfig
from protlm.config.composition import compose, to_plain
from protlm.conversion import convert
from protlm.data.vocabulary import STANDARD
from protlm.loading import model_of
from protlm.model.embedding import Embedder
from protlm.model.pretrained import PretrainedModel
from protlm.options.embed import Pooling
from protlm.system.processes import keep_freed_memory

ORIGINAL = "softmax"
MODELS = (ORIGINAL, "performer_relu", "performer_softmax", "hedgehog")
# The last one is the length of titin.
LENGTHS = (512, 2048, 8192, 35_213)
QUICK_LENGTHS = (64, 128)
PEAK = "peak_bytes"
THOROUGH = Pace(seconds=60.0, fewest=3, most=9)


def model(attention: str, preset: str) -> PretrainedModel:
    """Returns an ESM-2 with random weights, converted unless its attention is softmax."""
    found = random_checkpoint(f"model={preset}", f"attention={ORIGINAL}")
    if attention != ORIGINAL:
        chosen = to_plain(compose(TrainConfig, [f"attention={attention}"]))["attention"]
        found = convert(found, chosen, seed=0).checkpoint
    return model_of(found)


def embed(embedder: Embedder, sequence: str) -> float:
    """Embeds a protein; returns the processor seconds."""
    start = time.process_time()
    (found,) = embedder.vectors([sequence])
    assert found is not None
    assert all(vector.isfinite().all() for vector in found.values())
    return time.process_time() - start


def embedder_of(attention: str, preset: str) -> Embedder:
    """Returns an embedder for the means of the last layer."""
    loaded = model(attention, preset)
    return Embedder(loaded, (Pooling.mean,), (loaded.num_layers,))


def protein(length: int) -> str:
    """Returns a random protein."""
    return "".join(np.random.default_rng(0).choice(list(STANDARD), length))


def print_peak(attention: str, preset: str, length: str) -> None:
    """Embeds a protein, and prints the peak memory of this process in bytes."""
    embed(embedder_of(attention, preset), protein(int(length)))
    # Unlike the peak of getrusage, this one does not include the parent process.
    print(memory("VmHWM"))


def compare(
    embedders: dict[str, Embedder], preset: str, length: int, forecast: Forecast, pace: Pace
) -> Comparison:
    """Returns the seconds and the peak memory of all models at a length."""
    sequence = protein(length)

    def run(name: str) -> float:
        forecast.check(name, length)
        return embed(embedders[name], sequence)

    comparison = take_turns(
        f"L = {length:,}", {name: partial(run, name) for name in embedders}, pace
    )
    for name in comparison.costs:
        seconds = comparison.median(name)
        assert seconds is not None
        forecast.learn(name, length, seconds=seconds)
        given = "--peak", name, preset, str(length)
        comparison.facts[name] = {PEAK: in_process("benchmarks.linearized", *given)}
    return comparison


def main() -> None:
    """Measures, prints the tables, and writes the figures."""
    parser = options("benchmark_linearized", "softmax and converted models")
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--most-seconds", type=float, default=60.0, help="leave out slower passes")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    # As `protlm embed` does.
    keep_freed_memory()
    if given.peak:
        print_peak(*given.peak)
        return
    preset, pace = ("tiny", QUICK) if given.quick else ("esm2_8m", THOROUGH)
    embedders = {name: embedder_of(name, preset) for name in given.models}
    forecast = Forecast(given.most_seconds)
    lengths = sorted(given.lengths or (QUICK_LENGTHS if given.quick else LENGTHS))
    held = [compare(embedders, preset, length, forecast, pace) for length in lengths]
    report(
        given.json,
        {"linearized": held},
        (ORIGINAL,),
        speed_table("processor time", held, ORIGINAL),
        median_table("milliseconds of processor time", held),
        fact_table("peak memory of the process, MB", held, PEAK, scale=1e-6),
    )


if __name__ == "__main__":
    main()
