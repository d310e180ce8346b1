"""The results of all rounds: each case of the grid once, its ratios, and the CSV file."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.cases import PERFORMER_PYTORCH, SDPA, Case
from benchmarks.rounds import Round
from protlm.paths import complete_file

COLUMNS = [
    *("mode", "dtype", "length", "contender", "features", "turns"),
    *("forward_seconds", "backward_seconds", "seconds"),
    *("times_sdpa", "times_performer_pytorch"),
    *("peak_bytes_per_token_head", "kept_bytes_per_token_head", "left_out"),
]


@dataclass(frozen=True)
class Result:
    """A case in the round of its own mode and length."""

    case: Case
    held: Round

    @property
    def measured(self) -> bool:
        """Whether the case took part."""
        return self.case in self.held.seconds

    @property
    def left_out(self) -> str:
        """Why it did not; empty if it did."""
        return self.held.left_out.get(self.case, "")

    def times(self, peer: str, part: str = "total") -> float | None:
        """The time as a multiple of a peer's, of the same dtype and number of features."""
        features = self.case.features if peer == PERFORMER_PYTORCH else None
        other = replace(self.case, contender=peer, features=features)
        return self.held.ratio(self.case, other, part)


def of_grid(rounds: Iterable[Round]) -> list[Result]:
    """Every case of the grid once, measured or left out."""
    found = []
    for held in rounds:
        # A bar over two lengths lets a short case take turns among the long ones.
        longest = max((case.length for case in held.cases), default=0)
        found += [Result(case, held) for case in held.cases if case.length == longest]
    return found


def by_line(found: Iterable[Result]) -> dict[Case, list[Result]]:
    """The results of each contender in one mode and dtype, the shortest length first.

    Modes stand together, and in them the dtypes.
    """
    lines: dict[Case, list[Result]] = {}
    for result in sorted(found, key=lambda result: result.case.length):
        lines.setdefault(result.case.at(0), []).append(result)
    return dict(sorted(lines.items(), key=lambda item: (item[0].causal, item[0].dtype == "bf16")))


def write_csv(found: Sequence[Result], path: Path) -> None:
    """Writes every median, and who was left out with the reason."""
    with complete_file(path, overwrite=True) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(csv_row(result) for result in found)


def csv_row(result: Result) -> dict[str, object]:
    """One line of the CSV file; what was not measured is missing."""
    case, held = result.case, result.held
    row: dict[str, object] = {
        "mode": case.mode,
        "dtype": case.dtype,
        "length": case.length,
        "contender": case.contender,
        "features": case.features,
        "left_out": result.left_out,
    }
    if result.measured:
        row |= {
            "turns": len(held.seconds[case]),
            "forward_seconds": held.median(case, "forward"),
            "backward_seconds": held.median(case, "backward"),
            "seconds": held.median(case),
            "times_sdpa": result.times(SDPA),
            "times_performer_pytorch": result.times(PERFORMER_PYTORCH),
            "peak_bytes_per_token_head": held.bytes[case].peak / case.token_heads,
            "kept_bytes_per_token_head": held.bytes[case].kept / case.token_heads,
        }
    return row
