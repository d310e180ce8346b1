"""Models in contexts that are drawn from relatives, from Python."""

import re
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protlm.analysis.contact_regression import features, head_features
from protlm.bounds import Bounds
from protlm.build import describe
from protlm.config.data import Alignment
from protlm.data.families import Draw
from protlm.data.vocabulary import VOCABULARY
from protlm.interface import Model
from protlm.model.contexts import NetworkInContext
from protlm.model.memory import Room
from protlm.model.relatives import drawn_beside
from protlm.options.generate import Sampling
from protlm.options.relatives import FamilyOptions
from protlm.system.errors import InputDataError, UserError
from tests.small_models import composed, network_of, small_model, tokens_of

QUERY = "MKTAYIAKQRQISFVKSHFSRQ"
ROWS = [
    QUERY,
    "MRTAYIAKQRlwQISFV-SHFSRQ",
    "---AYVAKNRQISWVKAHYTR-",
    "MKSAYLARQKE-TFVRSHFSKQ",
    "MWWWYIAWQRQIWWVKSHWSRW",
]
FASTA = "".join(f">R{n}\n{row}\n" for n, row in enumerate(ROWS))


def seeing(relatives: str | None = "ordered", attention: str = "hybrid", **given: Any) -> Model:
    return Model.of(small_model(attention, relatives=relatives, **given))


def log_p_by_hand(model: Model, draw: Draw, query: str) -> np.ndarray:
    """Log-probabilities of a query, LV, from one row of all proteins at positions of its own."""
    proteins = [tokens_of(one) for one in [*(x.residues for x in draw.relatives), query]]
    places = [*(x.columns for x in draw.relatives), np.arange(len(query))]
    position_L = np.concatenate([[p[0], *(p + 1), p[-1] + 2] for p in places])
    spans = [*pairwise(accumulate(map(len, proteins), initial=0))]
    tokens_1L = torch.tensor([[token for one in proteins for token in one]])
    bounds = Bounds.of(
        spans, (1, len(position_L)), longest=64, families=[len(spans)], aligned=position_L
    )
    mask_1L = torch.ones_like(tokens_1L, dtype=torch.bool)
    with torch.no_grad():
        out = model.network(tokens_1L, mask_1L, causal=model.causal, bounds=bounds)
    return out.logits_BLV[0, spans[-1][0] :].log_softmax(-1).numpy()


@pytest.mark.parametrize(
    ("relatives", "objective"), [("full", "masked"), ("ordered", "masked"), ("ordered", "causal")]
)
@pytest.mark.parametrize("tokens_per_batch", [1, 1_000])
def test_scores_are_means_over_contexts(relatives, objective, tokens_per_batch) -> None:
    model = seeing(relatives, objective=objective)
    drawn = model.relatives(ROWS, contexts=3, tokens=70)
    draws = drawn.draws("", QUERY)
    assert [1 <= len(one.names) < len(ROWS) - 1 for one in draws[:2]] == [True, True]
    each = [log_p_by_hand(model, one, QUERY) for one in draws]
    own, new = VOCABULARY["K"], VOCABULARY["R"]
    if objective == "masked":
        expected = np.mean([one[2, new] - one[2, own] for one in each])
        estimator = "wt-marginals"
    else:
        mutants = [log_p_by_hand(model, one, "MR" + QUERY[2:]) for one in draws]
        targets = np.array([*tokens_of(QUERY)[1:]])
        rows = np.arange(len(targets))
        wild = np.mean([one[rows, targets].sum() for one in each])
        targets[1] = new
        expected, estimator = np.mean([x[rows, targets].sum() for x in mutants]) - wild, None
    given = {"relatives": drawn, "tokens_per_batch": tokens_per_batch}
    (came,) = model.score(QUERY, ["K2R"], estimator, **given)
    assert came == pytest.approx(expected, abs=1e-10)
    # One context is the first of several.
    alone = model.relatives(ROWS, contexts=1, tokens=70)
    assert alone.draws("", QUERY)[0].digest == draws[0].digest
    assert model.score(QUERY, ["K2R"], relatives=alone) != model.score(QUERY, ["K2R"])


def test_every_prediction_reads_a_context_of_relatives_that_all_see_all(capsys) -> None:
    model = seeing("full")
    drawn = model.relatives(ROWS, contexts=2, tokens=50)
    assert model.score(QUERY, ["K2R"], relatives=drawn) == model.score(
        QUERY, ["K2R"], "wt-marginals", relatives=drawn
    )
    assert "predictions" not in capsys.readouterr().err
    perplexity = model.perplexity([QUERY], relatives=drawn)
    rows = sum(one.num_tokens + len(QUERY) + 2 for one in drawn.draws("", QUERY))
    said = f"each of {len(QUERY)} predictions reads all contexts (2): {len(QUERY) * rows:,} tokens"
    assert said in capsys.readouterr().err
    each = [Model.of(one).perplexity([QUERY]) for one in drawn.models("", QUERY)]
    np.testing.assert_allclose(np.log(perplexity), np.mean(np.log(each), axis=0), rtol=1e-12)
    assert not np.allclose(each[0], each[1])
    ordered, _ = seeing("ordered"), capsys.readouterr()
    model.perplexity([QUERY[:3]])
    ordered.perplexity([QUERY], relatives=ordered.relatives(ROWS))
    assert "predictions" not in capsys.readouterr().err


@pytest.mark.parametrize("relatives", ["full", "ordered"])
def test_vectors_and_contacts_are_means_over_contexts(relatives) -> None:
    model = seeing(relatives)
    drawn = model.relatives(ROWS, contexts=2, tokens=50)
    each = [one for one in drawn.models("", QUERY) if isinstance(one, Model)]
    assert len(each) == 2
    for pooling in ("mean", "per_tok"):
        (found,) = model.embed([QUERY], pooling=pooling, relatives=drawn)
        vectors = [one.embed([QUERY], pooling=pooling)[0] for one in each]
        np.testing.assert_allclose(found, np.mean(vectors, axis=0), rtol=1e-12)
        assert not np.allclose(*vectors)
    (found,) = model.contacts([QUERY], relatives=drawn)
    fit = model._shipped_fit.regression
    expected = np.mean([fit.predict_protein(one, QUERY) for one in each], axis=0)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    batch = model.tokenize([QUERY])
    maps = model.attention_maps(batch, relatives=drawn)
    assert all(torch.equal(x, each[0].attention_maps(batch)[layer]) for layer, x in maps.items())
    assert min(float(x.sum(-1).min()) for x in maps.values()) < 0.99
    # A masked residue of the query is unknown where relatives are aligned to it.
    batch.tokens_BL[0, 2] = VOCABULARY.mask
    unaligned = model.relatives([f"{QUERY[:8]}WWWWW{QUERY[13:]}"])
    found = model.attention_maps(batch, relatives=unaligned)[1]
    assert torch.equal(found, unaligned.first("", f"MX{QUERY[2:]}").attention_maps(batch)[1])
    inner = maps[1][0] / maps[1][0].sum(-1, keepdim=True)
    own = head_features(each[0], QUERY)[:2]
    np.testing.assert_allclose(own, features(inner[:, 1:-1, 1:-1].numpy()), atol=1e-6)


def test_masked_residues_have_the_mean_of_log_probabilities() -> None:
    """Of a query that is given, since masked residues do not show which relative it is."""
    model = seeing()
    drawn = model.relatives(ROWS, ("P1", QUERY), contexts=2, tokens=50)
    (found,) = model.predict_masked([f"M<mask>{QUERY[2:]}", QUERY + "<mask>"][:1], relatives=drawn)
    models = [Model.of(one) for one in drawn.models("P1", QUERY)]
    each = [one.predict_masked([f"M<mask>{QUERY[2:]}"])[0][2] for one in models]
    ratios = [np.log(one["K"] / one["A"]) for one in (*each, found[2])]
    assert ratios[2] == pytest.approx(np.mean(ratios[:2]), abs=1e-5)


def test_what_exceeds_the_budget_alone_ends_no_context() -> None:
    short, long = [QUERY[:n] + "W" * 6 for n in range(8, 20)], ["W" * n for n in range(70, 90)]
    drawn = seeing().relatives([*short, *long], contexts=9, tokens=60)
    assert "left out: 20 longer than 58 residues" in drawn.to_plain("", QUERY)["relatives"]
    assert min(one.num_tokens for one in drawn.draws("", QUERY)) > 60 - 27


def test_a_query_is_the_same_alone_and_among_others(tmp_path: Path) -> None:
    model, names, folder = seeing(), [f"Q{n}" for n in range(50)], tmp_path / "x"
    folder.mkdir()
    for name in names:
        (folder / f"{name}.a3m").write_text(FASTA)
    many, one = model.relatives(folder, tokens=60), model.relatives(folder, tokens=60)
    digests = {name: [x.digest for x in many.draws(name, QUERY)] for name in reversed(names)}
    assert [x.digest for x in one.draws("Q7", QUERY)] == digests["Q7"]
    assert len({digest for of_query in digests.values() for digest in of_query}) > 10
    pairs = [(name, QUERY) for name in ("Q9", "Q7", "Q8")]
    found = model.embed(pairs, relatives=many)
    np.testing.assert_array_equal(found[1], model.embed(pairs[1:2], relatives=one)[0])
    assert not np.allclose(found[0], found[1])
    values = model.perplexity(iter(pairs), relatives=many)
    assert values[1] == model.perplexity(pairs[1:2], relatives=one)[0]
    with pytest.raises(InputDataError, match="1 of 1 queries, the first of them Q50"):
        model.embed([("Q50", QUERY)], relatives=many)
    single = model.relatives(folder / "Q7.a3m")
    with pytest.raises(InputDataError, match="the relatives of one query, not of 3"):
        model.embed(pairs, relatives=single)
    # All are variants of one query.
    variants = model.relatives(folder / "Q7.a3m", ("Q7", QUERY), tokens=60)
    mutant = "MR" + QUERY[2:]
    both = model.embed([QUERY, mutant], relatives=variants)
    np.testing.assert_allclose(both[1], model.embed([mutant], relatives=variants)[0], rtol=1e-12)
    assert not np.allclose(*both)


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_a_model_trained_alone_refuses_relatives_unless_forced(objective) -> None:
    model = seeing(None, objective=objective)
    with pytest.raises(UserError, match="trained without relatives") as caught:
        model.relatives(ROWS)
    assert caught.value.options == {"force_relatives": True}
    forced = model.relatives(ROWS, force=True)
    how = {"masked": "full", "causal": "ordered"}[objective]
    assert forced.model.description.model.relatives == how
    assert forced.model.hash == model.hash
    alone = model.perplexity([QUERY])
    assert abs(model.perplexity([QUERY], relatives=forced) - alone) > 1e-6
    # Without relatives a protein is as it is alone.
    none = FamilyOptions(allow_none=True, min_residues=50)
    empty = model.relatives(ROWS, filters=none, force=True)
    np.testing.assert_allclose(model.perplexity([QUERY], relatives=empty), alone, rtol=1e-12)


CANNOT = "attention=nystromformer cannot see relatives; train with model.relatives_heads=1 ("


@pytest.mark.parametrize("relatives", ["full", "ordered"])
def test_what_is_impossible_with_relatives_is_refused(relatives) -> None:
    model, two = seeing(relatives), FamilyOptions(contexts=2)
    drawn, masked = model.relatives(ROWS), f"M<mask>{QUERY[2:]}"
    learned = seeing(relatives, "softmax", max_length=23)
    batches = [model.tokenize([QUERY] * number) for number in (1, 2)]
    for refused, told in (
        (lambda: model.relatives(ROWS, filters=two), "filters have no contexts, tokens or seed"),
        (lambda: seeing().embed([QUERY], relatives=drawn), "another model; write model.relatives"),
        (lambda: model.attention_maps(batches[1], relatives=drawn), "one protein; the batch has 2"),
        (lambda: model.predict_masked([masked], relatives=drawn), "s(source, query=SEQUENCE)"),
        (lambda: drawn.first("", QUERY)(batches[0], gradients=True), "gradients do not reach the"),
        (
            lambda: learned.score(QUERY, ["K2A"], relatives=learned.relatives(ROWS)),
            "24 positions exceed the 23",
        ),
        (lambda: seeing(None, "nystromformer").relatives(ROWS, force=True), CANNOT),
        (lambda: network_of("attention=nystromformer", relatives=relatives), CANNOT),
    ):
        with pytest.raises(UserError, match=re.escape(told)):
            refused()


def test_a_new_member_follows_the_first_context() -> None:
    model = seeing(objective="causal")
    sampling = Sampling(temperature=0)
    for source in (ROWS, [row.replace("-", "").upper() for row in ROWS[1:]]):
        drawn = model.relatives(source, contexts=2, tokens=70)
        (found,) = model.generate(1, max_residues=30, sampling=sampling, relatives=drawn)
        expected = drawn.models("", "")[0].generate(1, max_residues=30, sampling=sampling)
        assert found == next(iter(expected))
        assert found != next(iter(model.generate(1, max_residues=30, sampling=sampling)))
        assert len(drawn.draws("", "")[0].names) >= 2


@pytest.mark.parametrize("alignment, inserted, end", [("pairwise", "ggg", 4), ("shift", "GGG", 1)])
def test_unaligned_relatives_are_aligned(alignment: str, inserted: str, end: int) -> None:
    """With gaps or, as in training, along the diagonal of most of their residues."""
    model = seeing("ordered", "softmax")
    row = f"---{QUERY[3:12]}{inserted}{QUERY[12:18]}{'-' * end}"
    filters = FamilyOptions(alignment=Alignment(alignment))
    found = [
        model.perplexity([QUERY], relatives=model.relatives(source, contexts=1, filters=filters))
        for source in ([QUERY, row], [row.replace("-", "").upper()])
    ]
    assert found[0] == found[1]


def test_relatives_that_are_alike_by_chance_are_told(tmp_path, capsys, recwarn) -> None:
    near = f"{QUERY[:8]}WWWWW{QUERY[13:]}"
    for rows, is_told in (
        (["GWGWGWGWGW", near, "PPPCPPP"], True),
        ([near, "PPCP", near[1:]], False),
        ([near, "PPPCPPP"], False),
        ([QUERY, "PPPCPPPWWWWGGGGHHHHC--"], False),
    ):
        relatives = seeing().relatives(rows, contexts=1)
        with drawn_beside(relatives, tmp_path / "out", [("", QUERY)]):
            (context,) = relatives.to_plain("", QUERY)["contexts"]
        assert ("may be unrelated: 1" in capsys.readouterr().err) == is_told == bool(recwarn)
        assert not is_told or "relatives of the query are no more" in str(recwarn.pop().message)
        found = dict(zip(context["residues"], context["identities"], strict=True))
        assert near not in rows or found[near] == 17 / 22


def test_the_budget_is_that_of_a_family_in_training() -> None:
    settings = ["data.batching=relatives", "data.tokens_per_row=1000"]
    assert describe(composed("model=tiny", *settings)).relatives_tokens == 1_000
    described = describe(composed("model=tiny", *settings, "data.relatives_tokens=500"))
    assert described.relatives_tokens == 500
    model, twin = seeing(), describe(composed("model=tiny", *settings, "data.relatives_alone=1"))
    model.description = replace(model.description, relatives_tokens=twin.relatives_tokens)
    with pytest.raises(UserError, match="was trained without relatives, so that what"):
        model.relatives(ROWS)
    assert model.relatives(ROWS, force=True).tokens == 8_192
    alone = describe(composed("model=tiny"))
    assert alone.relatives_tokens is None
    assert "relatives_tokens" not in alone.to_plain()
    model = seeing()
    assert model.relatives(ROWS).tokens == 8_192
    model.description = replace(model.description, relatives_tokens=60)
    drawn = model.relatives(ROWS)
    assert drawn.tokens == 60
    assert max(one.num_tokens for one in drawn.draws("", QUERY)) <= 60


def test_an_ordered_context_is_read_once_for_all_predictions(look_at) -> None:
    model, lengths = seeing("ordered"), list[int]()
    look_at(
        NetworkInContext, "read", lambda _, tokens, *rest, **__: lengths.append(tokens.shape[1])
    )
    drawn = model.relatives(ROWS, contexts=2)
    mutants = [f"{own}{n}W" for n, own in enumerate(QUERY, start=1)]
    given = {"estimator": "masked-marginals", "relatives": drawn}
    first = model.score(QUERY, mutants, **given)
    sizes = [one.num_tokens for one in drawn.draws("", QUERY)]
    assert lengths == sizes
    # They are kept for the next call, and read in pieces of whole proteins.
    assert np.array_equal(model.score(QUERY, mutants, **given), first)
    assert lengths == sizes
    lengths.clear()
    pieces = model.score(QUERY, mutants, **given, tokens_per_batch=25)
    np.testing.assert_allclose(pieces, first, rtol=1e-10)
    assert len(lengths) > 2 and sum(lengths) == sum(sizes) and max(lengths) <= 25


def test_the_memory_of_a_protein_is_not_that_of_its_context() -> None:
    model = seeing("ordered", "performer_relu")
    rng = np.random.default_rng(0)
    rows = [f"{QUERY[:9]}W{QUERY[10:]}{''.join(rng.choice([*QUERY], 378))}" for _ in range(60)]
    drawn = model.relatives(rows, contexts=1, tokens=24_000)
    needed, alone = (Room(one).needs(4_000) for one in (drawn.models("", QUERY)[0], model))
    assert needed < 1.5 * alone
