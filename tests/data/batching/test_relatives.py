"""Documents of relatives: each member in one of them, pure functions of the seed, whole in rows."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from protlm.data.batching.contexts import Contexts
from protlm.data.batching.order import EpochOrder, permuted
from protlm.data.batching.plan import BatchStream, Progress, forecast
from protlm.data.batching.relatives import Families, FamiliesRow, WholeFamilies
from protlm.data.shards.data_set import open_clusters, open_split
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.system.errors import UserError

MEMBERS = [1, 1, 2, 3, 4, 6, 1, 12, 27]
CLUSTERS = np.random.default_rng(0).permutation(np.repeat(np.arange(len(MEMBERS)), MEMBERS))
RULE = WholeFamilies(600, 100, block=5, row=300, members=4, alone=0.3, last=0.4)
# Documents of all that they may have.
ROOMY = WholeFamilies(10_000, 100, block=5, row=10_000, members=4)


def sequences(number, seed=0, most=90):
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice([*STANDARD], n)) for n in rng.integers(6, most, number)]


@pytest.fixture
def make(make_data_set):
    """Makes the families of sequences and their clusters."""

    def made(rule, texts=None, clusters=CLUSTERS, name="data"):
        texts = sequences(len(clusters)) if texts is None else texts
        proteins = [(f"{name}{number}", text) for number, text in enumerate(texts)]
        folder = make_data_set(proteins, name, [*map(int, clusters)])
        return Families([open_split(folder, "train")], [1], [open_clusters(folder, "train")], rule)

    return made


@pytest.fixture
def make_mixture(make):
    def made(rule):
        parts = [make(rule), make(rule, clusters=[0] * 9 + [1, 2], name="other")]
        splits, indexes = (
            [getattr(one, name)[0] for one in parts] for name in ("_splits", "clusters")
        )
        return Families(splits, [3, 1], indexes, rule)

    return made


def documents_of(families, epoch=0, seed=1, positions=None):
    """The samples of each document."""
    order = families.order(seed=seed)
    drawn = order.draw(epoch, np.arange(len(order)) if positions is None else positions)
    assert len(drawn.samples) == len(drawn.passes) == drawn.documents.sizes.sum()
    return [part.tolist() for part in np.split(drawn.samples, drawn.documents.sizes.cumsum()[:-1])]


def stream(families, rule=RULE, **options):
    return BatchStream(families.lengths_of, families.order(seed=1), rule, **options)


@pytest.mark.parametrize("size", [1, 2, 3, 63, 64, 65, 300])
def test_each_key_has_a_permutation_of_its_own(size):
    keys = np.random.default_rng(size).integers(0, 2**64, 2_000, np.uint64)
    places, sizes = np.tile(np.arange(size), len(keys)), np.full(len(keys) * size, size)
    orders = permuted(places, sizes, keys.repeat(size)).reshape(len(keys), size)
    assert np.array_equal(np.sort(orders), np.tile(np.arange(size), (len(keys), 1)))
    for place in (0, size - 1):
        # Every item is there equally often; chi-square has the mean size - 1, twice that variance.
        expected = len(keys) / size
        counts = np.bincount(orders[:, place], minlength=size)
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_square - (size - 1)) <= 5 * (2 * (size - 1)) ** 0.5


def test_an_epoch_divides_each_cluster_into_documents(make):
    families, seen = make(ROOMY), set()
    assert len(families.order()) == sum(-(-size // 4) for size in MEMBERS)
    first = np.cumsum([0, *(-(-size // 4) for size in MEMBERS)])
    for epoch in range(12):
        documents = documents_of(families, epoch)
        assert sorted(chain(*documents)) == list(range(sum(MEMBERS)))
        sizes = defaultdict(list)
        for document in documents:
            (cluster,) = {int(CLUSTERS[sample]) for sample in document}
            sizes[cluster].append(len(document))
        for cluster, size in enumerate(MEMBERS):
            # All but one are full.
            full, rest = divmod(size, 4)
            assert sorted(sizes[cluster], reverse=True) == [4] * full + [rest] * (rest > 0)
        # Documents come in the order of the epoch.
        epoch_order = EpochOrder(int(first[-1]), seed=1, epoch=epoch)[np.arange(first[-1])]
        expected = np.searchsorted(first, epoch_order, side="right") - 1
        assert [int(CLUSTERS[document[0]]) for document in documents] == expected.tolist()
        seen |= {frozenset(document) for document in documents if CLUSTERS[document[0]] == 8}
    # The members of a large cluster meet others in each pass.
    assert len(seen) > 80


def test_any_document_is_computed_directly(make, make_mixture):
    for families in (make(RULE, name="one"), make_mixture(RULE)):
        some = np.random.default_rng(0).integers(0, len(families.order()), 20)
        for epoch in (0, 3, 10**6):
            whole = documents_of(families, epoch)
            assert documents_of(families, epoch, positions=some) == [whole[n] for n in some]
        assert documents_of(families) != documents_of(families, seed=2)


def test_a_mixture_has_the_documents_of_each_data_set_in_turn(make_mixture):
    families = make_mixture(ROOMY)
    order, size = families.order(seed=1), sum(MEMBERS)
    assert len(order) == 18 + 5
    drawn = [documents_of(families, epoch) for epoch in range(8)]
    is_other = [document[0] >= size for document in chain(*drawn)]
    assert abs(sum(is_other) - len(is_other) / 4) < 1
    # Three passes over the first and one over the other take as long as 24 documents or 20.
    first = [document for document in chain(*drawn) if document[0] < size]
    for start in range(0, len(first) - 18, 18):
        assert sorted(chain(*first[start : start + 18])) == list(range(size))


def test_rows_have_whole_documents_and_each_member_once(make):
    families = make(RULE)
    rows = [row for plan in stream(families) for row in plan.rows]
    assert sorted(chain(*(row.samples for row in rows))) == list(range(sum(MEMBERS)))
    assert all(isinstance(row, FamiliesRow) for row in rows)
    found = []
    for row in rows:
        assert sum(row.families) == len(row.samples) == len(row.targets)
        assert sum(families.lengths_of(np.array(row.samples)) + 2) <= 300
        cuts = np.cumsum(row.families)[:-1]
        parts = zip(np.split(row.samples, cuts), np.split(row.targets, cuts), strict=True)
        found += [(part.tolist(), targets.tolist()) for part, targets in parts]
    drawn = families.order(seed=1).draw(0, np.arange(18)).documents
    # A document is a family, or as many as it has proteins; the last alone has targets, or all.
    sizes = [part.tolist() for part in np.split(drawn.leads, drawn.sizes.cumsum()[:-1])]
    expected = []
    for document, leads in zip(documents_of(families), sizes, strict=True):
        expected += [[one] for one in document] if all(leads) else [document]
    assert sorted(part for part, _ in found) == sorted(expected)
    for part, targets in found:
        assert targets in ([True] * len(part), [False] * (len(part) - 1) + [True])


@pytest.mark.slow
def test_the_fractions_are_those_of_documents(make):
    families = make(
        replace(RULE, tokens=300), texts=sequences(8_000, most=20), clusters=np.arange(8_000) // 4
    )
    order = families.order(seed=1)
    drawn = order.draw(0, np.arange(len(order))).documents
    leads, targets = drawn.leads.reshape(-1, 4), drawn.targets.reshape(-1, 4)
    is_alone, is_last = leads.all(1), ~targets[:, 0]
    assert not (is_alone & is_last).any()
    assert (leads[~is_alone] == [True, False, False, False]).all()
    assert (targets[is_last] == [False, False, False, True]).all() and targets[~is_last].all()
    for flags, fraction in ((is_alone, 0.3), (is_last, 0.4)):
        deviation = (fraction * (1 - fraction) / len(flags)) ** 0.5
        assert abs(flags.mean() - fraction) < 4 * deviation
    # Each pass draws them anew.
    again = order.draw(1, np.arange(len(order))).documents
    assert (again.leads.reshape(-1, 4).all(1) != is_alone).any()


def test_what_is_left_out_is_counted_and_the_rest_moves_with_the_pass(make):
    texts = ["M" * 99, "M" * 98, "A" * 40, "A" * 40, *sequences(3, most=60), "A" * 40]
    rule = replace(RULE, members=8, tokens=200, alone=0.0)
    families = make(rule, texts, clusters=[0] * 7 + [1])
    left, unfit = Counter(), set()
    for epoch in range(20):
        drawn = families.order(seed=1).draw(epoch, np.arange(2))
        taken = set(drawn.samples.tolist())
        told = drawn.documents.left_out
        counts = [
            next(n for why, n in told.items() if word in why) for word in ("long", "equal", "fit")
        ]
        assert len(taken) + sum(counts) == len(texts)
        # One has a token too many; the copy in the other cluster is another document's.
        assert counts[:2] == [1, 1] and not taken & {0} and len(taken & {2, 3}) <= 1 and 7 in taken
        left.update(told)
        unfit |= {1, 4, 5, 6} - taken
        assert sum(families.lengths_of(np.array([*taken - {7}])) + 2) <= 200
    assert unfit == {1, 4, 5, 6}
    found = forecast(families.lengths_of, families.order(seed=1), rule)
    assert "1 of the first 2 documents have relatives" in found
    assert "1 proteins longer than data.max_length, 1 equal to another one" in found


def test_a_run_resumes_after_any_batch(make_mixture):
    """Progress counts documents, and an epoch ends when all of them were read."""
    families = make_mixture(RULE)
    plans = list(stream(families, num_batches=40))
    assert plans[-1].after.epoch > 1
    assert Progress(1) in {plan.after for plan in plans}
    for done, plan in enumerate(plans[:-1], start=1):
        rest = stream(families, start=plan.after, num_batches=40, done=done)
        assert next(iter(rest)) == plans[done]


def test_documents_without_a_protein_that_fits_are_read_as_others(make):
    """They take no room; a run without any protein is refused."""
    texts = [text * (1 + 50 * (number % 3 > 0)) for number, text in enumerate(sequences(40))]
    families = make(RULE, texts, clusters=range(40))
    plans = list(stream(families))
    assert sorted(s for plan in plans for row in plan.rows for s in row.samples) == list(
        range(0, 40, 3)
    )
    assert plans[-1].after == Progress(1)
    told = r"no protein of the first 5 documents fits into data\.max_length=7; type a larger"
    with pytest.raises(UserError, match=told):
        list(stream(make(replace(RULE, max_length=7), name="none"), replace(RULE, max_length=7)))


def test_rows_of_peptides_have_a_limited_number(make):
    """A document of 32 or of 4."""
    for members, some in ((32, [0] * 60), (4, np.arange(60) // 4)):
        texts = [
            first + "M" * (2 + number % 4) for first in "ACDEFGHIKLNPQRS" for number in range(4)
        ]
        families = make(replace(RULE, members=members), texts, some, name=f"of{members}")
        rows = [row for plan in stream(families) for row in plan.rows]
        assert 0 < max(len(row.samples) for row in rows) <= 300 // 16
    assert sum(len(row.samples) for row in rows) == 60


QUERY = sequences(1, seed=5, most=91)[0] + "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"
WORD = "W" * 12
LEAKS = {
    "equal": [QUERY],
    "contain": [QUERY[1:], QUERY[5:-5], "GG" + QUERY],
    # One substitution; 96 % of the query beside others; not half of it.
    "identical": [QUERY[:30] + "W" + QUERY[31:], WORD + QUERY[: round(0.96 * len(QUERY))] + WORD],
    "": [QUERY[: len(QUERY) // 2] + STANDARD + STANDARD[::-1], *sequences(2, seed=6, most=50)],
}


def contexts_of(make, rule, texts, clusters, queries, of):
    context = make(rule, texts, clusters)
    asked = make(rule, queries, of, name="asked")
    return Contexts(context._splits[0], context.clusters[0], asked._splits[0], rule)


def test_contexts_do_not_give_the_query_away(make):
    texts = list(chain(*LEAKS.values()))
    rule = replace(RULE, max_length=200, members=20, row=2_000, tokens_per_batch=2_000)
    contexts = contexts_of(
        make, rule, texts, [7] * len(texts), [QUERY, "MKV", "A" * 199], [7, 6, 7]
    )
    assert contexts.has_relatives() and contexts.clusters(np.arange(3)).tolist() == [0, -1, 0]
    drawn = contexts.order(shuffle=False).draw(0, np.arange(3))
    told = drawn.documents.left_out
    for word, some in LEAKS.items():
        if word:
            assert [n for why, n in told.items() if word in why and "query" in why] == [len(some)]
    # The query is last, with its targets; one has no relatives; one is too long.
    assert drawn.documents.sizes.tolist() == [4, 1, 0]
    assert [VOCABULARY.decode(contexts[n]) for n in drawn.samples[3:]] == [QUERY, "MKV"]
    assert {VOCABULARY.decode(contexts[n]) for n in drawn.samples[:3]} == set(LEAKS[""])
    assert drawn.documents.targets.tolist() == [False, False, False, True, True]
    assert drawn.documents.leads.tolist() == [True, False, False, False, True]


def test_contexts_are_the_same_every_time_and_of_the_query_s_cluster(make):
    of = np.random.default_rng(3).integers(0, 14, 30)
    contexts = contexts_of(make, RULE, None, CLUSTERS, sequences(30, seed=9), of)
    order = contexts.order(shuffle=False)
    assert len(order) == 30
    drawn = order.draw(0, np.arange(30))
    assert np.array_equal(
        drawn.samples, contexts.order(shuffle=False).draw(0, np.arange(30)).samples
    )
    size = sum(MEMBERS)
    parts = np.split(drawn.samples, drawn.documents.sizes.cumsum()[:-1])
    for query, part in enumerate(parts):
        *relatives, last = part.tolist()
        assert last == size + query and {int(CLUSTERS[one]) for one in relatives} <= {
            int(of[query])
        }
        room = 300 - len(contexts[last]) - 2
        wanted = MEMBERS[of[query]] if of[query] < len(MEMBERS) else 0
        assert len(relatives) == min(wanted, 3) or sum(contexts.lengths_of(part)) > room - 92
    rows = [row for plan in BatchStream(contexts.lengths_of, order, RULE) for row in plan.rows]
    assert sorted(chain(*(row.samples for row in rows))) == sorted(drawn.samples.tolist())
