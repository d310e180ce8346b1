"""Models in the contexts of their queries, which are drawn from the relatives that people have.

A model in a context is one of its class, whose network reads each protein after the context, so
that whatever takes a model works in contexts, too.
"""

import json
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from multiprocessing import parent_process
from pathlib import Path
from statistics import median_low
from typing import Any, Self, TypeVar

import numpy as np

from protlm.checkpoints.format import DEFAULT
from protlm.config import Relatives as Seen
from protlm.config import RelativesPositions
from protlm.config.data import TOKENS_PER_BATCH, Alignment
from protlm.data.families import Draw, Relatives, draws
from protlm.data.families import Relative as Member
from protlm.data.pairwise import aligned_letters, aligned_positions, e_value
from protlm.data.records.in_memory import SequenceLike
from protlm.data.vocabulary import vocabulary_of
from protlm.model.contexts import NetworkInContext, Relative
from protlm.model.pretrained import PretrainedModel, begun
from protlm.model.transformer import build_network
from protlm.options.relatives import FamilyOptions, RelativesOptions
from protlm.system.errors import UserError
from protlm.system.paths import all_or_none, beside, complete_file
from protlm.system.terminal import printable

M = TypeVar("M", bound=PretrainedModel)
# The budget of a context, of a model that does not say how large its families were.
_TOKENS = 8_192
# Queries whose contexts are kept, so that what is drawn is not read again when it is written.
_KEPT = 256
# What is drawn, beside an output.
_DRAWN = ".relatives.jsonl"
# As many relatives are compared with their query, and most should have E-values of at most this.
_COMPARED, _BY_CHANCE = 8, 1e-3
# A shorter query may have larger ones with a relative that contains it.
_SHORTEST = 20


class InContexts:
    """The relatives of proteins, and a model in the contexts that are drawn from them.

    Contexts depend on the query alone, not on what was drawn before. Those of the last query, and
    what a model of `ordered` relatives has read of them, are kept.

    Args:
        model: one that was trained with relatives.
        source: where relatives come from, as of `Relatives`.
        options: which of them are taken, and how contexts are drawn.
        query: the name and the residues of the query of all proteins, "" if there are none; None:
            each protein is its own query.
        force: also takes a model that was trained without relatives.
    """

    def __init__(
        self,
        model: PretrainedModel,
        source: Path | Iterable[SequenceLike],
        options: FamilyOptions,
        *,
        query: tuple[str, str] | None = None,
        force: bool = False,
    ) -> None:
        self.model, self._alone = seeing_relatives(model, force=force), model
        self.options, self.query, self.unlike = options, query, set[tuple[str, str]]()
        self.tokens = options.relatives_tokens or model.description.relatives_tokens or _TOKENS
        # One that does not fit would end every context in which it is drawn.
        self._around = model.vocabulary.num_around
        limits = options.max_residues, model.max_residues, self.tokens - self._around
        longest = max(min(limit for limit in limits if limit is not None), 1)
        self._relatives = Relatives(source, replace(options, max_residues=longest))
        self._are_aligned = self.model.network.relatives_positions is RelativesPositions.aligned
        self._are_gapped = self._are_aligned and options.alignment is Alignment.pairwise
        # All relatives of a query, by its name and its residues.
        self.family = self._relatives.of
        self._drawn = lru_cache(maxsize=_KEPT)(self._draw)
        self.models = lru_cache(maxsize=1)(self._models)

    def begun(
        self, model: PretrainedModel, names: Collection[str], *, of_all: bool = False
    ) -> Self:
        """Returns itself; refuses another model, and names of proteins without relatives.

        Names `of_all` proteins are refused if none has relatives, also if that is allowed.
        """
        if model is not self._alone:
            raise UserError("these relatives are of another model; write model.relatives(...)")
        self._relatives.check(names if self.query is None else [self.query[0]], of_all=of_all)
        return self

    def groups(
        self, names: Sequence[str], sequences: Sequence[str], tokens_per_batch: int
    ) -> Iterator[tuple[list[PretrainedModel], list[int]]]:
        """Yields the models in the contexts of each query, and the places of its proteins."""
        queries = [self.query or own for own in zip(names, sequences, strict=True)]
        for query, places in groupby(range(len(queries)), queries.__getitem__):
            yield self.models(*query, tokens_per_batch), [*places]

    def first(self, name: str, residues: str) -> PretrainedModel:
        """Returns the model in the first context of a protein."""
        return self.models(*(self.query or (name, residues)))[0]

    @property
    def empty(self) -> PretrainedModel:
        """The model in a context without relatives."""
        return in_context(self.model, [], 1)

    @property
    def settings(self) -> dict[str, Any]:
        """All that draws depend on beside the queries, as JSON values by option."""
        plain = {"relatives": self._relatives.digest, **vars(self.options)}
        # Whole relatives are part of the digest.
        return plain | {"whole_relatives": None, "relatives_tokens": self.tokens}

    def to_plain(self, name: str, residues: str) -> dict[str, Any]:
        """Returns what is drawn for a query, for JSON."""
        return {
            "query": name,
            "relatives": self._drawn(name, residues)[0],
            "seed": self.options.relatives_seed,
            "relatives_tokens": self.tokens,
            "contexts": [
                {
                    "max_identity": drawn.max_identity,
                    "tokens": drawn.num_tokens,
                    "names": drawn.names,
                    "residues": [one.residues for one in drawn.relatives],
                    "identities": [self._identity(residues, one) for one in drawn.relatives],
                    "digest": drawn.digest,
                }
                for drawn in self.draws(name, residues)
            ],
        }

    def draws(self, name: str, residues: str) -> list[Draw]:
        """Returns the contexts of a query, without empty ones and those drawn twice."""
        return self._drawn(name, residues)[1]

    def _draw(self, name: str, residues: str) -> tuple[str, list[Draw]]:
        """Returns what was read for a query, and its contexts."""
        config = self.model.description.model
        numbers, runs = config.relatives_numbers, RelativesPositions.run
        family = self.family(name, residues)
        contexts = draws(
            family,
            count=self.options.contexts,
            tokens=self.tokens,
            seed=self.options.relatives_seed,
            around=self._around,
            most=numbers - 1 if numbers else None,
            has_order=(
                config.relatives is not Seen.full
                or numbers > 0
                or config.relatives_positions is runs
            ),
        )
        self._compare(name, residues, contexts[0].relatives[:_COMPARED])
        return str(family), contexts

    def _compare(self, name: str, residues: str, relatives: Sequence[Member]) -> None:
        """Warns once of relatives without an alignment of which most are as alike as by chance."""
        is_long = len(residues) >= _SHORTEST
        relatives = [one for one in relatives if one.columns is None and is_long]
        values = [e_value(residues, one.residues) for one in relatives]
        if not values or median_low(values) <= _BY_CHANCE:
            return
        # Only once, not in the processes that divide the work.
        if not self.unlike and parent_process() is None:
            warnings.warn(
                f"most relatives of {name or 'the query'} are no more similar to it than unrelated "
                f"proteins (E-values above {_BY_CHANCE}, with a median of "
                f"{median_low(values):.2g}), and mislead the model; check whose relatives they are",
                stacklevel=2,
            )
        self.unlike.add((name, residues))

    def _identity(self, residues: str, relative: Member) -> float | None:
        """Returns the identity of a relative to a query, if not known by the alignment here."""
        if relative.identity is not None or not (self._are_aligned and residues):
            return relative.identity
        letters = aligned_letters(residues, [relative.residues], has_gaps=self._are_gapped)
        return float((letters[0] == np.frombuffer(residues.encode(), np.uint8)).mean())

    def after(
        self, relatives: Sequence[Member], residues: str, tokens_per_batch: int
    ) -> PretrainedModel:
        """Returns the model in a context of these relatives of a query."""
        return in_context(self.model, [*self._read(relatives, residues)], tokens_per_batch)

    def _models(
        self, name: str, residues: str, tokens_per_batch: int = TOKENS_PER_BATCH
    ) -> list[PretrainedModel]:
        return [
            self.after(one.relatives, residues, tokens_per_batch)
            for one in self.draws(name, residues)
        ]

    def _read(self, relatives: Sequence[Member], query: str) -> Iterator[Relative]:
        for _, residues, _, places, _ in relatives:
            found = places
            if found is None and self._are_aligned:
                found = aligned_positions(query, residues, has_gaps=self._are_gapped)
            elif found is None:
                found = np.arange(len(residues))
            yield Relative(self.model.vocabulary.encode(residues), found)


def grouped(
    model: PretrainedModel,
    contexts: InContexts | None,
    names: Sequence[str],
    sequences: Sequence[str],
    tokens_per_batch: int,
) -> Iterator[tuple[Sequence[PretrainedModel], Sequence[int]]]:
    """Yields what predicts proteins, and their places: a model alone, or in their contexts."""
    if contexts is None:
        yield [model], range(len(sequences))
    else:
        given = begun(contexts, model, names)
        yield from given.groups(names, sequences, tokens_per_batch)


def in_contexts(
    model: PretrainedModel,
    options: RelativesOptions,
    names: Iterable[str],
    *,
    only_first: bool = False,
) -> InContexts | None:
    """Returns the contexts that the options of a command ask for, if they do, for its proteins.

    With `only_first`, the command reads the first one alone, and its number is refused.
    """
    if options.relatives is None:
        return None
    force, family = options.force_relatives, options.family
    if only_first:
        if family.contexts not in (1, FamilyOptions.contexts):
            raise UserError("one context alone is read here", {"contexts": None})
        family = replace(family, contexts=1)
    contexts = InContexts(model, options.relatives, family, force=force)
    return contexts.begun(model, [*names], of_all=True)


def models_of(
    model: PretrainedModel,
    contexts: InContexts | None,
    query: tuple[str, str],
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> Sequence[PretrainedModel]:
    """Returns a model alone, or in the contexts of a protein, by its name and its residues."""
    return [model] if contexts is None else contexts.models(*query, tokens_per_batch)


@contextmanager
def drawn_beside(
    contexts: InContexts | None, output: Path, queries: Iterable[tuple[str, str]]
) -> Iterator[None]:
    """Writes what is drawn for queries beside an output that the block writes, unless it fails.

    It is a line of JSON for each query, which has a name and residues.
    """
    with all_or_none() as written:
        if contexts is not None:
            written.append(beside(output, _DRAWN))
            with (
                complete_file(written[0], overwrite=True) as temporary,
                temporary.open("w", encoding="ascii") as file,
            ):
                drawn, unlike = list[list[int]](), 0
                for one in queries:
                    plain = contexts.to_plain(*one)
                    drawn.append([len(context["names"]) for context in plain["contexts"]])
                    unlike += one in contexts.unlike
                    file.write(f"{json.dumps(plain)}\n")
            sizes, alone = sorted(size for one in drawn for size in one if size), drawn.count([0])
            ends = " to ".join(f"{size:,}" for size in dict.fromkeys(sizes[:1] + sizes[-1:]))
            told = f"{written[0]}: relatives of each context: {ends or 0}; contexts: {len(sizes):,}"
            told += f"; queries without any: {alone:,}" * (alone > 0)
            told += f"; queries whose relatives may be unrelated: {unlike:,}" * (unlike > 0)
            print(printable(told), file=sys.stderr)
        yield


def in_context(model: M, relatives: Sequence[Relative], tokens_per_batch: int) -> M:
    """Returns a model, which sees relatives, in one context."""
    network = NetworkInContext(model.network, relatives, tokens_per_batch=tokens_per_batch)
    return type(model)(network, model.description, rebuild=model._rebuild)


def seeing_relatives(model: M, *, force: bool) -> M:
    """Returns a model that sees relatives: one that was trained so or, if forced, any."""
    described = model.description
    is_seeing = described.model.relatives is not None
    if is_seeing and (force or described.relatives_tokens != 0):
        return model
    if not force:
        raise UserError(
            "this model was trained without relatives, so that what it predicts after them means "
            "nothing; give one that was trained with data.batching=relatives and "
            f"data.relatives_alone below 1, such as {DEFAULT}, or use this one nevertheless",
            {"force_relatives": True},
        )
    how = Seen.ordered if model.causal else Seen.full
    described = replace(described, model=replace(described.model, relatives=how))
    network = build_network(
        described.model,
        described.attention_config,
        seed=described.seed,
        vocabulary=vocabulary_of(described.frame),
    ).to(model.network.embedding.weight)
    network.load_state_dict(model.network.state_dict())
    return type(model)(network, described, rebuild=model._rebuild)
