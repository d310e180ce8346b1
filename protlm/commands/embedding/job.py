"""What a command `embed` computes: the proteins of a file, a model, and the options."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protlm import __version__
from protlm.commands.embedding.options import EmbedOptions
from protlm.commands.embedding.plan import Plan, first_equal
from protlm.commands.embedding.ranges import Ranges, check_ranges, read_ranges
from protlm.data.records import Record
from protlm.data.records.proteins import Proteins
from protlm.data.vocabulary import VOCABULARY
from protlm.model.embedding import Embedder, num_windows
from protlm.model.pooling import Pooling
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import InputDataError
from protlm.system.paths import sha256_of

Key = tuple[Pooling, int]
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Named:
    """A model and its name in outputs."""

    model: PretrainedModel
    name: str

    @classmethod
    def of(cls, model: PretrainedModel, path: Path) -> "Named":
        """Names a model by the last part of its path, which says nothing of the machine."""
        name = path.absolute().name
        return cls(model, name.removesuffix(".ckpt").removesuffix(".pt"))


class Job:
    """The proteins of a file, and the division of the work on them.

    Args:
        fasta: a sequence file.
        named: the model.
        options: the settings.

    `options` has no repeated kinds and layers, and no negative layers.
    """

    def __init__(self, fasta: Path, named: Named, options: EmbedOptions) -> None:
        model = self.model = named.model
        self.name = named.name
        # Hashing takes seconds for a large model.
        self.model_hash = model.hash
        layers = (model.layer_number(layer, first=0) for layer in options.layers)
        self.options = replace(
            options,
            include=tuple(dict.fromkeys(options.include)),
            layers=tuple(dict.fromkeys(layers)),
        )
        self.ranges: dict[str, Ranges] = {}
        if options.ranges is not None:
            self.ranges = read_ranges(options.ranges)
        self._digests, self._names = bytearray(), list[str]()
        self.width = model.description.model.model_dim
        self.proteins = Proteins(
            fasta,
            max_residues=None if options.windows else model.max_residues,
            duplicates=options.duplicates,
            observe=self._observe,
        )
        if options.ranges is not None:
            check_ranges(options.ranges, self.ranges, self._names, self.proteins.lengths)
        self.plan = self._plan()

    @property
    def keys(self) -> list[Key]:
        """The arrays of a protein: kind and layer, in the order in which they are stored."""
        return [(kind, layer) for kind in self.options.include for layer in self.options.layers]

    @property
    def embedder(self) -> Embedder:
        """Computes what the options ask for."""
        options = self.options
        return Embedder(self.model, options.include, options.layers, options.compute_dtype.torch)

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

    def rows(self, kind: Pooling, record: Record) -> int:
        """Returns the number of vectors of a kind that a protein has."""
        return kind.num_rows(len(record.sequence), len(self.ranges_of(record)))

    def rows_of_all(self, kind: Pooling) -> np.ndarray:
        """Returns the number of vectors of a kind for each record."""
        lengths = np.array(self.proteins.lengths, np.int64)
        if kind is Pooling.ranges:
            return np.array([len(self.ranges.get(name, ())) for name in self._names], np.int64)
        return lengths if kind is Pooling.per_tok else np.ones_like(lengths)

    def ranges_of(self, record: Record) -> Ranges:
        """Returns the ranges of a protein in the table."""
        return self.ranges.get(record.identifier, ())

    def windows_of(self, record: Record) -> int:
        """Returns the number of passes of a protein."""
        return num_windows(len(record.sequence), self.model.max_residues)

    def original_id(self, record: Record) -> str:
        """Returns the identifier of a record in the file."""
        return self.proteins.renamed.get(record.identifier, record.identifier)

    def fingerprint(self) -> dict[str, Any]:
        """Returns everything that the vectors depend on, as JSON values."""
        options, ranges = self.options, self.options.ranges
        return {
            "protlm": __version__,
            "torch": torch.__version__,
            "vocabulary": VOCABULARY.hash,
            "the sequence file": sha256_of(self.proteins.source),
            "the model": self.model_hash,
            "the description of the model": self.model.description.to_plain(),
            "the name of the model": self.name,
            "--include": [kind.value for kind in options.include],
            "--repr-layers": list(options.layers),
            "--toks-per-batch": options.tokens_per_batch,
            "--dtype": options.dtype.value,
            "--compute-dtype": options.compute_dtype.value,
            "--duplicates": options.duplicates.value,
            "--windows": options.windows,
            "--ranges": None if ranges is None else sha256_of(ranges),
            "--device": self.model.device.type,
        }

    def attributes(self) -> dict[str, object]:
        """Returns the attributes of the output file."""
        options = self.options
        window = {"window_residues": self.model.max_residues} if options.windows else {}
        return {
            "model_name": self.name,
            "model_hash": self.model_hash,
            "layer": _unwrap_single(options.layers),
            "pooling": _unwrap_single([kind.value for kind in options.include]),
            "dtype": options.dtype.value,
            "compute_dtype": options.compute_dtype.value,
            "vocabulary_hash": VOCABULARY.hash,
            "protlm_version": __version__,
            **window,
        }

    def _plan(self) -> Plan:
        digests = np.frombuffer(bytes(self._digests), np.uint8).reshape(-1, _DIGEST_BYTES)
        lengths = np.array(self.proteins.lengths, np.int64)
        rows = np.sum([self.rows_of_all(kind) for kind in self.options.include], axis=0)
        item = self.options.dtype.stored.itemsize
        num_bytes = rows * (len(self.options.layers) * self.width * item)
        first = first_equal(digests)
        return Plan(lengths, first, num_bytes, self.options.tokens_per_batch)

    def _observe(self, record: Record) -> None:
        self._digests += self._digest(record)
        if self.options.ranges is not None:
            self._names.append(record.identifier)

    def _digest(self, record: Record) -> bytes:
        """Returns a digest of all that the vectors of a protein depend on."""
        digest = hashlib.blake2b(record.sequence.encode(), digest_size=_DIGEST_BYTES)
        if ranges := self.ranges_of(record):
            digest.update(repr(ranges).encode())
        return digest.digest()

    def _changed(self) -> InputDataError:
        return InputDataError(
            f"{self.proteins.path} has changed while it was read: type the same command again"
        )


def _unwrap_single(values: Sequence[Any]) -> object:
    """Returns the only value, or an array of several."""
    return values[0] if len(values) == 1 else list(values)
