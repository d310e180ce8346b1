"""`protlm data leakage`: counts held-out sequences with a close relative in `train`."""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from protlm.data.relatives import SKETCH_SIZE, K, KmerIndex, batches, sketch
from protlm.data.shards.data_set import SplitReader, open_split
from protlm.data.shards.manifest import read_manifest
from protlm.options.prepare import LeakageOptions
from protlm.system.errors import UserError, one_of
from protlm.system.json_file import write_json
from protlm.system.paths import check_output
from protlm.system.terminal import JobProgress, console

from .mmseqs import MAX_E_VALUE, find_mmseqs, highest_identities
from .split import TRAIN

# Number of sequences of a larger split that are compared, sampled by their hashes. This estimates
# a fraction to within half a percent.
_MAX_COMPARED = 50_000
# Further fractions that have a row in the table, in tenths.
_LEVELS = (9, 5, 2)


@dataclass(frozen=True)
class SplitLeakage:
    """Counts of the sequences of a split that have a relative in `train`.

    `identical` counts, among all `sequences`, those that are also in `train`. Among the `compared`
    sequences, `near` counts those whose k-mers are contained in one train sequence to at least the
    fraction `min_shared`; `shared_tenths` is the histogram of that fraction: below 0.1, from 0.1 to
    0.2, and so on. `homologous` counts those with a hit of MMseqs2; None if it was not run.
    """

    sequences: int
    identical: int
    compared: int
    near: int
    shared_tenths: tuple[int, ...]
    homologous: int | None = None


def leakage(directory: Path, options: LeakageOptions) -> dict[str, SplitLeakage]:
    """Compares every split with `train`, prints a table and returns its numbers.

    The SHA-256 of the shards are verified first, which is fast compared with the search.
    Memory is bounded by 50,000 sketches of each held-out split and 32 bytes for each of its
    sequences.
    """
    if options.json is not None:
        check_output(options.json)
    if options.mmseqs:
        find_mmseqs()
    train, held_out = _open(directory)
    identical, shares = _search(train, held_out)
    identities: dict[str, np.ndarray] = {}
    if options.mmseqs:
        queries = [tokens for one in held_out.values() for tokens in one.compared]
        sequences = (train[i] for i in range(len(train)))
        identities = _by_split(highest_identities(queries, sequences), held_out)
    results = {
        split: _summary(one, identical[split], shares[split], identities.get(split), options)
        for split, one in held_out.items()
    }
    printed = console()
    printed.print(_table(results, options))
    printed.print(_limits(options), markup=False, highlight=False)
    if options.json is not None:
        fields = {
            "train_sequences": len(train),
            "min_shared": options.min_shared,
            "kmer_length": K,
            "sketch_size": SKETCH_SIZE,
            "splits": {split: asdict(one) for split, one in results.items()},
        }
        write_json(options.json, fields, indent=1)
    return results


class _HeldOut:
    """A held-out split: the hashes of all its sequences, and a sample of them."""

    def __init__(self, reader: SplitReader) -> None:
        self.digests = _digests(reader[i] for i in range(len(reader)))
        fraction = min(1.0, _MAX_COMPARED / max(len(reader), 1))
        places = self.digests.view(">u8")[::2] / 2**64
        # Copies, because a view would keep the memory map of its shard open.
        sample = [reader[i].copy() for i, place in enumerate(places) if place <= fraction]
        sketches = [(tokens, sketch(tokens)) for tokens in sample]
        self.compared = [tokens for tokens, kmers in sketches if len(kmers)]
        self.sketches = [kmers for _, kmers in sketches if len(kmers)]


def _open(directory: Path) -> tuple[SplitReader, dict[str, _HeldOut]]:
    splits = sorted(read_manifest(directory).splits)
    if TRAIN not in splits or len(splits) < 2:
        raise UserError(
            f"{directory} has the splits {one_of(splits)}; leakage is counted between train and "
            "at least one other"
        )
    readers = {split: open_split(directory, split) for split in splits}
    train = readers.pop(TRAIN)
    return train, {split: _HeldOut(reader) for split, reader in readers.items()}


def _digests(sequences: Iterable[np.ndarray]) -> np.ndarray:
    """Returns the BLAKE2b-128 of each sequence, S16 [sequences], which numpy can sort."""
    return np.fromiter(
        (hashlib.blake2b(tokens.data, digest_size=16).digest() for tokens in sequences), "S16"
    )


def _search(
    train: SplitReader, held_out: dict[str, _HeldOut]
) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """Counts identical sequences per split, and finds the best match of each sketch."""
    wanted = np.unique(np.concatenate([one.digests for one in held_out.values()]))
    is_found = np.zeros(len(wanted), bool)
    index = KmerIndex([kmers for one in held_out.values() for kmers in one.sketches])
    with JobProgress("train sequences compared", len(train)) as progress:
        for batch in batches(train[i] for i in range(len(train))):
            digests = _digests(batch)
            places = np.searchsorted(wanted[:-1], digests)
            is_found[places[wanted[places] == digests]] = True
            index.search(batch)
            progress.advance(len(batch))
    identical = {
        split: int(np.count_nonzero(is_found[np.searchsorted(wanted, one.digests)]))
        for split, one in held_out.items()
    }
    return identical, _by_split(index.highest_shared_fractions, held_out)


def _by_split(values: np.ndarray, held_out: dict[str, _HeldOut]) -> dict[str, np.ndarray]:
    ends = np.cumsum([len(one.sketches) for one in held_out.values()])
    return dict(zip(held_out, np.split(values, ends[:-1]), strict=True))


def _summary(
    held_out: _HeldOut,
    identical: int,
    shares: np.ndarray,
    identities: np.ndarray | None,
    options: LeakageOptions,
) -> SplitLeakage:
    tenths = np.bincount(np.minimum(shares * 10, 9).astype(np.int64), minlength=10)
    return SplitLeakage(
        sequences=len(held_out.digests),
        identical=identical,
        compared=len(shares),
        near=int(np.count_nonzero(shares >= options.min_shared)),
        shared_tenths=tuple(tenths.tolist()),
        homologous=None if identities is None else int(np.count_nonzero(~np.isnan(identities))),
    )


def _table(results: dict[str, SplitLeakage], options: LeakageOptions) -> Table:
    table = Table("split", "nearest in train", "sequences", "of", "fraction", box=None)
    for column in table.columns[2:]:
        column.justify = "right"
    for split, one in results.items():
        levels = {level / 10: sum(one.shared_tenths[level:]) for level in _LEVELS}
        levels[options.min_shared] = one.near
        rows = [
            ("identical", one.identical, one.sequences),
            *(
                (f"{K}-mers >= {level:.0%}", number, one.compared)
                for level, number in sorted(levels.items(), reverse=True)
            ),
        ]
        if one.homologous is not None:
            rows.append(("MMseqs2 hit", one.homologous, one.compared))
        for name, (what, number, total) in zip([split, *[""] * len(rows)], rows, strict=False):
            table.add_row(name, what, f"{number:,}", f"{total:,}", f"{number / max(total, 1):.1%}")
    return table


def _limits(options: LeakageOptions) -> str:
    found = (
        f"MMseqs2 hits have E < {MAX_E_VALUE:g}."
        if options.mmseqs
        else "Remote homologs are not detected: --mmseqs searches for them."
    )
    return (
        f"{K}-mers: the fraction of a sequence's {K}-mers, by a sketch of {SKETCH_SIZE}, that one "
        f"train sequence contains: {options.min_shared:.0%} is about "
        f"{options.min_shared ** (1 / K):.0%} identity, and at 50% identity {0.5**K:.1%} remains. "
        f"{found}"
    )
