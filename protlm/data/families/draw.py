"""Contexts: relatives of a query that are drawn from its family, within a budget of tokens."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from protlm.data.batching.order import hashed
from protlm.data.families.family import Family, Relative
from protlm.system.errors import UserError

# The highest identities to the query in contexts, in turn.
LIMITS = (1.0, 0.95, 0.70, 0.50)
# Special tokens around a protein: `<cls>` and `<eos>`.
AROUND = 2


@dataclass(frozen=True, eq=False)
class Draw:
    """A context; without relatives if none is below the limit, or the first does not fit.

    Args:
        max_identity: the highest identity to the query that was allowed; None if all are unknown.
        relatives: in the order in which a model reads them.
        num_tokens: residues and special tokens of all.
    """

    max_identity: float | None
    relatives: Sequence[Relative]
    num_tokens: int

    @property
    def names(self) -> list[str]:
        """The names of the relatives."""
        return [one.name for one in self.relatives]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what a model reads: residues and columns, in order; in hexadecimal."""
        columns = [x.columns if x.columns is None else x.columns.tolist() for x in self.relatives]
        return _digest([one.residues for one in self.relatives], columns)


def draw(
    family: Family,
    *,
    number: int,
    tokens: int,
    seed: int,
    around: int = AROUND,
    most: int | None = None,
) -> Draw:
    """Draws a context without replacement, with the weights of the family, and shuffles it.

    It ends at the first relative that does not fit. Apart from the limits, it depends on `seed`,
    `number`, the family's digest, and the name of the query or else its residues: not on what was
    drawn before.

    Args:
        family: a query and its relatives.
        number: of the context, from 0; it decides the limit of identity, in turn `LIMITS`.
        tokens: the budget: most residues and special tokens of the relatives.
        seed: any integer.
        around: special tokens around each protein.
        most: maximum number of relatives.
    """
    limit = LIMITS[number % len(LIMITS)]
    is_known = any(one.identity is not None for one in family.relatives)
    places = np.array(
        [
            place
            for place, one in enumerate(family.relatives)
            if one.identity is None or one.identity <= limit
        ],
        np.intp,
    )
    key = int(_digest(seed, family.name or family.query, family.digest, number)[:16], 16)
    # Exponential times at rates of the weights: the order of arrival is a draw without replacement.
    uniform = ((hashed(family.keys[places], seed=key) >> np.uint64(11)) + 0.5) / 2**53
    order = places[np.argsort(-np.log(uniform) / family.weights[places], kind="stable")]
    sizes = np.array([len(family.relatives[place].residues) + around for place in order], np.int64)
    taken = order[: int(np.searchsorted(sizes.cumsum(), tokens, side="right"))][:most]
    shuffled = taken[hashed(family.keys[taken], seed=key, stream=1).argsort(kind="stable")]
    return Draw(
        limit if is_known else None,
        [family.relatives[place] for place in shuffled],
        int(sizes[: len(taken)].sum()),
    )


def draws(
    family: Family,
    *,
    count: int,
    tokens: int,
    seed: int,
    around: int = AROUND,
    most: int | None = None,
    has_order: bool = True,
) -> list[Draw]:
    """Draws the contexts of a query, as `draw` does; refuses a family of which nothing fits.

    Those that are empty, where no relative is below their limit of identity, and those that are
    equal to an earlier one, where order has no meaning in any order, are left out. A query without
    relatives has one, which is empty.
    """
    every = [
        draw(family, number=number, tokens=tokens, seed=seed, around=around, most=most)
        for number in range(count)
    ]
    found = dict[str, Draw]()
    for one in every:
        content = one.digest if has_order else " ".join(sorted(x.residues for x in one.relatives))
        found.setdefault(content, one)
    contexts = [one for one in found.values() if one.relatives]
    if family.relatives and not contexts:
        shortest = min(len(relative.residues) for relative in family.relatives) + around
        raise UserError(
            f"none of the {len(family.relatives):,} relatives of {family.name or 'the query'} is "
            f"in a context: those drawn first do not fit into {tokens:,} tokens (the shortest has "
            f"{shortest:,}), or are more identical to the query than the contexts allow",
            {"relatives_tokens": "TOKENS"},
        )
    return contexts or every[:1]


def _digest(*values: int | str | Sequence[object]) -> str:
    """Returns the SHA-256 of values, in hexadecimal."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
