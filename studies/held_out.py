"""Held-out families: clusters at 30 % identity whose members no model of the study has seen.

    python -m studies.held_out SWISSPROT50.splits.tsv SWISSPROT_FULL.splits.tsv
        [--families 100] [--large 40] [--seed 0] [--out runs/relatives]

Draws clusters of `cluster30` of the training split with at least 17 representatives, some of them
with at least 33. To --out it writes what `protlm prepare` and `evaluation=relatives` take, of all
proteins of the second table; those of a cluster at 50 % belong to the family of its representative:

- clusters50.tsv and clusters30.tsv: representative and member, as MMseqs2 writes them.
- splits.tsv: the splits, with all members of drawn families in `test_ood_family`.
- candidates.tsv: representative and member of the drawn families alone.
- in_distribution.tsv: validation proteins of as many other clusters at 50 %, one of each, and the
  training proteins of their cluster, of which each has at least 17.
- groups.tsv: their family by accession.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from protlm.data.tables import read_labels
from studies.tables import write_text

FEWEST, LARGE = 17, 33


def drawn_families(sizes: Counter[str], number: int, large: int, seed: int) -> list[str]:
    """Draws families with enough members, `large` of them with many."""
    rng = np.random.default_rng(seed)
    many = sorted(name for name, size in sizes.items() if size >= LARGE)
    few = sorted(name for name, size in sizes.items() if FEWEST <= size < LARGE)
    chosen = [*rng.permutation(many)[:large], *rng.permutation(few)[: number - large]]
    return sorted(map(str, chosen))


def in_distribution(
    clusters: Mapping[str, str], splits: Mapping[str, str], number: int, seed: int
) -> Iterator[tuple[str, str]]:
    """Yields validation proteins, and the training proteins of their cluster."""
    members, queries = defaultdict[str, list[str]](list), dict[str, str]()
    for name, cluster in clusters.items():
        if splits[name] == "train":
            members[cluster].append(name)
        elif splits[name] == "valid":
            queries.setdefault(cluster, name)
    large = [one for one in sorted(queries) if len(members[one]) >= FEWEST]
    for cluster in np.random.default_rng(seed).permutation(large)[:number]:
        yield from ((queries[cluster], one) for one in members[cluster])


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws the families, and writes the tables."""
    parser = argparse.ArgumentParser(description="Held-out families of the study of relatives.")
    parser.add_argument("representatives", type=Path, help="accession, split, cluster30")
    parser.add_argument("proteins", type=Path, help="accession, split, cluster50")
    parser.add_argument("--families", type=int, default=100)
    parser.add_argument("--large", type=int, default=40, help="of them, with 33 members or more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/relatives"))
    given = parser.parse_args(arguments)
    split_of = read_labels(given.representatives, "accession", "split")
    family_of = read_labels(given.representatives, "accession", "cluster30")
    sizes = Counter(family_of[name] for name, split in split_of.items() if split == "train")
    held_out = {*drawn_families(sizes, given.families, given.large, given.seed)}
    clusters = read_labels(given.proteins, "accession", "cluster50")
    splits = read_labels(given.proteins, "accession", "split")
    families = {name: family_of.get(cluster, cluster) for name, cluster in clusters.items()}
    members = {name: family for name, family in families.items() if family in held_out}
    splits |= dict.fromkeys(members, "test_ood_family")
    given.out.mkdir(parents=True, exist_ok=True)
    for name, of in (("clusters50", clusters), ("clusters30", families), ("candidates", members)):
        write(given.out / f"{name}.tsv", "", ((cluster, one) for one, cluster in of.items()))
    known = in_distribution(clusters, splits, given.families, given.seed)
    write(given.out / "in_distribution.tsv", "", known)
    write(given.out / "groups.tsv", "accession\tfamily", members.items())
    write(given.out / "splits.tsv", "accession\tsplit", splits.items())
    counted = Counter(splits.values())
    print(f"{len(held_out)} families, {len(members):,} members; {dict(counted)}")


def write(path: Path, header: str, rows: Iterable[tuple[str, ...]]) -> None:
    """Writes a tab-separated table."""
    lines = [header] * bool(header) + ["\t".join(row) for row in rows]
    write_text(path, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
