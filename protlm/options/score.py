"""The options of `protlm score`."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from protlm.config.fields import ANYTHING, Checked, at_least, flag
from protlm.options import shared
from protlm.options.relatives import RelativesOptions


class Estimator(StrEnum):
    """The estimators, by the names that `--estimator` takes."""

    wt_marginals = "wt-marginals"
    masked_marginals = "masked-marginals"
    mutant_marginals = "mutant-marginals"
    pseudo_log_likelihood = "pseudo-log-likelihood"
    causal_likelihood = "causal-likelihood"

    @property
    def scores_indels(self) -> bool:
        """Whether the estimator scores insertions and deletions."""
        return self in (Estimator.pseudo_log_likelihood, Estimator.causal_likelihood)


@dataclass(frozen=True)
class ScoreOptions(Checked):
    """The settings of `protlm score`; without estimators, the model's default.

    A wild type is a sequence file of one protein, and a reference that of ProteinGym in its place.
    """

    wild_type: Path | None = flag("A sequence file of one protein, the wild type.", None)
    reference: Path | None = flag(
        "In place of --wild-type: ProteinGym's reference file (DMS_id, target_seq).", None
    )
    label: str = flag("Column of the measured scores.", "DMS_score", words=ANYTHING)
    estimators: tuple[Estimator, ...] = flag(
        "wt-marginals, masked-marginals (default), mutant-marginals or pseudo-log-likelihood; of a "
        "causal model, causal-likelihood. Default with relatives that all see all: wt-marginals.",
        (),
        "--estimator",
    )
    first_residue: int = flag(
        "Number of the wild type's first residue in the column mutant.",
        1,
        allowed=at_least(-(10**9), at_most=10**9),
    )
    skip_invalid: bool = flag(
        "Leave rows that cannot be scored without a score, in place of an error.", False
    )
    per_token: bool = flag("Divide whole-sequence log-likelihoods by the number of tokens.", False)
    tokens_per_batch: int = shared.tokens_per_batch()
    json: Path | None = flag("Also write the metrics as JSON.", None)
    device: str = shared.device()
    scan: bool = flag("Score all substitutions of the protein in a sequence file.", False)
    figure: Path | None = shared.figure("Also draw a heat map of --scan.")
    relatives: RelativesOptions = field(default_factory=RelativesOptions)
