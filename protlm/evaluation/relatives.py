"""What relatives are worth: predictions of masked residues with more and more of them in context.

Queries, targets and the order of relatives are the same at every number, so that differences are
paired. Beside the model stand controls, contexts that look like relatives but are not, and what
the same relatives predict without a model.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from protlm.analysis.bootstrap import MODEL
from protlm.analysis.family_curve import MIXED, MIXED_ALONE, FamilyCurve, Key
from protlm.analysis.family_predictions import PREDICTORS, Background, Scores
from protlm.analysis.family_queries import FamilyQuery, chosen, hidden_of
from protlm.analysis.intervals import in_words, shown
from protlm.analysis.masked_residues import log_probabilities
from protlm.analysis.sequence_sums import groups_of
from protlm.data.families import Family, Relative
from protlm.data.frequencies import count_residues, sample
from protlm.data.masking import MaskingRule, row_rng
from protlm.data.vocabulary import STANDARD, STANDARD_TOKENS
from protlm.evaluation.base import Evaluation, EvaluationData, ResultTable, of_split, table_path
from protlm.model.pretrained import PretrainedModel
from protlm.model.relatives import InContexts
from protlm.options.shared import new_figure
from protlm.system.errors import InputDataError, OptionError, UserError
from protlm.system.terminal import watched

_ORDERS = 5
_MIXED = MIXED_ALONE, MIXED


@final
class Relatives(Evaluation):
    """Nats, perplexity and accuracy of masked residues by the number of relatives in context.

    Alignments, identities and baselines know of a query what the model knows: not its targets.
    Candidates that give it away are left out by comparing whole sequences. A causal model predicts
    the same residues, from those before them.
    """

    reads_tokens = False
    sees_relatives = True
    draws_contexts = False

    def __init__(
        self,
        *,
        numbers: list[int],
        tokens: list[int],
        fewest: int | None = None,
        max_identity: float = 0.5,
        per_family: int = 2,
        groups: str | None = None,
        column: str = "family",
        controls: bool = True,
        mask_fraction: float = 0.15,
        seed: int = 0,
        per_query: str | None = None,
        figure: str | None = None,
    ) -> None:
        self.numbers, self.tokens = sorted({0, *numbers}), sorted({*tokens})
        self.most = self.numbers[-1]
        self.fewest = self.most if fewest is None else fewest
        if self.numbers[0] < 0 or min(tokens, default=1) < 1 or (tokens and not self.most):
            raise OptionError(
                f"numbers={numbers} must be at least 0, and tokens={tokens} above 0; tokens need a "
                "number above 0, since differences and controls are of the largest"
            )
        if self.fewest < self.most:
            raise OptionError(f"fewest={fewest} must be at least the largest number, {self.most}")
        if per_family < 1:
            raise OptionError(f"per_family={per_family} leaves no query; give 1 or more")
        if not 0 < max_identity <= 1:
            raise OptionError(f"max_identity={max_identity} must be above 0 and at most 1")
        self.max_identity, self.per_family = max_identity, per_family
        self.groups, self.column = None if groups is None else Path(groups), column
        self.controls, self.seed = controls, seed
        self.masking = MaskingRule(mask_fraction=mask_fraction, mask_prob=1.0, random_prob=0.0)
        self.per_query = table_path("per_query", per_query)
        self.figure = None if figure is None else new_figure(figure)

    def outputs_of(self, split: str) -> list[Path]:
        return [of_split(path, split) for path in (self.per_query, self.figure) if path]

    def run(self, model: PretrainedModel, data: EvaluationData | None) -> dict[str, Any]:
        """Returns figures by label of the context and predictor, differences and counts.

        Figures are means over families of nats per target. `share_closed` is the share of the
        distance from the model alone to the columns that the model closes.
        """
        assert data is not None
        if data.contexts is None:
            raise UserError("this evaluation needs relatives", {"relatives": "PATH"})
        left_out = Counter[str]()
        queries = [*self._queries(data, data.contexts, left_out)]
        if len({query.family for query in queries}) < 2:
            counted = ", ".join(f"{number:,} {why}" for why, number in left_out.items())
            raise InputDataError(
                f"{data.name}: queries of at least two families are needed, with {self.fewest:,} "
                f"relatives below {self.max_identity:.0%} identity each; left out: {counted}; type "
                "smaller evaluation.relatives.numbers or a higher evaluation.relatives.max_identity"
            )
        counts = count_residues(sample(data.train))[STANDARD_TOKENS] + 1.0
        curve = FamilyCurve(queries, Background(counts / counts.sum()))
        self._predict(curve, data.contexts, data)
        for path in filter(None, [self.per_query]):
            curve.write(of_split(path, data.name))
        return self._result(curve, data.contexts) | {
            "left_out": dict(left_out),
            "relatives": data.contexts.settings,
            "trained_as": model.description.objective.value,
        }

    def _queries(
        self, data: EvaluationData, contexts: InContexts, left_out: Counter[str]
    ) -> Iterator[FamilyQuery]:
        split, limit = data.split, contexts.model.max_residues or math.inf
        names = [split.identifier(number) for number in range(len(split))]
        group_of, without_group = groups_of(names, self.groups, self.column)
        if without_group:
            left_out[f"of no {self.column}, each a family by itself"] = without_group

        def families() -> Iterator[tuple[Family, str, np.ndarray]]:
            for number, group in enumerate(watched(f"{data.name}: proteins", group_of)):
                name, residues = data.query(number)
                if len(residues) > limit:
                    left_out[f"longer than {limit:,} residues"] += 1
                    continue
                hidden = hidden_of(split[number], self.masking, seed=self.seed, number=number)
                yield contexts.family(name, residues), group, hidden

        return chosen(
            families(),
            fewest=self.fewest,
            per_family=self.per_family,
            max_identity=self.max_identity,
            seed=self.seed,
            left_out=left_out,
        )

    def _predict(self, curve: FamilyCurve, contexts: InContexts, data: EvaluationData) -> None:
        """Adds the predictions of the model, and those of the baselines."""
        around = contexts.model.vocabulary.num_around
        curve.numbers = {str(one): [one] * len(curve.queries) for one in self.numbers} | {
            f"{one} tokens": [query.within(one, around) for query in curve.queries]
            for one in self.tokens
        }
        found: dict[str, list[tuple[float, float]]] = {}
        probabilities: dict[str, list[np.ndarray]] = {}
        for number, query in enumerate(watched(f"{data.name}: queries", curve.queries)):
            for label, relatives in self._contexts(curve, number):
                one = contexts.after(relatives, query.masked, data.tokens_per_batch)
                log_p, targets = log_probabilities(
                    one, query.residues, hidden=query.hidden, places=query.places
                )
                nats = -log_p[np.arange(len(targets)), targets].sum()
                correct = (log_p.argmax(1) == targets).sum()
                found.setdefault(label, []).append((float(nats), float(correct)))
                letters = one.vocabulary.encode(STANDARD)
                probabilities.setdefault(label, []).append(np.exp(log_p[:, letters]))
        for label, sums in found.items():
            curve.scores[label, MODEL] = Scores(*np.array(sums).T)
        for label, numbers in curve.numbers.items():
            curve.add_baselines(label, numbers, probabilities["0"], probabilities[label])

    def _contexts(
        self, curve: FamilyCurve, number: int
    ) -> Iterator[tuple[str, Sequence[Relative]]]:
        """Yields the contexts of a query, and controls with as many proteins as the longest."""
        query = curve.queries[number]
        for label, numbers in curve.numbers.items():
            yield label, query.order[: numbers[number]]
        if not (self.controls and self.most):
            return
        real = query.order[: self.most]
        rng = row_rng(self.seed, 1, number)
        own = {one.residues for one in query.order}
        others = [
            one
            for one in curve.queries
            if one.family != query.family and own.isdisjoint(x.residues for x in one.order)
        ]
        lengths = [
            abs(one.num_residues(self.most) - query.num_residues(self.most)) for one in others
        ]
        if not others:
            raise InputDataError(
                f"no query of another family is unrelated to {query.name}: they have relatives in "
                "common; give groups, or leave controls out by controls=false"
            )
        yield "unrelated", others[int(np.argmin(lengths))].order[: self.most]
        yield (
            "shuffled",
            [one._replace(residues="".join(rng.permutation([*one.residues]))) for one in real],
        )
        yield "own copy", [*real[:-1], Relative(query.name, query.residues)]
        for order in range(1, _ORDERS + 1):
            yield f"order {order}", [real[place] for place in rng.permutation(self.most)]

    def _result(self, curve: FamilyCurve, contexts: InContexts) -> dict[str, Any]:
        last, seed, around = str(self.most), self.seed, contexts.model.vocabulary.num_around
        controls = [label for label, who in curve.scores if label not in curve.numbers]
        pairs = self._pairs(controls)
        found = {
            label: {who: curve.figures(label, who, seed) for who in (MODEL, *PREDICTORS, *_MIXED)}
            for label in curve.numbers
        }
        return {
            "queries": len(curve.queries),
            "families": int(curve.families.max()) + 1,
            "targets": int(curve.num_targets.sum()),
            "max_identity": self.max_identity,
            "curve": found,
            "controls": {one: curve.figures(one, MODEL, seed) for one in controls},
            "contexts": {one: _size(curve, one, around) for one in curve.numbers},
            "differences": {name: curve.difference(*pair, seed) for name, pair in pairs.items()},
            "share_closed": curve.share_closed(
                (last, MODEL), ("0", MODEL), (last, "columns"), seed
            ),
            "bins": curve.bins(pairs, seed),
            "fitted": curve.fitted,
        }

    def _pairs(self, controls: Sequence[str]) -> dict[str, tuple[Key, Key]]:
        """Returns what is compared with the model that sees the most relatives, by name."""
        if not self.most:
            return {}
        last = str(self.most)
        others = {
            "alone": ("0", MODEL),
            **{name: (last, name) for name in ("columns", "diagonal", "nearest")},
            **{one: (one, MODEL) for one in ("unrelated", "shuffled") if one in controls},
        }
        pairs = {f"model - {name}": ((last, MODEL), other) for name, other in others.items()}
        return pairs | {f"{MIXED} - {MIXED_ALONE}": ((last, MIXED), (last, MIXED_ALONE))}

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        rows, notes = [], []
        # All that fits into 80 columns; the notes have the others.
        shown_too = ("composition", "nearest", "columns", MIXED_ALONE, MIXED)
        columns = ("relatives", "model", "\N{PLUS-MINUS SIGN}", *shown_too)
        for split, values in results.items():
            if len(results) > 1:
                rows.append((f"{split}:", *[""] * (len(columns) - 1)))
            for label, found in values["curve"].items():
                others = (shown(found[who]["nats"]["mean"]) for who in shown_too)
                rows.append((label, *_cells(found[MODEL]["nats"]), *others))
            orders = []
            for label, one in values["controls"].items():
                if label.startswith("order"):
                    orders.append(one["nats"]["mean"])
                else:
                    rows.append((label, *_cells(one["nats"]), *[""] * len(shown_too)))
            notes += _notes(split, values, orders)
        return ResultTable(columns, rows, "\n".join(notes))


def _size(curve: FamilyCurve, label: str, around: int) -> dict[str, float]:
    """Returns the mean numbers of relatives and of tokens of a context."""
    pairs = zip(curve.queries, curve.numbers[label], strict=True)
    tokens = [query.num_residues(number) + number * around for query, number in pairs]
    return {"relatives": float(np.mean(curve.numbers[label])), "tokens": float(np.mean(tokens))}


def _cells(score: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the cells of a mean, and of half of its interval."""
    low, high = score["low"], score["high"]
    return shown(score["mean"]), "" if low is None else shown((high - low) / 2)


def _notes(split: str, values: Mapping[str, Any], orders: Sequence[float]) -> Iterator[str]:
    """Yields the lines below the table of a split."""
    yield (
        f"{split}: nats per target, means over {values['families']:,} families "
        f"({values['queries']:,} queries, {values['targets']:,} targets) and half of their 95 % "
        f"interval; relatives below {values['max_identity']:.0%} identity"
    )
    for label, one in values["curve"].items():
        model, size = one[MODEL], values["contexts"][label]
        yield (
            f"{split}: {label}: perplexity {model['perplexity']:.2f}, accuracy "
            f"{model['accuracy']:.1%}; {size['relatives']:.1f} relatives of {size['tokens']:,.0f} "
            "tokens"
        )
    for reason, number in values["left_out"].items():
        yield f"{split}: {number:,} left out, {reason}"
    if orders:
        yield f"{split}: other orders: {min(orders):.3f} to {max(orders):.3f}"
    for name, one in values["differences"].items():
        yield f"{split}: {name}: {in_words(one, '+.3f')}"
    if values["differences"]:
        closed = in_words(values["share_closed"], ".0%")
        yield f"{split}: of the distance from alone to columns, closed: {closed}"
    for name, one in values["bins"].items():
        yield f"{split}: most similar candidate {name}: queries: {one['queries']:,}"
