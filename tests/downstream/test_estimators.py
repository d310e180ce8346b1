"""Estimators against their definitions, one pass at a time; windows, indels and refusals."""

from collections.abc import Callable

import numpy as np
import pytest

from protlm.data.vocabulary import VOCABULARY
from protlm.downstream.estimators import LogProbabilities, Query, score
from protlm.downstream.variants import Variant, parse_mutant, parse_sequence
from protlm.model.pretrained import PretrainedModel
from protlm.options.score import Estimator
from protlm.system.errors import UserError
from tests.marks import slow_but
from tests.small_models import log_p_of, small_model, tokens_of, watched_batches

pytestmark = pytest.mark.usefixtures("checked_shapes")
WILD_TYPE = "MKTAYIAKQRXQ"
SUBSTITUTIONS = ["M1A", "K2R", "M1C", "K2R:T3S", "T3T", "M1A:Q12W:I6V"]
INDELS = ["MKTAYIAKQRXQQ", "KTAYIAKQRXQ", "MKTAYIAKQRXQ", "AKTAYIAKQRXQ"]


def tokens_at(sequence: str, position: int, *, masked: bool) -> list[int]:
    """The tokens of a protein, with or without a mask at a residue."""
    tokens = tokens_of(sequence)
    if masked:
        tokens[position + 1] = VOCABULARY.mask
    return tokens


def causal_log_p(model: PretrainedModel, sequence: str) -> list[float]:
    """The log-probability of every token after the first, by one pass."""
    tokens = tokens_of(sequence)
    log_p_LV = log_p_of(model, tokens)
    return [float(log_p_LV[i, token]) for i, token in enumerate(tokens[1:])]


def variants(texts: list[str] = SUBSTITUTIONS) -> list[Variant]:
    return [parse_mutant(text, WILD_TYPE) for text in texts]


class Direct:
    """The definitions, with one pass for each probability."""

    def __init__(self, model: PretrainedModel) -> None:
        self.model = model

    def log_p(self, sequence: str, position: int, residue: str, masked: bool = True) -> float:
        log_p_LV = log_p_of(self.model, tokens_at(sequence, position, masked=masked))
        return float(log_p_LV[position + 1, VOCABULARY[residue]])

    def marginals(
        self, variant: Variant, *, context: Callable[[Variant], str], masked: bool
    ) -> float:
        total = 0.0
        for own, position, residue in variant.substitutions:
            total += self.log_p(context(variant), position, residue, masked)
            total -= self.log_p(context(variant), position, own, masked)
        return total

    def pseudo(self, sequence: str) -> float:
        return sum(self.log_p(sequence, i, residue) for i, residue in enumerate(sequence))

    def causal(self, sequence: str) -> float:
        return sum(causal_log_p(self.model, sequence))

    def score(self, estimator: Estimator, variant: Variant) -> float:
        mutant = variant.apply(WILD_TYPE)
        match estimator:
            case Estimator.wt_marginals:
                return self.marginals(variant, context=lambda _: WILD_TYPE, masked=False)
            case Estimator.masked_marginals:
                return self.marginals(variant, context=lambda _: WILD_TYPE, masked=True)
            case Estimator.mutant_marginals:
                return self.marginals(variant, context=lambda _: mutant, masked=False)
            case Estimator.pseudo_log_likelihood:
                return self.pseudo(mutant) - self.pseudo(WILD_TYPE)
            case Estimator.causal_likelihood:
                return self.causal(mutant) - self.causal(WILD_TYPE)


# In float64 a sum of 100 probabilities of another batch differs by 1e-13; a probability of a
# neighboring position or of another mask differs by 1e-2 and more.
TOLERANCE = 1e-9


@pytest.mark.parametrize("attention", slow_but(["softmax", "performer_relu"], "performer_relu"))
@pytest.mark.parametrize("estimator", Estimator)
def test_scores_are_their_definitions(attention: str, estimator: Estimator) -> None:
    causal = estimator is Estimator.causal_likelihood
    model = small_model(attention, "causal" if causal else "masked")
    asked = variants()
    if estimator.scores_indels:
        asked = [*asked, *(parse_sequence(text, WILD_TYPE) for text in INDELS)]
    expected = [Direct(model).score(estimator, variant) for variant in asked]
    for tokens_per_batch in (1, 50, 10_000):
        found = score(estimator, LogProbabilities(model, tokens_per_batch), WILD_TYPE, asked)
        np.testing.assert_allclose(found.values, expected, atol=TOLERANCE, rtol=0)
    assert found.values[SUBSTITUTIONS.index("T3T")] == pytest.approx(0, abs=TOLERANCE)
    assert np.abs(found.values[0]) > 1e-3


def test_a_mutant_takes_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if two rows name it, one of them with a residue that stays the same."""
    model = small_model("softmax")
    batches = watched_batches(model, monkeypatch)
    asked = variants(["K2R:T3S", "M1A", "T3S:K2R:A4A", "K2R:T3S"])
    values = score(Estimator.mutant_marginals, LogProbabilities(model), WILD_TYPE, asked).values
    assert sum(map(len, batches)) == 2
    assert not any((tokens_BL == VOCABULARY.mask).any() for tokens_BL in batches)
    np.testing.assert_allclose(values[[2, 3]], values[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "estimator", [Estimator.pseudo_log_likelihood, Estimator.causal_likelihood]
)
def test_likelihoods_per_token(estimator: Estimator) -> None:
    causal = estimator is Estimator.causal_likelihood
    model = small_model("softmax", "causal" if causal else "masked")
    direct = Direct(model).causal if causal else Direct(model).pseudo
    asked = [parse_sequence(text, WILD_TYPE) for text in INDELS]
    found = score(estimator, LogProbabilities(model), WILD_TYPE, asked, per_token=True)
    # A causal model also predicts <eos>.
    expected = [
        direct(text) / (len(text) + causal) - direct(WILD_TYPE) / (len(WILD_TYPE) + causal)
        for text in INDELS
    ]
    np.testing.assert_allclose(found.values, expected, atol=TOLERANCE, rtol=0)
    assert "divided by its number of tokens" in found.definition


def test_the_perplexity_of_the_wild_type() -> None:
    model = small_model("softmax")
    predictor = LogProbabilities(model)
    direct = Direct(model)
    pseudo = score(Estimator.pseudo_log_likelihood, predictor, WILD_TYPE, variants())
    expected = np.exp(-direct.pseudo(WILD_TYPE) / len(WILD_TYPE))
    assert pseudo.perplexity == pytest.approx(expected)
    marginals = score(Estimator.masked_marginals, predictor, WILD_TYPE, variants(["M1A", "K2R"]))
    own = [direct.log_p(WILD_TYPE, position, WILD_TYPE[position]) for position in (0, 1)]
    assert marginals.perplexity == pytest.approx(np.exp(-np.mean(own)))
    assert score(Estimator.masked_marginals, predictor, WILD_TYPE, [Variant()]).perplexity is None
    assert score(Estimator.wt_marginals, predictor, WILD_TYPE, variants()).perplexity is None


@pytest.mark.parametrize(
    ("objective", "estimator", "per_token", "other"),
    [
        ("causal", "wt-marginals", False, "causal-likelihood"),
        ("masked", "causal-likelihood", False, "masked-marginals"),
        # Insertions and deletions.
        ("masked", "masked-marginals", False, "pseudo-log-likelihood"),
        ("masked", "wt-marginals", True, "pseudo-log-likelihood"),
    ],
)
def test_what_an_estimator_cannot_score_is_refused(
    objective: str, estimator: str, per_token: bool, other: str
) -> None:
    predictor = LogProbabilities(small_model("softmax", objective))
    asked = variants() if per_token else [parse_sequence(INDELS[0], WILD_TYPE)]
    with pytest.raises(UserError, match=f"the estimator {estimator} .* but {other} ") as error:
        score(Estimator(estimator), predictor, WILD_TYPE, asked, per_token=per_token)
    mending = {"estimators": other, **({"per_token": None} if per_token else {})}
    assert error.value.options == mending


SEQUENCES = ["MKTAYIAKQR", "MKTAYIAKQRQISFVK", "MENDELMENDELMENDEL"]
WINDOW = 12


@pytest.mark.parametrize("tokens_per_batch", [1, 40, 1000])
def test_batches_keep_the_order_and_the_budget(
    tokens_per_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("softmax")
    batches = watched_batches(model, monkeypatch)
    queries = [Query(one, i, masked=i % 3 > 0) for one in SEQUENCES for i in range(len(one))]
    found = list(LogProbabilities(model, tokens_per_batch).log_p(iter(queries)))
    assert [query for query, _ in found] == queries
    assert all(len(one) == 1 or one.numel() <= tokens_per_batch for one in batches)
    assert (len(batches) == 3) == (tokens_per_batch == 1000)
    monkeypatch.undo()
    for query, log_p_V in found:
        tokens = tokens_at(query.sequence, query.position, masked=query.masked)
        np.testing.assert_allclose(log_p_V, log_p_of(model, tokens)[query.position + 1], atol=1e-9)


@pytest.mark.parametrize("masked", [True, False])
def test_a_long_protein_is_read_through_windows(masked: bool) -> None:
    model = small_model("softmax", max_length=WINDOW)
    sequence = SEQUENCES[-1]
    positions = range(len(sequence))
    predictor = LogProbabilities(model, 40)
    if masked:
        found = {q.position: p for q, p in predictor.log_p(Query(sequence, i) for i in positions)}
    else:
        (found,) = predictor.unmasked_log_p([(sequence, positions)])
    for position in positions:
        tokens = tokens_at(sequence, position, masked=masked)
        # Centered where there are six tokens on both sides, else at the end.
        start = min(max(position + 1 - 6, 0), len(tokens) - WINDOW)
        expected_LV = log_p_of(model, tokens[start : start + WINDOW])
        np.testing.assert_allclose(found[position], expected_LV[position + 1 - start], atol=1e-9)


def test_a_protein_that_fits_is_read_whole() -> None:
    model = small_model("softmax", max_length=WINDOW)
    sequence = SEQUENCES[0]
    assert len(sequence) + 2 == WINDOW
    log_p_LV = log_p_of(model, tokens_of(sequence))
    (found,) = LogProbabilities(model).unmasked_log_p([(sequence, [3, 0])])
    assert set(found) == {0, 3}
    np.testing.assert_allclose(found[3], log_p_LV[4], atol=1e-9)
    np.testing.assert_allclose(found[0], log_p_LV[1], atol=1e-9)


@pytest.mark.parametrize("tokens_per_batch", [1, 40, 1000])
def test_unmasked_sequences_of_a_length_share_a_batch(
    tokens_per_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("softmax")
    sequences = [*SEQUENCES, SEQUENCES[-1][::-1]]
    expected = [log_p_of(model, tokens_of(sequence))[1:-1] for sequence in sequences]
    batches = watched_batches(model, monkeypatch)
    asked = ((sequence, [5, 0, len(sequence) - 1]) for sequence in sequences)
    found = list(LogProbabilities(model, tokens_per_batch).unmasked_log_p(asked))
    assert all(len(one) == 1 or one.numel() <= tokens_per_batch for one in batches)
    assert sum(map(len, batches)) == 4
    assert (len(batches) == 3) == (tokens_per_batch >= 40)
    for sequence, log_p, expected_LV in zip(sequences, found, expected, strict=True):
        assert list(log_p) == [5, 0, len(sequence) - 1]
        for position, log_p_V in log_p.items():
            np.testing.assert_allclose(log_p_V, expected_LV[position], atol=1e-9)


@pytest.mark.parametrize("attention", ["softmax", "performer_relu"])
@pytest.mark.parametrize("tokens_per_batch", [1, 40, 1000])
def test_causal_probabilities_do_not_depend_on_the_batch(
    attention: str, tokens_per_batch: int
) -> None:
    model = small_model(attention, "causal")
    found = list(LogProbabilities(model, tokens_per_batch).causal_log_p(iter(SEQUENCES)))
    assert len(found) == len(SEQUENCES)
    for sequence, log_p_L in zip(SEQUENCES, found, strict=True):
        np.testing.assert_allclose(log_p_L, causal_log_p(model, sequence), atol=1e-9)


def test_a_causal_model_reads_no_windows() -> None:
    predictor = LogProbabilities(small_model("softmax", "causal", max_length=WINDOW))
    with pytest.raises(UserError, match="16 residues is longer than the 10"):
        list(predictor.causal_log_p(SEQUENCES[:2]))
