"""The options of `protlm features`."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from protlm.config.fields import Checked, at_least, flag
from protlm.options import shared
from protlm.system.errors import UserError
from protlm.system.json_file import Count

# How the active features are chosen.
Sparsity = StrEnum("Sparsity", {"topk": "topk", "batch_topk": "batch-topk"})


@dataclass(frozen=True)
class FeatureOptions(Checked):
    """How features are trained: `k` of the `latents` are active."""

    latents: Annotated[int, range(1, 1 << 24)] = flag(
        "Number of features.", 4096, allowed=at_least(1)
    )
    k: Annotated[int, range(1, 1 << 24)] = flag(
        "Active features of a residue.", 32, allowed=at_least(1)
    )
    # At least those of a step.
    residues: Count = flag("Residues to learn from.", 2_000_000, allowed=at_least(2_048))
    seed: Count = shared.seed("Seed of the first weights and of the order of proteins.")
    sparsity: Sparsity = flag("topk or batch-topk.", Sparsity.topk)
    random_weights: int | None = flag(
        "Seed of an untrained model in place of the trained one: a control.",
        None,
        allowed=at_least(0),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k > self.latents:
            raise UserError(f"--k {self.k} must be at most --latents {self.latents}")


@dataclass(frozen=True)
class DescribeOptions(Checked):
    """How features are compared with annotations."""

    proteins: Path | None = flag("Sequences, for labels without sequences.", None)
    random: Path | None = flag("Features of --random-weights: a control.", None)
    max_proteins: int = flag("Proteins drawn, without relatives.", 1000, allowed=at_least(1))
    max_residues: int = flag("Longer proteins are left out.", 1024, allowed=at_least(1))
    # Fewer bound what can be in excess of their mean, and so the 95 % quantile.
    permutations: int = flag("Exchanges of annotations, for chance.", 100, allowed=at_least(20))
    seed: int = shared.seed("Seed of the draw, the exchanges and the masks.")
    device: str = shared.device()
