"""The commands `protlm data verify`, `info` and `export`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.markup import escape
from rich.table import Table

from protlm.console import console
from protlm.data import shards
from protlm.data.manifest import Manifest, read_manifest
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import InputDataError, UserError, one_of
from protlm.fasta_file import STANDARD_OUTPUT, fasta_file, fasta_text
from protlm.paths import check_output

_QUANTILES = {"shortest": 0.0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "longest": 1.0}
_LISTED_FAULTS = 20


def verify(directory: Path) -> None:
    """Checks a data set and prints a line for each split.

    Raises:
        UserError: there is no data set.
        InputDataError: something is damaged, missing or too much; the message lists it.
    """
    faults = shards.verify(directory)
    if faults:
        more = [f"and {len(faults) - _LISTED_FAULTS} more"] if len(faults) > _LISTED_FAULTS else []
        raise InputDataError("; ".join([*faults[:_LISTED_FAULTS], *more]))
    for split, entries in sorted(read_manifest(directory).splits.items()):
        sequences = sum(entry.sequences for entry in entries)
        residues = sum(entry.residues for entry in entries)
        print(
            f"{split}: {sequences:,} sequences, {residues:,} residues in {len(entries)} shards: ok"
        )


def info(directory: Path) -> None:
    """Prints splits, lengths, sources and counts of a data set.

    Raises:
        UserError: there is no data set.
        InputDataError: it is damaged.
    """
    manifest = read_manifest(directory)
    printed = console()
    printed.print(_splits_table(directory, manifest))
    table = Table("source", "bytes", "SHA-256 begins", box=None)
    for source in manifest.sources:
        table.add_row(escape(source.file), f"{source.bytes:,}", source.sha256[:16])
    printed.print(table)
    table = Table("records", f"{manifest.counts.records:,}", box=None)
    for kind, counts in manifest.counts.by_kind().items():
        for reason, number in sorted(counts.items()):
            table.add_row(escape(f"{kind}: {reason}"), f"{number:,}")
    printed.print(table)
    rule = ", ".join(f"{name} {value}" for name, value in manifest.split_rule.items())
    printed.print(f"split {rule}; made by protlm {manifest.tool_version}", markup=False)


def _splits_table(directory: Path, manifest: Manifest) -> Table:
    table = Table("split", "sequences", "residues", "shards", box=None)
    for name in _QUANTILES:
        table.add_column(name)
    for column in table.columns:
        column.justify, column.no_wrap = "left" if column is table.columns[0] else "right", True
    for split, entries in sorted(manifest.splits.items()):
        up_to = np.cumsum(shards.open_split(directory, split, verify="sizes").length_counts())
        ranks = np.rint(np.array(list(_QUANTILES.values())) * (up_to[-1] - 1))
        quantiles = np.searchsorted(up_to, ranks, side="right").tolist()
        residues = sum(entry.residues for entry in entries)
        sizes = (int(up_to[-1]), residues, len(entries), *quantiles)
        table.add_row(split, *(f"{size:,}" for size in sizes))
    return table


def export(directory: Path, output: Path | None, splits: Sequence[str]) -> None:
    """Writes the sequences back as FASTA, each under its accession.

    Args:
        directory: the data set.
        output: a file to make, gzip if its name ends with .gz; None or `-` prints.
        splits: which, in this order; none writes all.

    Raises:
        UserError: no data set, or no such split.
        InputDataError: a shard is damaged.
        OutputError: `output` exists or cannot be written.
    """
    output = output or STANDARD_OUTPUT
    if output != STANDARD_OUTPUT:
        # Before the shards are hashed, which takes its time.
        check_output(output)
    there = sorted(read_manifest(directory).splits)
    for split in splits:
        if split not in there:
            raise UserError(f"{directory} has no split {split!r}; it has: {one_of(there)}")
    names = dict.fromkeys(splits or there)
    readers = [shards.open_split(directory, name) for name in names]
    with fasta_file(output) as file:
        for reader in readers:
            for index in range(len(reader)):
                sequence = VOCABULARY.decode(reader[index])
                file.write(fasta_text(reader.identifier(index), sequence))
