"""Data sets to one: their shards linked in order, their counts and sources added up."""

import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from data_prep.report import Report, read_rejected, write_rejected
from data_prep.wording import difference
from protlm.console import console
from protlm.data.manifest import Counts, Manifest, ShardEntry, read_manifest
from protlm.data.records import MAX_LISTED
from protlm.data.shards import open_split
from protlm.errors import UserError
from protlm.paths import check_output, complete_folder


def merge(parts: Sequence[Path], out: Path) -> Report:
    """Makes one data set of several; where the disk allows it, no shard is copied.

    Sequences that occur in two parts stay in both.

    Args:
        parts: the data sets, in the order that their sequences are to have.
        out: the data set to make.

    Raises:
        UserError: no part, one given twice, or parts split by different rules.
        InputDataError: a part is no data set, or damaged.
        OutputError: `out` exists or cannot be written.
    """
    check_output(out)
    if len({os.path.realpath(part) for part in parts}) != len(parts) or not parts:
        raise UserError("give the data sets to merge, each once: protlm data merge A B --out DIR")
    manifests = _mergeable(parts, verify="full")
    _warn_of_sources_in_common(parts, manifests)
    with complete_folder(out) as directory:
        report = _merge(parts, manifests, directory)
    console(stderr=True).print(report.table())
    return report


def merge_into(directory: Path, parts: Sequence[Path]) -> Report:
    """As `merge`, into an empty folder that the caller gives its name when it is complete.

    Raises:
        UserError, InputDataError: as from `merge`.
        OSError: the disk is full.
    """
    # They were hashed when they were written, just now.
    return _merge(parts, _mergeable(parts, verify="sizes"), directory)


def _warn_of_sources_in_common(parts: Sequence[Path], manifests: Sequence[Manifest]) -> None:
    """Says which parts hold the same sequences, all of which the merged set will hold twice."""
    first: dict[str, tuple[Path, str]] = {}
    for part, manifest in zip(parts, manifests, strict=True):
        for source in manifest.sources:
            other, name = first.setdefault(source.sha256, (part, source.file))
            if other != part:
                print(
                    f"protlm: warning: {part} and {other} were both made of {name}: its sequences "
                    "will be there twice",
                    file=sys.stderr,
                )


def _mergeable(parts: Sequence[Path], *, verify: str) -> list[Manifest]:
    """The manifests of data sets that fit together."""
    manifests = [read_manifest(part) for part in parts]
    for part, manifest in zip(parts, manifests, strict=True):
        if manifest.split_rule != manifests[0].split_rule:
            told = difference(manifest.split_rule, manifests[0].split_rule)
            raise UserError(
                f"{part} was split by another rule than {parts[0]} ({told}): prepare it again with "
                "the same options"
            )
        for split in manifest.splits:
            open_split(part, split, verify=verify)
    return manifests


def _merge(parts: Sequence[Path], manifests: Sequence[Manifest], directory: Path) -> Report:
    merged = Manifest(
        splits=_link(parts, manifests, directory),
        sources=tuple(source for manifest in manifests for source in manifest.sources),
        counts=_sum([manifest.counts for manifest in manifests]),
        split_rule=manifests[0].split_rule,
    )
    merged.write(directory)
    report = Report.of(merged)
    report.write(directory)
    write_rejected(directory, _rejected(parts))
    return report


def _link(
    parts: Sequence[Path], manifests: Sequence[Manifest], directory: Path
) -> dict[str, tuple[ShardEntry, ...]]:
    """Brings the shards together under new numbers; their entries, by split."""
    splits: dict[str, list[ShardEntry]] = {}
    for part, manifest in zip(parts, manifests, strict=True):
        for split, shards in manifest.splits.items():
            (directory / split).mkdir(exist_ok=True)
            entries = splits.setdefault(split, [])
            for shard in shards:
                file = f"{split}/shard-{len(entries):05d}.h5"
                _link_or_copy(part / shard.file, directory / file)
                entries.append(
                    ShardEntry(file, shard.sequences, shard.residues, shard.bytes, shard.sha256)
                )
    return {split: tuple(splits[split]) for split in sorted(splits)}


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        # Another disk, or one that knows no links.
        shutil.copyfile(source, target)


def _sum(counts: Sequence[Counts]) -> Counts:
    kinds: dict[str, Counter[str]] = {}
    for one in counts:
        for kind, by_reason in one.by_kind().items():
            kinds.setdefault(kind, Counter()).update(by_reason)
    return Counts(sum(one.records for one in counts), **{kind: dict(kinds[kind]) for kind in kinds})


def _rejected(parts: Sequence[Path]) -> dict[str, list[tuple[str, str, int]]]:
    merged: dict[str, list[tuple[str, str, int]]] = {}
    for part in parts:
        for reason, records in read_rejected(part).items():
            listed = merged.setdefault(reason, [])
            listed += records[: MAX_LISTED - len(listed)]
    return merged
