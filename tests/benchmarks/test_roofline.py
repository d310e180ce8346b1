"""The roofline: counts of work from the formulas, rates from this machine."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cases import NUM_HEADS, SDPA, Case
from benchmarks.contenders import contenders
from benchmarks.roofline import Machine, Work, measure_machine, work_of

M, D, C, L = 256, 64, 64, 1000


@pytest.mark.parametrize(
    ("name", "features", "causal", "flops", "exponentials", "vectors"),
    [
        ("performer_softmax", M, False, 24 * M * D, 4 * M, 12),
        ("performer_softmax", M, True, 26 * M * D + C * (8 * M + 6 * D), 4 * M, 16),
        ("performer_relu", D, False, 12 * D * D, 0, 12),
        ("performer_relu", M, False, 24 * M * D, 0, 12),
        ("performer_relu", D, True, 14 * D * D + 14 * C * D, 0, 16),
        (SDPA, None, False, 14 * L * D, 2 * L, 12),
        (SDPA, None, True, 7 * L * D, L, 12),
    ],
)
def test_work_is_that_of_the_formulas(
    name: str, features: int | None, causal: bool, flops: int, exponentials: int, vectors: int
) -> None:
    for dtype, size in (("fp32", 4), ("bf16", 2)):
        case = Case(name, features, causal, L, dtype)
        work = work_of(case)
        assert work is not None
        assert work.flops == flops * case.token_heads
        assert work.exponentials == exponentials * case.token_heads
        assert work.bytes == vectors * D * size * case.token_heads


def test_who_is_not_counted_has_no_work() -> None:
    assert work_of(Case("performer-pytorch", M, False, L)) is None


def test_the_roof_is_the_larger_of_computing_and_moving() -> None:
    machine = Machine({"fp32": {"slow": 1.0, "fast": 2.0}}, exponentials=4.0, bandwidth=8.0)
    assert Work(flops=2, exponentials=4, bytes=8).seconds(machine, "fp32") == (1, 1, 1)
    assert Work(flops=2, exponentials=4, bytes=8).least_seconds(machine, "fp32") == 2
    assert Work(flops=2, exponentials=4, bytes=80).least_seconds(machine, "fp32") == 10


def test_the_better_of_two_measurements_counts() -> None:
    calm = Machine({"fp32": {"a": 2.0, "b": 1.0}}, exponentials=1.0, bandwidth=3.0)
    busy = Machine({"fp32": {"a": 1.0, "b": 4.0}}, exponentials=2.0, bandwidth=2.0)
    assert calm.or_better(busy) == busy.or_better(calm)
    assert calm.or_better(busy) == Machine({"fp32": {"a": 2.0, "b": 4.0}}, 2.0, 3.0)


def test_this_machine_has_rates() -> None:
    machine = measure_machine(torch.device("cpu"))
    assert machine.products.keys() == {"fp32", "bf16"}
    assert min(rate for ways in machine.products.values() for rate in ways.values()) > 0
    assert machine.exponentials > 0 and machine.bandwidth > 0


def added_product_flops(
    onto: torch.Size, x: torch.Size, y: torch.Size, out_shape: object = None
) -> int:
    batch, rows, inner = x
    return 2 * batch * rows * inner * y[-1]


@pytest.mark.parametrize("causal", [False, True])
def test_the_products_counted_are_those_that_are_made(causal: bool) -> None:
    length = 1024
    case = Case("performer_softmax", M, causal, length)
    attend = contenders()["performer_softmax"].prepare(case, torch.device("cpu"))
    # In float64, whose products are those that torch counts.
    vectors = [
        torch.randn(1, NUM_HEADS, length, D, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    ]
    # The counter knows the product that is added to another, but not its form in place.
    in_place = {torch.ops.aten.baddbmm_: added_product_flops}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        attend(*vectors).sum().backward()
    work = work_of(case)
    assert work is not None
    # The column of the denominator is not in the formulas.
    assert 1 <= counter.get_total_flops() / work.flops < 1.03
