"""Copying: which attention learns to read a masked residue off relatives that are known to have it.

    python -m studies.copying FASTA [--arms NAME ...] [--kinds near ...] [--steps 125] [--jobs 1]
        [--seed 0] [--out runs/copying]

A family is a protein of FASTA, of 60 to 330 residues, and four copies, in which each residue is
replaced with a probability, by one that BLOSUM62 says is likely; those of the kind `gaps` have
three insertions or deletions of up to ten residues each, too. Every arm is trained on families of
3,000 proteins drawn at random (`data.batching=relatives`), with equal batches and masks, and is
validated on masked residues of 150 others, each after its copies, which are not masked. What is
best possible is known: the posterior of a residue, given those of the copies that come from it. The
table has the fraction of the distance from residue frequencies to there that each arm has closed.
Finished runs are not repeated, and interrupted ones continue.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protlm.data.pairwise import substitutions
from protlm.data.records import Tally, read_records
from protlm.data.vocabulary import STANDARD
from studies.runs import end_by_signal, name_of, protlm, side_by_side, train, validations
from studies.settings import keep_settings
from studies.tables import markdown, write_text

SHORTEST, LONGEST, COPIES, TRAINING, VALIDATION = 60, 330, 4, 3_000, 150
# The probability of a replacement, and the number of insertions and deletions.
KINDS = {"near": (0.1, 0), "middle": (0.3, 0), "remote": (0.5, 0), "gaps": (0.3, 3)}
LONGEST_GAP = 10
BASE = (
    *("model=medium", "model.model_dim=128", "model.feedforward_dim=344"),
    *("objective=mask_only", "optimizer=muon", "schedule=wsd_linear"),
    *("optimizer.learning_rate=6e-3", "optimizer.beta2=0.99"),
    *("data.batching=relatives", "data.max_length=512", "data.tokens_per_row=2048"),
    *("data.tokens_per_batch=8192", "data.relatives_from=context", "data.num_workers=0"),
    *("data.verify=sizes", "trainer.gradient_clip=1.0", "trainer.log_every=25"),
)
WIDE = ("model.num_heads=2",)
ARMS = {
    "softmax": ("attention=softmax",),
    "softmax, running positions": ("attention=softmax", "model.relatives_positions=run"),
    "softmax, no convolution": ("attention=softmax", "model.convolution=null"),
    "softmax, ordered": ("attention=softmax", "model.relatives=ordered"),
    "performer_relu": ("attention=performer_relu",),
    "performer_relu, 64 channels": ("attention=performer_relu", *WIDE),
    "performer_relu, 256 features": ("attention=performer_relu", "attention.num_features=256"),
    "performer_relu, no convolution": ("attention=performer_relu", "model.convolution=null"),
    "performer_relu, apart": ("attention=performer_relu", "model.relatives_sum=apart"),
    "performer_softmax": ("attention=performer_softmax",),
    "hedgehog": ("attention=hedgehog",),
    "hybrid": ("attention=hybrid",),
    "hybrid, hedgehog": ("attention=hybrid", "attention.mechanism=hedgehog"),
    "hybrid, aligned ±8": ("attention=hybrid", "attention.relatives_window=8"),
    "hybrid, aligned ±32": ("attention=hybrid", "attention.relatives_window=32"),
    "hybrid, hedgehog, aligned ±32": (
        *("attention=hybrid", "attention.mechanism=hedgehog"),
        "attention.relatives_window=32",
    ),
}


class Family(NamedTuple):
    """A protein, its copies, and the letter of each copy that comes from a residue, or -1."""

    name: str
    letters_L: np.ndarray
    copies: list[np.ndarray]
    copied_KL: np.ndarray


def replacements() -> np.ndarray:
    """Returns the probability of each letter that replaces another, [letter, letter]."""
    table = substitutions(np.full(20, 1 / 20))
    np.fill_diagonal(table, 0)
    return table / table.sum(1, keepdims=True)


def families(fasta: Path, kind: str, seed: int) -> Iterator[Family]:
    """Yields, in a random order, a family for each protein neither too short nor too long."""
    table, rng = replacements().cumsum(1), np.random.default_rng(seed)
    records = [
        record
        for record in read_records(fasta, Tally())
        if SHORTEST <= len(record.sequence) <= LONGEST and {*record.sequence} <= {*STANDARD}
    ]
    for place in rng.permutation(len(records)):
        letters_L = np.array([STANDARD.index(one) for one in records[place].sequence])
        pairs = [_copy(letters_L, table, *KINDS[kind], rng) for _ in range(COPIES)]
        copies, copied = zip(*pairs, strict=True)
        yield Family(records[place].identifier, letters_L, list(copies), np.stack(copied))


def _copy(
    letters_L: np.ndarray, table: np.ndarray, rate: float, gaps: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a copy, and its letter that comes from each residue, -1 where it is lost."""
    is_other = rng.random(len(letters_L)) < rate
    draws = rng.random((int(is_other.sum()), 1))
    copy_L = letters_L.copy()
    copy_L[is_other] = (table[letters_L[is_other]] < draws).sum(1).clip(max=19)
    origin, copy = np.arange(len(copy_L)), copy_L
    for _ in range(gaps):
        size, place = int(rng.integers(1, LONGEST_GAP + 1)), int(rng.integers(len(copy)))
        if rng.random() < 0.5:
            copy = np.insert(copy, place, rng.integers(20, size=size))
            origin = np.insert(origin, place, np.full(size, -1))
        else:
            gone = slice(place, place + size)
            copy, origin = np.delete(copy, gone), np.delete(origin, gone)
    is_left = np.isin(np.arange(len(copy_L)), origin)
    return copy, np.where(is_left, copy_L, -1)


def write_families(fasta: Path, kind: str, folder: Path, seed: int) -> None:
    """Prepares the data set of a kind, and writes the best and the worst loss beside it."""
    if (folder / "data" / "manifest.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    names = "all.fasta", "splits.tsv", "cluster.tsv"
    sequences, splits, clusters = (folder / name for name in names)
    queries = list[Family]()
    lines: dict[Path, list[str]] = {sequences: [], splits: ["accession\tsplit\n"], clusters: []}
    for number, family in enumerate(islice(families(fasta, kind, seed), TRAINING + VALIDATION)):
        is_query = number >= TRAINING
        queries += [family] * is_query
        for place, letters in enumerate([family.letters_L, *family.copies]):
            split = ("context" if place else "valid") if is_query else "train"
            name, text = f"{family.name}-{place}", "".join(STANDARD[one] for one in letters)
            lines[sequences].append(f">{name}\n{text}\n")
            lines[splits].append(f"{name}\t{split}\n")
            lines[clusters].append(f"{family.name}-0\t{name}\n")
    losses = {"best": best_loss(queries, kind), "frequencies": frequency_loss(queries)}
    lines[folder / "losses.json"] = [json.dumps(losses), "\n"]
    for path, text in lines.items():
        write_text(path, "".join(text))
    tables = ("--split-table", str(splits), "--cluster-table", str(clusters))
    protlm("prepare", str(sequences), "--out", str(folder / "data"), *tables)


def best_loss(queries: Sequence[Family], kind: str) -> float:
    """Returns the mean of -log P(residue | what came of it in the copies), in nats."""
    rate, _ = KINDS[kind]
    channel = (1 - rate) * np.eye(20) + rate * replacements()
    prior, losses = _frequencies(queries), list[np.ndarray]()
    for family in queries:
        log_p_L20 = np.tile(np.log(prior), (len(family.letters_L), 1))
        for copied_L in family.copied_KL:
            seen = copied_L >= 0
            log_p_L20[seen] += np.log(channel[:, copied_L[seen]].T)
        log_p_L20 -= np.log(np.exp(log_p_L20).sum(1, keepdims=True))
        losses.append(-np.take_along_axis(log_p_L20, family.letters_L[:, None], 1)[:, 0])
    return float(np.concatenate(losses).mean())


def frequency_loss(queries: Sequence[Family]) -> float:
    """Returns the entropy of the residues of the queries, in nats."""
    prior = _frequencies(queries)
    return float(-(prior * np.log(prior)).sum())


def _frequencies(queries: Sequence[Family]) -> np.ndarray:
    counts = np.bincount(np.concatenate([one.letters_L for one in queries]), minlength=20)
    return counts / counts.sum()


def make(job: tuple[str, str], given: argparse.Namespace) -> None:
    """Trains an arm on a kind of families, or continues it."""
    arm, kind = job
    folder = given.out / kind
    settings = [*BASE, *ARMS[arm], f"seed={given.seed}", f"data.dir={folder / 'data'}"]
    settings.append(f"trainer.valid_every={max(given.steps // 5, 1)}")
    train(settings, folder / name_of(arm), steps=given.steps)


def table(given: argparse.Namespace) -> str:
    """Returns the part of the possible gain of each arm and kind, in Markdown."""
    rows = [["attention", *given.kinds]]
    for arm in given.arms:
        rows.append([arm])
        for kind in given.kinds:
            loss = validations(given.out / kind / name_of(arm)).get(given.steps)
            if loss is None:
                rows[-1].append("")
                continue
            bounds = json.loads((given.out / kind / "losses.json").read_text())
            gain = (bounds["frequencies"] - loss) / (bounds["frequencies"] - bounds["best"])
            rows[-1].append(f"{loss:.3f} ({gain:.0%})")
    return markdown(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains what is missing, and prints the table after each kind."""
    parser = argparse.ArgumentParser(description="Which attention learns to copy from relatives.")
    parser.add_argument("fasta", type=Path, help="proteins, each of its own family")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--steps", type=int, default=125, help="steps of 8,192 tokens")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/copying"))
    given = parser.parse_args(arguments)
    keep_settings(given, "fasta", "steps", "seed")
    end_by_signal()
    for kind in given.kinds:
        if not all(given.steps in validations(given.out / kind / name_of(x)) for x in given.arms):
            write_families(given.fasta, kind, given.out / kind, given.seed)
        side_by_side(lambda arm, kind=kind: make((arm, kind), given), given.arms, given.jobs)
        print(table(given), flush=True)


if __name__ == "__main__":
    main()
