"""The commands `protlm data verify`, `info` and `export`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.markup import escape
from rich.table import Column, Table

from protlm.commands.outputs import STANDARD_OUTPUT, fasta_file, fasta_text
from protlm.data.shards import data_set as shards
from protlm.data.shards.manifest import Manifest, read_manifest
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import InputDataError
from protlm.system.terminal import console, printable

_QUANTILES = {"shortest": 0.0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "longest": 1.0}
_LISTED_FAULTS = 20


def verify(directory: Path) -> None:
    """Verifies a data set and prints a line for each split."""
    faults = shards.verify(directory)
    if faults:
        more = [f"and {len(faults) - _LISTED_FAULTS} more"] if len(faults) > _LISTED_FAULTS else []
        raise InputDataError("; ".join([*faults[:_LISTED_FAULTS], *more]))
    manifest = read_manifest(directory)
    for split, entries in sorted(manifest.splits.items()):
        sequences = sum(entry.sequences for entry in entries)
        residues = sum(entry.residues for entry in entries)
        clusters = manifest.clusters
        of = "" if clusters is None else f" of {clusters.indexes[split].clusters:,} clusters"
        print(
            f"{split}: {sequences:,} sequences{of}, {residues:,} residues in {len(entries)} "
            "shards: ok"
        )


def info(directory: Path) -> None:
    """Prints the splits, lengths, sources and counts of a data set."""
    manifest = read_manifest(directory)
    printed = console()
    printed.print(_splits_table(directory, manifest))
    table = Table(Column("source", overflow="fold"), "bytes", "SHA-256 begins", box=None)
    for source in manifest.sources:
        table.add_row(escape(printable(source.file)), f"{source.bytes:,}", source.sha256[:16])
    printed.print(table)
    table = Table("records", f"{manifest.counts.records:,}", box=None)
    for kind, counts in manifest.counts.by_kind().items():
        for reason, number in sorted(counts.items()):
            table.add_row(escape(printable(f"{kind}: {reason}")), f"{number:,}")
    printed.print(table)
    if (clusters := manifest.clusters) is not None:
        printed.print(
            f"clusters of {printable(clusters.table)}, SHA-256 {clusters.sha256:.16}...",
            markup=False,
        )
    rule = ", ".join(f"{name} {value}" for name, value in manifest.split_rule.items())
    printed.print(f"split {rule}; made by protlm {manifest.tool_version}", markup=False)


def _splits_table(directory: Path, manifest: Manifest) -> Table:
    indexes = {} if manifest.clusters is None else manifest.clusters.indexes
    names = ("sequences", "residues", "shards", *(["clusters"] if indexes else []), *_QUANTILES)
    table = Table("split", *names, box=None)
    for column in table.columns:
        column.justify, column.no_wrap = "left" if column is table.columns[0] else "right", True
    for split, entries in sorted(manifest.splits.items()):
        up_to = np.cumsum(shards.open_split(directory, split, verify="sizes").length_counts())
        ranks = np.rint(np.array(list(_QUANTILES.values())) * (up_to[-1] - 1))
        quantiles = np.searchsorted(up_to, ranks, side="right").tolist()
        residues = sum(entry.residues for entry in entries)
        clusters = [indexes[split].clusters] if indexes else []
        sizes = (int(up_to[-1]), residues, len(entries), *clusters, *quantiles)
        table.add_row(split, *(f"{size:,}" for size in sizes))
    return table


def export(directory: Path, output: Path | None, splits: Sequence[str]) -> None:
    """Writes the sequences as FASTA; None and `-` print it, and no splits means all."""
    output = output or STANDARD_OUTPUT
    names = dict.fromkeys(splits or sorted(read_manifest(directory).splits))
    readers = [shards.open_split(directory, name) for name in names]
    with fasta_file(output) as file:
        for reader in readers:
            for index in range(len(reader)):
                file.write(fasta_text(reader.identifier(index), VOCABULARY.decode(reader[index])))
