"""The time and the memory of one forward and one backward pass of attention."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Comparison, Forecast, Pace, UnavailableError, take_turns

NUM_HEADS, HEAD_DIM = 8, 64
MODEL_DIM = NUM_HEADS * HEAD_DIM
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# A contender that would need more than this for a pass is left out.
MOST_BYTES = 4e9

# Attention as it is timed: a function of queries, keys and values, BHLK, BHLK and BHLC.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """The input of attention: its mode, length, precision and device."""

    causal: bool
    length: int
    dtype: str
    device: torch.device

    @property
    def mode(self) -> str:
        """The mode is `causal` or `bidirectional`."""
        return "causal" if self.causal else "bidirectional"


class Inputs(NamedTuple):
    """The inputs of a pass: queries, keys, values, and the gradient of the output."""

    q_BHLK: Tensor
    k_BHLK: Tensor
    v_BHLC: Tensor
    dout_BHLC: Tensor


def standard_normal_inputs(case: Case) -> Inputs:
    """Returns the inputs of one sequence, the same for every contender."""
    generator = torch.Generator().manual_seed(case.length)
    shape = (1, NUM_HEADS, case.length, HEAD_DIM)
    q, k, v, gradient = (
        torch.randn(shape, generator=generator).to(case.device, DTYPES[case.dtype])
        for _ in range(4)
    )
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), gradient)


@dataclass(frozen=True)
class Pass:
    """A pass of one contender on inputs that all contenders share."""

    attend: Attend
    inputs: Inputs

    def seconds(self) -> float:
        """Runs forward and backward once and returns the time of both."""
        *leaves, dout_BHLC = self.inputs
        # A mechanism may have parameters and may use the hidden input.
        leaves += getattr(self.attend, "more_leaves", ())

        def work() -> None:
            out_BHLC = self.attend(*self.inputs[:3])
            torch.autograd.grad(out_BHLC, leaves, dout_BHLC, allow_unused=True)

        return timed(work, dout_BHLC.device)

    def memory(self) -> dict[str, float]:
        """Runs once and returns the bytes it needs beyond its inputs.

        `peak` is the most that torch's allocator holds at one time. `kept` is what autograd keeps
        from forward to backward, every storage once, inputs that are read again included.
        """
        kept: dict[int, int] = {}

        def keep(saved: Tensor) -> Tensor:
            storage = saved.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return saved

        with saved_tensors_hooks(keep, lambda saved: saved):
            on_cuda = self.inputs.dout_BHLC.is_cuda
            peak = (_peak_on_cuda if on_cuda else _peak_on_cpu)(self.seconds)
        return {"peak_bytes": peak, "kept_bytes": sum(kept.values())}


def compare(
    makers: Mapping[str, Callable[[Case], Attend]], case: Case, forecast: Forecast, pace: Pace
) -> Comparison:
    """Compares the contenders that `makers` build on one case.

    Contenders that are not available, or too costly by the forecast, are left out.
    """
    inputs, passes, left_out = standard_normal_inputs(case), dict[str, Pass](), dict[str, str]()
    for name, make in makers.items():
        try:
            forecast.check(name, case.length)
            passes[name] = Pass(make(case), inputs)
        except UnavailableError as error:
            left_out[name] = str(error)
    runs = {name: each.seconds for name, each in passes.items()}
    comparison = take_turns(f"L={case.length:,}", runs, pace)
    comparison.left_out |= left_out
    for name in comparison.costs:
        memory = passes[name].memory()
        seconds = comparison.median(name) or 0.0
        forecast.learn(name, case.length, seconds=seconds, size=memory["peak_bytes"])
        share = memory["kept_bytes"] / case.length / NUM_HEADS
        comparison.facts[name] = memory | {"kept_per_position_and_head": share}
    return comparison


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of `work` on a device."""

    def now() -> float:
        # A CUDA kernel runs on after its call has returned.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    start = now()
    work()
    return now() - start


def _peak_on_cuda(run: Callable[[], object]) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def _peak_on_cpu(run: Callable[[], object]) -> int:
    # The profiler sees each allocation; the resident size of the process depends on malloc.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    # The types that torch declares for these events leave out their bytes.
    events: list[Any] = profiler.profiler.kineto_results.events()
    changes = sorted(
        ((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"),
        key=lambda change: change[0],
    )
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak
