"""Merging of data sets: shards are linked in order, counts and sources are added up."""

import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from protlm.data.records import Tally
from protlm.data.shards.data_set import open_split
from protlm.data.shards.manifest import Manifest, ShardEntry, read_manifest
from protlm.system.errors import UserError
from protlm.system.paths import complete_folder
from protlm.system.terminal import printable
from protlm.system.work_folder import difference

from .report import Report, conclude, read_rejected


def merge(parts: Sequence[Path], output: Path) -> Report:
    """Merges several data sets into one; where the disk allows it, shards are hard-linked.

    Sequences that occur in two parts are kept in both. Clusters are kept if all parts have those
    of the same table.
    """
    if len({os.path.realpath(part) for part in parts}) != len(parts) or not parts:
        raise UserError(
            "give the data sets to merge, each once: protlm data merge A B --output DIR"
        )
    manifests = _mergeable(parts, verify="full")
    _warn_of_sources_in_common(parts, manifests)
    _warn_of_lost_clusters(parts, manifests)
    with complete_folder(output) as directory:
        report = _merge(parts, manifests, directory)
    report.print()
    return report


def merge_into(directory: Path, parts: Sequence[Path]) -> Report:
    """Merges into an empty folder, which the caller renames when it is complete."""
    # They were hashed when they were written, moments ago.
    return _merge(parts, _mergeable(parts, verify="sizes"), directory)


def _warn_of_sources_in_common(parts: Sequence[Path], manifests: Sequence[Manifest]) -> None:
    first: dict[str, tuple[Path, str]] = {}
    for part, manifest in zip(parts, manifests, strict=True):
        for source in manifest.sources:
            other, name = first.setdefault(source.sha256, (part, source.file))
            if other != part:
                message = f"{part} and {other} were both made from {name}"
                print(
                    f"protlm: warning: {printable(message)}: its sequences will occur twice",
                    file=sys.stderr,
                )


def _warn_of_lost_clusters(parts: Sequence[Path], manifests: Sequence[Manifest]) -> None:
    tables = [_table(manifest) for manifest in manifests]
    if len(set(tables)) == 1:
        return
    number = next(number for number, table in enumerate(tables) if table != tables[0])
    which = " and ".join(f"{parts[n]} has {_in_words(tables[n])}" for n in (0, number))
    print(
        f"protlm: warning: {printable(which)}: the merged data set will have no clusters, so "
        "data.sampling=cluster cannot be used with it; prepare both with one table to keep them",
        file=sys.stderr,
    )


def _table(manifest: Manifest) -> tuple[str, str] | None:
    found = manifest.clusters
    return None if found is None else (found.table, found.sha256)


def _in_words(table: tuple[str, str] | None) -> str:
    return "no clusters" if table is None else f"clusters of {table[0]} ({table[1]:.8})"


def _mergeable(parts: Sequence[Path], *, verify: str) -> list[Manifest]:
    manifests = [read_manifest(part) for part in parts]
    for part, manifest in zip(parts, manifests, strict=True):
        if manifest.split_rule != manifests[0].split_rule:
            what = difference(manifest.split_rule, manifests[0].split_rule)
            raise UserError(
                f"{part} and {parts[0]} were split by different rules ({what}): prepare one of "
                "them again with the options of the other"
            )
        for split in manifest.splits:
            open_split(part, split, verify=verify)
    return manifests


def _merge(parts: Sequence[Path], manifests: Sequence[Manifest], directory: Path) -> Report:
    splits, table = _link(parts, manifests, directory), _table(manifests[0])
    is_one_table = all(_table(manifest) == table for manifest in manifests)
    sources = tuple(source for manifest in manifests for source in manifest.sources)
    totals = Tally()
    for part, manifest in zip(parts, manifests, strict=True):
        counts = {kind: Counter(some) for kind, some in manifest.counts.by_kind().items()}
        totals.add(Tally(manifest.counts.records, **counts, listed=read_rejected(part)))
    return conclude(
        directory,
        splits,
        sources,
        totals,
        manifests[0].split_rule,
        table if is_one_table else None,
    )


def _link(
    parts: Sequence[Path], manifests: Sequence[Manifest], directory: Path
) -> dict[str, tuple[ShardEntry, ...]]:
    splits: dict[str, list[ShardEntry]] = {}
    for part, manifest in zip(parts, manifests, strict=True):
        for split, shards in manifest.splits.items():
            (directory / split).mkdir(exist_ok=True)
            entries = splits.setdefault(split, [])
            for shard in shards:
                file = f"{split}/shard-{len(entries):05d}.h5"
                try:
                    os.link(part / shard.file, directory / file)
                except OSError:
                    # The source is on another disk, or its file system has no hard links.
                    shutil.copyfile(part / shard.file, directory / file)
                entries.append(replace(shard, file=file))
    return {split: tuple(splits[split]) for split in sorted(splits)}
