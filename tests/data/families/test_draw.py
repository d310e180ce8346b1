"""Contexts: what decides a draw, its budget, its limits of identity, and its weights."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from protlm.data.families import LIMITS, Family, Relative, draw, draws
from protlm.data.vocabulary import STANDARD
from protlm.system.errors import UserError
from tests.data.families.conftest import QUERY, fasta


def family_of_sizes(*sizes: int, identities: list[float | None] | None = None) -> Family:
    """A family of different relatives of these lengths, without columns."""
    identities = identities or [None] * len(sizes)
    relatives = [
        Relative(f"r{n}", ((STANDARD[n % 20] + "AC"[n // 20]) * size)[:size], identity)
        for n, (size, identity) in enumerate(zip(sizes, identities, strict=True))
    ]
    return Family("MKV", "Q1", tuple(relatives), "ab" * 32)


def test_a_draw_depends_on_seed_name_file_and_number_alone() -> None:
    family = family_of_sizes(*range(20, 60))
    first = draw(family, number=2, tokens=500, seed=3)
    assert draw(family, number=2, tokens=500, seed=3).names == first.names
    # Whatever was drawn before, and the residues of a query that has a name.
    assert draws(family, count=5, tokens=500, seed=3)[2].names == first.names
    assert draw(replace(family, query="MKL"), number=2, tokens=500, seed=3).names == first.names
    others = [
        draw(family, number=6, tokens=500, seed=3),
        draw(family, number=2, tokens=500, seed=4),
        draw(replace(family, name="Q2"), number=2, tokens=500, seed=3),
        draw(replace(family, name=""), number=2, tokens=500, seed=3),
        draw(replace(family, name="", query="MKL"), number=2, tokens=500, seed=3),
        draw(replace(family, digest="cd" * 32), number=2, tokens=500, seed=3),
    ]
    assert len({tuple(one.names) for one in [first, *others]}) == 7
    assert len({one.digest for one in [first, *others]}) == 7


def test_draws_stay_as_they_are() -> None:
    """On all machines and in all versions, since stored results name them."""
    names = draw(family_of_sizes(*range(20, 60)), number=0, tokens=300, seed=0).names
    assert names == ["r10", "r7", "r5", "r31", "r0", "r23", "r28", "r18"]


def test_a_context_ends_at_the_first_that_does_not_fit() -> None:
    family = family_of_sizes(*[8] * 30, 200)
    for seed in range(20):
        order = draw(family, number=0, tokens=10**6, seed=seed)
        assert sorted(order.names) == sorted(one.name for one in family.relatives)
        assert order.num_tokens == 30 * 10 + 202
        context = draw(family, number=0, tokens=109, seed=seed)
        # Of eleven that are drawn first, ten fit with their frames, unless the long one is there.
        assert context.num_tokens == 10 * len(context.names) <= 100
        assert len(draw(family, number=0, tokens=110, seed=seed, around=3).names) <= 10
    sizes = Counter(len(draw(family, number=0, tokens=109, seed=n).names) for n in range(200))
    assert max(sizes) == 10 and 0.5 < sizes[10] / 200 < 0.85 and len(sizes) > 5


def test_the_order_of_a_context_is_not_that_of_its_draw() -> None:
    """The first of two that are drawn, with weights, stands first in half of the contexts."""
    family = family_of_sizes(8, 8)
    firsts = [draw(family, number=0, tokens=20, seed=n).names[0] for n in range(200)]
    only = [draw(family, number=0, tokens=10, seed=n).names[0] for n in range(200)]
    assert 60 < sum(one == other for one, other in zip(firsts, only, strict=True)) < 140
    assert 60 < firsts.count("r0") < 140


def test_contexts_have_limits_of_identity_in_turn() -> None:
    identities = [1.0, 0.96, 0.95, 0.71, 0.7, 0.51, 0.5, 0.2, None]
    family = family_of_sizes(*range(5, 14), identities=identities)
    for number in range(8):
        context = draw(family, number=number, tokens=10**6, seed=0)
        limit = LIMITS[number % 4]
        # What has no identity is in all of them.
        allowed = {x for x in identities if x is None or x <= limit}
        assert {one.identity for one in context.relatives} == allowed
        assert context.max_identity == limit


def test_copies_are_drawn_as_one(read) -> None:
    """Of nine near copies and one other, with weights, the other is first half of the time."""
    rng = np.random.default_rng(0)
    letters = np.array(list("ACDEFGHIKLMNPQRSTVWY"))
    one, other, query = ("".join(rng.choice(letters, 50)) for _ in range(3))
    copies = [one[:place] + "W" + one[place + 1 :] for place in range(9)]
    rows = fasta(query + "-", *(row + "-" for row in [*copies, other]), names="qabcdefghiz")
    for weights, low, high in (("neighbors", 0.38, 0.62), ("uniform", 0.02, 0.2)):
        family = read(rows, query, weights=weights)
        assert len(family.relatives) == 10
        firsts = [draw(family, number=0, tokens=52, seed=n).names for n in range(300)]
        assert low < firsts.count(["z"]) / 300 < high


def test_weights_stay_with_their_relatives_below_a_limit() -> None:
    family = family_of_sizes(*range(5, 10), identities=[1.0, 1.0, 0.5, 0.5, 0.5])
    # The weights of a family are computed once.
    vars(family)["weights"] = np.array([1e3, 1e-3, 1e-3, 1e3, 1e-3])
    for seed in range(20):
        assert draw(family, number=3, tokens=10, seed=seed).names == ["r3"]


def test_a_draw_is_of_what_a_model_reads(read) -> None:
    family = read(fasta(QUERY, "MKTAggYLAK--QLSFVKSHFS", "MKTAYLAKQRQLSFVKSHFS"))
    context = draw(family, number=0, tokens=99, seed=0)
    one, other = context.relatives
    assert {*map(id, context.relatives)} == {*map(id, family.relatives)}
    assert context.num_tokens == 44
    changed = [other._replace(columns=other.columns + 1), other._replace(residues="MKV")]
    given = [[one, other], [other, one], *([one, new] for new in changed)]
    assert len({replace(context, relatives=each).digest for each in given}) == 4
    renamed = [one, other._replace(name="x")]
    assert replace(context, relatives=renamed).digest == context.digest


def test_a_family_that_fits_into_no_context_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"none of the 2 relatives of Q1 .*9 tokens .*has 10\)"
    ) as e:
        draws(family_of_sizes(8, 9), count=2, tokens=9, seed=0)
    assert e.value.options == {"relatives_tokens": "TOKENS"}
    # A family without relatives is one of the query alone.
    assert draws(family_of_sizes(), count=1, tokens=9, seed=0)[0].names == []
    # Of four contexts, those of low limits are empty, and the second is equal to the first.
    contexts = draws(family_of_sizes(8, identities=[0.8]), count=4, tokens=99, seed=0)
    assert [one.max_identity for one in contexts] == [1.0]
    contexts = draws(family_of_sizes(8, 9), count=9, tokens=99, seed=0, most=1)
    assert {(one.max_identity, one.num_tokens) for one in contexts} == {(None, 10), (None, 11)}
    assert len(contexts) == 2
    # All fit, in one order or another.
    several = {"family": family_of_sizes(8, 9, 10), "count": 9, "tokens": 99, "seed": 0}
    assert 1 < len(draws(**several)) <= 6 and len(draws(**several, has_order=False)) == 1
