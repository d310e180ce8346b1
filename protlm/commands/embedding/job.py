"""What a command `embed` computes: its options, the proteins of a file, and a model."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protlm import __version__
from protlm.analysis.features.autoencoder import FEATURES, read_features
from protlm.commands.embedding.plan import Block, Plan, first_equal
from protlm.data.records import Record
from protlm.data.records.proteins import Proteins
from protlm.data.records.record import Names
from protlm.data.tables import places_of, read_table
from protlm.loading import load_model
from protlm.model.embedding import Embedder
from protlm.options.embed import Dtype, EmbedOptions, Pooling
from protlm.system.errors import InputDataError
from protlm.system.paths import sha256_of
from protlm.system.terminal import printable

Key = tuple[Pooling, int]
Ranges = tuple[tuple[int, int], ...]
# The columns of a table of ranges.
_COLUMNS = ("accession", "first", "last")
_DIGEST_BYTES = 16


def stored(dtype: Dtype) -> np.dtype:
    """Returns the type of stored numbers: integers for the bits of bfloat16, which NumPy lacks."""
    return np.dtype("uint16" if dtype is Dtype.bfloat16 else str(dtype))


class Job:
    """The proteins of files, and the division of the work; `options` without repetitions."""

    def __init__(
        self, files: Path | Sequence[Path], model_path: Path, options: EmbedOptions
    ) -> None:
        model = self.model = load_model(model_path, device=options.device)
        # The last part of the path, which says nothing of the machine.
        self.name = model_path.absolute().name.removesuffix(".ckpt").removesuffix(".pt")
        # Hashing takes seconds for a large model.
        self.model_hash = model.hash
        chosen = options.layers or range(model.num_layers + 1)
        self.options = replace(
            options,
            include=tuple(dict.fromkeys(options.include)),
            layers=tuple(dict.fromkeys(model.layer_number(layer, first=0) for layer in chosen)),
        )
        self.autoencoder, self.features_hash, self._own_layers = None, None, {}
        if options.features is not None:
            self.autoencoder = read_features(options.features).to(model.device)
            self.autoencoder.settings.check(model)
            self._own_layers = {Pooling.features: [self.autoencoder.settings.layer]}
            self.features_hash = sha256_of(options.features / FEATURES.weights)
        include, dtype = self.options.include, getattr(torch, options.compute_dtype)
        # Before the file is read, because it refuses what the model does not have.
        self.layers = tuple(dict.fromkeys(layer for _, layer in self.keys))
        self.embedder = Embedder(model, include, self.layers, dtype)
        self.ranges = {} if options.ranges is None else _read_ranges(options.ranges)
        self._of_ranges = Names(self.ranges, options.ranges)
        self._digests, self._names = bytearray(), list[str]()
        self.width = model.description.model.model_dim
        self.proteins = Proteins(
            files,
            max_residues=None if options.windows else model.max_residues,
            duplicates=options.duplicates,
            observe=self._observe,
        )
        if options.ranges is not None:
            self._check_ranges(options.ranges)
        self.plan = self._plan()

    @property
    def keys(self) -> list[Key]:
        """The arrays of a protein: kind and layer, in the order in which they are stored."""
        options, own = self.options, self._own_layers
        return [(kind, at) for kind in options.include for at in own.get(kind, options.layers)]

    def records(self) -> Iterator[tuple[int, Record]]:
        """Yields the records with their numbers, from 0."""
        number = -1
        for number, record in enumerate(self.proteins):
            start = number * _DIGEST_BYTES
            if self._digest(record) != self._digests[start : start + _DIGEST_BYTES]:
                raise self._changed()
            yield number, record
        if number + 1 != len(self.proteins):
            raise self._changed()

    def groups(self) -> Iterator[tuple[list[Block], dict[int, Record]]]:
        """Yields the blocks of each group, and their records by number."""
        distinct = (item for item in self.records() if self.plan.first[item[0]] == item[0])
        for group in self.plan.groups:
            size = sum(len(batch) for block in group for batch in block.batches)
            yield group, dict(islice(distinct, size))

    def rows_of_all(self, kind: Pooling) -> np.ndarray:
        """Returns the number of vectors of a kind for each record."""
        lengths = np.array(self.proteins.lengths, np.int64)
        if kind is Pooling.ranges:
            return np.array([len(self.ranges_of(name)) for name in self._names], np.int64)
        return lengths if kind.is_matrix else np.ones_like(lengths)

    def ranges_of(self, identifier: str) -> Ranges:
        return self.ranges.get(self._of_ranges.find(identifier) or "", ())

    def fingerprint(self) -> dict[str, Any]:
        """Returns everything that the vectors depend on, as JSON values."""
        options, ranges = self.options, self.options.ranges
        return {
            "protlm": __version__,
            "torch": torch.__version__,
            "vocabulary": self.model.vocabulary.hash,
            # Of the sequences that were read from it.
            "the sequence file": hashlib.sha256(self._digests).hexdigest(),
            "the model": self.model.identity,
            "the name of the model": self.name,
            "--include": [kind.value for kind in options.include],
            "--repr-layers": list(options.layers),
            "--toks-per-batch": options.tokens_per_batch,
            "--dtype": options.dtype.value,
            "--compute-dtype": options.compute_dtype.value,
            "--duplicates": options.duplicates.value,
            "--windows": options.windows,
            "--ranges": None if ranges is None else sha256_of(ranges),
            "--features": self.features_hash,
            "--device": self.model.device.type,
        }

    def attributes(self) -> dict[str, object]:
        options = self.options
        limit = self.model.max_residues
        window = {"window_residues": limit} if options.windows and limit is not None else {}
        return {
            "model_name": self.name,
            "model_hash": self.model_hash,
            "layer": _unwrap_single(self.layers),
            "pooling": _unwrap_single([kind.value for kind in options.include]),
            "dtype": options.dtype.value,
            "compute_dtype": options.compute_dtype.value,
            "vocabulary_hash": self.model.vocabulary.hash,
            "protlm_version": __version__,
            **window,
            **({"features_hash": self.features_hash} if self.features_hash else {}),
        }

    def _plan(self) -> Plan:
        digests = np.frombuffer(bytes(self._digests), np.uint8).reshape(-1, _DIGEST_BYTES)
        lengths = np.array(self.proteins.lengths, np.int64)
        rows = np.sum([self.rows_of_all(kind) for kind, _ in self.keys], axis=0)
        num_bytes = rows * (self.width * stored(self.options.dtype).itemsize)
        tokens, around = self.options.tokens_per_batch, self.model.vocabulary.num_around
        return Plan(lengths, first_equal(digests), num_bytes, tokens, around=around)

    def _observe(self, record: Record) -> None:
        self._digests += self._digest(record)
        if self.options.ranges is not None:
            self._names.append(record.identifier)

    def _digest(self, record: Record) -> bytes:
        """Returns a digest of all that the vectors of a protein depend on."""
        digest = hashlib.blake2b(record.sequence.encode(), digest_size=_DIGEST_BYTES)
        if ranges := self.ranges_of(record.identifier):
            digest.update(repr(ranges).encode())
        return digest.digest()

    def _check_ranges(self, path: Path) -> None:
        known: dict[str, tuple[str, int]] = {}
        for name, length in zip(self._names, self.proteins.lengths, strict=True):
            key = self._of_ranges.find(name)
            if key and known.setdefault(key, (name, length))[0] != name:
                raise InputDataError(
                    f"{path}: {printable(key)} may be {printable(known[key][0])} or "
                    f"{printable(name)}; write the whole name of the protein"
                )
        for name, some in self.ranges.items():
            if name not in known:
                raise InputDataError(
                    f"{path}: {printable(name)} is not among the embedded proteins; correct the "
                    "accession or remove its rows"
                )
            last = max(end for _, end in some)
            if last > known[name][1]:
                raise InputDataError(
                    f"{path}: a range of {printable(name)} ends at residue {last:,}, and it has "
                    f"{known[name][1]:,}; correct the range"
                )

    def _changed(self) -> InputDataError:
        return InputDataError(
            f"{self.proteins.name} has changed while it was read: type the same command again"
        )


def _unwrap_single(values: Sequence[Any]) -> object:
    return values[0] if len(values) == 1 else list(values)


def _read_ranges(path: Path) -> dict[str, Ranges]:
    """Returns the ranges of each protein, in the order of a table; residues count from 1."""
    columns, rows = read_table(path, "a table of ranges", _COLUMNS)
    places = places_of(path, columns, _COLUMNS)
    found: dict[str, Ranges] = {}
    for line, row in rows:
        accession, *ends = (row[place] for place in places)
        first, last = (_number(end) for end in ends)
        if not 1 <= first <= last:
            raise InputDataError(
                f"{path}, line {line}: {' to '.join(ends)} is not a range; residues are counted "
                "from 1, and the last one is included"
            )
        found[accession] = (*found.get(accession, ()), (first, last))
    return found


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0
