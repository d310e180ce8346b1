"""Registers, spills and shared memory of the fused kernels, compiled without a GPU.

PYTHONPATH=. python -m benchmarks.kernel_resources --cards sm_90

The kernels are compiled as they would be on the card; only the launch is left out.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from protlm.attention.linearized.fused.relu import relu_attention
from protlm.attention.linearized.fused.softmax import softmax_attention


@dataclass(frozen=True)
class Card:
    """The limits of a card (CUDA C++ Programming Guide, table of compute capabilities).

    Attributes:
        shared: bytes of shared memory that a program may have.
        shared_of_all: bytes of shared memory of a multiprocessor.
        warps: the most warps of a multiprocessor.
    """

    shared: int
    shared_of_all: int
    warps: int = 64


CARDS = {
    "sm_80": Card(163 << 10, 164 << 10),
    "sm_90": Card(227 << 10, 228 << 10),
    "sm_100": Card(227 << 10, 228 << 10),
}
REGISTERS = 65_536
WIDTHS = ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 64))
COLUMNS = "card", "values", "width", "kernel", "registers", "spilled", "shared", "occupancy"


def rows(cards: Sequence[str], widths: Sequence[tuple[torch.dtype, int]]) -> list[tuple[str, ...]]:
    """Compiles every kernel for every card, and returns the rows of the table."""
    found = []
    for card in cards:
        for dtype, width in widths:
            for name, compiled in _compile(card, dtype, width):
                dtype_name = str(dtype).removeprefix("torch.")
                found.append((card, dtype_name, str(width), name, *_usage(card, compiled)))
    return found


def _compile(card: str, dtype: torch.dtype, width: int) -> list[tuple[str, Any]]:
    compiled: list[tuple[str, Any]] = []

    def launch(kernel: Any, grid: tuple[int, ...]) -> Any:
        def warm_up(*arguments: Any, **options: Any) -> None:
            module = kernel.fn.__module__.rpartition(".")[2].removesuffix("_kernels")
            name = f"{module}: {kernel.fn.__name__}"
            compiled.append((name, kernel.warmup(*arguments, grid=grid, **options)))

        return warm_up

    x = torch.zeros(1, 256, 4, width, dtype=dtype).transpose(1, 2).requires_grad_()
    mask, rows_RK = torch.ones(1, 256, dtype=torch.bool), torch.zeros(128, width)
    with _target(card), mock.patch.object(JITFunction, "__getitem__", launch):
        for out in (
            softmax_attention(x, x, x, mask, rows_RK, rows_RK[:, 0].contiguous())[0],
            relu_attention(x, x, x, mask, rows_RK, 1e-3)[0],
        ):
            out.float().sum().backward()
    return compiled


@contextmanager
def _target(card: str) -> Iterator[None]:
    """Makes Triton compile for a card that is not there."""
    target = GPUTarget("cuda", int(card.removeprefix("sm_")), 32)
    absent = mock.Mock(
        get_current_target=lambda: target,
        get_current_device=lambda: target.arch,
        get_current_stream=lambda _: 0,
    )
    before = driver._active
    driver.set_active(absent)
    try:
        yield
    finally:
        driver._active = before


def _usage(name: str, compiled: Any) -> tuple[str, ...]:
    card, warps = CARDS[name], compiled.metadata.num_warps
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [program, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert usage is not None, text
    registers, stack = map(int, usage.groups())
    shared = compiled.metadata.shared
    # A multiprocessor gives registers to warps by 256, and 1 KiB of shared memory to each program.
    programs = min(
        REGISTERS // (-(-registers // 8) * 256 * warps),
        card.shared_of_all // (shared + 1024),
        card.warps // warps,
    )
    return str(registers), str(stack), str(shared), f"{programs * warps / card.warps:.0%}"


def table(found: Sequence[Sequence[str]]) -> str:
    """Returns the rows as a table in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *found]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="The resources of the fused kernels.")
    parser.add_argument("--cards", nargs="+", default=tuple(CARDS), choices=tuple(CARDS))
    sys.stdout.write(table(rows(parser.parse_args().cards, WIDTHS)))


if __name__ == "__main__":
    main()
