"""Relatives: sequences that share 6-mers, found among any number of others.

If each residue is conserved independently with probability p, the fraction of conserved 6-mers is
p^6: half of them at 89 % identity, and 6 % at 63 %. Remote homologs share fewer and are not found,
nor are long proteins that have one domain of several in common.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise

import numpy as np

from protlm.data.batching.order import splitmix64
from protlm.data.vocabulary import STANDARD, VOCABULARY

K = 6
SKETCH_SIZE = 64
# The fraction of the 6-mers of the shorter of two relatives, at least, that they share.
MIN_SHARED = 0.06
# A peptide of fewer 6-mers counts as this number: one of them may be shared by chance.
_LEAST = 20

_LETTERS = len(STANDARD)
# A number for each k-mer of standard residues, and one for all others.
_NO_KMER = _LETTERS**K
_FIRST = min(VOCABULARY[letter] for letter in STANDARD)
_BREAK = np.full(1, VOCABULARY["X"], np.uint8)
_PAIRS = 1 << 23
_BATCH_RESIDUES = 1 << 20


def highest_shared_fractions(
    queries: Sequence[str], others: Iterable[str], *, enough: float = np.inf
) -> np.ndarray:
    """Returns for each query the highest fraction of distinct 6-mers shared with one of the others.

    Shared 6-mers are divided by those of the shorter of the two, or by 20 if it has fewer, so that
    a fragment is found in a long protein and the reverse; float64 [queries], 0 for queries of fewer
    than 6 residues. A query that shares `enough` with one is not compared with the rest, so that
    thousands of variants of a protein are not compared pair by pair.

    >>> highest_shared_fractions(["MKTAYIAK", "WWWWWW"], ["AAAA", "MKTAYIA"]).tolist()
    [0.1, 0.0]
    """
    sets = [_distinct_kmers(VOCABULARY.encode(one)) for one in queries]
    best, left, index = np.zeros(len(sets)), np.arange(len(sets)), None
    for batch in batches(map(VOCABULARY.encode, others), 1):
        index = index or KmerIndex([sets[row] for row in left], of_shorter=True)
        index.search(batch)
        best[left] = np.fmax(best[left], index.highest_shared_fractions)
        is_open = best[left] < enough
        if not is_open.all():
            left, index = left[is_open], None
        if not left.size:
            break
    return best


def unrelated(sequences: Iterable[str], *, limit: int) -> list[int]:
    """Returns the places of the first sequences that are not relatives of one already taken.

    Relatives are equal, or share the fraction `MIN_SHARED` or more of the 6-mers, as in
    `highest_shared_fractions`.

    >>> unrelated(["MKTAYIAKQRQ", "MKTAYIAKQRQ", "WWWWWW", "MKTAYIAKHHH"], limit=3)
    [0, 2]
    """
    taken: dict[str, int] = {}
    sizes: list[int] = []
    having: defaultdict[int, list[int]] = defaultdict(list)
    for place, sequence in enumerate(sequences):
        kmers = _distinct_kmers(VOCABULARY.encode(sequence)).tolist()
        shared = Counter(chain.from_iterable(having[kmer] for kmer in kmers if kmer in having))
        if sequence not in taken and not any(
            number / max(min(len(kmers), sizes[other]), _LEAST) >= MIN_SHARED
            for other, number in shared.items()
        ):
            for kmer in kmers:
                having[kmer].append(len(taken))
            sizes.append(len(kmers))
            taken[sequence] = place
            if len(taken) == limit:
                break
    return list(taken.values())


def sketch(tokens: np.ndarray) -> np.ndarray:
    """Returns the distinct k-mers of a sequence with the smallest hashes, uint32 [<= 64].

    They are a uniform sample of its k-mers, which bounds the memory for many sequences.
    """
    numbers = _distinct_kmers(tokens)
    if len(numbers) <= SKETCH_SIZE:
        return numbers
    hashes = splitmix64(numbers.astype(np.uint64))
    return numbers[np.argpartition(hashes, SKETCH_SIZE)[:SKETCH_SIZE]]


def batches(
    sequences: Iterable[np.ndarray], first: int = _BATCH_RESIDUES
) -> Iterator[list[np.ndarray]]:
    """Yields the sequences, uint8 tokens, in lists of about a million residues.

    The `first` list may be of fewer residues, which are then doubled.
    """
    batch: list[np.ndarray] = []
    num_residues = 0
    for one in sequences:
        batch.append(one)
        num_residues += len(one)
        if num_residues >= first:
            yield batch
            batch, num_residues, first = [], 0, min(2 * first, _BATCH_RESIDUES)
    if batch:
        yield batch


class KmerIndex:
    """Finds, for each set of k-mers, the largest part that one of many sequences contains.

    Sequences are searched in batches and not stored. Memory is 16 bytes for each k-mer of the sets
    plus at most 256 MB. A set, uint32, has the distinct k-mers of a query, or a `sketch` of them.
    With `of_shorter`, shared ones are divided by those of the searched sequence if these are fewer,
    and by 20 at least; then the sets have to be complete.
    """

    def __init__(self, sets: Sequence[np.ndarray], *, of_shorter: bool = False) -> None:
        self._of_shorter = of_shorter
        self._sizes = np.array([len(one) for one in sets], np.int64)
        self._best = np.zeros(len(sets))
        all_kmers = np.concatenate([*sets, np.zeros(0, np.uint32)])
        order = np.argsort(all_kmers, kind="stable")
        self._owners = np.repeat(np.arange(len(sets)), self._sizes)[order]
        different, starts = np.unique(all_kmers[order], return_index=True)
        self._starts = np.append(starts, len(order))
        # Counted from 1, because untouched zeros take no memory.
        self._row_of = np.zeros(_NO_KMER + 1, np.int32)
        self._row_of[different] = np.arange(1, len(different) + 1)

    @property
    def highest_shared_fractions(self) -> np.ndarray:
        """Highest fraction of each set that one sequence shared, float64; NaN for empty sets."""
        return np.where(self._sizes > 0, self._best, np.nan)

    def search(self, sequences: Sequence[np.ndarray]) -> None:
        """Compares sequences, uint8 tokens, with all sets."""
        # A letter that occurs in no k-mer separates adjacent sequences.
        tokens = np.concatenate([array for one in sequences for array in (one, _BREAK)])
        ends = np.cumsum([len(one) + 1 for one in sequences])
        rows = self._row_of[kmers(tokens)]
        places = np.flatnonzero(rows)
        numbers = np.searchsorted(ends, places, side="right")
        # A k-mer that a sequence repeats is counted once.
        hits = np.unique(numbers * len(self._starts) + rows[places] - 1)
        numbers, rows = np.divmod(hits, len(self._starts))
        sizes = [len(_distinct_kmers(one)) for one in sequences] if self._of_shorter else []
        for block in self._blocks(numbers, rows):
            self._count(numbers[block], rows[block], np.array(sizes))

    def _blocks(self, numbers: np.ndarray, rows: np.ndarray) -> list[slice]:
        """Splits hits between sequences, so that the pairs of each block fit in memory."""
        num_pairs = np.cumsum(self._starts[rows + 1] - self._starts[rows])
        borders = np.flatnonzero(np.diff(numbers)) + 1
        blocks_at = num_pairs[borders - 1] // _PAIRS
        cuts = borders[np.flatnonzero(np.diff(blocks_at)) + 1] if len(borders) else borders
        return [slice(start, stop) for start, stop in pairwise([0, *cuts.tolist(), len(rows)])]

    def _count(self, numbers: np.ndarray, rows: np.ndarray, sizes: np.ndarray) -> None:
        repeats = self._starts[rows + 1] - self._starts[rows]
        firsts = np.repeat(self._starts[rows] - np.cumsum(repeats) + repeats, repeats)
        owners = self._owners[firsts + np.arange(len(firsts))]
        pairs = np.repeat(numbers, repeats) * len(self._sizes) + owners
        different, shared = np.unique(pairs, return_counts=True)
        numbers, owners = np.divmod(different, len(self._sizes))
        least = self._sizes[owners]
        if self._of_shorter:
            least = np.maximum(np.minimum(least, sizes[numbers]), _LEAST)
        np.maximum.at(self._best, owners, shared / least)


def kmers(tokens: np.ndarray) -> np.ndarray:
    """Returns the number of the k-mer that begins at each residue, uint32 [num_residues - K + 1].

    Those with X, B, U, Z or O have one number.
    """
    digits = tokens.astype(np.uint32) - _FIRST
    if len(digits) < K:
        return np.zeros(0, np.uint32)
    pairs = digits[:-1] * _LETTERS + digits[1:]
    numbers = (pairs[:-4] * _LETTERS**2 + pairs[2:-2]) * _LETTERS**2 + pairs[4:]
    foreign = np.flatnonzero(digits >= _LETTERS)
    for shift in range(K):
        first = foreign - shift
        numbers[first[(first >= 0) & (first < len(numbers))]] = _NO_KMER
    return numbers


def _distinct_kmers(tokens: np.ndarray) -> np.ndarray:
    """Returns the distinct k-mers of standard residues, uint32, ascending."""
    numbers = np.unique(kmers(tokens))
    return numbers[:-1] if len(numbers) and numbers[-1] == _NO_KMER else numbers
