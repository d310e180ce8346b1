"""One forward and one backward pass: its time, and what it takes in memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import DTYPES, HEAD_DIM, NUM_HEADS, Attend


class Inputs(NamedTuple):
    """Queries, keys, values, and the gradient that comes back to the output; contiguous."""

    q_BHLK: Tensor
    k_BHLK: Tensor
    v_BHLC: Tensor
    dout_BHLC: Tensor


@dataclass(frozen=True)
class Seconds:
    """The time of the two halves of a pass."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Bytes:
    """What a pass takes beyond its inputs.

    `peak` is the most that torch's allocator holds at one time, with the output and the gradients
    of the inputs. `kept` is what autograd holds from forward to backward: every storage once, the
    inputs' among them where the backward pass reads them.
    """

    peak: int
    kept: int


def standard_normal_inputs(length: int, dtype: str, device: torch.device) -> Inputs:
    """Inputs of one sequence, the same in each call."""
    generator = torch.Generator().manual_seed(length)
    shape = (1, NUM_HEADS, length, HEAD_DIM)
    q, k, v, gradient = (
        torch.randn(shape, generator=generator).to(device, DTYPES[dtype]) for _ in range(4)
    )
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), gradient)


def timed_pass(attend: Attend, inputs: Inputs) -> Seconds:
    """Runs forward and backward once; the forward pass keeps what training needs."""
    *leaves, dout_BHLC = inputs
    start = _now(dout_BHLC.device)
    out_BHLC = attend(*leaves)
    middle = _now(dout_BHLC.device)
    # A mechanism may have parameters and look at the hidden input; what only returns V has no
    # gradient even for q and k.
    leaves = [*leaves, *getattr(attend, "more_leaves", ())]
    torch.autograd.grad(out_BHLC, leaves, dout_BHLC, allow_unused=True)
    end = _now(dout_BHLC.device)
    return Seconds(forward=middle - start, backward=end - middle)


def measured_pass(attend: Attend, inputs: Inputs) -> tuple[Seconds, Bytes]:
    """The same, with its memory; the time is that of the pass under observation."""
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return saved

    def run() -> Seconds:
        with saved_tensors_hooks(keep, lambda saved: saved):
            return timed_pass(attend, inputs)

    on_cuda = inputs.dout_BHLC.device.type == "cuda"
    seconds, peak = _with_peak_on_cuda(run) if on_cuda else _with_peak_on_cpu(run)
    return seconds, Bytes(peak=peak, kept=sum(kept.values()))


@dataclass(frozen=True)
class Passes:
    """Passes of one attention on the same inputs."""

    attend: Attend
    inputs: Inputs

    def timed(self) -> Seconds:
        """Runs one pass."""
        return timed_pass(self.attend, self.inputs)

    def measured(self) -> tuple[Seconds, Bytes]:
        """Runs one pass under observation."""
        return measured_pass(self.attend, self.inputs)


def _now(device: torch.device) -> float:
    # A CUDA kernel runs on after its call has returned.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _with_peak_on_cuda(run: Callable[[], Seconds]) -> tuple[Seconds, int]:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = run()
    return seconds, torch.cuda.max_memory_allocated() - before


def _with_peak_on_cpu(run: Callable[[], Seconds]) -> tuple[Seconds, int]:
    # The profiler sees each allocation; the resident size of the process would depend on what
    # malloc gives back, and can only grow.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        seconds = run()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    # What torch declares of these events leaves out their bytes.
    events: list[Any] = profiler.profiler.kineto_results.events()
    changes = sorted(
        ((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"),
        key=lambda change: change[0],
    )
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return seconds, peak
