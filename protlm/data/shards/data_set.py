"""Opening of data sets, and verification against the manifest."""

from pathlib import Path

from protlm.data.shards.cluster_index import ClusterIndex
from protlm.data.shards.manifest import (
    MANIFEST,
    MANIFEST_SHA256,
    Manifest,
    ShardEntry,
    read_manifest,
)
from protlm.data.shards.mapped_shard import find_arrays, map_shard, size_fault
from protlm.data.shards.reader import SplitReader
from protlm.system.errors import InputDataError, UserError, one_of
from protlm.system.paths import sha256_of
from protlm.system.terminal import JobProgress

__all__ = [
    "ClusterIndex",
    "Manifest",
    "ShardEntry",
    "SplitReader",
    "open_clusters",
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
        verify: `full` compares sizes and hashes with the manifest and checks every number;
            `sizes` compares only sizes, and the structure of a shard is checked on first use.
        shuffled: sequences will be read in random order.
    """
    manifest = _manifest_with(directory, split, verify)
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


def open_clusters(directory: Path, split: str, *, verify: str = "full") -> ClusterIndex:
    """Opens the cluster index of a split after checking it.

    Args:
        directory: the folder of the data set.
        split: the name of the split.
        verify: as for `open_split`.
    """
    manifest = _manifest_with(directory, split, verify)
    if manifest.clusters is None:
        raise UserError(
            f"{directory} was prepared without clusters, which data.sampling=cluster needs; type "
            "data.sampling=uniform, or prepare it again with --cluster-table TABLE or --cluster"
        )
    index = _index(directory, manifest, split)
    try:
        index.check() if verify == "full" else index.check_size()
    except InputDataError as error:
        raise InputDataError(
            f"{error}; see: protlm data verify {directory}; or make the data set again"
        ) from error
    return index


def _index(directory: Path, manifest: Manifest, split: str) -> ClusterIndex:
    assert manifest.clusters is not None
    entry = manifest.clusters.indexes[split]
    num_sequences = sum(shard.sequences for shard in manifest.splits[split])
    return ClusterIndex(directory / entry.file, entry, num_sequences)


def _manifest_with(directory: Path, split: str, verify: str) -> Manifest:
    """Returns the manifest of a data set, after checking the name of the split."""
    manifest = read_manifest(directory)
    if split not in manifest.splits:
        raise UserError(
            f"{directory} has no split {split!r}; it has: {one_of(list(manifest.splits))} "
            "(protlm prepare --valid-fraction and --test-fraction create valid and test)"
        )
    if verify not in ("full", "sizes"):
        raise UserError(f"verify={verify} is unknown; choose one of: full, sizes")
    return manifest


def verify(directory: Path) -> list[str]:
    """Checks a data set completely, and returns one sentence per fault."""
    manifest = read_manifest(directory)
    entries = [entry for shards in manifest.splits.values() for entry in shards]
    indexes = manifest.clusters.indexes if manifest.clusters else {}
    expected = {MANIFEST, MANIFEST_SHA256, REPORT, REJECTED}
    expected |= {entry.file for entry in [*entries, *indexes.values()]}
    faults = []
    with JobProgress("shards checked", len(entries)) as progress:
        for done, entry in enumerate(entries, start=1):
            if fault := _fault(directory / entry.file, entry):
                faults.append(fault)
            progress.update(done)
    for split in indexes:
        try:
            _index(directory, manifest, split).check()
        except InputDataError as error:
            faults.append(str(error))
    for path in sorted(directory.rglob("*")):
        file = path.relative_to(directory).as_posix()
        if not path.is_dir() and file not in expected:
            faults.append(f"{path} is not in the manifest")
    return faults


def _fault(path: Path, entry: ShardEntry) -> str:
    """Returns why a file does not match its manifest entry, or an empty string.

    HDF5 opens the file only after its size and its hash were verified.
    """
    if fault := size_fault(path, entry):
        return fault
    try:
        if sha256_of(path) != entry.sha256:
            return f"the shard {path} is damaged or was replaced: its SHA-256 differs"
        map_shard(path, entry, find_arrays(path, entry)).check()
    except OSError as error:
        return f"the shard {path} cannot be read: {error.strerror}"
    except InputDataError as error:
        return str(error)
    return ""
