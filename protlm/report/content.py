"""The content of a page: plain values of a protein and of one or two models."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from typing import Any, final

from protlm import __version__
from protlm.analysis.contact_regression import ContactRegression
from protlm.analysis.precision import DIVISORS, SEPARATIONS, precision
from protlm.attention.layers import attention_label, meaning
from protlm.data.families import Draw
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import num_parameters
from protlm.report.features import InspectedFeatures
from protlm.report.heads import STATISTICS, Codes, inspected_heads
from protlm.report.protein import InspectedProtein, predictions_to_plain
from protlm.report.relatives import relatives_to_plain
from protlm.system.errors import UserError

# A head of a longer protein would take a third of the page, and the browser seconds.
MAX_RESIDUES = 2_048


@final
@dataclass(frozen=True, eq=False)
class InspectedModel:
    """A model to inspect, and which of its layers and heads, numbered from 1.

    The name is for the reader; regression and features are those of the model, if there are any,
    and the draw is that of its context, if it has one.
    """

    name: str
    model: PretrainedModel
    layers: Sequence[int]
    heads: Sequence[int]
    regression: ContactRegression | None = None
    features: InspectedFeatures | None = None
    draw: Draw | None = None


def page_content(
    protein: InspectedProtein,
    models: Sequence[InspectedModel],
    *,
    is_selection: bool,
    with_predictions: bool,
) -> dict[str, Any]:
    """Returns the content of the page of a protein, by one model or two, for `assemble`.

    Predictions take a pass for each residue.
    """
    if len(protein) > MAX_RESIDUES:
        raise UserError(
            f"the protein has {len(protein):,} residues, and a page shows at most "
            f"{MAX_RESIDUES:,}; give a domain of it, or type: protlm attention, which writes maps "
            "of any length"
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
        "models": [
            {
                **_description(one),
                "heads": [
                    head.to_plain()
                    for head in inspected_heads(
                        one.model,
                        protein,
                        layers=one.layers,
                        heads=one.heads,
                        keep_full=is_selection,
                        num_models=len(models),
                    )
                ],
                "predictions": (
                    predictions_to_plain(one.model, protein.sequence)
                    if with_predictions and one.model.predicts
                    else None
                ),
                "contacts": _contacts(one.regression, one.model, protein),
                "relatives": one.draw
                and relatives_to_plain(
                    one.model, one.draw, protein.sequence, one.layers, one.heads
                ),
                "features": one.features and one.features.to_plain(one.model, protein.sequence),
            }
            for one in models
        ],
    }


def _description(one: InspectedModel) -> dict[str, Any]:
    model, attention = one.model, one.model.description.attention_config
    return {
        "name": one.name,
        "hash": model.hash,
        "vocabulary": model.vocabulary.hash,
        "attention": attention_label(attention),
        "meaning": meaning(attention, model.num_layers),
        "objective": model.description.objective.value,
        "parameters": num_parameters(model.network),
        "layers": model.num_layers,
        "heads_per_layer": model.num_heads,
    }


def _contacts(
    regression: ContactRegression | None, model: PretrainedModel, protein: InspectedProtein
) -> dict[str, Any] | None:
    if regression is None:
        return None
    predicted_LL = regression.predict_protein(model, protein.sequence)
    known_LL, rows = protein.contacts, []
    for (name, between), (label, divisor) in product(SEPARATIONS.items(), DIVISORS.items()):
        if known_LL is not None:
            hits, asked = precision(predicted_LL, known_LL, separation=between, divisor=divisor)
            rows.append({"range": name, "pairs": label, "hits": hits, "asked": asked})
    return {
        "heads_used": regression.num_heads_used,
        "map": Codes.of(predicted_LL).to_plain(),
        "precision": rows,
    }
