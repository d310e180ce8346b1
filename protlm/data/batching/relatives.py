"""Documents of relatives: members of one cluster, packed to rows in which they see each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, final

import numpy as np

from protlm.bounds import TOKENS_PER_PROTEIN
from protlm.data.batching.mixture import Documents, Draw, Mixture, SampleOrder
from protlm.data.batching.order import hashed, permuted, splitmix64
from protlm.data.batching.plan import SPECIALS, Content, SampleBlock, Sequences
from protlm.data.batching.strategies import ProteinsRow, WholeProteins, filled
from protlm.data.shards.cluster_index import ClusterIndex
from protlm.data.shards.data_set import SplitReader
from protlm.system.errors import UserError

# Of proteins, the number of the document of each, and its sequence number.
Members: TypeAlias = tuple[np.ndarray, np.ndarray]
_LONG = "proteins longer than data.max_length"
_EQUAL = "equal to another one of their document"
_UNFIT = "that did not fit into their document"


@final
@dataclass(frozen=True)
class FamiliesRow(ProteinsRow):
    """Whole documents, end to end: `families` has the number of proteins of each family.

    A document of single proteins has as many families. Only proteins with `targets` are corrupted.
    """

    families: tuple[int, ...]
    targets: tuple[bool, ...]

    def read(self, sequences: Sequences, *, seed: int) -> list[Content]:
        contents = super().read(sequences, seed=seed)
        return [
            (tokens, rng if has_targets else None)
            for (tokens, rng), has_targets in zip(contents, self.targets, strict=True)
        ]


@final
@dataclass(frozen=True)
class WholeFamilies(WholeProteins):
    """Fills rows with the documents of a block, end to end, and shuffles the batches.

    Proteins of more than `max_length` tokens are left out of documents.

    Args:
        members: maximum number of proteins of a document.
        tokens: maximum number of tokens of a document; None is that of a row.
        alone: fraction of documents whose proteins do not see each other.
        last: fraction of documents of which only the last protein has targets.
        positions: from where positions count in layers of the family.
    """

    # Documents, of one protein to 32.
    usual_block: ClassVar[int] = 2_048

    members: int = 32
    tokens: int | None = None
    alone: float = 0.0
    last: float = 0.0
    positions: str = "restart"

    def __post_init__(self) -> None:
        super().__post_init__()
        most, given = self.longest_row, self.tokens
        if given is not None and not self.max_length <= given <= most:
            raise UserError(
                f"data.relatives_tokens={given} must be at least data.max_length={self.max_length},"
                f" so that every protein fits, and at most the {most} tokens of a row"
            )

    def _cuts(self, block: SampleBlock) -> list[tuple[Any, int]]:
        room = _totals(block, room_of(block.num_residues))
        places = np.flatnonzero(room)
        if not len(places) and block.start.samples == 0:
            raise UserError(
                f"no protein of the first {len(room):,} documents fits into "
                f"data.max_length={self.max_length}; type a larger one"
            )
        rows = [places[row].tolist() for row in filled(room[places].tolist(), self.longest_row)]
        if rows:
            # Those from which all proteins were left out count as read, too.
            rows[0] += np.flatnonzero(room == 0).tolist()
        return self._batched(rows)

    def _num_tokens(self, block: SampleBlock) -> np.ndarray:
        return _totals(block, block.num_residues + SPECIALS)

    def _rows(self, block: SampleBlock, places: Any) -> list[Any]:
        assert block.documents is not None
        documents, rows = block.documents, []
        members_of = np.split(np.arange(len(documents.leads)), np.cumsum(documents.sizes)[:-1])
        for row in places:
            members = np.concatenate([members_of[one] for one in row])
            leads = np.append(np.flatnonzero(documents.leads[members]), len(members))
            rows.append(
                FamiliesRow(
                    tuple(self._proteins(block, members)),
                    tuple(np.diff(leads).tolist()),
                    tuple(documents.targets[members].tolist()),
                )
            )
        return rows


def room_of(num_residues: np.ndarray) -> np.ndarray:
    """Returns the tokens of proteins, or, of a peptide, those for which a row has one protein."""
    return np.maximum(num_residues + SPECIALS, TOKENS_PER_PROTEIN)


def _totals(block: SampleBlock, numbers: np.ndarray) -> np.ndarray:
    """Returns the sum of the numbers of each document's proteins, int64."""
    assert block.documents is not None
    return np.diff(np.append(0, np.cumsum(numbers))[np.append(0, np.cumsum(block.documents.sizes))])


@final
class Families(Mixture):
    """The clusters of several splits, from which documents are drawn.

    A pass over a data set divides the members of each cluster, in a new order, into documents, and
    draws the documents in a new order.
    """

    def __init__(
        self,
        splits: Sequence[SplitReader],
        shares: Sequence[int] | None,
        clusters: Sequence[ClusterIndex],
        rule: WholeFamilies,
    ) -> None:
        super().__init__(splits, shares, clusters)
        self.rule, self.clusters = rule, clusters
        # Of each data set, the number of documents before each cluster, and of sequences before it.
        self.starts = [index.starts(rule.members) for index in clusters]
        self.firsts = np.cumsum([0, *map(len, splits)]).tolist()
        number = sum(int(starts[-1]) for starts in self.starts)
        self._of_clusters = f"{number:,} documents of at most {rule.members} members of a cluster"

    def order(self, *, seed: int = 0, shuffle: bool = True) -> "FamilyOrder":
        return FamilyOrder(self, self._shares, seed=seed, shuffle=shuffle)


@final
class FamilyOrder(SampleOrder):
    """The document at each position of an epoch: a pure function of the seed.

    The members of a cluster are in an order that depends on the seed, the cluster and the pass; the
    first ones are a document, and so on.
    """

    def __init__(
        self, families: Families, shares: Sequence[int], *, seed: int, shuffle: bool
    ) -> None:
        sizes = [int(starts[-1]) for starts in families.starts]
        super().__init__(sizes, shares=shares, seed=seed, shuffle=shuffle)
        self._families = families

    def draw(self, epoch: int, positions: np.ndarray) -> Draw:
        documents, passes, _ = super().draw(epoch, positions)
        families, most = self._families, self._families.rule.members
        sources = np.searchsorted(self._firsts, documents, side="right") - 1
        kinds, found = np.empty(len(documents)), list[Members]()
        for source in np.unique(sources).tolist():
            here, starts = np.flatnonzero(sources == source), families.starts[source]
            own = documents[here] - self._firsts[source]
            clusters = np.searchsorted(starts, own.astype(starts.dtype), side="right") - 1
            numbers = own - starts[clusters].astype(np.int64)
            keys = splitmix64(passes[here].astype(np.uint64))
            keys = splitmix64(keys ^ hashed(clusters, seed=self.seed, stream=source))
            kinds[here] = splitmix64(~keys ^ numbers.astype(np.uint64)) / 2.0**64
            owners, samples = members_of(
                families.clusters[source], clusters, keys, firsts=numbers * most, most=most
            )
            found.append((here[owners], samples + families.firsts[source]))
        owners, samples = map(np.concatenate, zip(*found, strict=True))
        return drawn(families, families.rule, (owners, samples), passes, kinds, {})


def members_of(
    index: ClusterIndex,
    clusters: np.ndarray,
    keys: np.ndarray,
    *,
    firsts: np.ndarray | int = 0,
    most: int,
) -> Members:
    """Returns up to `most` members of each of these clusters, from a place of their order on.

    The order of a cluster's members is drawn by its key.
    """
    sizes = index.sizes(clusters)
    taken = np.minimum(sizes - firsts, most)
    numbers = np.repeat(np.arange(len(clusters)), taken)
    places = np.arange(len(numbers)) + (firsts - np.cumsum(taken) + taken)[numbers]
    items = permuted(places, sizes[numbers], keys[numbers])
    return numbers, index.members(clusters[numbers], items.astype(np.uint64), 0)


def drawn(
    sequences: SplitReader,
    rule: WholeFamilies,
    members: Members,
    passes: np.ndarray,
    kinds: np.ndarray,
    left_out: dict[str, int],
) -> Draw:
    """Returns documents, each of its members in turn until one does not fit.

    The first one that is taken is the last one in the row, so that this is a query, if there is
    one. Those that are too long, or repeat an earlier one, are left out.

    Args:
        kinds: a number of each document, below 1, that decides which proteins see each other and
            which have targets.
        left_out: number of members that were left out before, by reason.
    """
    order = np.argsort(members[0], kind="stable")
    number, samples = (one[order] for one in members)
    lengths = sequences.lengths_of(samples)
    is_long = lengths + SPECIALS > rule.max_length
    is_equal = ~is_long & _is_repeated(sequences, samples, number, lengths)
    is_left = ~is_long & ~is_equal
    room = np.append(0, np.cumsum(np.where(is_left, room_of(lengths), 0)))
    is_taken = is_left & (
        room[1:] - room[np.searchsorted(number, number)] <= (rule.tokens or rule.longest_row)
    )
    reasons = {_LONG: is_long, _EQUAL: is_equal, _UNFIT: is_left & ~is_taken}
    counts = {why: int(np.count_nonzero(some)) for why, some in reasons.items()}
    # In the order of documents, the last one of each first.
    number, samples = (x[is_taken][::-1] for x in (number, samples))
    order = np.argsort(number, kind="stable")
    number, samples = number[order], samples[order]
    is_border = np.append(True, number[1:] != number[:-1])[: len(number)]
    is_last, kind = np.append(is_border[1:], True)[: len(number)], kinds[number]
    is_alone = kind < rule.alone
    only_last = ~is_alone & (kind < rule.alone + rule.last)
    sizes = np.bincount(number, minlength=len(passes))
    documents = Documents(sizes, is_border | is_alone, is_last | ~only_last, left_out | counts)
    return Draw(samples, passes[number], documents)


def _is_repeated(
    sequences: SplitReader, samples: np.ndarray, documents: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Returns whether a sequence equals an earlier one of its document, bool.

    Reads only those of which a document has several of one length.
    """
    keys = documents * (lengths.max(initial=0) + 1) + lengths
    _, which, counts = np.unique(keys, return_inverse=True, return_counts=True)
    is_repeated, seen = np.zeros(len(samples), bool), set[tuple[int, bytes]]()
    for place in np.flatnonzero(counts[which] > 1).tolist():
        found = int(documents[place]), sequences[int(samples[place])].tobytes()
        is_repeated[place] = found in seen
        seen.add(found)
    return is_repeated
