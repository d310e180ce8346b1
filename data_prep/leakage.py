"""`protlm data leakage`: how many held-out sequences have a near neighbour in `train`."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from data_prep.homologues import MAX_E_VALUE, highest_identities
from data_prep.mmseqs import find_mmseqs
from data_prep.sketch import SKETCH_SIZE, K, SketchIndex, sketch
from data_prep.split import TRAIN
from protlm.console import console
from protlm.data.shards import SplitReader, open_split, read_manifest
from protlm.errors import UserError, one_of
from protlm.paths import check_output, complete_file
from protlm.progress import JobProgress

# Of a larger split so many are compared by k-mers and by MMseqs2, drawn by their hashes: enough
# for a share to be known to within half a percent.
_MAX_COMPARED = 50_000
_BATCH_RESIDUES = 1 << 20
# Further shares that the table has a line for, in tenths.
_LEVELS = (9, 5, 2)


@dataclass(frozen=True)
class LeakageOptions:
    """How near is near.

    Args:
        min_shared: the share of its k-mers that makes a train sequence a neighbour.
        json: a file to write the numbers into as well.
        mmseqs: searches with MMseqs2 besides.
    """

    min_shared: float = 0.5
    json: Path | None = None
    mmseqs: bool = False


@dataclass(frozen=True)
class SplitLeakage:
    """What of a split has a neighbour in `train`.

    `identical` counts, among all `sequences`, those that stand in `train` letter by letter. Among
    the `compared` ones `near` counts those of which one train sequence contains at least
    `min_shared` of the k-mers; `shared_tenths` counts them by that share: below 0.1, from 0.1 to
    0.2, and so on, 0.9 and above. `homologous` counts those that MMseqs2 finds a hit for; None if
    it was not asked.
    """

    sequences: int
    identical: int
    compared: int
    near: int
    shared_tenths: tuple[int, ...]
    homologous: int | None = None


def leakage(directory: Path, options: LeakageOptions) -> dict[str, SplitLeakage]:
    """Compares every split with `train`, prints a table and returns its numbers.

    The shards' SHA-256 are compared before: that reads once more what takes far longer to compare.
    Memory is bounded by 50,000 sketches of each held-out split and 32 bytes for each of its
    sequences.

    Raises:
        UserError: `min_shared` is impossible, there is nothing to compare, or no MMseqs2.
        InputDataError: there is no data set, or it is damaged.
        OutputError: the JSON file exists or cannot be written.
    """
    if not 0 < options.min_shared <= 1:
        raise UserError(f"--min-shared {options.min_shared} must be above 0 and at most 1")
    if options.json is not None:
        check_output(options.json)
    if options.mmseqs:
        find_mmseqs()
    train, held_out = _open(directory)
    identical, shares = _search(train, held_out)
    identities = _search_homologues(train, held_out) if options.mmseqs else {}
    results = {
        split: _summary(
            len(one.digests),
            identical[split],
            shares[split],
            identities.get(split),
            options.min_shared,
        )
        for split, one in held_out.items()
    }
    printed = console()
    printed.print(_table(results, options))
    printed.print(_limits(options), markup=False, highlight=False)
    if options.json is not None:
        _write(options.json, len(train), options, results)
    return results


class _HeldOut:
    """A split to be compared: the hashes of all its sequences, and a sample of them."""

    def __init__(self, reader: SplitReader) -> None:
        self.digests = _digests(reader[i] for i in range(len(reader)))
        share = min(1.0, _MAX_COMPARED / max(len(reader), 1))
        places = self.digests.view(">u8")[::2] / 2**64
        # Copies: a view would keep the memory map of its shard, and there may be many.
        sample = [reader[i].copy() for i, place in enumerate(places) if place <= share]
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
    """The BLAKE2b-128 of each sequence, S16 [sequences]: 16 bytes that numpy sorts and compares."""
    return np.fromiter(
        (hashlib.blake2b(tokens.data, digest_size=16).digest() for tokens in sequences), "S16"
    )


def _search(
    train: SplitReader, held_out: dict[str, _HeldOut]
) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """How many of each split occur in `train`, and the highest share of each sketch's k-mers."""
    wanted = np.unique(np.concatenate([one.digests for one in held_out.values()]))
    is_found = np.zeros(len(wanted), bool)
    index = SketchIndex([kmers for one in held_out.values() for kmers in one.sketches])
    with JobProgress("train sequences compared", len(train)) as progress:
        done = 0
        for batch in _batches(train):
            digests = _digests(batch)
            places = np.searchsorted(wanted[:-1], digests)
            is_found[places[wanted[places] == digests]] = True
            index.search(batch)
            done += len(batch)
            progress.update(done)
    identical = {
        split: int(np.count_nonzero(is_found[np.searchsorted(wanted, one.digests)]))
        for split, one in held_out.items()
    }
    return identical, _by_split(index.highest_shares, held_out)


def _search_homologues(train: SplitReader, held_out: dict[str, _HeldOut]) -> dict[str, np.ndarray]:
    queries = [tokens for one in held_out.values() for tokens in one.compared]
    sequences = (train[i] for i in range(len(train)))
    return _by_split(highest_identities(queries, sequences), held_out)


def _batches(reader: SplitReader) -> Iterator[list[np.ndarray]]:
    batch: list[np.ndarray] = []
    num_residues = 0
    for i in range(len(reader)):
        batch.append(reader[i])
        num_residues += len(batch[-1])
        if num_residues >= _BATCH_RESIDUES:
            yield batch
            batch, num_residues = [], 0
    if batch:
        yield batch


def _by_split(values: np.ndarray, held_out: dict[str, _HeldOut]) -> dict[str, np.ndarray]:
    ends = np.cumsum([len(one.sketches) for one in held_out.values()])
    return dict(zip(held_out, np.split(values, ends[:-1]), strict=True))


def _summary(
    sequences: int,
    identical: int,
    shares: np.ndarray,
    identities: np.ndarray | None,
    min_shared: float,
) -> SplitLeakage:
    tenths = np.bincount(np.minimum(shares * 10, 9).astype(np.int64), minlength=10)
    hits = None if identities is None else int(np.count_nonzero(~np.isnan(identities)))
    return SplitLeakage(
        sequences=sequences,
        identical=identical,
        compared=len(shares),
        near=int(np.count_nonzero(shares >= min_shared)),
        shared_tenths=tuple(tenths.tolist()),
        homologous=hits,
    )


def _table(results: dict[str, SplitLeakage], options: LeakageOptions) -> Table:
    table = Table("split", "nearest in train", "sequences", "of", "share", box=None)
    for column in table.columns[2:]:
        column.justify = "right"
    for split, one in results.items():
        rows = [("identical", one.identical, one.sequences)]
        levels = {level / 10: sum(one.shared_tenths[level:]) for level in _LEVELS}
        levels[options.min_shared] = one.near
        for level, number in sorted(levels.items(), reverse=True):
            rows.append((f"{K}-mers >= {level:.0%}", number, one.compared))
        if one.homologous is not None:
            rows.append(("MMseqs2 hit", one.homologous, one.compared))
        for name, (what, number, total) in zip([split, *[""] * len(rows)], rows, strict=False):
            share = f"{number / max(total, 1):.1%}"
            table.add_row(name, what, f"{number:,}", f"{total:,}", share)
    return table


def _limits(options: LeakageOptions) -> str:
    """What the numbers mean, and what they cannot see."""
    identity = options.min_shared ** (1 / K)
    text = (
        f"{K}-mers: the share of a sequence's, by a sketch of {SKETCH_SIZE}, that one train "
        f"sequence contains: {options.min_shared:.0%} is about {identity:.0%} identity, and at 50% "
        f"identity {0.5**K:.1%} is left. "
    )
    if options.mmseqs:
        return text + f"MMseqs2 hits have E < {MAX_E_VALUE:g}."
    return text + "Remote homologues are not seen: --mmseqs looks for them."


def _write(
    path: Path, num_train: int, options: LeakageOptions, results: dict[str, SplitLeakage]
) -> None:
    fields = {
        "train_sequences": num_train,
        "min_shared": options.min_shared,
        "kmer_length": K,
        "sketch_size": SKETCH_SIZE,
        "splits": {split: asdict(one) for split, one in results.items()},
    }
    with complete_file(path) as temporary:
        temporary.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
