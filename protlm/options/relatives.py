"""The options of relatives: where they come from, which are taken, and how contexts are drawn."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from protlm.config.data import Alignment
from protlm.config.fields import Checked, at_least, by_flag, flag
from protlm.options import shared
from protlm.system.errors import UserError

_FRACTION = at_least(0, at_most=1)


# The weights with which relatives are drawn.
Weights = StrEnum("Weights", ["neighbors", "uniform"])


@dataclass(frozen=True)
class FamilyOptions(Checked):
    """Which relatives of a query are used, and how contexts are drawn from them.

    Identities and coverages are fractions of the residues of the query (docs/relatives.md).

    Args:
        whole_relatives: a sequence file with the whole proteins of a table or an alignment.
        relatives_tokens: None is the number of tokens of a family in training.
        weights: None is `neighbors` for an alignment, and `uniform` for other relatives.
        allow_none: queries without relatives are read alone, in place of an error.
    """

    contexts: int = flag(
        "Number of contexts that are drawn and averaged; maps, pages and generate read one.",
        4,
        allowed=at_least(1, at_most=1_000),
    )
    relatives_tokens: int | None = flag(
        "Most tokens of the relatives in a context; default: those of a family in training.",
        None,
        allowed=at_least(1),
    )
    whole_relatives: Path | None = flag(
        "Sequence file of whole proteins, found by their names; a table of members needs it.", None
    )
    weights: Weights | None = flag(
        "How relatives are weighted in a draw: by 1/neighbors at 80 % identity (neighbors), or "
        "equally (uniform); default: neighbors if they are aligned, or else uniform.",
        None,
    )
    alignment: Alignment = flag(
        "How relatives without an alignment are aligned to the query, for models of aligned "
        "positions: pairwise, with gaps, or by one shift each.",
        Alignment.pairwise,
    )
    min_identity: float = flag("Minimum identity to the query.", 0.0, allowed=_FRACTION)
    max_identity: float = flag("Maximum identity to the query.", 1.0, allowed=_FRACTION)
    min_coverage: float = flag(
        "Minimum fraction of the query's residues that are aligned.", 0.5, allowed=_FRACTION
    )
    min_residues: int = flag("Minimum length of a relative.", 1, allowed=at_least(1))
    max_residues: int | None = flag(
        "Maximum length of a relative; default: that of the model.", None, allowed=at_least(1)
    )
    max_unknown: float = flag("Maximum fraction of X in a relative.", 0.1, allowed=_FRACTION)
    allow_none: bool = flag("Read queries without relatives alone, in place of an error.", False)
    relatives_seed: int = shared.seed("Seed for drawing contexts.")


@dataclass(frozen=True)
class RelativesOptions(Checked):
    """Relatives of the proteins of a command; without `relatives`, they are read alone."""

    relatives: Path | None = flag(
        "Relatives of the query: an alignment (A3M, A2M, Stockholm, FASTA) or a FASTA file; for "
        "several queries, a folder with a file for each, or a table of members (cluster.tsv, m8).",
        None,
    )
    family: FamilyOptions = field(default_factory=FamilyOptions)
    force_relatives: bool = flag(
        "Use a model that was trained without relatives.", False, needs="--relatives PATH"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        usual = by_flag(FamilyOptions())
        typed = [name for name, value in by_flag(self.family).items() if value != usual[name]]
        if typed and self.relatives is None:
            name = typed[0].lstrip("-").replace("-", "_")
            raise UserError(f"{name} has no effect without relatives", {"relatives": "PATH"})
