"""Scores of variants from the log-probabilities of a protein language model.

Every score is a sum of log-probability differences between a variant and its wild type, in nats: 0
for the wild type, higher for variants that the model considers more probable. Probabilities are
over the whole vocabulary. x is the wild type, y a variant, M the replaced positions, and x\\i the
sequence x with position i masked. The marginals are those of Meier et al. 2021
(doi:10.1101/2021.07.09.450648), except that masked-marginals masks one position at a time, not all
of M at once.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from protlm.config.data import TOKENS_PER_BATCH
from protlm.data.vocabulary import VOCABULARY
from protlm.downstream.variants import Variant
from protlm.model.contexts import NetworkInContext
from protlm.model.embedding import consecutive
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import ENCODER
from protlm.options.score import Estimator
from protlm.system.errors import UserError
from protlm.system.terminal import watched

T = TypeVar("T")


@dataclass(frozen=True)
class Query:
    """A position, from 0, whose residue a masked model predicts, replaced by `<mask>` or not."""

    sequence: str
    position: int
    masked: bool = True


@dataclass(frozen=True)
class LogProbabilities:
    """A model, the largest number of tokens in one of its batches, and whether progress is hidden.

    A protein longer than a masked model accepts is cut, for each query, to the window of
    `max_length` tokens whose center is nearest to the position; `<cls>` and `<eos>` are in the
    window only if it includes them (ProteinGym's `optimal` window). With `others`, models as of one
    in several contexts, log-probabilities are means over all of them.
    """

    model: PretrainedModel
    tokens_per_batch: int = TOKENS_PER_BATCH
    quiet: bool = False
    others: Sequence[PretrainedModel] = ()

    def __post_init__(self) -> None:
        if self.model.network.head is None:
            raise UserError(ENCODER)

    def log_p(self, queries: Iterable[Query]) -> Iterator[tuple[Query, np.ndarray]]:
        """Yields each query, in order, with the log-probabilities of all tokens, float64 V."""
        rows = ((query, *self._window(query)) for query in queries)
        for batch in consecutive(rows, lambda x: len(x[1]), self.tokens_per_batch, alike=True):
            asked, tokens, places = zip(*batch, strict=True)
            tokens_BL = torch.from_numpy(np.stack(tokens)).long().to(self.model.device)
            mask_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
            log_p_BV = self._means(
                one.network(tokens_BL, mask_BL, causal=False).logits_BLV[range(len(batch)), places]
                for one in self._models
            )
            yield from zip(asked, log_p_BV, strict=True)

    def unmasked_log_p(
        self, asked: Iterable[tuple[str, Sequence[int]]]
    ) -> Iterator[dict[int, np.ndarray]]:
        """Yields, for positions of each sequence, log-probabilities given all of it, float64 V."""
        words, limit = self.model.vocabulary, self.model.max_residues
        size, around = self.tokens_per_batch, words.num_around
        for batch in consecutive(asked, lambda row: len(row[0]) + around, size, alike=True):
            if limit is not None and len(batch[0][0]) > limit:
                for sequence, positions in batch:
                    queries = (Query(sequence, position, masked=False) for position in positions)
                    yield {query.position: log_p_V for query, log_p_V in self.log_p(queries)}
                continue
            tokens = self.model.tokenize([sequence for sequence, _ in batch])
            log_p_BLV = self._means(one(tokens).logits_BLV[:, words.inner] for one in self._models)
            for log_p_LV, (_, positions) in zip(log_p_BLV, batch, strict=True):
                yield {position: log_p_LV[position].copy() for position in positions}

    def causal_log_p(self, sequences: Iterable[str]) -> Iterator[np.ndarray]:
        """Yields log p of the residues and of `<eos>`, each given those before it, float64."""
        words, size = self.model.vocabulary, self.tokens_per_batch
        first, num_after = words.before.start, len(words.suffix)
        for some in consecutive(sequences, lambda x: len(x) + words.num_around, size):
            batch = self.model.tokenize(some)
            targets_BL1 = batch.tokens_BL[:, first + 1 :, None].cpu().numpy()
            log_p_BLV = self._means(one(batch).logits_BLV[:, first:-1] for one in self._models)
            log_p_BL = np.take_along_axis(log_p_BLV, targets_BL1, axis=-1)[..., 0]
            for row, length in zip(log_p_BL, batch.lengths, strict=True):
                yield row[: length + num_after]

    @property
    def _models(self) -> Sequence[PretrainedModel]:
        return (self.model, *self.others)

    def _means(self, logits: Iterable[Tensor]) -> np.ndarray:
        """Returns the means of log-probabilities, float64, of the logits of each model."""
        with torch.inference_mode():
            each = [one.cpu().double().log_softmax(-1).numpy() for one in logits]
        return np.mean(each, axis=0)

    @property
    def networks_read_again(self) -> Sequence[NetworkInContext]:
        """The networks of which every pass reads a context; none without relatives."""
        networks = (one.network for one in self._models)
        return [one for one in networks if isinstance(one, NetworkInContext) and one.is_read_again]

    def announce(self, num_passes: int, sequence: str) -> None:
        """Prints the tokens and the time of passes that each read all contexts."""
        networks = self.networks_read_again
        if not networks or num_passes < 2 or self.quiet:
            return
        start, own = time.perf_counter(), len(sequence) + self.model.vocabulary.num_around
        _ = [*self.unmasked_log_p([(sequence, [0])])]
        seconds = round(num_passes * (time.perf_counter() - start))
        tokens = num_passes * sum(network.num_before + own for network in networks)
        print(
            f"each of {num_passes:,} predictions reads all contexts ({len(networks)}): {tokens:,} "
            f"tokens, about {timedelta(seconds=seconds)}",
            file=sys.stderr,
        )

    def _window(self, query: Query) -> tuple[np.ndarray, int]:
        """Returns the tokens of a query's window, and the place of the position in it."""
        words = self.model.vocabulary
        tokens_L = words.framed(words.encode(query.sequence))
        place, limit = query.position + words.start, self.model.max_length
        if query.masked:
            tokens_L[place] = words.mask
        if limit is None or len(tokens_L) <= limit:
            return tokens_L, place
        start = min(max(place - limit // 2, 0), len(tokens_L) - limit)
        return tokens_L[start : start + limit], place - start


def averaged(models: Sequence[PretrainedModel], tokens_per_batch: int) -> LogProbabilities:
    """Returns the means of the log-probabilities of models, as of one in each of its contexts."""
    return LogProbabilities(models[0], tokens_per_batch, others=models[1:])


DEFINITIONS = {
    Estimator.wt_marginals: "sum over M of log p(y_i | x) - log p(x_i | x), nothing masked",
    Estimator.masked_marginals: "sum over M of log p(y_i | x\\i) - log p(x_i | x\\i)",
    Estimator.mutant_marginals: "sum over M of log p(y_i | y) - log p(x_i | y), nothing masked",
    Estimator.pseudo_log_likelihood: "sum over all i of log p(y_i | y\\i), less that of x",
    Estimator.causal_likelihood: "log p(y) - log p(x), including the end of the sequence",
}


@dataclass(frozen=True)
class Scores:
    """The scores of variants in nats, float64, and their formula.

    The perplexity is of the wild type at positions that are predicted unseen; None without any.
    """

    values: np.ndarray
    perplexity: float | None
    definition: str


def default_estimator(predictor: LogProbabilities) -> Estimator:
    """Returns masked-marginals for a masked model and causal-likelihood for a causal one.

    If every prediction reads contexts of relatives again, wt-marginals, which need one.
    """
    if predictor.networks_read_again:
        return Estimator.wt_marginals
    return Estimator.causal_likelihood if predictor.model.causal else Estimator.masked_marginals


def check_estimator(
    estimator: Estimator,
    predictor: LogProbabilities,
    variants: Iterable[Variant] = (),
    *,
    per_token: bool = False,
) -> None:
    """Refuses an estimator that the model, one of the variants or `per_token` does not allow."""
    causal = predictor.model.causal
    if causal != (estimator is Estimator.causal_likelihood):
        kind, default = "causal" if causal else "masked", default_estimator(predictor)
        raise UserError(
            f"the estimator {estimator} cannot be computed with a {kind} model, but {default} can",
            {"estimators": default},
        )
    of_sequences = Estimator.causal_likelihood if causal else Estimator.pseudo_log_likelihood
    if not estimator.scores_indels and any(variant.indel is not None for variant in variants):
        raise UserError(
            f"the estimator {estimator} cannot score insertions and deletions, but {of_sequences} "
            "can",
            {"estimators": of_sequences},
        )
    if per_token and not estimator.scores_indels:
        raise UserError(
            f"per_token divides the likelihoods of whole sequences, and the estimator {estimator} "
            f"has none, but {of_sequences} has",
            {"estimators": of_sequences, "per_token": None},
        )


def score(
    estimator: Estimator,
    predictor: LogProbabilities,
    wild_type: str,
    variants: Sequence[Variant],
    *,
    per_token: bool = False,
) -> Scores:
    """Scores variants; `per_token` divides log-likelihoods of sequences by their tokens."""
    check_estimator(estimator, predictor, variants, per_token=per_token)
    predictor.announce(_num_passes(estimator, wild_type, variants), wild_type)
    definition = DEFINITIONS[estimator]
    if estimator.scores_indels:
        found = _likelihoods(predictor, wild_type, variants, per_token)
        definition += ", each divided by its number of tokens" if per_token else ""
    else:
        found = _MARGINALS[estimator](predictor, wild_type, variants)
    return Scores(*found, definition)


def _num_passes(estimator: Estimator, wild_type: str, variants: Sequence[Variant]) -> int:
    if estimator is Estimator.wt_marginals:
        return 1
    if estimator is Estimator.masked_marginals:
        return len(_positions(variants))
    mutants = [variant.apply(wild_type) for variant in variants]
    is_of_mutants = estimator is Estimator.mutant_marginals
    return len({*mutants}) if is_of_mutants else sum(map(len, [wild_type, *mutants]))


def _wt_marginals(
    predictor: LogProbabilities, wild_type: str, variants: Sequence[Variant]
) -> tuple[np.ndarray, float | None]:
    """Takes one pass, as the wild type is not masked."""
    (profile,) = predictor.unmasked_log_p([(wild_type, _positions(variants))])
    return _marginals(profile, variants), None


def _masked_marginals(
    predictor: LogProbabilities, wild_type: str, variants: Sequence[Variant]
) -> tuple[np.ndarray, float | None]:
    """Takes one pass for each position that any variant replaces."""
    queries = [Query(wild_type, position) for position in _positions(variants)]
    found = _watched(predictor, predictor.log_p(queries), len(queries))
    profile = {query.position: log_p_V for query, log_p_V in found}
    own = [log_p_V[VOCABULARY[wild_type[position]]] for position, log_p_V in profile.items()]
    return _marginals(profile, variants), float(np.exp(-np.mean(own))) if own else None


def _mutant_marginals(
    predictor: LogProbabilities, wild_type: str, variants: Sequence[Variant]
) -> tuple[np.ndarray, float | None]:
    """Takes one pass for each distinct mutant, which is not masked."""
    numbers: dict[str, list[int]] = {}
    for number, variant in enumerate(variants):
        numbers.setdefault(variant.apply(wild_type), []).append(number)
    asked = ((y, _positions(variants[n] for n in group)) for y, group in numbers.items())
    found = _watched(predictor, predictor.unmasked_log_p(asked), len(numbers))
    values = np.zeros(len(variants))
    for group, profile in zip(numbers.values(), found, strict=True):
        values[group] = _marginals(profile, [variants[number] for number in group])
    return values, None


_MARGINALS = {
    Estimator.wt_marginals: _wt_marginals,
    Estimator.masked_marginals: _masked_marginals,
    Estimator.mutant_marginals: _mutant_marginals,
}


def _likelihoods(
    predictor: LogProbabilities, wild_type: str, variants: Sequence[Variant], per_token: bool
) -> tuple[np.ndarray, float]:
    """Compares the likelihoods of whole sequences, in the order of their lengths."""
    order = sorted(range(len(variants)), key=lambda n: len(variants[n].indel or wild_type))
    combine = np.mean if per_token else np.sum
    (own,) = _unseen_log_p(predictor, [wild_type])
    sequences = (variants[number].apply(wild_type) for number in order)
    found = _watched(predictor, _unseen_log_p(predictor, sequences), len(order))
    values = np.zeros(len(variants))
    for number, log_p in zip(order, found, strict=True):
        values[number] = combine(log_p) - combine(own)
    return values, float(np.exp(-own[: len(wild_type)].mean()))


def perplexity(predictor: LogProbabilities, sequences: Sequence[str]) -> Iterator[float]:
    """Yields exp of the mean -log p of the residues of each sequence, predicted unseen."""
    predictor.announce(sum(map(len, sequences)), max(sequences, key=len, default=""))
    for sequence, log_p in zip(sequences, _unseen_log_p(predictor, sequences), strict=True):
        yield float(np.exp(-log_p[: len(sequence)].mean()))


def _unseen_log_p(predictor: LogProbabilities, sequences: Iterable[str]) -> Iterator[np.ndarray]:
    """Yields log p of the residues of each sequence, which the model does not see."""
    causal = predictor.model.causal
    return predictor.causal_log_p(sequences) if causal else _pseudo_log_p(predictor, sequences)


def _pseudo_log_p(predictor: LogProbabilities, sequences: Iterable[str]) -> Iterator[np.ndarray]:
    """Yields log p of each residue of each sequence, given all other residues."""
    queries = (Query(sequence, i) for sequence in sequences for i in range(len(sequence)))
    own: list[float] = []
    for query, log_p_V in predictor.log_p(queries):
        own.append(log_p_V[VOCABULARY[query.sequence[query.position]]])
        if len(own) == len(query.sequence):
            yield np.array(own)
            own = []


def _positions(variants: Iterable[Variant]) -> list[int]:
    return sorted({one.position for variant in variants for one in variant.substitutions})


def _marginals(profile: Mapping[int, np.ndarray], variants: Sequence[Variant]) -> np.ndarray:
    values = np.zeros(len(variants))
    for number, variant in enumerate(variants):
        for own, position, mutant in variant.substitutions:
            log_p_V = profile[position]
            values[number] += log_p_V[VOCABULARY[mutant]] - log_p_V[VOCABULARY[own]]
    return values


def _watched(predictor: LogProbabilities, found: Iterator[T], total: int) -> Iterator[T]:
    return watched("scoring", found, total=total, quiet=predictor.quiet or not total)
