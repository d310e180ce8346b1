"""The steps of `benchmarks/gpu.py`. Each is run as a process and prints lines of JSON.

python -m benchmarks.gpu_step machine | kernels | training --device cuda [...]
"""

import argparse
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pytorch_lightning.utilities import move_data_to_device

from benchmarks import harness
from benchmarks.attention_passes import timed
from benchmarks.harness import Pace, emulates_bfloat16, machine, take_turns
from benchmarks.language_models import mean_loss, training_step
from protlm.attention.linearized.case import Case
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.data.dataset import Batch
from protlm.data.masking import IGNORE
from protlm.data.vocabulary import VOCABULARY
from protlm.model.transformer import build_network, num_parameters
from protlm.training.callbacks.hooks import compile_model
from protlm.training.flops import ModelFlops, peak_tflops
from protlm.training.optimization import build_optimizer

# The settings of the measured models.
MODELS = {
    # The architecture of hybrid-6m, but for its attention.
    "5.9M": ["model=medium_8", "optimizer=muon"],
    "paper_36": ["model=paper_36"],
    # The width of ESM-2's 150 M model, with three layers fewer.
    "133M": [
        "model=paper_36",
        *("model.num_layers=27", "model.num_heads=10"),
        *("model.model_dim=640", "model.feedforward_dim=2560"),
    ],
    "tiny": ["model=tiny"],
}
# Linear attention and its peer, exact attention, in otherwise equal models.
ATTENTIONS = ("performer_relu", "softmax")
_TARGETS = 0.15
# (Packed) softmax or ReLU, dtype, channels of a head, features or None for its coordinates,
# causality.
KernelCase = tuple[str, torch.dtype, int, int | None, bool]
_KINDS = (("ReLU", None), ("softmax", 256), ("softmax", 64))
# The cases of fused kernels to check; those on which an assembler has failed come first.
KERNELS: tuple[KernelCase, ...] = (
    *(
        (name, torch.bfloat16, width, rows, causal)
        for causal in (True, False)
        for width in (64, 32, 24)
        for name, rows in _KINDS
    ),
    *(
        (f"packed {name}", torch.bfloat16, 32, rows, causal)
        for causal in (True, False)
        for name, rows in _KINDS[:2]
    ),
    *((name, torch.bfloat16, 128, 128, False) for name in ("ReLU", "softmax")),
    *((name, torch.float32, 64, 128, False) for name in ("ReLU", "softmax")),
    *((name, torch.float32, 16, 64, True) for name in ("ReLU", "softmax")),
)
_SIDE_BY_SIDE = 14


@dataclass(frozen=True)
class Effort:
    """The tokens of a step and the pace of the comparisons."""

    tokens: int
    pace: Pace


THOROUGH = Effort(65_536, Pace(seconds=6.0, fewest=3, most=5, turn_seconds=0.5))
QUICK = Effort(512, harness.QUICK)


def precision(device: torch.device) -> torch.dtype:
    """Returns the precision of products: bfloat16, or float32 where bfloat16 is emulated."""
    return torch.float32 if emulates_bfloat16(device) else torch.bfloat16


def describe(device: torch.device, effort: Effort) -> None:
    """Reports the device, its rate of matrix products, and its memory bandwidth."""
    on_cuda, dtype = device.type == "cuda", precision(device)
    size = 8192 if on_cuda else 256
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.randn(size, size, device=device)
    target = torch.empty_like(source)
    runs = {
        "product": lambda: timed(lambda: torch.mm(a, b), device),
        "copy": lambda: timed(lambda: target.copy_(source), device),
    }
    costs = take_turns("products and copies", runs, effort.pace).costs
    best = {name: min(each) for name, each in costs.items()}
    memory = torch.cuda.get_device_properties(device).total_memory / 1e9 if on_cuda else None
    report(
        {
            **machine(device),
            "memory_gb": memory,
            "cuda": torch.version.cuda,
            "products": str(dtype).removeprefix("torch."),
            "flops": 2 * size**3 / best["product"],
            "bandwidth": 2 * source.nbytes / best["copy"],
        }
    )


def kernels(device: torch.device) -> None:
    """Reports whether each fused kernel agrees with PyTorch in float64, and why if not.

    Compiling them takes one processor about a minute, so several processes do it.
    """
    # A CPU only tests the script.
    if device.type != "cuda":
        for case in KERNELS:
            report(_kernel(case, "needs a GPU"))
        return
    # Each is compared in a process of its own, and the verdict kept for the steps that follow.
    with ThreadPoolExecutor(min(_SIDE_BY_SIDE, len(os.sched_getaffinity(0)))) as pool:
        checked = [pool.submit(_checked, case, device) for case in KERNELS]
        for case, each in zip(KERNELS, checked, strict=True):
            error = each.exception()
            reason = f"{type(error).__name__}: {error}" if error else each.result()
            report(_kernel(case, reason))


def _checked(case: KernelCase, device: torch.device) -> str:
    """Compares the fused kernels of a case twice with PyTorch in float64; returns what is wrong."""
    from protlm.attention.linearized.fused.check import verdict

    name, dtype, width, features, causal = case
    sizes, is_exponential = (width, width, features), name.endswith("softmax")
    kind = Case(device, dtype, dtype, dtype, *sizes, is_exponential, causal)
    return verdict(kind._replace(is_packed=name.startswith("packed")))


def _kernel(case: KernelCase, reason: str) -> dict[str, Any]:
    name, dtype, width, features, causal = case
    return {
        "kernel": name,
        "values": str(dtype).removeprefix("torch."),
        "channels": width,
        "features": features or width,
        "causal": causal,
        "failure": reason,
    }


def training(
    model: str, lengths: list[int], device: torch.device, effort: Effort, compiled: bool
) -> None:
    """Reports the speed of training a model with each mechanism, in turns, at several lengths."""
    for length in lengths:
        try:
            report({"length": length, **_training(model, length, device, effort, compiled)})
        except RuntimeError as error:
            # Out of memory or no kernel: the other lengths are still measured.
            report({"length": length, "failure": str(error).splitlines()[0]})


def _training(
    model: str, length: int, device: torch.device, effort: Effort, compiled: bool
) -> dict[str, Any]:
    num_rows = max(effort.tokens // length, 1)
    trained = {name: Trained(model, name, length, device, compiled) for name in ATTENTIONS}
    for each in trained.values():
        num_rows = each.rows_that_fit(num_rows)
    runs = {name: each.steps_of(num_rows) for name, each in trained.items()}
    comparison = take_turns(f"L={length:,}", runs, effort.pace)
    found: dict[str, Any] = {"tokens_of_a_step": num_rows * length, "failures": comparison.left_out}
    for name in comparison.costs:
        seconds, speed = comparison.median(name), comparison.speed(name, ATTENTIONS[-1])
        assert seconds is not None
        found[name] = {
            **trained[name].facts(num_rows, seconds),
            "times_as_fast_as_softmax": speed and str(speed),
        }
    return found


class Trained:
    """A model in training on random residues, in rows of one length."""

    def __init__(
        self, model: str, attention: str, length: int, device: torch.device, compiled: bool
    ) -> None:
        given = [*MODELS[model], f"attention={attention}", f"model.max_length={length}"]
        self._config = compose(TrainConfig, given)
        network = build_network(self._config.model, self._config.attention, seed=0)
        self._network = network.to(device).train()
        self._optimizer = build_optimizer(network, self._config.optimizer)
        self._length, self._device, self._peak = length, device, 0.0
        if compiled:
            compile_model(network)

    def rows_that_fit(self, num_rows: int) -> int:
        """Returns a number of rows that fits into memory, halving it until a step succeeds."""
        while True:
            try:
                self.steps_of(num_rows)()
                return num_rows
            except torch.OutOfMemoryError:
                if num_rows == 1:
                    raise
                num_rows //= 2
                torch.cuda.empty_cache()

    def steps_of(self, num_rows: int) -> Callable[[], float]:
        """Returns a function that runs one optimizer step and returns its seconds."""
        batch = move_data_to_device(random_batch(num_rows, self._length), self._device)

        def step() -> None:
            training_step(
                partial(mean_loss, self._network, batch, is_whole=True),
                self._network,
                self._optimizer,
                device=self._device,
                is_mixed=precision(self._device) == torch.bfloat16,
                clip=self._config.trainer.gradient_clip,
            )

        def run() -> float:
            if self._device.type != "cuda":
                return timed(step, self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            seconds = timed(step, self._device)
            self._peak = torch.cuda.max_memory_allocated(self._device) / 1e9
            return seconds

        return run

    def facts(self, num_rows: int, seconds: float) -> Mapping[str, float | None]:
        """Returns the size of the model and the rates of a step that takes `seconds`."""
        flops = ModelFlops(self._network, causal=False).training(self._length, self._device)
        flops *= num_rows / seconds
        peak = self._config.trainer.peak_tflops or peak_tflops(self._device)
        return {
            "parameters": num_parameters(self._network),
            "tokens_per_second": num_rows * self._length / seconds,
            "flops_per_second": flops,
            "mfu": flops / peak / 1e12 if peak else None,
            "memory_gb": self._peak or None,
        }


def random_batch(num_rows: int, length: int) -> Batch:
    """Returns full rows of random residues; a seventh of them are targets."""
    generator = torch.Generator().manual_seed(0)
    residues = torch.from_numpy(VOCABULARY.residues.astype("int64"))
    tokens_BL = residues[torch.randint(len(residues), (num_rows, length), generator=generator)]
    is_target_BL = torch.rand(tokens_BL.shape, generator=generator) < _TARGETS
    targets_BL = tokens_BL.masked_fill(~is_target_BL, IGNORE)
    masked_BL = tokens_BL.masked_fill(is_target_BL, VOCABULARY.mask)
    mask_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
    return Batch(masked_BL, targets_BL, mask_BL, tokens_BL[:, 0], (0, 0, 0))


def report(values: dict[str, Any]) -> None:
    """Prints a line of results in JSON."""
    print(json.dumps(values), flush=True)


def main() -> None:
    """Runs one of the steps."""
    parser = argparse.ArgumentParser(description="A part of benchmarks/gpu.sh.")
    parser.add_argument("step", choices=("machine", "kernels", "training"))
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--model", default="paper_36", choices=MODELS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    effort = QUICK if arguments.quick else THOROUGH
    if arguments.step == "machine":
        describe(arguments.device, effort)
    elif arguments.step == "kernels":
        kernels(arguments.device)
    else:
        training(arguments.model, arguments.lengths, arguments.device, effort, arguments.compile)


if __name__ == "__main__":
    main()
