"""A step of `benchmarks/gpu.py`: checks that a stopped run continues exactly.

python -m benchmarks.gpu_resume --device cuda

A short run is stopped by SIGTERM and continued, and its weights and losses are compared with those
of a run that was not stopped.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from protlm.checkpoints.format import latest, load_training, step_of
from protlm.checkpoints.validations import METRICS, read_metrics
from protlm.data_prep import prepare, split
from protlm.system.errors import ExitCode
from protlm.system.paths import sample_dir

Process = subprocess.Popen[bytes]


def main() -> None:
    """Runs the check and prints its result."""
    parser = argparse.ArgumentParser(description="A part of benchmarks/gpu.sh.")
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    device, steps = arguments.device, 40 if arguments.quick else 200
    with tempfile.TemporaryDirectory(prefix="protlm-bench-") as name:
        folder = Path(name)
        fasta = sample_dir() / "uniprot_tiny.fasta.gz"
        prepare.prepare([fasta], folder / "data", split_rule=split.HashSplit(0.1, 0.1))
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
        found = {"stopped_with": stopped, "stopped_after": stop}
        print(json.dumps(found | _compare(whole, parts, stop)), flush=True)


def _start(folder: Path, run_dir: Path, steps: int, device: torch.device) -> Process:
    settings = [
        "model=tiny",
        f"data.dir={folder / 'data'}",
        f"run_dir={run_dir}",
        "data.max_length=128",
        "data.tokens_per_batch=1024",
        f"trainer.accelerator={'cuda' if device.type == 'cuda' else 'cpu'}",
        "trainer.precision=auto",
        f"trainer.max_steps={steps}",
        "trainer.log_every=1",
        "trainer.valid_batches=2",
    ]
    command = [sys.executable, "-m", "protlm.train", *settings]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _finish(process: Process) -> None:
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
        # Relative differences of the first step after the stop and of all steps.
        "first_loss_differs_by": changes[stop],
        "losses_differ_by": max(changes),
    }


if __name__ == "__main__":
    main()
