"""Similarity of amino acids by attention, compared with BLOSUM62.

Vig et al. 2021 (arXiv 2006.15222, section 4.2), and for Performers arXiv 2009.14794, C.4: amino
acids are similar if the same heads attend to them. v_a has for each head the fraction of its
attention that goes to amino acid a; the similarity of a and b is the Pearson correlation of v_a and
v_b over heads; it is compared with BLOSUM62 over the 190 pairs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from protlm.analysis.bootstrap import Metrics, draws
from protlm.analysis.structures import Protein, ProteinChoice
from protlm.data.vocabulary import STANDARD
from protlm.downstream.metrics import spearman
from protlm.evaluation.base import NO_SPLIT, Evaluation, EvaluationData, ResultTable, compared
from protlm.model.pretrained import PretrainedModel
from protlm.system.terminal import watched
from studies.attended_pairs import MIN_ARCS, PropertySums, check_threshold, property_sums, summed

# What counts of attention: weights, weights divided by the frequency of the amino acid and
# centered, or pairs above a threshold.
_FORMS = ("weights", "divided", "threshold")


def blosum62() -> np.ndarray:
    """Returns BLOSUM62 of the 20 amino acids in the order of `STANDARD`, float64 [20, 20]."""
    from Bio.Align import substitution_matrices

    matrix: Any = substitution_matrices.load("BLOSUM62")
    return np.array([[matrix[a, b] for b in STANDARD] for a in STANDARD], dtype=np.float64)


def correlation_with_blosum(fractions: np.ndarray, background: np.ndarray | None) -> dict[str, Any]:
    """Returns the correlations of the similarity of amino acids with BLOSUM62.

    `fractions` has the fraction of each head's attention to each amino acid, [heads, 20]. With the
    frequencies of the amino acids as background, fractions are divided by it, and the mean over
    amino acids is subtracted in each head; without the subtraction, the division would have no
    effect on a correlation over heads. NaN if fewer than three heads or a constant amino acid are
    left.
    """
    if background is not None:
        fractions = fractions / background
        fractions = fractions - fractions.mean(axis=1, keepdims=True)
    lower = np.tril_indices(len(STANDARD), -1)
    if len(fractions) < 3 or (fractions.std(axis=0) == 0).any():
        return {"pearson": float("nan"), "spearman": float("nan")}
    similar, known = np.corrcoef(fractions.T)[lower], blosum62()[lower]
    return {
        "pearson": float(np.corrcoef(similar, known)[0, 1]),
        "spearman": spearman(known, similar),
    }


@final
class Similarity(Evaluation):
    """The correlation of attention's amino-acid similarity with BLOSUM62, and of random weights."""

    needs_data = False

    def __init__(
        self,
        *,
        structures: str = "sample",
        sequences: str | None = None,
        max_proteins: int = 1000,
        max_residues: int = 512,
        threshold: float = 0.3,
        seed: int = 0,
    ) -> None:
        check_threshold(threshold)
        self.proteins = ProteinChoice(structures, max_proteins, max_residues, sequences)
        self.threshold, self.seed = threshold, seed

    def run(self, model: PretrainedModel, data: EvaluationData | None) -> dict[str, Any]:
        """Returns correlations with intervals over proteins, by predictor and form."""
        proteins = self.proteins.read(model)
        counts = np.array([[p.sequence.count(a) for a in STANDARD] for p in proteins])
        result: dict[str, Any] = {"num_proteins": len(proteins), "threshold": self.threshold}
        for who, one in compared(model, self.seed).items():
            sums = self._sums(one, proteins, who)
            result[who] = {form: _interval(sums, counts, form, seed=self.seed) for form in _FORMS}
        return result

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        values, rows = results[NO_SPLIT], []
        above = f"pairs with a ≥ {values['threshold']:g}"
        names = ("weights", "weights / background, centered", above)
        for who in ("model", "random_weights"):
            for form, name in zip(_FORMS, names, strict=True):
                found = values[who][form]
                cells = [_cell(found[kind]) for kind in ("pearson", "spearman")]
                rows.append((who, name, *cells, str(found["heads"])))
        caption = f"{values['num_proteins']} proteins; 95 % intervals over proteins"
        columns = ("similarity, BLOSUM62", "attention by", "Pearson", "Spearman", "heads")
        return ResultTable(columns, rows, caption=caption)

    def _sums(
        self, model: PretrainedModel, proteins: Sequence[Protein], who: str
    ) -> list[PropertySums]:
        found = []
        for protein in watched(f"attention to amino acids, {who}", proteins):
            sequence, length = protein.sequence, len(protein.sequence)
            is_letter = np.array([[x == a for x in sequence] for a in STANDARD])
            properties = np.broadcast_to(is_letter[:, None], (len(STANDARD), length, length))
            known_LL = np.ones((length, length), dtype=bool)
            threshold = self.threshold
            found.append(property_sums(model, sequence, properties, known_LL, threshold=threshold))
        return found


def _interval(
    sums: list[PropertySums], counts: np.ndarray, form: str, *, seed: int
) -> dict[str, Any]:
    """Returns each correlation with its interval, and the number of heads that count."""
    divided, arcs = form == "divided", form == "threshold"

    def of(some: np.ndarray) -> tuple[dict[str, Any], int]:
        both = summed([sums[n] for n in some])
        observed, total = both.observed, both.total
        if arcs:
            observed, total = both.observed_arcs, both.total_arcs
        enough = total >= (MIN_ARCS if arcs else 1e-12)
        fractions = observed[enough] / total[enough, None]
        background = counts[some].sum(axis=0) / counts[some].sum()
        # A resample without an amino acid has no frequency to divide by.
        usable = not divided or bool((background > 0).all())
        found = correlation_with_blosum(
            fractions if usable else fractions[:0], background if divided and usable else None
        )
        return found, int(enough.sum())

    everything, heads = of(np.arange(len(sums)))
    resampled = [list(of(drawn)[0].values()) for drawn in draws(len(sums), seed=seed)]
    return {"heads": heads, **Metrics(everything, np.array(resampled)).to_plain()}


def _cell(found: Mapping[str, Any]) -> str:
    if found["value"] is None:
        return "too few heads"
    return f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"
