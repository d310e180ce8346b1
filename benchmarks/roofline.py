"""What this machine can do, and how near to it attention comes.

A pass has matrix products, exponentials and memory traffic to do. Each is counted from the formulas
and divided by the rate measured here; a pass cannot take less than its products and exponentials,
which share the cores, nor less than its traffic.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.cases import DTYPES, HEAD_DIM, SDPA, Case

# Positions that the count of causal linear attention takes for one chunk.
_CHUNK = 64
_REPEATS = 5


@dataclass(frozen=True)
class Machine:
    """Rates of this machine: the best of some repeats.

    `products` holds FLOP/s by dtype and library; `exponentials` are float32 ones per second in
    cache, `bandwidth` is bytes read and written per second by a copy in memory.
    """

    products: dict[str, dict[str, float]]
    exponentials: float
    bandwidth: float

    def or_better(self, other: "Machine") -> "Machine":
        """The better of two measurements, rate by rate."""
        return Machine(
            products={
                dtype: {way: max(rate, other.products[dtype][way]) for way, rate in ways.items()}
                for dtype, ways in self.products.items()
            },
            exponentials=max(self.exponentials, other.exponentials),
            bandwidth=max(self.bandwidth, other.bandwidth),
        )

    def most_flops(self, dtype: str) -> float:
        """The faster library's FLOP/s."""
        return max(self.products[dtype].values())


@dataclass(frozen=True)
class Work:
    """What forward and backward have to do: FLOP in products, exponentials, bytes moved."""

    flops: float
    exponentials: float
    bytes: float

    def seconds(self, machine: Machine, dtype: str) -> tuple[float, float, float]:
        """The least time of the products, of the exponentials, and of the memory traffic."""
        return (
            self.flops / machine.most_flops(dtype),
            self.exponentials / machine.exponentials,
            self.bytes / machine.bandwidth,
        )

    def least_seconds(self, machine: Machine, dtype: str) -> float:
        """The time below which no implementation of this count can come on the machine."""
        products, exponentials, memory = self.seconds(machine, dtype)
        return max(products + exponentials, memory)


def work_of(case: Case) -> Work | None:
    """Counts forward and backward, features recomputed; nothing for who is not counted."""
    if case.contender == SDPA:
        return _exact(case)
    if case.contender == "performer_softmax":
        return _linear(case, projected=True, exponentials_per_feature=4)
    if case.contender == "performer_relu":
        return _linear(case, projected=case.features != HEAD_DIM, exponentials_per_feature=0)
    return None


def _exact(case: Case) -> Work:
    # Forward 4 L d; backward 10 L d, with the logits computed again. Half of it where causal.
    seen = case.length / 2 if case.causal else case.length
    tokens = case.token_heads
    return Work(14 * seen * HEAD_DIM * tokens, 2 * seen * tokens, _traffic(case, vectors=12))


def _linear(case: Case, *, projected: bool, exponentials_per_feature: int) -> Work:
    assert case.features is not None
    # In units of m d: sum over keys and reading by queries, forward 4, backward 8; causal 10, with
    # the state of each chunk built again. Projecting q and k costs 4, again 4 in backward, and 4
    # for the way back.
    units = 4 + (10 if case.causal else 8)
    if projected:
        units += 12
    flops = units * case.features * HEAD_DIM
    if case.causal:
        flops += _CHUNK * (8 * case.features + 6 * HEAD_DIM)
    tokens = case.token_heads
    return Work(
        flops * tokens,
        exponentials_per_feature * case.features * tokens,
        _traffic(case, vectors=16 if case.causal else 12),
    )


def _traffic(case: Case, *, vectors: int) -> float:
    return vectors * HEAD_DIM * DTYPES[case.dtype].itemsize * case.token_heads


def measure_machine(device: torch.device) -> Machine:
    """Measures the rates of products, of exponentials and of memory."""
    cached = torch.randn(1 << 17, device=device)
    result = torch.empty_like(cached)
    source = torch.randn(1 << 25, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * source.element_size()
    return Machine(
        products={dtype: _product_rates(dtype, device) for dtype in DTYPES},
        exponentials=cached.numel() / _best(lambda: torch.exp2(cached, out=result), device),
        bandwidth=copied / _best(lambda: target.copy_(source), device),
    )


def _product_rates(dtype: str, device: torch.device) -> dict[str, float]:
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(DTYPES[dtype]) for _ in range(2))
    ways: dict[str, Callable[[], object]] = {"torch.mm": lambda: torch.mm(a, b)}
    # PyTorch multiplies float32 by another library than oneDNN; which is faster depends on the CPU.
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        linear = torch.ops.mkldnn._linear_pointwise
        ways["oneDNN"] = lambda: linear(a, b, None, "none", [], "")
    return {name: 2 * size**3 / _best(multiply, device) for name, multiply in ways.items()}


def _best(run: Callable[[], object], device: torch.device) -> float:
    taken = []
    for _ in range(_REPEATS):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        taken.append(time.perf_counter() - start)
    return min(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
