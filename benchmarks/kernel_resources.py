"""Registers, spills and shared memory of the fused kernels, compiled without a GPU.

PYTHONPATH=. python -m benchmarks.kernel_resources --cards sm_90

The kernels are compiled as they would be on the card; only the launch is left out.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from protlm.attention.linearized.fused import blocks
from protlm.attention.linearized.fused.attention import attention


@dataclass(frozen=True)
class Card:
    """The limits of a card (CUDA C++ Programming Guide, table of compute capabilities).

    Attributes:
        shared: bytes of shared memory that a program may have.
        shared_of_all: bytes of shared memory of a multiprocessor.
        warps: the largest number of warps of a multiprocessor.
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
# Long enough for two chunks.
_LENGTH = 512
# By the mode: causal or not.
WIDTHS = {
    False: ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 64)),
    True: ((torch.bfloat16, 64), (torch.float32, 16)),
}
# The dtype of the values, the width of a head, and the kernel.
Key = tuple[str, str, str]


class Usage(NamedTuple):
    """The resources that a program takes.

    Attributes:
        registers: registers of a thread.
        spilled: bytes of local memory of a thread.
        shared: bytes of shared memory.
        occupancy: warps of a full multiprocessor, as a fraction of the largest number.
    """

    registers: int
    spilled: int
    shared: int
    occupancy: float

    def __str__(self) -> str:
        """Returns what is in the table."""
        return f"{self.registers}, {self.spilled}, {self.shared:,}, {self.occupancy:.0%}"


def usages(card: str, *, is_packed: bool = False) -> dict[Key, Usage]:
    """Compiles every kernel for a card, for rows of one length or for packed proteins."""
    starts = torch.tensor([0, 100, 300, _LENGTH], dtype=torch.int32) if is_packed else None
    return {
        (str(dtype).removeprefix("torch."), str(width), name): _usage(CARDS[card], compiled)
        for causal, widths in WIDTHS.items()
        for dtype, width in widths
        for name, compiled in _compile(card, dtype, width, starts, causal=causal)
    }


def table(cards: Sequence[str]) -> str:
    """Returns a table in Markdown, with a column for each card."""
    columns = [usages(card) for card in cards]
    titles = "values", "K", "kernel", *cards
    rows = [(*key, *(str(column[key]) for column in columns)) for key in columns[0]]
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _compile(
    card: str, dtype: torch.dtype, width: int, starts: torch.Tensor | None, *, causal: bool
) -> list[tuple[str, Any]]:
    compiled: list[tuple[str, Any]] = []

    def launch(kernel: Any, grid: tuple[int, ...]) -> Any:
        return lambda **arguments: compiled.append(
            (_name(kernel, arguments, causal=causal), kernel.warmup(grid=grid, **arguments))
        )

    x = torch.zeros(1, _LENGTH, 4, width, dtype=dtype).transpose(1, 2).requires_grad_()
    mask, rows_RK = torch.ones(1, _LENGTH, dtype=torch.bool), torch.zeros(128, width)
    bias_R = rows_RK[:, 0].contiguous()
    hopper = mock.patch.object(blocks, "is_hopper", lambda _: card == "sm_90")
    with _target(card), hopper, mock.patch.object(JITFunction, "__getitem__", launch):
        for bias in (bias_R, None):
            out_BHLC, *_ = attention(x, x, x, mask, starts, rows_RK, bias, 1e-3, causal)
            out_BHLC.float().sum().backward()
    return compiled


def _name(kernel: Any, arguments: Mapping[str, Any], *, causal: bool) -> str:
    mode = "causal" if causal else "bidirectional"
    features = "relu" if arguments["bias"] is None else "softmax"
    # Causal sums are computed twice: of chunks, and before each of their blocks.
    with_states = ", states" if arguments.get("states") is not None else ""
    return f"{mode} {features}: {kernel.fn.__name__}{with_states}"


@contextmanager
def _target(card: str) -> Iterator[None]:
    """Makes Triton compile for a card that this machine does not have."""
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


def _usage(card: Card, compiled: Any) -> Usage:
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [program, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    registers, spilled = map(int, found.groups())
    # A warp takes registers in units of 256, and a program 1 KiB of extra shared memory.
    programs = min(
        REGISTERS // (-(-registers // 8) * 256 * warps),
        card.shared_of_all // (shared + 1024),
        card.warps // warps,
    )
    return Usage(registers, spilled, shared, programs * warps / card.warps)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Compile the fused kernels for cards.")
    parser.add_argument("--cards", nargs="+", default=tuple(CARDS), choices=tuple(CARDS))
    sys.stdout.write(table(parser.parse_args().cards))


if __name__ == "__main__":
    main()
