"""The manifest of a data set: shards with their hashes, sources, and counts of records."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from protlm import __version__
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import existing_file

FORMAT = "protlm-shards"
FORMAT_VERSION = 1
MANIFEST, MANIFEST_SHA256 = "manifest.json", "manifest.json.sha256"

_SPLIT = re.compile(r"[a-z0-9_]{1,64}")
_FILE = re.compile(r"[a-z0-9_]{1,64}/shard-[0-9]{5,8}\.h5")
_INDEX = re.compile(r"[a-z0-9_]{1,64}/clusters\.h5")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_BYTES = 1 << 26
_T = TypeVar("_T")


@dataclass(frozen=True)
class ShardEntry:
    """Description of a shard: `file` is relative to the manifest, `sha256` covers all its bytes."""

    file: str
    sequences: int
    residues: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class IndexEntry:
    """Description of the cluster index of a split; fields as in `ShardEntry`."""

    file: str
    clusters: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Clusters:
    """The clusters of a data set.

    Args:
        table: name of the cluster table.
        sha256: SHA-256 of the cluster table.
        indexes: the cluster index of each split.
    """

    table: str
    sha256: str
    indexes: dict[str, IndexEntry]


@dataclass(frozen=True)
class SourceEntry:
    """A source file, identified by its name without the folder."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Counts:
    """Counts of the sources' records by reason.

    `rejected` counts records that cannot be used, `filtered` those that were not selected.
    """

    records: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    filtered: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    noted: dict[str, int] = field(default_factory=dict)

    def by_kind(self) -> dict[str, dict[str, int]]:
        """Returns the counts of records that were not kept unchanged, by kind."""
        return {
            "rejected": self.rejected,
            "filtered": self.filtered,
            "changed": self.changed,
            "noted": self.noted,
        }


@dataclass(frozen=True)
class Manifest:
    """The manifest; `splits` has the shards of each split in order.

    `clusters` is None for a data set without clusters.
    """

    splits: dict[str, tuple[ShardEntry, ...]]
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
        fields = asdict(self)
        if self.clusters is None:
            del fields["clusters"]
        text = json.dumps(fields, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        (directory / MANIFEST_SHA256).write_bytes(_checksum(text.encode()))
        (directory / MANIFEST).write_bytes(text.encode())


def _checksum(content: bytes) -> bytes:
    """Returns the line that `sha256sum --check` reads."""
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode()


def is_split_name(name: str) -> bool:
    """Returns whether a name is valid for a split; it becomes the name of a folder.

    >>> is_split_name("test_iid"), is_split_name("../test")
    (True, False)
    """
    return _SPLIT.fullmatch(name) is not None


def read_manifest(directory: Path) -> Manifest:
    """Reads and checks the manifest of a data set."""
    path = directory / MANIFEST
    try:
        is_there = path.is_file()
    except OSError as error:
        raise InputDataError(f"{directory} cannot be read: {error.strerror}") from error
    if not is_there:
        raise InputDataError(
            f"{directory} has no {MANIFEST}; make a data set with: "
            f"protlm prepare SOURCE.fasta.gz --out {directory}"
        )
    try:
        if existing_file(path, "a manifest").stat().st_size > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES:,} bytes")
        content = path.read_bytes()
        if (directory / MANIFEST_SHA256).read_bytes() != _checksum(content):
            raise ValueError(f"its SHA-256 differs from {MANIFEST_SHA256}")
        fields = json.loads(content.decode("utf-8"))
        _check_version(path, fields)
        return _parse(fields)
    except FileNotFoundError as error:
        raise InputDataError(
            f"{path} has no {MANIFEST_SHA256} next to it: copy it too, or make the data set again "
            "with protlm prepare"
        ) from error
    except OSError as error:
        raise InputDataError(f"{error.filename} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
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


def _parse(fields: dict[str, Any]) -> Manifest:
    splits = {
        split: tuple(_shard(split, entry) for entry in _a(list, entries))
        for split, entries in _a(dict, fields["splits"]).items()
    }
    counts = _a(dict, fields["counts"])
    return Manifest(
        splits=splits,
        sources=tuple(
            SourceEntry(_a(str, e["file"]), _count(e["bytes"]), _matching(_SHA256, e["sha256"]))
            for e in fields["sources"]
        ),
        counts=Counts(
            _count(counts["records"]),
            *(_counts(counts[kind]) for kind in ("rejected", "filtered", "changed", "noted")),
        ),
        split_rule=_a(dict, fields["split_rule"]),
        clusters=_clusters(fields["clusters"], splits) if "clusters" in fields else None,
        tool_version=_a(str, fields["tool_version"]),
    )


def _shard(split: str, entry: dict[str, Any]) -> ShardEntry:
    # A path from the manifest must not lead out of the folder.
    file = _matching(_FILE, entry["file"])
    if not file.startswith(f"{_matching(_SPLIT, split)}/"):
        raise ValueError(f"{file} is listed under the split {split}")
    numbers = (_count(entry[name]) for name in ("sequences", "residues", "bytes"))
    return ShardEntry(file, *numbers, sha256=_matching(_SHA256, entry["sha256"]))


def _clusters(fields: dict[str, Any], splits: dict[str, tuple[ShardEntry, ...]]) -> Clusters:
    indexes = {split: _index(split, e) for split, e in _a(dict, fields["indexes"]).items()}
    if indexes.keys() != splits.keys():
        raise ValueError("the splits with clusters differ from those of the data set")
    return Clusters(_a(str, fields["table"]), _matching(_SHA256, fields["sha256"]), indexes)


def _index(split: str, entry: dict[str, Any]) -> IndexEntry:
    file = _matching(_INDEX, entry["file"])
    if not file.startswith(f"{_matching(_SPLIT, split)}/"):
        raise ValueError(f"{file} is listed under the split {split}")
    numbers = (_count(entry[name]) for name in ("clusters", "bytes"))
    return IndexEntry(file, *numbers, sha256=_matching(_SHA256, entry["sha256"]))


def _counts(value: Any) -> dict[str, int]:
    return {_a(str, reason): _count(number) for reason, number in _a(dict, value).items()}


def _matching(pattern: re.Pattern[str], value: Any) -> str:
    if not pattern.fullmatch(_a(str, value)):
        raise ValueError(f"{value[:80]!r} is not allowed here")
    return value


def _count(value: Any) -> int:
    if _a(int, value) < 0:
        raise ValueError(f"{value} is negative")
    return value


def _a(kind: type[_T], value: Any) -> _T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.80} is not of type {kind.__name__}")
    return value
