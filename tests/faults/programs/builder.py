"""Builds with small segments, for the programs of builders: importing this sets their size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protlm.data.records import block
from protlm.data_prep import prepare, split
from protlm.data_prep.clusters import ClusterTable  # pyright: ignore[reportMissingImports]

# Blocks of 16 KiB, so that a small file has many segments.
block.BLOCK_BYTES = 1 << 14


def build(sources: Sequence[str], out: Path | str, *tables: str, **options: Any) -> None:
    """Builds a data set, with clusters if there is a table of them."""
    prepare.prepare(
        [Path(source) for source in sources],
        Path(out),
        split_rule=split.HashSplit(0.1, 0.1),
        clusters=ClusterTable(Path(tables[0])) if tables else None,
        options=prepare.PrepareOptions(**{"shard_residues": 30_000, **options}),
    )
    assert (Path(out) / "train" / "clusters.h5").is_file() == bool(tables)


def contents(output: Path) -> dict[Path, bytes]:
    """Returns the bytes of a file, or of all files of a folder, by relative path."""
    files = (path for path in [output, *output.rglob("*")] if path.is_file())
    return {path.relative_to(output): path.read_bytes() for path in files}


def peak_megabytes() -> int:
    """Returns the peak of this process's memory: getrusage includes the parent before the fork."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
    return int(line.split()[1]) // 1024
