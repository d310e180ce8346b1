"""The content of a page: plain values of a protein and of one or two models."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, final

import numpy as np

from protlm import __version__, attention
from protlm.analysis.contact_regression import ContactRegression
from protlm.analysis.precision import DIVISORS, SEPARATIONS, precision
from protlm.data.vocabulary import VOCABULARY
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import num_parameters
from protlm.report.codes import Codes
from protlm.report.heads import STATISTICS, inspected_heads
from protlm.report.plan import PagePlan, plan_page
from protlm.report.predictions import predictions_to_plain
from protlm.report.protein import InspectedProtein


@final
@dataclass(frozen=True, eq=False)
class InspectedModel:
    """A model to inspect, and which of it.

    Attributes:
        name: its name for the reader.
        model: the model.
        layers: numbers of layers, from 1.
        heads: numbers of heads, from 1.
        regression: the contact regression that was fitted to it, if any.
    """

    name: str
    model: PretrainedModel
    layers: Sequence[int]
    heads: Sequence[int]
    regression: ContactRegression | None = None


def page_content(
    protein: InspectedProtein,
    models: Sequence[InspectedModel],
    *,
    is_selection: bool,
    with_predictions: bool,
) -> dict[str, Any]:
    """Returns the content of the page, for `assemble`.

    Args:
        protein: the protein.
        models: one model, or two to compare.
        is_selection: whether the user selected layers or heads.
        with_predictions: whether to predict every residue, which takes one pass for each.
    """
    plan = plan_page(
        len(protein),
        [len(one.layers) * len(one.heads) for one in models],
        is_selection=is_selection,
        num_contact_maps=sum(one.regression is not None for one in models),
    )
    for one in models:
        # Refuses what the model does not accept before the work for another one.
        one.model.tokenize([protein.sequence])
    return {
        "version": __version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "protein": protein.to_plain(),
        "statistics": [
            {"name": name, "label": label, "unit": unit, "meaning": meaning}
            for name, label, unit, meaning in STATISTICS
        ],
        "models": [_model(one, protein, plan, with_predictions) for one in models],
    }


def _model(
    one: InspectedModel, protein: InspectedProtein, plan: PagePlan, with_predictions: bool
) -> dict[str, Any]:
    model = one.model
    mechanism = model.description.attention
    heads = inspected_heads(model, protein, plan, layers=one.layers, heads=one.heads)
    predictions = predictions_to_plain(model, protein.sequence) if with_predictions else None
    return {
        "name": one.name,
        "hash": model.hash,
        "vocabulary": VOCABULARY.hash,
        "attention": mechanism,
        "meaning": attention.mechanism(mechanism).map_meaning,
        "objective": model.description.objective.value,
        "parameters": num_parameters(model.network),
        "layers": model.num_layers,
        "heads_per_layer": model.num_heads,
        "heads": [head.to_plain() for head in heads],
        "predictions": predictions,
        "contacts": _contacts(one.regression, model, protein),
    }


def _contacts(
    regression: ContactRegression | None, model: PretrainedModel, protein: InspectedProtein
) -> dict[str, Any] | None:
    """Returns the predicted contacts, and rows of a table of their precision."""
    if regression is None:
        return None
    predicted_LL = regression.predict_protein(model, protein.sequence)
    known_LL = protein.contacts
    return {
        "heads_used": regression.num_heads_used,
        "map": Codes.of(predicted_LL).to_plain(),
        "precision": [] if known_LL is None else _precision_rows(predicted_LL, known_LL),
    }


def _precision_rows(predicted_LL: np.ndarray, contacts_LL: np.ndarray) -> list[dict[str, Any]]:
    rows = []
    for name, separation in SEPARATIONS.items():
        for label, divisor in DIVISORS.items():
            hits, asked = precision(
                predicted_LL, contacts_LL, separation=separation, divisor=divisor
            )
            rows.append({"range": name, "pairs": label, "hits": hits, "asked": asked})
    return rows
