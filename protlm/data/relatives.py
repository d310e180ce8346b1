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
from protlm.system.memory import blocks_of

K = 6
SKETCH_SIZE = 64
# The fraction of the 6-mers of the shorter of two relatives, at least, that they share.
MIN_SHARED = 0.06
# A peptide of fewer 6-mers counts as this number: one of them may be shared by chance.
_LEAST = 20

# If more than 98 % of more than 95 % of the residues of the shorter of two are identical, at least
# 83 % of its 6-mers are shared: each other residue changes six, and each end has less than 5 %.
_LEAK = 0.8

_LETTERS = len(STANDARD)
# A number for each k-mer of standard residues, and one for all others.
_NO_KMER, _NO_SHORT = _LETTERS**K, _LETTERS**3
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


def leaks(query: np.ndarray, others: Sequence[np.ndarray]) -> list[str]:
    """Returns why each of its relatives, uint8 tokens, gives a query away, or an empty string.

    It does so if it equals the query, contains it, is contained in it, or shares 80 % or more of
    the distinct 6-mers of the shorter one: what is more than 98 % identical over more than 95 % of
    the shorter one, unless most of that is repeats, and some that are less, from about 96 % on.
    """
    of_query, numbers, ends = _distinct_kmers(query), *_joined_kmers(others)
    owners = np.searchsorted(ends, np.arange(len(numbers)), side="right")
    is_kmer = numbers != _NO_KMER
    # Sorting is several times as fast as the hashes of `np.unique`.
    pairs = np.sort(owners[is_kmer] * _NO_KMER + numbers[is_kmer])
    owners, numbers = np.divmod(pairs[np.diff(pairs, prepend=-1) != 0], _NO_KMER)
    sizes = np.bincount(owners, minlength=len(others))
    shared = np.bincount(owners[np.isin(numbers, of_query)], minlength=len(others))
    is_near = (shared > 0) & (shared >= _LEAK * np.minimum(sizes, len(of_query)))
    found = []
    for other, near in zip(others, is_near.tolist(), strict=True):
        shorter, longer = sorted((query.tobytes(), other.tobytes()), key=len)
        reasons = {
            "equal to their query": shorter == longer,
            "that contain their query or are contained in it": shorter in longer,
            "nearly identical to their query (80 % of 6-mers)": near,
        }
        found.append(next((reason for reason, is_so in reasons.items() if is_so), ""))
    return found


def best_diagonal(first: np.ndarray, other: np.ndarray) -> int:
    """Returns how far another protein, uint8 tokens, is shifted to have the first one's positions.

    It is the diagonal with the most shared 3-mers that the first one has once, since repeats are
    shared everywhere; of several, the smallest shift. Without a shared 3-mer it is 0: the starts of
    relatives are more often at the same place than elsewhere. 3-mers, and not 6-mers, since at 30 %
    identity hardly any 6-mer is conserved, but the diagonal has several 3-mers, and any other of
    hundreds hardly two by chance. One shift for a protein ignores its insertions.

    >>> best_diagonal(VOCABULARY.encode("GGMKTAY"), VOCABULARY.encode("MKTAY"))
    2
    """
    one, two = _short_kmers(first), _short_kmers(other)
    counts = np.bincount(one, minlength=_NO_SHORT + 1)
    place_of = np.full(_NO_SHORT + 1, -1)
    place_of[one] = np.arange(len(one))
    place_of[counts > 1] = place_of[_NO_SHORT] = -1
    places = place_of[two]
    shifts, counts = np.unique((places - np.arange(len(two)))[places >= 0], return_counts=True)
    best = shifts[counts == counts.max(initial=0)]
    return int(best[np.abs(best).argmin()]) if len(best) else 0


def _short_kmers(tokens: np.ndarray) -> np.ndarray:
    """Returns the number of the 3-mer that begins at each residue, int64."""
    digits = tokens.astype(np.int64) - _FIRST
    words = np.stack([digits[:-2], digits[1:-1], digits[2:]])
    return np.where((words < _LETTERS).all(0), _LETTERS ** np.arange(3) @ words, _NO_SHORT)


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
    """Returns the sequences, uint8 tokens, in lists of about a million residues.

    The `first` list may be of fewer residues, which are then doubled.
    """
    return blocks_of(sequences, len, first, most=_BATCH_RESIDUES)


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
        numbers, ends = _joined_kmers(sequences)
        rows = self._row_of[numbers]
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


def _joined_kmers(sequences: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the k-mers of sequences, one after the other, and where each sequence ends."""
    # A letter that occurs in no k-mer separates adjacent sequences.
    tokens = np.concatenate([_BREAK[:0], *(x for one in sequences for x in (one, _BREAK))])
    return kmers(tokens), np.cumsum([len(one) + 1 for one in sequences])


def _distinct_kmers(tokens: np.ndarray) -> np.ndarray:
    """Returns the distinct k-mers of standard residues, uint32, ascending."""
    numbers = np.unique(kmers(tokens))
    return numbers[:-1] if len(numbers) and numbers[-1] == _NO_KMER else numbers
