"""Vectors of many proteins: batches of similar length, windows, and batches that do not fit."""

import mmap
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from protlm.config.data import EMBED_TOKENS
from protlm.data.batching.plan import SPECIALS
from protlm.data.records import Record
from protlm.data.records.in_memory import residues_of
from protlm.data.records.proteins import Proteins
from protlm.model.memory import Room
from protlm.model.pooling import Ranges, pool
from protlm.model.pretrained import PretrainedModel
from protlm.model.relatives import InContexts
from protlm.model.vector_store import VectorStore
from protlm.options.embed import Pooling
from protlm.system.errors import InputDataError, UserError, is_full_memory
from protlm.system.paths import failures_explained
from protlm.system.processes import return_freed_memory
from protlm.system.terminal import printable, watched

Vectors = dict[tuple[Pooling, int], Tensor]
T = TypeVar("T")
# The number of records of a file that are sorted by length at a time, which bounds the memory.
_WINDOW, _GAPS = 2_048, 256
# Hidden states of more numbers are in files, and in float16, up to its largest number.
IN_MEMORY, _LARGEST = 2**28, 65_504


def batches(
    lengths: Sequence[int],
    tokens_per_batch: int,
    most: int | None = None,
    *,
    longest_first: bool = False,
    around: int = SPECIALS,
) -> Iterator[list[int]]:
    """Returns the indices of sequences in batches of similar length, within a number of tokens.

    A sequence has `around` tokens beside its residues; a longer one is a batch by itself. Batches
    depend on nothing but the arguments, and have at most `most` sequences, if it is given.

    >>> list(batches([3, 8, 4], tokens_per_batch=12))
    [[0, 2], [1]]
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=longest_first)
    return consecutive(order, lambda n: lengths[n] + around, tokens_per_batch, most=most)


def consecutive(
    rows: Iterable[T],
    num_tokens: Callable[[T], int],
    tokens_per_batch: int,
    *,
    most: int | None = None,
    alike: bool = False,
) -> Iterator[list[T]]:
    """Yields batches of consecutive rows, of one length if `alike`."""
    batch: list[T] = []
    longest = 0
    for row in rows:
        length = num_tokens(row)
        tokens = (len(batch) + 1) * max(longest, length)
        is_full = tokens > tokens_per_batch or len(batch) == most
        if batch and (is_full or (alike and length != longest)):
            yield batch
            batch, longest = [], 0
        batch.append(row)
        longest = max(longest, length)
    if batch:
        yield batch


def windows(num_residues: int, width: int) -> list[tuple[int, int, int]]:
    """Returns the overlapping windows of a long protein.

    Each begins half a width after the one before, and the last ends with the protein. A window is
    its first residue, and the start and end of the residues taken from it, from 0: those that are
    nearer to its center than to the centers of its neighbors.

    >>> windows(10, 4)
    [(0, 0, 3), (2, 3, 5), (4, 5, 7), (6, 7, 10)]
    """
    starts = [*range(0, num_residues - width, max(1, width // 2)), num_residues - width]
    cuts = [(after + start + width) // 2 for start, after in pairwise(starts)]
    return list(zip(starts, [0, *cuts], [*cuts, num_residues], strict=True))


def num_windows(num_residues: int, width: int | None) -> int:
    """Returns the number of passes of a protein: 1, or that of its windows."""
    return 1 if width is None or num_residues <= width else len(windows(num_residues, width))


@dataclass
class Embedder:
    """Computes the vectors of sequences; a batch that does not fit into the memory is halved.

    Matrix products have the `compute_dtype`; with float32, that of the weights. `num_halved`
    counts the batches that did not fit. Sequences that are longer than the model accepts are
    computed in windows: the vector of `<cls>` is then the mean of the windows'. In contexts of
    relatives, vectors are the means over the contexts, read in `context_tokens` at a time.
    """

    model: PretrainedModel
    poolings: tuple[Pooling, ...]
    layers: tuple[int, ...]
    compute_dtype: torch.dtype = torch.float32
    num_halved: int = 0
    contexts: InContexts | None = None
    context_tokens: int = EMBED_TOKENS

    def __post_init__(self) -> None:
        if not self.model.vocabulary.start and {Pooling.cls, Pooling.bos} & {*self.poolings}:
            raise UserError(
                "the pooling cls is the vector of the token before the residues, and this model "
                "has none; choose mean",
                {"include": "mean"},
            )
        family = (self.model.description.source or {}).get("family")
        if self.compute_dtype is torch.float16 and family == "t5":
            raise UserError(
                "float16 ends at 65,504, and numbers in the feed-forward of a T5 encoder are "
                "larger; compute in bfloat16 or float32",
                {"compute_dtype": "bfloat16 or float32"},
            )

    @cached_property
    def room(self) -> Room:
        return Room(self.model)

    @torch.inference_mode()
    def vectors(
        self,
        sequences: Sequence[str],
        ranges: Sequence[Ranges] | None = None,
        names: Sequence[str] | None = None,
    ) -> list[Vectors | None]:
        """Returns the vectors of each sequence on the CPU; None if it does not fit by itself.

        The sequences are in the order of their lengths; the names say which relatives are theirs.
        """
        spans = ranges or [()] * len(sequences)
        if self.contexts is not None:
            return self._in_contexts(sequences, spans, names or [""] * len(sequences))
        limit = self.model.max_residues
        number = len(sequences)
        fitting = number if limit is None else sum(len(one) <= limit for one in sequences)
        if fitting < number and number > 1:
            # Each of the longer ones is several windows.
            return self._by_parts(sequences, spans, sorted({0, *range(fitting, number + 1)}))
        if number == 1 and self.room.refusal(len(sequences[0])):
            return [None]
        pooled = unless_full(lambda: self._pooled(self._hidden(sequences), sequences, spans))
        if pooled is not None:
            return [*pooled]
        self.num_halved += 1
        if number == 1:
            return [None]
        return self._by_parts(sequences, spans, [0, number // 2, number])

    def _in_contexts(
        self, sequences: Sequence[str], spans: Sequence[Ranges], names: Sequence[str]
    ) -> list[Vectors | None]:
        assert self.contexts is not None
        means: list[Vectors | None] = []
        for models, places in self.contexts.groups(names, sequences, self.context_tokens):
            own = [sequences[n] for n in places], [spans[n] for n in places]
            embedders = [replace(self, model=one, contexts=None, num_halved=0) for one in models]
            each = [one.vectors(*own) for one in embedders]
            self.num_halved += sum(one.num_halved for one in embedders)
            means += map(_mean, zip(*each, strict=True))
        return means

    def _by_parts(
        self, sequences: Sequence[str], spans: Sequence[Ranges], cuts: Sequence[int]
    ) -> list[Vectors | None]:
        parts = [slice(*ends) for ends in pairwise(cuts)]
        return [one for part in parts for one in self.vectors(sequences[part], spans[part])]

    def checked(self, vectors: Vectors | None, name: str) -> Vectors:
        """Returns the vectors of a sequence, called `name`, that fits and has finite numbers."""
        if vectors is None:
            raise UserError(
                f"{name} does not fit into the memory of {self.model.device}; use another device"
            )
        if all(bool(values.isfinite().all()) for values in vectors.values()):
            return vectors
        if self.compute_dtype != torch.float32:
            given = str(self.compute_dtype).removeprefix("torch.")
            raise UserError(
                f"the vectors of {name} are not finite: numbers of the computation are too large "
                f"for {given}; compute in float32",
                {"compute_dtype": "float32"},
            )
        raise InputDataError(
            f"the vectors of {name} are not finite, although they were computed in float32: the "
            "weights of this model are unusable; choose another checkpoint"
        )

    def _pooled(
        self, hidden: dict[int, Tensor], sequences: Sequence[str], spans: Sequence[Ranges]
    ) -> list[Vectors]:
        """Copies each kind and layer of a batch to the CPU at once."""
        found: list[Vectors] = [{} for _ in sequences]
        lengths, start = [*map(len, sequences)], self.model.vocabulary.start
        for pooling in self.poolings:
            counts = [pooling.num_rows(n, len(own)) for n, own in zip(lengths, spans, strict=True)]
            for layer, hidden_BLD in hidden.items():
                pooled = pool(hidden_BLD, lengths, pooling, spans, start=start).cpu()
                for vectors, values in zip(found, pooled.split(counts), strict=True):
                    vectors[pooling, layer] = values if pooling.is_matrix else values[0]
        return found

    def _hidden(self, sequences: Sequence[str]) -> dict[int, Tensor]:
        limit = self.model.max_residues
        if limit is not None and len(sequences[0]) > limit:
            return self._windowed(sequences[0], limit)
        is_lower = self.compute_dtype != torch.float32
        with torch.autocast(self.model.device.type, self.compute_dtype, enabled=is_lower):
            return self.model.hidden_states(self.model.batch_of(sequences), self.layers)

    def _windowed(self, sequence: str, width: int) -> dict[int, Tensor]:
        parts: dict[int, list[Tensor]] = {layer: [] for layer in self.layers}
        before: dict[int, list[Tensor]] = {layer: [] for layer in self.layers}
        inset = self.model.vocabulary.start
        for start, first, end in windows(len(sequence), width):
            own = slice(first - start + inset, end - start + inset)
            for layer, hidden_1LD in self._hidden([sequence[start : start + width]]).items():
                parts[layer].append(hidden_1LD[0, own].cpu())
                before[layer].append(hidden_1LD[0, :inset].cpu())
        means = {layer: torch.stack(rows).mean(0) for layer, rows in before.items()}
        return {layer: torch.cat([means[layer], *parts[layer]])[None] for layer in self.layers}


def _mean(each: Sequence[Vectors | None]) -> Vectors | None:
    found = [one for one in each if one is not None]
    if len(found) < len(each):
        return None
    return {key: torch.stack([one[key] for one in found]).mean(0) for key in found[0]}


def embed_all(
    embedder: Embedder,
    sequences: Sequence[str],
    tokens_per_batch: int,
    spans: Sequence[Any] | None = None,
    *,
    names: Sequence[str] | None = None,
    longest_first: bool = False,
) -> Iterator[tuple[int, Vectors | None]]:
    """Yields the index of each sequence and its vectors, None if it does not fit by itself."""
    lengths = [len(one) for one in sequences]
    around = embedder.model.vocabulary.num_around
    for some in batches(lengths, tokens_per_batch, longest_first=longest_first, around=around):
        of_some = None if spans is None else [spans[index] for index in some]
        named = None if names is None else [names[index] for index in some]
        found = embedder.vectors([sequences[n] for n in some], of_some, named)
        yield from zip(some, found, strict=True)


class EmbeddedProtein(NamedTuple):
    """A record of a file, and its vectors: (D,), or (L, D) of its residues."""

    record: Record
    vectors: np.ndarray


class EmbeddedFile:
    """The proteins of a file with their vectors, in the order of the file.

    Every record is yielded or in `skipped`, with the reason; those that do not fit into the memory
    are added while the file is iterated. Equal sequences that are near each other are computed
    once. The memory does not grow with the file. Vectors that are not finite are a `UserError`.
    """

    def __init__(self, embedder: Embedder, proteins: Proteins, tokens_per_batch: int) -> None:
        self._embedder, self._proteins = embedder, proteins
        self._tokens_per_batch = tokens_per_batch
        self.skipped = proteins.without_entry()

    def __len__(self) -> int:
        return len(self._proteins)

    def __iter__(self) -> Iterator[EmbeddedProtein]:
        self.skipped = self._proteins.without_entry()
        (kind,), (layer,) = self._embedder.poolings, self._embedder.layers
        records = iter(self._proteins)
        while window := list(islice(records, _WINDOW)):
            distinct = list(dict.fromkeys(record.sequence for record in window))
            embedded = embed_all(self._embedder, distinct, self._tokens_per_batch)
            vectors_of = {distinct[index]: vectors for index, vectors in embedded}
            for record in window:
                vectors = vectors_of[record.sequence]
                if vectors is None:
                    reason = self._embedder.room.reason(len(record.sequence))
                    self.skipped.append((record.identifier, reason))
                else:
                    self._embedder.checked(vectors, printable(record.identifier))
                    yield EmbeddedProtein(record, vectors[kind, layer].numpy())


def unless_full(compute: Callable[[], T]) -> T | None:
    """Returns what is computed, or None if the memory of the device was full."""
    try:
        return compute()
    except (MemoryError, RuntimeError) as error:
        if not is_full_memory(error):
            raise
    # Outside of the handler, whose traceback keeps the tensors alive.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def embeddings(
    model: PretrainedModel,
    sequences: Sequence[str],
    *,
    layers: Sequence[int],
    tokens_per_batch: int = EMBED_TOKENS,
    places: Sequence[np.ndarray] | None = None,
    store: VectorStore | None = None,
    in_contexts: tuple[InContexts, Sequence[str]] | None = None,
) -> list[np.ndarray]:
    """Returns hidden states by layer, float32, of the first residues that the model accepts.

    They are means, [sequences, D], or those of the residues `places` of each sequence, [residues,
    D]; many are in temporary files, in float16. One that does not fit into the memory, or whose
    vectors are not finite, is a `UserError`. Means are kept in the `store`, if there is one. In
    contexts of relatives, names say whose they are.
    """
    contexts, names = in_contexts or (None, None)
    limit = model.max_residues or sys.maxsize
    if contexts is not None and (number := sum(len(one) > limit for one in sequences)):
        raise UserError(
            f"{number:,} proteins are longer than the {limit:,} residues that this model reads, "
            "and relatives are of whole proteins; leave these out"
        )
    if places is None and store is not None and contexts is None:
        compute = partial(embeddings, model, layers=layers, tokens_per_batch=tokens_per_batch)
        return store.means(f"{model.identity} {layers}", sequences, compute)
    kind = Pooling.mean if places is None else Pooling.ranges
    features = Embedder(
        model, (kind,), tuple(layers), contexts=contexts, context_tokens=tokens_per_batch
    )
    spans = places and [np.stack([own + 1, own + 1], axis=1) for own in places]
    texts = residues_of(sequence[: model.max_residues] for sequence in sequences)
    ends = np.cumsum([0, *([1] * len(texts) if places is None else map(len, places))])
    shape = (int(ends[-1]), model.description.model.model_dim)
    in_memory = shape[0] * shape[1] * len(layers) <= IN_MEMORY
    states_of = [np.empty(shape, np.float32) if in_memory else _on_disk(shape) for _ in layers]
    computed = embed_all(features, texts, tokens_per_batch, spans, names=names, longest_first=True)
    done = watched("sequences embedded", computed, total=len(texts), quiet=places is not None)
    for number, (row, vectors) in enumerate(done):
        # Batches of ever smaller tensors leave gaps in the heap.
        if number % _GAPS == 0:
            return_freed_memory()
        checked = features.checked(vectors, f"a protein of {len(texts[row]):,} residues")
        for layer, states in zip(layers, states_of, strict=True):
            if not in_memory and checked[kind, layer].abs().max() > _LARGEST:
                raise UserError(
                    f"hidden states of layer {layer} exceed {_LARGEST:,}, the largest number "
                    "of float16, in which they are stored; choose other layers",
                    {"layers": "LAYERS"},
                )
            states[ends[row] : ends[row + 1]] = checked[kind, layer].numpy()
            forget(states)
    return_freed_memory()
    return states_of


def _on_disk(shape: tuple[int, int]) -> np.ndarray:
    """Returns an array in a temporary file, float16 zeros."""
    with failures_explained(Path(tempfile.gettempdir())), tempfile.TemporaryFile() as file:
        # Written, because a file with holes ends the process when the disk is full.
        for _ in range(shape[0]):
            file.write(bytes(2 * shape[1]))
        file.flush()
        return np.memmap(file, np.float16, "r+", shape=shape)


def forget(states: np.ndarray) -> None:
    """Takes the rows of a file out of the memory; they are read again when they are used."""
    if isinstance(states, np.memmap):
        states._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
