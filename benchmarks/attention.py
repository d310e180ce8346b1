"""Times every attention mechanism, forward and backward, beside PyTorch's own attention.

python -m benchmarks.attention [--device cuda] [--csv FILE]

All contenders take turns within each repeat, so a machine that is busy for a while slows them all;
what is reported are medians, and their ratio to `scaled_dot_product_attention` in the same turns.
"""

import argparse
import csv
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from omegaconf import OmegaConf
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from protlm.attention import Attention, create, names
from protlm.paths import complete_file, conf_dir

PEER = "SDPA"
LENGTHS = (512, 1024, 2048, 4096)
REPEATS = 5
NUM_HEADS, HEAD_DIM = 8, 64
MODEL_DIM = NUM_HEADS * HEAD_DIM

Contender = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """One contender at one length: the median over the repeats, and its ratio to the peer's."""

    mode: str
    length: int
    attention: str
    seconds: float
    times_peer: float


def from_yaml(name: str, device: torch.device) -> Attention:
    """Builds a mechanism with the settings that protlm ships for it."""
    options = OmegaConf.to_container(OmegaConf.load(conf_dir() / "attention" / f"{name}.yaml"))
    assert isinstance(options, dict)
    return create(
        name,
        {str(key): value for key, value in options.items() if key != "name"},
        num_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        model_dim=MODEL_DIM,
        max_length=max(LENGTHS),
    ).to(device)


def contender(
    mechanism: Attention, *, length: int, causal: bool, device: torch.device
) -> Contender:
    """Binds all of a mechanism's inputs but the queries, keys and values."""
    hidden_BLD = torch.randn(1, length, MODEL_DIM, device=device)
    mask_BL = torch.ones(1, length, dtype=torch.bool, device=device)

    def attend(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
        return mechanism(
            q_BHLK, k_BHLK, v_BHLC, hidden_BLD=hidden_BLD, mask_BL=mask_BL, causal=causal
        )

    return attend


def seconds(attend: Contender, length: int, device: torch.device) -> float:
    """The time of one forward and one backward pass, on fresh inputs."""
    shape = (1, NUM_HEADS, length, HEAD_DIM)
    q_BHLK, k_BHLK, v_BHLC = (
        torch.randn(shape, device=device, requires_grad=True) for _ in range(3)
    )
    _wait(device)
    start = time.perf_counter()
    attend(q_BHLK, k_BHLK, v_BHLC).sum().backward()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    # A CUDA kernel runs on after its call has returned.
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(length: int, *, causal: bool, device: torch.device) -> list[Row]:
    """Lets all contenders take turns at one length."""

    def peer(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
        return scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLC, is_causal=causal)

    contenders: dict[str, Contender] = {PEER: peer}
    for name in names():
        mechanism = from_yaml(name, device)
        if mechanism.supports_causal if causal else mechanism.supports_bidirectional:
            contenders[name] = contender(mechanism, length=length, causal=causal, device=device)
    # The first turn pays for warming up and is not counted.
    turns = [
        {name: seconds(attend, length, device) for name, attend in contenders.items()}
        for _ in range(REPEATS + 1)
    ][1:]
    return [
        Row(
            mode="causal" if causal else "bidirectional",
            length=length,
            attention=name,
            seconds=median(turn[name] for turn in turns),
            times_peer=median(turn[name] / turn[PEER] for turn in turns),
        )
        for name in contenders
    ]


def table(rows: list[Row], where: str) -> Table:
    """The ratios as a table: one line for each mode and length."""
    columns = list(dict.fromkeys(row.attention for row in rows))
    drawn = Table(
        box=SIMPLE,
        title=f"Forward and backward, in times of PyTorch's {PEER}: medians of {REPEATS}\n{where}",
    )
    for heading in ("mode", "length", *columns):
        drawn.add_column(heading, justify="left" if heading == "mode" else "right")
    for mode, length in dict.fromkeys((row.mode, row.length) for row in rows):
        line = {row.attention: row for row in rows if (row.mode, row.length) == (mode, length)}
        ratios = (f"{line[name].times_peer:.2f}" if name in line else "" for name in columns[1:])
        drawn.add_row(mode, str(length), f"{line[PEER].seconds * 1000:.0f} ms", *ratios)
    return drawn


def main() -> None:
    """Measures, prints the table, and writes every figure to a CSV file."""
    parser = argparse.ArgumentParser(description="Time the attention mechanisms.")
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--csv", default=Path("outputs/benchmark_attention.csv"), type=Path)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    rows = [
        row
        for causal in (False, True)
        for length in LENGTHS
        for row in measure(length, causal=causal, device=arguments.device)
    ]
    cores = f"{torch.get_num_threads()} threads, {platform.machine()}"
    place = torch.cuda.get_device_name() if arguments.device.type == "cuda" else cores
    Console().print(table(rows, f"batch 1, {NUM_HEADS} heads of {HEAD_DIM}, float32, {place}"))
    with complete_file(arguments.csv, overwrite=True) as path, path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    print(f"Wrote {arguments.csv}")


if __name__ == "__main__":
    main()
