"""Estimators against their definitions, one pass at a time; windows, indels and refusals."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.downstream.estimators import Estimator, Predictor, score
from protlm.downstream.variants import Substitution, Variant, parse_mutant, parse_sequence
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import ModelOutput
from protlm.system.errors import UserError
from tests.small_models import log_p_of, small_model, tokens_of, watched_batches

pytestmark = pytest.mark.usefixtures("checked_shapes")
WILD_TYPE = "MKTAYIAKQRXQ"
SUBSTITUTIONS = ["M1A", "K2R", "M1C", "K2R:T3S", "T3T", "M1A:Q12W:I6V"]
INDELS = ["MKTAYIAKQRXQQ", "KTAYIAKQRXQ", "MKTAYIAKQRXQ", "AKTAYIAKQRXQ"]
MASKED = [one for one in Estimator if one is not Estimator.causal_likelihood]


def variants(texts: list[str] = SUBSTITUTIONS) -> list[Variant]:
    return [parse_mutant(text, WILD_TYPE) for text in texts]


class Direct:
    """The definitions, with one pass for each probability."""

    def __init__(self, model: PretrainedModel) -> None:
        self.model = model

    def log_p(self, sequence: str, position: int, residue: str, masked: bool = True) -> float:
        tokens = tokens_of(sequence)
        if masked:
            tokens[position + 1] = VOCABULARY.mask
        return float(log_p_of(self.model, tokens)[position + 1, VOCABULARY[residue]])

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
        tokens = tokens_of(sequence)
        log_p_LV = log_p_of(self.model, tokens)
        return float(sum(log_p_LV[i, token] for i, token in enumerate(tokens[1:])))

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


@pytest.mark.parametrize("attention", ["softmax", "performer_relu"])
@pytest.mark.parametrize("estimator", Estimator)
def test_scores_are_their_definitions(attention: str, estimator: Estimator) -> None:
    causal = estimator is Estimator.causal_likelihood
    model = small_model(attention, "causal" if causal else "masked")
    asked = variants()
    if estimator.scores_indels:
        asked = [*asked, *(parse_sequence(text, WILD_TYPE) for text in INDELS)]
    expected = [Direct(model).score(estimator, variant) for variant in asked]
    for tokens_per_batch in (1, 50, 10_000):
        found = score(estimator, Predictor(model, tokens_per_batch), WILD_TYPE, asked)
        np.testing.assert_allclose(found.values, expected, atol=TOLERANCE, rtol=0)
    assert found.values[SUBSTITUTIONS.index("T3T")] == pytest.approx(0, abs=TOLERANCE)
    assert np.abs(found.values[0]) > 1e-3


def test_estimators_differ() -> None:
    predictor = Predictor(small_model("softmax"))
    asked = variants(["K2R", "K2R:T3S", "M1A:Q12W:I6V"])
    values = np.array([score(one, predictor, WILD_TYPE, asked).values for one in MASKED])
    gaps = np.abs(values[:, None] - values[None]).min(axis=-1)
    assert (gaps[~np.eye(len(MASKED), dtype=bool)] > 1e-4).all()


def test_a_mutant_takes_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if two rows name it, one of them with a residue that stays the same."""
    model = small_model("softmax")
    batches = watched_batches(model, monkeypatch)
    asked = variants(["K2R:T3S", "M1A", "T3S:K2R:A4A", "K2R:T3S"])
    values = score(Estimator.mutant_marginals, Predictor(model), WILD_TYPE, asked).values
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
    found = score(estimator, Predictor(model), WILD_TYPE, asked, per_token=True)
    # A causal model also predicts <eos>.
    expected = [
        direct(text) / (len(text) + causal) - direct(WILD_TYPE) / (len(WILD_TYPE) + causal)
        for text in INDELS
    ]
    np.testing.assert_allclose(found.values, expected, atol=TOLERANCE, rtol=0)
    assert "divided by its number of tokens" in found.definition


def test_the_perplexity_of_the_wild_type() -> None:
    model = small_model("softmax")
    predictor = Predictor(model)
    direct = Direct(model)
    pseudo = score(Estimator.pseudo_log_likelihood, predictor, WILD_TYPE, variants())
    expected = np.exp(-direct.pseudo(WILD_TYPE) / len(WILD_TYPE))
    assert pseudo.perplexity == pytest.approx(expected)
    marginals = score(Estimator.masked_marginals, predictor, WILD_TYPE, variants(["M1A", "K2R"]))
    own = [direct.log_p(WILD_TYPE, position, WILD_TYPE[position]) for position in (0, 1)]
    assert marginals.perplexity == pytest.approx(np.exp(-np.mean(own)))
    assert score(Estimator.masked_marginals, predictor, WILD_TYPE, [Variant()]).perplexity is None
    assert score(Estimator.wt_marginals, predictor, WILD_TYPE, variants()).perplexity is None


@pytest.mark.parametrize("estimator", MASKED)
def test_each_residue_is_read_at_its_own_position(
    estimator: Estimator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every substitution in a protein that is predicted with logits of 5 costs 5 nats."""
    model = small_model("softmax")
    tokens = torch.tensor(tokens_of(WILD_TYPE))
    logits_LV = 5.0 * torch.nn.functional.one_hot(tokens, len(VOCABULARY))

    def known(tokens_BL: torch.Tensor, mask_BL: object, **named: object) -> ModelOutput:
        return ModelOutput(logits_LV.expand(len(tokens_BL), -1, -1), {})

    monkeypatch.setattr(model.network, "forward", known)
    every = [
        Variant((Substitution(own, position, letter),))
        for position, own in enumerate(WILD_TYPE)
        if own in STANDARD
        for letter in STANDARD
        if letter != own
    ]
    found = score(estimator, Predictor(model), WILD_TYPE, every)
    np.testing.assert_allclose(found.values, -5, atol=1e-5)


def test_long_proteins_are_scored_through_windows() -> None:
    predictor = Predictor(small_model("softmax", max_length=10))
    for estimator in MASKED:
        found = score(estimator, predictor, WILD_TYPE, variants())
        assert np.isfinite(found.values).all()
    # Position 1 sees the first ten tokens alone, so the far end of the protein changes nothing.
    other = WILD_TYPE[:-1] + "W"
    first = variants(["M1A"])
    for estimator in MASKED[:3]:
        values = [score(estimator, predictor, wild, first).values for wild in (WILD_TYPE, other)]
        np.testing.assert_array_equal(*values)


REFUSED = {
    "a masked estimator of a causal model": ("causal", "wt-marginals", "causal-likelihood"),
    "a causal estimator of a masked model": ("masked", "causal-likelihood", "masked-marginals"),
    "indels": ("masked", "masked-marginals", "pseudo-log-likelihood"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_estimator_cannot_score_is_refused(case: str) -> None:
    objective, estimator, instead = REFUSED[case]
    predictor = Predictor(small_model("softmax", objective))
    asked = [parse_sequence(INDELS[0], WILD_TYPE)]
    with pytest.raises(UserError, match=f"--estimator {estimator}.*type --estimator {instead}"):
        score(Estimator(estimator), predictor, WILD_TYPE, asked)


def test_marginals_are_not_divided() -> None:
    predictor = Predictor(small_model("softmax"))
    with pytest.raises(UserError, match=r"--per-token divides .* and wt-marginals has none"):
        score(Estimator.wt_marginals, predictor, WILD_TYPE, variants(), per_token=True)
