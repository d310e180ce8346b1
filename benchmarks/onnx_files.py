"""Measures exported ONNX files beside torch, and what they cost by the length.

python -m benchmarks.onnx_files [--quick] [...]

Models with random weights, in onnxruntime with one thread. A third of the last rows of a batch is
padding. The cost is processor time. The memory is the peak of the process during a run, beside what
it has before (Linux only).
"""

import sys
import time
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import onnxruntime
import torch

from benchmarks.harness import (
    QUICK,
    Comparison,
    Pace,
    UnavailableError,
    fact_table,
    median_table,
    options,
    peak,
    report,
    take_turns,
)
from benchmarks.language_models import random_checkpoint
from protlm.interop.onnx_file import INPUTS, Graph, difference, export
from protlm.loading import model_of

MECHANISMS = ("softmax", "performer_relu", "performer_softmax", "hybrid", "linear")
LENGTHS, QUICK_LENGTHS, BATCHES = (64, 512, 2048, 8192), (8, 40), (1, 4)
THOROUGH = Pace(seconds=5.0, fewest=3, most=9)
# Of softmax, whose memory grows with the square.
_LONGEST = 2048


class File:
    """An exported model with random weights, and a session of it without a pool of memory."""

    def __init__(self, label: str, preset: str, folder: str) -> None:
        name, objective = label.split()
        typed = f"attention={name}", f"objective={objective}", "model.num_layers=2"
        found = random_checkpoint(f"model={preset}", *typed)
        self.graph = Graph(model := model_of(found))
        path, options = Path(folder) / f"{label}.onnx", onnxruntime.SessionOptions()
        print(label, export(model, path), file=sys.stderr, flush=True)
        options.intra_op_num_threads, options.enable_cpu_mem_arena = 1, False
        self.session = onnxruntime.InferenceSession(path, options)
        self.is_quadratic = name == "softmax"

    def run(self, tokens_BL: torch.Tensor, mask_BL: torch.Tensor) -> float:
        """Returns the processor seconds of a run."""
        if self.is_quadratic and tokens_BL.shape[1] > _LONGEST:
            raise UnavailableError(f"no longer than {_LONGEST:,}")
        start = time.process_time()
        self.session.run(None, dict(zip(INPUTS, (tokens_BL.numpy(), mask_BL.numpy()), strict=True)))
        return time.process_time() - start


def measure(files: dict[str, File], length: int, batch: int, pace: Pace) -> Comparison:
    """Compares all files at one length and batch with torch."""
    tokens_BL = torch.randint(4, 24, (batch, length), generator=torch.Generator().manual_seed(0))
    mask_BL = torch.ones_like(tokens_BL)
    mask_BL[(batch + 1) // 2 :, length * 2 // 3 :] = 0
    runs = {label: partial(file.run, tokens_BL, mask_BL) for label, file in files.items()}
    found = take_turns(f"{length:,} x {batch}", runs, pace)
    for label in found.costs:
        one = files[label]
        error = difference(one.graph, one.session, (tokens_BL, mask_BL))
        found.facts[label] = {"error": error, "bytes": peak(runs[label])[1]}
    return found


def main() -> None:
    """Measures, prints the tables, and writes the figures."""
    parser = options("benchmark_onnx", "exported ONNX files")
    parser.add_argument("--mechanisms", nargs="+", choices=MECHANISMS, default=MECHANISMS)
    given = parser.parse_args()
    preset, pace = ("tiny", QUICK) if given.quick else ("small", THOROUGH)
    lengths = QUICK_LENGTHS if given.quick else LENGTHS
    labels = [" ".join(pair) for pair in product(given.mechanisms, ("masked", "causal"))]
    with TemporaryDirectory() as folder:
        files = {label: File(label, preset, folder) for label in labels}
        held = [measure(files, length, batch, pace) for batch, length in product(BATCHES, lengths)]
    report(
        given.json,
        {"onnx": held},
        (),
        fact_table("difference from torch, 1e-6 of the largest value", held, "error", scale=1e6),
        median_table("milliseconds of processor time, one thread", held),
        fact_table("peak memory of a run, MB", held, "bytes", scale=1e-6),
    )


if __name__ == "__main__":
    main()
