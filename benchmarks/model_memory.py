"""Peak memory of training the paper's 36-layer model on one long sequence.

python -m benchmarks.model_memory --attention performer_softmax [--length 16384]

One forward and one backward pass, fp32, batch 1, activation checkpointing on. What is printed is
the peak of the whole process, Python and torch included, in GB; on CUDA that of torch's allocator.
"""

import argparse
import resource
import subprocess
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from protlm.build import build_network, compose
from protlm.config import TrainConfig
from protlm.data.vocabulary import VOCABULARY

LENGTH = 16_384


def peak_gigabytes(attention: str, *, length: int, device: torch.device) -> float:
    """Runs forward and backward once, and returns the peak of this process."""
    config = compose(
        TrainConfig, ["model=paper_36", f"model.max_length={length}", f"attention={attention}"]
    )
    network = build_network(config.model, config.attention, seed=config.seed).to(device)
    network.activation_checkpointing = True
    network.train()
    tokens_BL = torch.randint(len(VOCABULARY), (1, length), device=device)
    mask_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
    logits_BLV = network(tokens_BL, mask_BL, causal=False).logits_BLV
    cross_entropy(logits_BLV.flatten(0, 1), tokens_BL.flatten()).backward()
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return _largest_resident_bytes() / 1e9


def _largest_resident_bytes() -> int:
    # On Linux getrusage starts a process at the peak of the one that made it; this line does not.
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(attention: str, *, device: torch.device, length: int = LENGTH) -> float | str:
    """The peak of a process of its own, in GB, or why there is none."""
    command = [sys.executable, "-m", "benchmarks.model_memory"]
    options = ["--attention", attention, "--device", str(device), "--length", str(length)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"failed with exit code {done.returncode}"
    return float(done.stdout.split()[0])


def main() -> None:
    """Measures one mechanism and prints its peak."""
    parser = argparse.ArgumentParser(description="Peak memory of the 36-layer model.")
    parser.add_argument("--attention", default="performer_softmax")
    parser.add_argument("--length", default=LENGTH, type=int)
    parser.add_argument("--device", default="cpu", type=torch.device)
    arguments = parser.parse_args()
    peak = peak_gigabytes(arguments.attention, length=arguments.length, device=arguments.device)
    print(f"{peak:.2f} GB")


if __name__ == "__main__":
    main()
