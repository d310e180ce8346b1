"""What a command `embed` computes: the vectors of proteins by a model, and in what parts."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from protlm import __version__
from protlm.analysis.features.autoencoder import FEATURES, SparseAutoencoder
from protlm.commands.embedding.inputs import Inputs
from protlm.commands.embedding.plan import Block, Plan
from protlm.data.records import Record
from protlm.model.embedding import Embedder
from protlm.model.pretrained import PretrainedModel
from protlm.options.embed import Dtype, EmbedOptions, Pooling
from protlm.system.paths import sha256_of
from protlm.system.work_folder import begun_with

Key = tuple[Pooling, int]


def stored(dtype: Dtype) -> np.dtype:
    """Returns the type of stored numbers: integers for the bits of bfloat16, which NumPy lacks."""
    return np.dtype("uint16" if dtype is Dtype.bfloat16 else str(dtype))


@dataclass(frozen=True)
class Job:
    """The vectors of proteins, and the division of the work.

    Args:
        options: with every kind and layer once, and layers counted from 0.
        name: that of the model, which says nothing of the machine, unlike its path.
        keys: the arrays of a protein, kind and layer, in the order in which they are stored.
    """

    options: EmbedOptions
    name: str
    keys: tuple[Key, ...]
    embedder: Embedder
    autoencoder: SparseAutoencoder | None
    inputs: Inputs
    plan: Plan

    @property
    def model(self) -> PretrainedModel:
        return self.embedder.model

    @property
    def width(self) -> int:
        return self.model.description.model.model_dim

    def groups(self) -> Iterator[tuple[list[Block], dict[int, Record]]]:
        """Yields the blocks of each group, and their records by number."""
        distinct = (item for item in self.inputs if self.plan.first[item[0]] == item[0])
        for group in self.plan.groups:
            size = sum(len(batch) for block in group for batch in block.batches)
            yield group, dict(islice(distinct, size))

    def begun_with(self, device: str) -> dict[str, Any]:
        """Returns everything that the vectors depend on, as JSON values."""
        options = self.options
        settings = {
            **self._relatives,
            "vocabulary": self.model.vocabulary.hash,
            # Of the sequences that were read from it.
            "the sequence file": self.inputs.digest,
            "--include": [kind.value for kind in options.include],
            "--repr-layers": list(options.layers),
            "--toks-per-batch": options.tokens_per_batch,
            "--dtype": options.dtype.value,
            "--compute-dtype": options.compute_dtype.value,
            "--duplicates": options.duplicates.value,
            "--windows": options.windows,
            "--features": self._features_hash,
            "--device": device,
        }
        return begun_with(
            settings,
            files={"--ranges": options.ranges},
            models={"the model": self.model.identity, "the name of the model": self.name},
        )

    @cached_property
    def attributes(self) -> dict[str, object]:
        """The attributes of the output. To hash a large model takes seconds."""
        options, limit = self.options, self.model.max_residues
        return {
            "model_name": self.name,
            "model_hash": self.model.hash,
            "layer": _unwrap_single(self.embedder.layers),
            "pooling": _unwrap_single([kind.value for kind in options.include]),
            "dtype": options.dtype.value,
            "compute_dtype": options.compute_dtype.value,
            "vocabulary_hash": self.model.vocabulary.hash,
            "protlm_version": __version__,
            **({"window_residues": limit} if options.windows and limit is not None else {}),
            **({"features_hash": self._features_hash} if self._features_hash else {}),
            **({"relatives": json.dumps(self._relatives)} if self._relatives else {}),
        }

    @cached_property
    def _relatives(self) -> dict[str, Any]:
        """What draws of relatives depend on, by flag; nothing without them."""
        contexts = self.embedder.contexts
        settings = {} if contexts is None else contexts.settings
        return {f"--{name.replace('_', '-')}": value for name, value in settings.items()}

    @cached_property
    def _features_hash(self) -> str | None:
        folder = self.options.features
        return None if folder is None else sha256_of(folder / FEATURES.weights)


def _unwrap_single(values: Sequence[Any]) -> object:
    return values[0] if len(values) == 1 else list(values)
