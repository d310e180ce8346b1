"""Measures exported ONNX files beside torch, and what they cost by the length.

python -m benchmarks.onnx_files [--quick] [...]

Models with random weights, in onnxruntime with one thread. A third of the last rows of a batch is
padding. The cost is processor time. The memory is the peak of the process during a run, beside what
it has before (Linux only).
"""

import argparse
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
    left_out_lines,
    machine,
    median_table,
    show,
    take_turns,
)
from protlm.build import describe
from protlm.checkpoints.format import Checkpoint
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.interop.onnx_file import INPUTS, Graph, difference, export
from protlm.loading import model_of
from protlm.model.transformer import build_network
from protlm.system.processes import return_freed_memory

MECHANISMS = ("softmax", "performer_relu", "performer_softmax", "hybrid", "linear")
LENGTHS, QUICK_LENGTHS, BATCHES = (64, 512, 2048, 8192), (8, 40), (1, 4)
# Of softmax, whose memory grows with the square.
_LONGEST = 2048


class File:
    """An exported model with random weights, and a session of it without a pool of memory."""

    def __init__(self, label: str, preset: str, folder: str) -> None:
        name, objective = label.split()
        typed = [
            f"model={preset}",
            "model.num_layers=2",
            f"attention={name}",
            f"objective={objective}",
        ]
        config = compose(TrainConfig, typed)
        network = build_network(config.model, config.attention, seed=0)
        found = Checkpoint(Path(folder), describe(config), dict(network.state_dict()))
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


def peak(run: partial[float]) -> int:
    """Returns the bytes that a run adds to the memory of this process at most."""
    # Of what earlier runs left, a run would use some again.
    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    run()
    return _memory("VmHWM") - before


def _memory(name: str) -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) << 10


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
        found.facts[label] = {"error": error, "bytes": peak(runs[label])}
    return found


def main() -> None:
    """Measures, and prints the tables."""
    parser = argparse.ArgumentParser(description="Measure exported ONNX files.")
    parser.add_argument("--quick", action="store_true", help="tiny models, short rows")
    parser.add_argument("--mechanisms", nargs="+", choices=MECHANISMS, default=MECHANISMS)
    given = parser.parse_args()
    preset, pace, lengths = "small", Pace(seconds=5.0, fewest=3, most=9), LENGTHS
    if given.quick:
        preset, pace, lengths = "tiny", QUICK, QUICK_LENGTHS
    labels = [" ".join(pair) for pair in product(given.mechanisms, ("masked", "causal"))]
    with TemporaryDirectory() as folder:
        files = {label: File(label, preset, folder) for label in labels}
        held = [measure(files, length, batch, pace) for batch, length in product(BATCHES, lengths)]
    show(
        machine(torch.device("cpu")),
        fact_table("difference from torch, 1e-6 of the largest value", held, "error", scale=1e6),
        median_table("milliseconds of processor time, one thread", held),
        fact_table("peak memory of a run, MB", held, "bytes", scale=1e-6),
        *left_out_lines(held),
    )


if __name__ == "__main__":
    main()
