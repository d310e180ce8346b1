"""The manifest of a data set: shards with their hashes, sources, and counts of records."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from protlm import __version__
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import InputDataError, UserError
from protlm.system.json_file import Count, Sha256, from_json, read_json, to_json
from protlm.system.paths import existing_file, sha256_of

FORMAT = "protlm-shards"
FORMAT_VERSION = 1
MANIFEST, MANIFEST_SHA256 = "manifest.json", "manifest.json.sha256"

# It becomes the name of a folder.
SPLIT_NAME = re.compile(r"[a-z0-9_]{1,64}")
# A path from the manifest must not lead out of the folder.
_ShardFile = Annotated[str, re.compile(r"[a-z0-9_]{1,64}/shard-[0-9]{5,8}\.h5")]
_IndexFile = Annotated[str, re.compile(r"[a-z0-9_]{1,64}/clusters\.h5")]
_Split = Annotated[str, SPLIT_NAME]
_Counts = dict[str, Count]


@dataclass(frozen=True)
class ShardEntry:
    """Description of a shard: `file` is relative to the manifest, `sha256` covers all its bytes."""

    file: _ShardFile
    sequences: Count
    residues: Count
    bytes: Count
    sha256: Sha256


@dataclass(frozen=True)
class IndexEntry:
    """Description of the cluster index of a split; fields as in `ShardEntry`."""

    file: _IndexFile
    clusters: Count
    bytes: Count
    sha256: Sha256


@dataclass(frozen=True)
class Clusters:
    """The clusters of a data set."""

    table: str
    sha256: Sha256
    indexes: dict[_Split, IndexEntry]


@dataclass(frozen=True)
class SourceEntry:
    """A source file, identified by its name without the folder."""

    file: str
    bytes: Count
    sha256: Sha256


@dataclass(frozen=True)
class Counts:
    """Counts of the sources' records by reason.

    `rejected` counts records that cannot be used, `filtered` those that were not selected.
    """

    records: Count = 0
    rejected: _Counts = field(default_factory=dict)
    filtered: _Counts = field(default_factory=dict)
    changed: _Counts = field(default_factory=dict)
    noted: _Counts = field(default_factory=dict)

    def by_kind(self) -> dict[str, dict[str, int]]:
        """Returns the counts of records that were not kept unchanged, by kind."""
        return {kind: counts for kind, counts in vars(self).items() if kind != "records"}


@dataclass(frozen=True)
class Manifest:
    """The manifest; `splits` has the shards of each split in order.

    `clusters` is None for a data set without clusters.
    """

    splits: dict[_Split, tuple[ShardEntry, ...]]
    sources: tuple[SourceEntry, ...]
    counts: Counts
    split_rule: dict[str, Any]
    clusters: Clusters | None = None
    vocabulary: str = VOCABULARY.hash
    tool_version: str = __version__
    format: str = FORMAT
    format_version: int = FORMAT_VERSION

    def write(self, directory: Path) -> None:
        """Writes `manifest.json` and its SHA-256; equal manifests give equal bytes."""
        fields = to_json(self)
        if self.clusters is None:
            del fields["clusters"]
        text = json.dumps(fields, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        digest = hashlib.sha256(text.encode()).hexdigest()
        # As `sha256sum --check` reads it.
        (directory / MANIFEST_SHA256).write_bytes(f"{digest}  {MANIFEST}\n".encode())
        (directory / MANIFEST).write_bytes(text.encode())


def read_manifest(directory: Path) -> Manifest:
    """Reads and checks the manifest of a data set."""
    path = directory / MANIFEST
    try:
        is_there = path.is_file()
    except OSError as error:
        raise InputDataError(f"{directory} cannot be read: {error.strerror}") from error
    if not is_there:
        is_file = directory.is_file()
        source = directory if is_file else "SOURCE.fasta.gz"
        raise InputDataError(
            f"{directory} has no {MANIFEST} (there is no {path.absolute()}); give the path of a "
            f"data set (data.dir=DIR in a setting), or make one with: protlm prepare {source}"
        )
    try:
        expected = f"{sha256_of(existing_file(path, 'a manifest'))}  {MANIFEST}\n"
        if (directory / MANIFEST_SHA256).read_bytes() != expected.encode():
            raise ValueError(f"its SHA-256 differs from {MANIFEST_SHA256}")
        fields = read_json(path, "a manifest")
        _check_version(path, fields)
        return _checked(from_json(Manifest, fields))
    except FileNotFoundError as error:
        raise InputDataError(
            f"{path} has no {MANIFEST_SHA256} next to it: copy it too, or make the data set again "
            "with protlm prepare"
        ) from error
    except OSError as error:
        raise InputDataError(f"{error.filename} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError) as error:
        raise InputDataError(
            f"{path} is damaged ({error}); make the data set again with protlm prepare"
        ) from error


def _check_version(path: Path, fields: dict[str, Any]) -> None:
    if fields["format"] != FORMAT or fields["format_version"] != FORMAT_VERSION:
        raise UserError(
            f"{path} is {fields['format']!s:.40} version {fields['format_version']!s:.40}; this "
            f"protlm reads {FORMAT} version {FORMAT_VERSION}: make it again with protlm prepare"
        )
    if fields["vocabulary"] != VOCABULARY.hash:
        raise UserError(
            f"{path} was made with another vocabulary ({fields['vocabulary']!s:.12}, not "
            f"{VOCABULARY.hash:.12}): make it again with protlm prepare"
        )


def _checked(manifest: Manifest) -> Manifest:
    """Returns a manifest whose files are in the folders of their splits."""
    files = [(split, one.file) for split, shards in manifest.splits.items() for one in shards]
    if manifest.clusters is not None:
        if manifest.clusters.indexes.keys() != manifest.splits.keys():
            raise ValueError("the splits with clusters differ from those of the data set")
        files += [(split, one.file) for split, one in manifest.clusters.indexes.items()]
    for split, file in files:
        if not file.startswith(f"{split}/"):
            raise ValueError(f"{file} is listed under the split {split}")
    return manifest
