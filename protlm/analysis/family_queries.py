"""Queries with enough relatives, in one order that does not depend on what is masked in them."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from protlm.analysis.family_predictions import NUMBERS, Evidence
from protlm.data.batching.order import hashed
from protlm.data.families import Family, Relative
from protlm.data.families.family import keys_of
from protlm.data.masking import IGNORE, MaskingRule, corrupt, row_rng
from protlm.data.pairwise import aligned_letters, identities
from protlm.data.relatives import leaks
from protlm.data.vocabulary import VOCABULARY

# Where bins of the highest identity of a relative begin and end, in percent.
BINS = (0, 30, 50, 70, 90, 100)


@dataclass(frozen=True, eq=False)
class FamilyQuery:
    """A protein with masked residues, and its relatives in the order in which they are taken.

    Args:
        name: its name.
        family: the name of its family.
        residues: its residues.
        hidden: the places of the masked residues, int64.
        order: relatives, all of them less similar than allowed.
        letters: those aligned to the query, uint8 [relatives, residues].
        shifted: those along one diagonal, of the same shape.
        highest: the highest identity of all candidates, also of those that are not taken.

    Alignments, identities and the order come from the query as it is known: X at the targets. Only
    the rule that leaves out candidates which give the query away compares whole sequences.
    """

    name: str
    family: str
    residues: str
    hidden: np.ndarray
    order: Sequence[Relative]
    letters: np.ndarray
    shifted: np.ndarray
    highest: float

    @cached_property
    def places(self) -> np.ndarray:
        """Those of the targets, the masked residues that are in `STANDARD`, int64 [targets]."""
        return self.hidden[NUMBERS[[*self.residues.encode()]][self.hidden] >= 0]

    @cached_property
    def targets(self) -> np.ndarray:
        """The numbers in `STANDARD` of the targets, int64 [targets]."""
        return NUMBERS[[*self.residues.encode()]][self.places]

    @cached_property
    def masked(self) -> str:
        """Its residues, with X where they are masked."""
        return masked(self.residues, self.hidden)

    @property
    def bin(self) -> str:
        """The range of its highest identity."""
        place = int(np.searchsorted(BINS[1:-1], 100 * self.highest, side="right"))
        return f"{BINS[place]} to {BINS[place + 1]} %"

    def evidence(self, number: int, *, is_shifted: bool = False) -> Evidence:
        """Returns what its first relatives have at the targets, as aligned or as shifted."""
        letters = (self.shifted if is_shifted else self.letters)[:number]
        joined = "".join(one.residues for one in self.order[:number])
        return Evidence(joined, letters, self.places, identities(self.masked, letters))

    def num_residues(self, number: int) -> int:
        """Returns the residues of its first relatives."""
        return sum(len(one.residues) for one in self.order[:number])

    def within(self, tokens: int, around: int) -> int:
        """Returns how many of its first relatives fit into a number of tokens."""
        sizes = np.cumsum([len(one.residues) + around for one in self.order])
        return int(np.searchsorted(sizes, tokens, side="right"))


def masked(residues: str, places: np.ndarray) -> str:
    """Returns residues with X at some places.

    >>> masked("MKT", np.array([1]))
    'MXT'
    """
    letters = np.array([*residues])
    letters[places] = "X"
    return "".join(letters)


def hidden_of(residues: np.ndarray, rule: MaskingRule, *, seed: int, number: int) -> np.ndarray:
    """Returns the places of residues that `evaluation=masked` masks, int64.

    Args:
        residues: of a sequence, tokens uint8.
        rule: the fraction of them.
        seed: that of the evaluation.
        number: of the sequence in its split.
    """
    tokens = VOCABULARY.framed(residues)
    _, targets = corrupt(tokens, VOCABULARY.is_residue[tokens], rule, row_rng(seed, 0, number))
    return np.flatnonzero(targets[VOCABULARY.inner] != IGNORE)


def chosen(
    families: Iterable[tuple[Family, str, np.ndarray]],
    *,
    fewest: int,
    per_family: int,
    max_identity: float,
    seed: int,
    left_out: Counter[str],
) -> Iterator[FamilyQuery]:
    """Yields the first queries of each family that have enough relatives; counts the others.

    Args:
        families: candidates of each query, the name of its family, and its masked places.
        fewest: number of relatives below `max_identity` that a query needs.
        per_family: most queries of a family.
        max_identity: of relatives that are taken.
        seed: decides their order, with their residues and the name of the query.
        left_out: numbers of queries, and of relatives that tell a query, by reason; added to.
    """
    taken = Counter[str]()
    for family, name, hidden in families:
        if taken[name] == per_family:
            left_out[f"more than {per_family:,} of a family"] += 1
            continue
        if not (NUMBERS[[*family.query.encode()]][hidden] >= 0).any():
            left_out["nothing masked"] += 1
            continue
        query = masked(family.query, hidden)
        # Those that have too few need no alignment.
        relatives = [*family.relatives] if len(family.relatives) >= fewest else []
        why = leaks(
            VOCABULARY.encode(family.query), [VOCABULARY.encode(one.residues) for one in relatives]
        )
        left_out.update(f"relatives {reason}" for reason in filter(None, why))
        letters = aligned_letters(query, [one.residues for one in relatives])
        found = identities(query, letters)
        key = hashlib.sha256(f"{seed} {family.name}".encode()).digest()
        keys = hashed(keys_of(relatives), seed=int.from_bytes(key[:8], "big"))
        order = keys.argsort(kind="stable")
        is_taken = (found < max_identity) & np.array([not reason for reason in why], bool)
        order = order[is_taken[order]]
        if len(order) < fewest:
            left_out[f"fewer than {fewest:,} relatives below {max_identity:.0%} identity"] += 1
            continue
        taken[name] += 1
        # What a file says of columns, it says with the masked residues.
        known = [
            Relative(relatives[one].name, relatives[one].residues, float(found[one]))
            for one in order
        ]
        shifted = aligned_letters(query, [one.residues for one in known], has_gaps=False)
        yield FamilyQuery(
            *(family.name, name, family.query, hidden, known, letters[order], shifted),
            highest=float(found.max(initial=0)),
        )
