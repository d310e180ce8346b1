"""What relatives are worth: planted models are shown for what they are, and baselines are right."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch

from protlm.analysis.family_predictions import (
    PREDICTORS,
    Background,
    Evidence,
    columns,
    composition,
    cross_fitted,
    family_means,
    nearest,
)
from protlm.analysis.family_queries import chosen, hidden_of
from protlm.analysis.masked_residues import log_probabilities
from protlm.data.families import Family, Relative, read_family
from protlm.data.masking import MaskingRule
from protlm.data.pairwise import aligned_letters, substitutions
from protlm.data.vocabulary import STANDARD, VOCABULARY, Vocabulary, vocabulary_of
from protlm.evaluation.accuracy import Accuracy
from protlm.evaluation.base import EvaluationData
from protlm.evaluation.relatives import Relatives
from protlm.interface import Model
from protlm.interop.e1 import E1
from protlm.model.relatives import InContexts
from protlm.options.relatives import FamilyOptions
from protlm.system.errors import InputDataError, UserError
from tests.small_models import small_model

UNIFORM = Background(np.full(20, 0.05))
FAMILIES, MEMBERS, LENGTH = 24, 6, 60


class Split:
    """A split in memory."""

    def __init__(self, sequences: dict[str, str], fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.names, self.texts = [*sequences], [*sequences.values()]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> np.ndarray:
        return VOCABULARY.encode(self.texts[number])

    def identifier(self, number: int) -> str:
        return self.names[number]

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        return np.array([len(self.texts[number]) for number in numbers])

    def length_counts(self) -> np.ndarray:
        return np.bincount([len(one) for one in self.texts])


@pytest.fixture(scope="module")
def families() -> dict[str, list[str]]:
    """A query and relatives of it, in which two of three residues are replaced."""
    rng = np.random.default_rng(0)
    found = {}
    for number in range(FAMILIES):
        query = rng.choice([*STANDARD], LENGTH)
        others = [
            np.where(rng.random(LENGTH) < 0.65, rng.choice([*STANDARD], LENGTH), query)
            for _ in range(MEMBERS)
        ]
        found[f"F{number}"] = ["".join(one) for one in (query, *others)]
    return found


class Planted:
    """A model whose letters are those of the relatives before it, or of nothing."""

    max_residues, causal = None, False
    description = SimpleNamespace(objective=SimpleNamespace(value="masked"))
    vocabulary: Vocabulary = VOCABULARY

    def __init__(self, copied: str | None = None) -> None:
        self.copied = copied

    def batch_of(self, sequences: Sequence[str]) -> Any:
        (text,) = sequences
        tokens = torch.from_numpy(self.vocabulary.framed(self.vocabulary.encode(text)))[None]
        return SimpleNamespace(tokens_BL=tokens, mask_BL=torch.ones_like(tokens).bool())

    def network(self, tokens_BL: torch.Tensor, mask_BL: torch.Tensor, *, causal: bool) -> Any:
        """A tenth of the probability is for all tokens, the rest for what is copied, if it is."""
        logits_BLV = torch.zeros(*tokens_BL.shape, len(VOCABULARY))
        if self.copied:
            place = torch.from_numpy(VOCABULARY.encode(self.copied).astype(int))[:LENGTH]
            logits_BLV[0, torch.arange(1, len(place) + 1), place] = 3.0
        return SimpleNamespace(logits_BLV=logits_BLV)


class Contexts:
    """Contexts of planted models: those that copy the `nearest` relative, or ignore all.

    Those that know the `truth` do so after relatives of the query, and of nothing else.
    """

    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, families: dict[str, list[str]], copies: str = "") -> None:
        self.families, self.copies, self.model = families, copies, Planted()

    def family(self, name: str, residues: str) -> Family:
        return read_family(self.families[name][1:], residues, name)

    def after(self, relatives: Sequence[Relative], residues: str, tokens_per_batch: int) -> Planted:
        assert residues.count("X") > 0, "what is masked is not known"
        known = [one.residues for one in relatives]
        if not (self.copies and relatives):
            return Planted()
        if self.copies == "truth":
            own = (some[0] for some in self.families.values() if known[0] in some)
            return Planted(next(own, None))
        # Of two that are as near, one that does not depend on the order.
        nearest = max(known, key=lambda one: (sum(map(str.__eq__, one, residues)), one))
        return Planted(nearest)


def data_of(families: dict[str, list[str]], contexts: Any) -> EvaluationData:
    queries = {name: members[0] for name, members in families.items()}
    split, train = (cast(Any, Split(queries, name)) for name in ("test", "train"))
    return EvaluationData(split, train, 1_000, "test", contexts)


@pytest.mark.parametrize("copies", ["nearest", "truth", ""])
def test_planted_models_are_shown_for_what_they_are(
    copies: str, families: dict[str, list[str]]
) -> None:
    evaluation = Relatives(numbers=[1, 4], tokens=[121], max_identity=0.9)
    contexts: Any = Contexts(families, copies)
    found = evaluation.run(contexts.model, data_of(families, contexts))
    assert found["families"] == found["queries"] == FAMILIES and not found["left_out"]
    alone, some = found["curve"]["0"]["model"], found["curve"]["4"]["model"]
    assert alone["nats"]["mean"] == pytest.approx(np.log(len(VOCABULARY)))
    assert some["perplexity"] == pytest.approx(np.exp(some["nats"]["mean"]))
    # Two relatives of 60 residues do not fit with their special tokens.
    assert found["contexts"]["121 tokens"] == {"relatives": 1.0, "tokens": 62.0}
    assert found["curve"]["121 tokens"] == found["curve"]["1"]
    differences, own = found["differences"], found["controls"]["own copy"]
    for name, one in differences.items():
        # Each family has one query, and is in one bin.
        parts = [part["families"] * part[name]["mean"] for part in found["bins"].values()]
        assert sum(parts) == pytest.approx(FAMILIES * one["mean"], abs=1e-9)
    means = [alone, some, found["curve"]["4"]["columns"]]
    first, model, columns = (one["nats"]["mean"] for one in means)
    assert found["share_closed"]["mean"] == pytest.approx((first - model) / (first - columns))
    mixed = differences.pop("mixed - mixed alone")
    if not copies:
        zero = {name: differences[f"model - {name}"] for name in ("alone", "unrelated", "shuffled")}
        assert all(one["mean"] == one["low"] == one["high"] == 0 for one in zero.values())
        assert mixed["mean"] == 0 and own["nats"] == alone["nats"]
        return
    assert differences["model - alone"]["high"] < 0 > differences["model - unrelated"]["high"]
    assert differences["model - shuffled"]["high"] < 0 and own["accuracy"] == 1
    orders = [found["controls"][f"order {n}"]["nats"]["mean"] for n in range(1, 6)]
    assert orders == [pytest.approx(some["nats"]["mean"])] * 5
    if copies == "truth":
        assert some["accuracy"] == 1 and mixed["high"] < 0
        return
    # It copies nothing but the nearest relative, which a baseline does as well.
    assert 3 * alone["accuracy"] < some["accuracy"] < 1 and abs(mixed["mean"]) < 0.1
    assert some["accuracy"] == pytest.approx(found["curve"]["4"]["nearest"]["accuracy"], abs=0.05)


def test_columns_are_better_than_the_nearest_relative_and_both_than_composition(
    families: dict[str, list[str]],
) -> None:
    contexts: Any = Contexts(families)
    curve = Relatives(numbers=[6], tokens=[], max_identity=0.9).run(
        contexts.model, data_of(families, contexts)
    )["curve"]
    nats = {who: one["nats"]["mean"] for who, one in curve["6"].items()}
    assert nats["columns"] < nats["nearest"] < nats["composition"]
    assert nats["mixed"] == nats["mixed alone"] <= nats["columns"] + 0.05
    # Without relatives, all have the residues of the training split alone.
    alike = ("composition", "columns", "diagonal", "nearest")
    assert len({curve["0"][who]["nats"]["mean"] for who in alike}) == 1


@pytest.mark.slow
def test_without_relatives_it_is_the_masked_evaluation(
    families: dict[str, list[str]], tmp_path: Path
) -> None:
    model = Model.of(small_model("hybrid", relatives="ordered"))
    sequences = tmp_path / "members.fasta"
    rows = [(f"{name}-{n}", x) for name, some in families.items() for n, x in enumerate(some[1:])]
    sequences.write_text("".join(f">{name}\n{text}\n" for name, text in rows))
    table = tmp_path / "cluster.tsv"
    table.write_text("".join(f"{name.split('-')[0]}\t{name}\n" for name, _ in rows))
    contexts = InContexts(model, table, FamilyOptions(whole_relatives=sequences))
    data = data_of(families, contexts)
    found = Relatives(numbers=[0, 2], tokens=[], max_identity=1.0, seed=3).run(model, data)
    alone = Accuracy(objective="masked", seed=3).run(model, data_of(families, None))
    assert found["targets"] == alone["targets"] and found["queries"] == FAMILIES
    assert found["relatives"]["relatives"] == contexts.settings["relatives"]
    nats = Relatives(numbers=[], tokens=[], max_identity=1.0, seed=3, controls=False)
    result = nats.run(model, data)["curve"]["0"]["model"]
    assert result == found["curve"]["0"]["model"]
    # Families have a protein each here, of different numbers of targets.
    path = tmp_path / "queries.tsv"
    Relatives(numbers=[], tokens=[], per_query=str(path), seed=3).run(model, data)
    header, *lines = (tmp_path / "queries.test.tsv").read_text().splitlines()
    place = header.split("\t").index("model, 0")
    sums = [float(line.split("\t")[place]) for line in lines]
    expected = np.log(alone["model"]["perplexity"]) * alone["targets"]
    assert sum(sums) == pytest.approx(expected, rel=1e-5)


def test_a_query_is_known_without_its_targets() -> None:
    """Order, alignment, identities and the nearest relative do not move with masked residues."""
    rng = np.random.default_rng(1)
    query, other = ("".join(rng.choice([*STANDARD], 50)) for _ in range(2))
    places = np.arange(0, 50, 3)
    hidden = [*query]
    for place in places:
        hidden[place] = STANDARD[(STANDARD.index(query[place]) + 1) % 20]
    relatives = [query[:25] + other[25:], other[:30] + query[30:], other]

    def of(residues: str) -> Any:
        family = read_family(relatives, residues, "Q")
        (found,) = chosen(
            [(family, "F", places)],
            fewest=2,
            per_family=1,
            max_identity=1.0,
            seed=0,
            left_out=Counter(),
        )
        return found

    one, same = of(query), of("".join(hidden))
    assert (one.letters == same.letters).all() and (one.shifted == same.shifted).all()
    assert [x.identity for x in one.order] == [x.identity for x in same.order]
    assert one.highest == same.highest and (one.targets != same.targets).all()
    evidence = [found.evidence(2) for found in (one, same)]
    assert evidence[0].identities.tolist() == evidence[1].identities.tolist()
    # What is predicted along one diagonal has the letters there, and nothing else has.
    assert (
        [name for name, x in PREDICTORS.items() if x.is_shifted] == ["diagonal"]
        and np.shares_memory(evidence[0].letters, one.letters)
        and np.shares_memory(one.evidence(2, is_shifted=True).letters, one.shifted)
    )
    assert all(x.columns is None for x in one.order)
    # Bins are of all candidates, and the order takes those below the limit alone.
    (low,) = chosen(
        [(read_family(relatives, query, "Q"), "F", places)],
        fewest=1,
        per_family=1,
        max_identity=0.5,
        seed=0,
        left_out=(left_out := Counter[str]()),
    )
    assert low.bin == one.bin == "50 to 70 %" and len(low.order) == 2 and not left_out


def test_queries_and_relatives_that_are_left_out_are_counted() -> None:
    rng = np.random.default_rng(2)
    texts = ["".join(rng.choice([*STANDARD], 40)) for _ in range(4)]
    near = texts[0][:20] + "A" + texts[0][21:]
    # Compared with X at both places, the first one would have 78 % of the 6-mers.
    family, places = read_family([near, *texts[1:]], texts[0]), np.array([3, 12])
    given = [(family, "F", places), (family, "F", places), (family, "G", places[:0])]
    left_out, told = Counter[str](), "relatives nearly identical to their query (80 % of 6-mers)"
    limits = {"per_family": 1, "max_identity": 0.99, "seed": 0, "left_out": left_out}
    (found,) = chosen(given, fewest=3, **limits)
    assert near not in {one.residues for one in found.order} and found.highest > 0.9
    assert left_out == {"more than 1 of a family": 1, "nothing masked": 1, told: 1}
    assert [*chosen(given[:1], fewest=4, **limits)] == []
    assert left_out["fewer than 4 relatives below 99% identity"] == 1 and left_out[told] == 2
    # The order is one of many, and not that of similarity.
    queries = (next(chosen(given, fewest=3, **limits | {"seed": seed})) for seed in range(20))
    assert len({tuple(one.residues for one in query.order) for query in queries}) > 3


def test_alignments_are_global_with_free_ends() -> None:
    """Fragments, longer proteins and insertions, and unknown residues on both sides."""
    query = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"
    relatives = [query[10:], "GSHM" + query, query[:15] + "GGGGG" + query[15:], "U" + query[1:]]
    letters = aligned_letters(query, relatives)
    fragment, longer, inserted, rare = (row.tobytes().decode("latin1") for row in letters)
    assert fragment == "\0" * 10 + query[10:] and longer == inserted == query
    assert rare == "U" + query[1:]
    # Along one diagonal, the shorter side of an insertion is lost.
    *equal, shifted, _ = aligned_letters(query, relatives, has_gaps=False)
    assert (equal == letters[:2]).all() and shifted[15:].tobytes().decode() == query[15:]


def test_predictions_of_relatives_are_those_of_the_papers() -> None:
    letters = np.frombuffer(b"AAWWAAWWAC\0W", np.uint8).reshape(3, 4)
    evidence = Evidence("AAWWAAWWACW", letters, np.array([0, 1, 2]), np.array([0.2, 0.1, 0.4]))
    table = substitutions(UNIFORM.frequencies)
    assert np.allclose(table.sum(1), 1) and (table.argmax(1) == np.arange(20)).all()
    a, c, w = (STANDARD.index(x) for x in "ACW")
    # The first two are neighbors, of half a weight each; the third has no residue in one column.
    expected = np.zeros((3, 20))
    expected[0, a] = 2
    expected[1, [a, c]] = 1
    expected[2, w] = 1
    assert np.array_equal(evidence.counts, expected)
    found = columns(evidence, UNIFORM, (2.0, 1.0))
    by_hand = expected[1] + 2.0 * (table[a] + table[c]) / 2 + 0.05
    assert np.allclose(found[1], by_hand / by_hand.sum())
    # The third one is the nearest, and where it has no residue, the first one.
    near = nearest(evidence, UNIFORM, (0.3, 0.0))
    assert near[1, c] == pytest.approx(0.7 + 0.3 * table[c, c])
    assert near[2, w] == pytest.approx(0.7 + 0.3 * table[w, w])
    assert np.allclose(nearest(evidence, UNIFORM, (0.3, 0.2)), 0.8 * near + 0.2 * 0.05)
    counts = np.bincount([a] * 5 + [c] + [w] * 5, minlength=20)
    assert np.allclose(composition(evidence, UNIFORM, 10.0), (counts + 0.5) / 21)
    nothing = Evidence("", letters[:0], evidence.places, np.zeros(0))
    for predict, grid, _ in PREDICTORS.values():
        assert np.allclose(predict(nothing, UNIFORM, grid[0]), 0.05)


def test_parameters_are_those_of_the_other_families() -> None:
    """The second value is the best of all, but without family 1 the first one is."""
    nats = np.array([[1.0, 1.0, 8.0, 1.0, 1.0], [2.0, 2.0, 0.0, 2.0, 2.0]])
    families = np.array([0, 0, 1, 2, 3])
    assert cross_fitted(nats, np.ones(5), families).tolist() == [1, 1, 0, 1, 1]
    assert family_means(nats[0], np.ones(5), families).tolist() == [1, 8, 1, 1]


def test_fewer_than_twenty_families_have_no_interval(families: dict[str, list[str]]) -> None:
    contexts: Any = Contexts(families, "nearest")
    some = dict([*families.items()][:19])
    found = Relatives(numbers=[1], tokens=[]).run(contexts.model, data_of(some, contexts))
    model = found["curve"]["1"]["model"]["nats"]
    assert model["count"] == 19 and model["low"] is model["high"] is None
    # Without relatives there is nothing to compare.
    alone = Relatives(numbers=[], tokens=[]).run(contexts.model, data_of(some, contexts))
    assert alone["differences"] == alone["controls"] == {}


def test_what_is_impossible_is_refused(families: dict[str, list[str]]) -> None:
    for settings, match in (
        ({"numbers": [-1]}, "at least 0"),
        ({"numbers": [0], "tokens": [250]}, "tokens need a number above 0"),
        ({"fewest": 1}, "at least the largest number, 4"),
        ({"per_family": 0}, "leaves no query"),
        ({"max_identity": 0.0}, "above 0"),
        ({"per_query": "queries"}, "not the name of a table.*per_query=sums.tsv"),
        ({"figure": "curve.doc"}, "is not a figure"),
    ):
        with pytest.raises(UserError, match=match):
            Relatives(**{"numbers": [4], "tokens": [], **settings})
    contexts: Any = Contexts(families)
    with pytest.raises(UserError, match="needs relatives"):
        Relatives(numbers=[4], tokens=[]).run(contexts.model, data_of(families, None))
    with pytest.raises(InputDataError, match="24 fewer than 7 relatives below 50% identity"):
        Relatives(numbers=[7], tokens=[]).run(contexts.model, data_of(families, contexts))


def test_masked_residues_are_hidden_in_the_frame_of_a_model() -> None:
    """Those that are not standard are hidden, too, and are no targets."""
    rule = MaskingRule(mask_fraction=0.5, mask_prob=1.0, random_prob=0.0)
    residues = VOCABULARY.encode("MXKTUAYZIAKB" * 20)
    hidden = hidden_of(residues, rule, seed=1, number=3)
    assert np.array_equal(hidden, hidden_of(residues, rule, seed=1, number=3))
    assert not np.array_equal(hidden, hidden_of(residues, rule, seed=1, number=4))
    family = read_family(["MKVV"], VOCABULARY.decode(residues), "Q")
    limits = {"fewest": 1, "per_family": 1, "max_identity": 1.0, "seed": 0}
    (query,) = chosen([(family, "F", hidden)], **limits, left_out=Counter())
    seen = list[np.ndarray]()

    class OfE1(Planted):
        vocabulary = vocabulary_of(E1.frame)

        def network(self, tokens_BL: torch.Tensor, mask_BL: torch.Tensor, *, causal: bool) -> Any:
            seen.append(tokens_BL[0].numpy())
            return super().network(tokens_BL, mask_BL, causal=causal)

    log_p, targets = log_probabilities(
        OfE1(), query.residues, hidden=query.hidden, places=query.places
    )
    words = OfE1.vocabulary
    assert words.start == 2 and np.flatnonzero(seen[0] == words.mask).tolist() == [*(hidden + 2)]
    assert len(log_p) == len(targets) == len(query.places) < len(hidden)
    assert words.decode(targets.astype(np.uint8)) == "".join(family.query[n] for n in query.places)
    assert {*words.decode(targets.astype(np.uint8))} <= {*STANDARD}


def test_a_causal_model_predicts_targets_from_what_is_before_them() -> None:
    model = Model.of(small_model("performer_relu", objective="causal"))
    family = read_family(["MKVV"], "MKTAYIAKQRQISFVKSHFS", "Q")
    places = np.array([0, 7, 19])
    limits = {"fewest": 1, "per_family": 1, "max_identity": 1.0, "seed": 0}
    (query,) = chosen([(family, "F", places)], **limits, left_out=Counter())
    log_p, targets = log_probabilities(
        model, query.residues, hidden=query.hidden, places=query.places
    )
    assert VOCABULARY.decode(targets.astype(np.uint8)) == "MKS"
    for row, place in zip(log_p, places.tolist(), strict=True):
        before = VOCABULARY.framed(VOCABULARY.encode(family.query))[None, : place + 1]
        tokens = torch.from_numpy(before)
        logits = model.network(tokens, torch.ones_like(tokens).bool(), causal=True).logits_BLV
        assert np.allclose(row, logits[0, -1].log_softmax(-1).detach().numpy(), atol=1e-5)
