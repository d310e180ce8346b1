"""Similarity of amino acids by attention, compared with BLOSUM62.

Vig et al. 2021 (arXiv 2006.15222, section 4.2), and for Performers arXiv 2009.14794, C.4: amino
acids are similar if the same heads attend to them. v_a has for each head the fraction of its
attention that goes to amino acid a; the similarity of a and b is the Pearson correlation of v_a and
v_b over heads; it is compared with BLOSUM62 over the 190 pairs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from protlm.analysis.attention_properties import (
    PropertySums,
    check_threshold,
    pooled,
    property_sums,
)
from protlm.analysis.bootstrap import bounds
from protlm.analysis.proteins import Protein, ProteinChoice
from protlm.data.vocabulary import STANDARD
from protlm.downstream.probe_tables import finite_or_none
from protlm.downstream.score_metrics import spearman
from protlm.evaluation.base import NO_SPLIT, Evaluation, EvaluationData, ResultTable
from protlm.model.pretrained import PretrainedModel
from protlm.system.terminal import JobProgress

# With fewer pairs above the threshold, a head does not count, as in the paper's code.
MIN_ARCS = 100
_RESAMPLES = 1000


def blosum62() -> np.ndarray:
    """Returns BLOSUM62 of the 20 amino acids in the order of `STANDARD`, float64 [20, 20]."""
    from Bio.Align import substitution_matrices

    matrix: Any = substitution_matrices.load("BLOSUM62")
    return np.array([[matrix[a, b] for b in STANDARD] for a in STANDARD], dtype=np.float64)


def correlation_with_blosum(fractions: np.ndarray, background: np.ndarray | None) -> dict[str, Any]:
    """Returns the correlations of the similarity of amino acids with BLOSUM62.

    Args:
        fractions: the fraction of each head's attention to each amino acid, [heads, 20].
        background: the frequency of each amino acid. If given, fractions are divided by it, and
            the mean over amino acids is subtracted in each head. Without the subtraction, the
            division would have no effect on a correlation over heads.

    Returns:
        {"pearson", "spearman"}; NaN if fewer than three heads or a constant amino acid are left.
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
    """The correlation of attention's amino-acid similarity with BLOSUM62, and of random weights.

    Args:
        structures: the folder whose proteins are used; `sample` is the shipped one.
        sequences: a sequence file used in its place.
        max_proteins: only the first of them; intervals take them as independent, see
            `ProteinChoice`.
        max_residues: longer proteins are excluded.
        threshold: θ of the form with a threshold; the other form has none.
        seed: seed of random weights and of the bootstrap over proteins.
    """

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
        self.proteins = ProteinChoice(
            structures=structures,
            sequences=sequences,
            max_proteins=max_proteins,
            max_residues=max_residues,
        )
        self.threshold = threshold
        self.seed = seed

    def run(self, model: PretrainedModel, data: EvaluationData | None) -> dict[str, Any]:
        """Returns correlations with intervals over proteins, by predictor and form."""
        proteins = self.proteins.read(model)
        counts = np.array([[p.sequence.count(a) for a in STANDARD] for p in proteins])
        result: dict[str, Any] = {"num_proteins": len(proteins), "threshold": self.threshold}
        for who, compared in (
            ("model", model),
            ("random_weights", model.with_random_weights(self.seed)),
        ):
            sums = self._sums(compared, proteins, who)
            result[who] = {
                "weights": _interval(sums, counts, divided=False, arcs=False, seed=self.seed),
                "divided": _interval(sums, counts, divided=True, arcs=False, seed=self.seed),
                "threshold": _interval(sums, counts, divided=False, arcs=True, seed=self.seed),
            }
        return result

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        """Builds a row for each predictor and form."""
        values, rows = results[NO_SPLIT], []
        names = {
            "weights": "weights",
            "divided": "weights / background, centered",
            "threshold": f"pairs with a ≥ {values['threshold']:g}",
        }
        for who in ("model", "random_weights"):
            for form, name in names.items():
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
        with JobProgress(f"attention to amino acids, {who}", len(proteins)) as progress:
            for done, protein in enumerate(proteins, start=1):
                is_letter = np.array([[x == a for x in protein.sequence] for a in STANDARD])
                length = len(protein.sequence)
                properties = np.broadcast_to(is_letter[:, None], (len(STANDARD), length, length))
                known_LL = np.ones((length, length), dtype=bool)
                threshold = self.threshold
                found.append(
                    property_sums(
                        model, protein.sequence, properties, known_LL, threshold=threshold
                    )
                )
                progress.update(done)
        return found


def _interval(
    sums: list[PropertySums], counts: np.ndarray, *, divided: bool, arcs: bool, seed: int
) -> dict[str, Any]:
    """Returns each correlation with its interval, and the number of heads that count."""

    def of(some: np.ndarray) -> tuple[dict[str, Any], int]:
        both = pooled([sums[n] for n in some])
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
    generator = np.random.default_rng(seed)
    drawn = [of(generator.integers(len(sums), size=len(sums)))[0] for _ in range(_RESAMPLES)]
    result: dict[str, Any] = {"heads": heads}
    for kind, value in everything.items():
        numbers = (value, *bounds(np.array([one[kind] for one in drawn])))
        named = zip(("value", "low", "high"), numbers, strict=True)
        result[kind] = {name: finite_or_none(number) for name, number in named}
    return result


def _cell(found: Mapping[str, Any]) -> str:
    if found["value"] is None:
        return "too few heads"
    return f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"
