"""A data set of HDF5 shards: opened, and checked against its manifest."""

from pathlib import Path

from protlm.data.manifest import MANIFEST, MANIFEST_SHA256, Manifest, ShardEntry, read_manifest
from protlm.data.shard_map import find_arrays, map_shard, size_fault
from protlm.data.split_reader import SplitReader
from protlm.errors import InputDataError, UserError, one_of
from protlm.paths import sha256_of
from protlm.progress import JobProgress

__all__ = [
    "Manifest",
    "ShardEntry",
    "SplitReader",
    "open_split",
    "read_manifest",
    "verify",
]

REPORT, REJECTED = "report.json", "rejected.tsv"


def open_split(
    directory: Path, split: str, *, verify: str = "full", shuffled: bool = False
) -> SplitReader:
    """Opens a split after checking its shards.

    Args:
        directory: the folder of the data set.
        split: the name of the split.
        verify: `full` compares sizes and hashes with the manifest and looks at every number,
            `sizes` compares the sizes alone; a shard's structure is checked when it is first used.
        shuffled: sequences will be asked for in a random order.

    Raises:
        UserError: no data set, no such split, or another `verify`.
        InputDataError: the split is empty, or a shard is missing or damaged.
    """
    manifest = read_manifest(directory)
    if split not in manifest.splits:
        raise UserError(
            f"{directory} has no split {split!r}; it has: {one_of(list(manifest.splits))} "
            "(protlm prepare makes them by --valid-fraction and --test-fraction)"
        )
    if verify not in ("full", "sizes"):
        raise UserError(f"verify={verify} is unknown; choose one of: full, sizes")
    if not any(entry.sequences for entry in manifest.splits[split]):
        raise InputDataError(f"the split {split} of {directory} is empty; choose another one")
    for entry in manifest.splits[split]:
        path = directory / entry.file
        fault = size_fault(path, entry) if verify == "sizes" else _fault(path, entry)
        if fault:
            raise InputDataError(
                f"{fault}; see: protlm data verify {directory}; or make the data set again"
            )
    return SplitReader(directory, manifest.splits[split], shuffled=shuffled)


def verify(directory: Path) -> list[str]:
    """Checks all of a data set: one sentence per fault, none when all is well.

    Raises:
        UserError: there is no data set, or it is of another format.
        InputDataError: the manifest is damaged.
    """
    manifest = read_manifest(directory)
    entries = [entry for shards in manifest.splits.values() for entry in shards]
    expected = {MANIFEST, MANIFEST_SHA256, REPORT, REJECTED} | {entry.file for entry in entries}
    faults = []
    with JobProgress("shards checked", len(entries)) as progress:
        for done, entry in enumerate(entries, start=1):
            if fault := _fault(directory / entry.file, entry):
                faults.append(fault)
            progress.update(done)
    for path in sorted(directory.rglob("*")):
        file = path.relative_to(directory).as_posix()
        if not path.is_dir() and file not in expected:
            faults.append(f"{path} is not in the manifest")
    return faults


def _fault(path: Path, entry: ShardEntry) -> str:
    """Why a file is not the shard that the manifest means, or nothing; HDF5 comes last."""
    if fault := size_fault(path, entry):
        return fault
    try:
        if sha256_of(path) != entry.sha256:
            return f"the shard {path} is damaged or another one: its SHA-256 differs"
        map_shard(path, entry, find_arrays(path, entry)).check()
    except OSError as error:
        return f"the shard {path} cannot be read: {error.strerror}"
    except InputDataError as error:
        return str(error)
    return ""
