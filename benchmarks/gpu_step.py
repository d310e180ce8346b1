"""What `benchmarks/gpu.py` runs in processes of their own; each prints JSON, a line for a result.

python -m benchmarks.gpu_step machine | training | resume --device cuda [...]
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.roofline import measure_machine
from data_prep.prepare import prepare
from data_prep.split import HashSplit
from protlm.build import build_network, compose
from protlm.config import TrainConfig
from protlm.data.masking import IGNORE
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import ExitCode
from protlm.model.checkpoint import latest, load_training, step_of
from protlm.model.objective import target_sums
from protlm.model.transformer import ProteinLM, num_parameters
from protlm.paths import sample_dir
from protlm.training.compilation import compile_blocks
from protlm.training.flops import ModelFlops, peak_tflops
from protlm.training.metrics import METRICS, read_metrics
from protlm.training.optimization import build_optimizer

# Settings of the models that are measured.
MODELS = {
    "paper_36": ["model=paper_36"],
    # The width of ESM-2's 150 M model, three layers less.
    "133M": [
        "model=paper_36",
        *("model.num_layers=27", "model.num_heads=10"),
        *("model.model_dim=640", "model.feedforward_dim=2560"),
    ],
    "tiny": ["model=tiny"],
}
ATTENTION = "attention=performer_relu"
_TARGETS = 0.15


@dataclass(frozen=True)
class Effort:
    """How much of it: tokens of a step, steps that are not timed, seconds that are."""

    tokens: int
    warm_up: int
    seconds: float


THOROUGH, QUICK = Effort(65_536, 3, 3.0), Effort(512, 1, 0.1)


def machine(device: torch.device) -> None:
    """Reports what the device is and can do."""
    measured = measure_machine(device)
    on_cuda = device.type == "cuda"
    size = torch.cuda.get_device_properties(device).total_memory if on_cuda else None
    _report(
        {
            "device": torch.cuda.get_device_name(device) if on_cuda else "CPU",
            "memory_gb": size and size / 1e9,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "flops": measured.most_flops("bf16"),
            "bandwidth": measured.bandwidth,
        }
    )


def training(
    model: str, lengths: list[int], device: torch.device, effort: Effort, compiled: bool
) -> None:
    """Reports forward, backward and optimiser step of a model at several lengths."""
    for length in lengths:
        try:
            found = _training(model, length, device, effort, compiled)
        except RuntimeError as error:
            # Out of memory or no kernel: the other lengths are still measured.
            found = {"failure": str(error).splitlines()[0]}
        _report({"length": length, **found})


def _training(
    model: str, length: int, device: torch.device, effort: Effort, compiled: bool
) -> dict[str, Any]:
    config = compose(TrainConfig, [*MODELS[model], ATTENTION, f"model.max_length={length}"])
    network = build_network(config.model, config.attention, seed=0).to(device).train()
    optimizer = build_optimizer(network, config.optimizer)
    if compiled:
        compile_blocks(network)
    on_cuda = device.type == "cuda"
    num_rows = max(effort.tokens // length, 1)
    while True:
        try:
            if on_cuda:
                torch.cuda.reset_peak_memory_stats(device)
            step = _step(network, optimizer, config, num_rows * length, length)
            seconds = _seconds_of_a_step(step, device, effort)
            break
        except torch.OutOfMemoryError:
            if num_rows == 1:
                raise
            num_rows //= 2
            torch.cuda.empty_cache()
    flops = ModelFlops(network, causal=False).training(length, device) * num_rows / seconds
    peak = config.trainer.peak_tflops or peak_tflops(device)
    return {
        "parameters": num_parameters(network),
        "tokens_of_a_step": num_rows * length,
        "tokens_per_second": num_rows * length / seconds,
        "flops_per_second": flops,
        "mfu": flops / peak / 1e12 if peak else None,
        "memory_gb": torch.cuda.max_memory_allocated(device) / 1e9 if on_cuda else None,
    }


def _step(
    network: ProteinLM,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    num_tokens: int,
    length: int,
) -> Callable[[], None]:
    """An optimiser step on random residues, a seventh of them targets."""
    device = next(network.parameters()).device
    generator = torch.Generator().manual_seed(0)
    residues = torch.from_numpy(VOCABULARY.residues.astype("int64"))
    chosen = torch.randint(len(residues), (num_tokens,), generator=generator)
    tokens_BL = residues[chosen].view(-1, length)
    is_target_BL = torch.rand(tokens_BL.shape, generator=generator) < _TARGETS
    targets_BL: Tensor = tokens_BL.masked_fill(~is_target_BL, IGNORE).to(device)
    tokens_BL = tokens_BL.masked_fill(is_target_BL, VOCABULARY.mask).to(device)
    mask_BL = torch.ones_like(tokens_BL, dtype=torch.bool)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            sums = target_sums(network(tokens_BL, mask_BL, causal=False).logits_BLV, targets_BL)
        (sums.nats / sums.count).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), config.trainer.gradient_clip)
        optimizer.step()

    return step


def _seconds_of_a_step(step: Callable[[], None], device: torch.device, effort: Effort) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(effort.warm_up):
        step()
    wait()
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < effort.seconds:
        step()
        done += 1
        wait()
    return (time.perf_counter() - start) / done


def resume(device: torch.device, effort: Effort) -> None:
    """Reports whether a run that was stopped and continued ends as the one that was not."""
    steps = 200 if effort is THOROUGH else 40
    with tempfile.TemporaryDirectory(prefix="protlm-bench-") as name:
        folder = Path(name)
        fasta = sample_dir() / "uniprot_tiny.fasta.gz"
        prepare([fasta], folder / "data", split_rule=HashSplit(0.1, 0.1))
        whole, parts = folder / "whole", folder / "parts"
        _finish(_start(folder, whole, steps, device))
        process = _start(folder, parts, steps, device)
        while process.poll() is None and len(read_metrics(parts / METRICS)) < 3:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        if (stopped := process.wait()) != ExitCode.PREEMPTED:
            raise RuntimeError(f"protlm train ended with {stopped} after SIGTERM")
        checkpoint = latest(parts)
        assert checkpoint is not None
        _finish(_start(folder, parts, steps, device))
        stop = step_of(checkpoint)
        _report({"stopped_with": stopped, "stopped_after": stop, **_compare(whole, parts, stop)})


def _start(
    folder: Path, run_dir: Path, steps: int, device: torch.device
) -> "subprocess.Popen[bytes]":
    settings = [
        "model=tiny",
        f"data.dir={folder / 'data'}",
        f"run_dir={run_dir}",
        "data.max_length=128",
        "data.tokens_per_batch=1024",
        f"trainer.accelerator={'cuda' if device.type == 'cuda' else 'cpu'}",
        "trainer.precision=bf16-mixed",
        f"trainer.max_steps={steps}",
        "trainer.log_every=1",
        "trainer.valid_batches=2",
    ]
    command = [sys.executable, "-m", "protlm.train", *settings]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _finish(process: "subprocess.Popen[bytes]") -> None:
    if code := process.wait():
        raise RuntimeError(f"protlm train ended with {code}")


def _compare(whole: Path, parts: Path, stop: int) -> dict[str, Any]:
    checkpoints = [latest(run_dir) for run_dir in (whole, parts)]
    one, other = (load_training(path)["state_dict"] for path in checkpoints if path is not None)
    differences = [(one[name].double() - other[name].double()).abs().max() for name in one]
    losses = [
        [row["train_loss"] for row in read_metrics(run_dir / METRICS) if "train_loss" in row]
        for run_dir in (whole, parts)
    ]
    changes = [abs(a - b) / a for a, b in zip(*losses, strict=True)]
    return {
        "weights_differ_by": max(float(difference) for difference in differences),
        "steps": len(changes),
        # Relative: of the first step after the stop, and of all steps.
        "first_loss_differs_by": changes[stop],
        "losses_differ_by": max(changes),
    }


def _report(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    """Runs one of the steps."""
    parser = argparse.ArgumentParser(description="A part of benchmarks/gpu.sh.")
    parser.add_argument("step", choices=("machine", "training", "resume"))
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--model", default="paper_36", choices=MODELS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    effort = QUICK if arguments.quick else THOROUGH
    if arguments.step == "machine":
        machine(arguments.device)
    elif arguments.step == "training":
        training(arguments.model, arguments.lengths, arguments.device, effort, arguments.compile)
    else:
        resume(arguments.device, effort)


if __name__ == "__main__":
    main()
