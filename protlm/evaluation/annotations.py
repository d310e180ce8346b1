"""Attention to contacts, secondary structure and amino acids, head by head (Vig et al. 2021).

Beside the frequency of a property over all pairs (the background), the attention expected from the
distances alone is reported: the mean when weights are permuted among pairs of the same |i - j|,
because any local head attends to near pairs more often.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from protlm.data.vocabulary import STANDARD
from protlm.errors import UserError
from protlm.evaluation.attention_properties import (
    LOWEST_P,
    PropertySums,
    pooled,
    property_sums,
    sign_flip_p_values,
)
from protlm.evaluation.base import NO_SPLIT, Evaluation, EvaluationData, ResultTable
from protlm.evaluation.contacts import MIN_SEPARATION
from protlm.evaluation.dssp import HELIX, STRAND, secondary_structure
from protlm.evaluation.proteins import Protein, ProteinChoice
from protlm.evaluation.similarity import MIN_ARCS
from protlm.model.pretrained import PretrainedModel
from protlm.terminal import JobProgress

_RESIDUE_PROPERTIES = ("helix", "strand", *STANDARD)
NAMES = ("contact", *_RESIDUE_PROPERTIES)


@final
class Annotations(Evaluation):
    """The fraction of each head's attention that goes to annotated residues or pairs.

    Contacts are counted over resolved pairs 6 or more apart, properties of the residue attended to
    over all pairs whose second residue is resolved. p-values are of sign flips over proteins of
    observed - expected, corrected for the number of heads by the largest statistic of all heads.

    Args:
        structures: the folder of structures; `sample` is the shipped one.
        max_proteins: only the first of them.
        max_residues: longer proteins are excluded.
        threshold: θ of the form with a threshold, for heads with 100 pairs above it.
        seed: seed of random weights and sign flips.

    Raises:
        UserError: a setting out of range.
    """

    needs_data = False

    def __init__(
        self,
        *,
        structures: str = "sample",
        max_proteins: int = 100,
        max_residues: int = 400,
        threshold: float = 0.3,
        seed: int = 0,
    ) -> None:
        if not 0 < threshold <= 1:
            raise UserError(f"threshold={threshold} must be above 0 and at most 1")
        self.proteins = ProteinChoice(
            structures=structures,
            sequences=None,
            max_proteins=max_proteins,
            max_residues=max_residues,
        )
        self.threshold = threshold
        self.seed = seed

    def run(self, model: PretrainedModel, data: EvaluationData | None) -> dict[str, Any]:
        """Returns for each property the background, and the values of all heads, [N, H].

        Raises:
            InputDataError: the structures cannot be read.
        """
        proteins = self.proteins.read(model)
        annotated = [_pair_groups(protein) for protein in proteins]
        result: dict[str, Any] = {
            "num_proteins": len(proteins),
            "threshold": self.threshold,
            "background": _background(annotated),
        }
        for who, compared in (
            ("model", model),
            ("random_weights", model.with_random_weights(self.seed)),
        ):
            result[who] = self._measured(compared, proteins, annotated, who)
        return result

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        """Builds a row for each property: the head with the highest ratio to the expected one."""
        values, rows = results[NO_SPLIT], []
        for name in NAMES:
            for who in ("model", "random_weights"):
                found = {key: np.array(x) for key, x in values[who][name].items()}
                ratio = found["weighted"] / np.maximum(found["expected"], 1e-12)
                layer, head = np.unravel_index(int(ratio.argmax()), ratio.shape)
                at = (layer, head)
                above = found["threshold"][at]
                rows.append(
                    (
                        name,
                        who,
                        f"{layer + 1}-{head + 1}",
                        f"{found['weighted'][at]:.2%}",
                        f"{found['expected'][at]:.2%}",
                        f"{values['background'][name]:.2%}",
                        _p_value(found["p_value"][at]),
                        "" if above is None else f"{above:.2%}",
                        f"{int(found['arcs'][at]):,}",
                    )
                )
        columns = ("attention to", "predictor", "layer-head", "attention", "by distance")
        columns += ("background", "p", f"a ≥ {values['threshold']:g}", "pairs above")
        caption = (
            f"{values['num_proteins']} proteins; the head with the highest ratio of attention to "
            "that expected by distance; p: two-sided, corrected for the number of heads"
        )
        return ResultTable(columns, rows, caption=caption)

    def _measured(
        self,
        model: PretrainedModel,
        proteins: Sequence[Protein],
        annotated: Sequence[list[tuple[np.ndarray, np.ndarray]]],
        who: str,
    ) -> dict[str, Any]:
        groups: tuple[list[PropertySums], list[PropertySums]] = ([], [])
        with JobProgress(f"attention to annotations, {who}", len(proteins)) as progress:
            for done, (protein, pairs) in enumerate(zip(proteins, annotated, strict=True), start=1):
                for group, (properties, known_LL) in zip(groups, pairs, strict=True):
                    group.append(
                        property_sums(
                            model, protein.sequence, properties, known_LL, threshold=self.threshold
                        )
                    )
                progress.update(done)
        shape = (model.num_layers, model.num_heads)
        found = {}
        for names, sums in zip((("contact",), _RESIDUE_PROPERTIES), groups, strict=True):
            found |= _by_property(names, sums, shape, self.seed)
        return found


def _by_property(
    names: Sequence[str], sums: list[PropertySums], shape: tuple[int, int], seed: int
) -> dict[str, dict[str, Any]]:
    together = pooled(sums)
    differences = np.stack([one.observed - one.expected for one in sums])
    p_values = sign_flip_p_values(differences, seed=seed)
    enough = together.total_arcs >= MIN_ARCS
    found = {}
    for place, name in enumerate(names):
        above = together.observed_arcs[:, place] / np.maximum(together.total_arcs, 1)
        above = above.astype(object)
        above[~enough] = None
        values = {
            "weighted": together.observed[:, place] / together.total,
            "expected": together.expected[:, place] / together.total,
            "p_value": p_values[:, place],
            "threshold": above,
            "arcs": together.total_arcs,
        }
        found[name] = {key: x.reshape(shape).tolist() for key, x in values.items()}
    return found


def _p_value(p: float) -> str:
    return f"≤ {LOWEST_P:.2g}" if p <= LOWEST_P else f"{p:.2g}"


def _pair_groups(protein: Protein) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns properties and known pairs: of contacts, then of the residue attended to."""
    assert protein.structure is not None
    contacts_LL = protein.contacts()
    length = len(contacts_LL)
    positions = np.arange(length)
    far_LL = np.abs(positions[:, None] - positions) >= MIN_SEPARATION
    letters = np.array(list(protein.sequence))
    states = np.array(list(secondary_structure(protein.structure.backbone_L43, letters == "P")))
    rows = [states == HELIX, states == STRAND, *(letters == a for a in STANDARD)]
    is_known = ~np.isnan(protein.structure.backbone_L43).any(axis=(1, 2))
    to_residue = np.broadcast_to(np.array(rows)[:, None], (len(rows), length, length))
    return [
        ((contacts_LL == 1)[None], far_LL & (contacts_LL >= 0)),
        (to_residue, np.broadcast_to(is_known, (length, length))),
    ]


def _background(annotated: Sequence[list[tuple[np.ndarray, np.ndarray]]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for group, names in enumerate((("contact",), _RESIDUE_PROPERTIES)):
        pairs = [protein[group] for protein in annotated]
        total = sum(int(known_LL.sum()) for _, known_LL in pairs)
        hits = sum((f & known_LL).sum(axis=(1, 2)) for f, known_LL in pairs)
        found |= dict(zip(names, (np.asarray(hits) / total).tolist(), strict=True))
    return found
