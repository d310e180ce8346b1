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
        "Number of active features of a residue.", 32, allowed=at_least(1)
    )
    # At least those of a step.
    residues: Count = flag("Number of residues to learn from.", 2_000_000, allowed=at_least(2_048))
    seed: Count = shared.seed("Seed of the first weights and of the order of proteins.")
    sparsity: Sparsity = flag(
        "topk: --k features of each residue; batch-topk: --k on average over a batch.",
        Sparsity.topk,
    )
    random_weights: int | None = flag(
        "Use the model with random weights of this seed, as a control.",
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

    proteins: Path | None = flag(
        "A sequence file with the proteins, if the annotations have no sequences.", None
    )
    random: Path | None = flag(
        "Features that were trained with --random-weights, as a control.", None
    )
    max_proteins: int = flag(
        "Maximum number of proteins, drawn without relatives of each other.",
        1000,
        allowed=at_least(1),
    )
    max_residues: int = flag("Leave out proteins of more residues.", 1024, allowed=at_least(1))
    # Fewer bound what can be in excess of their mean, and so the 95 % quantile.
    permutations: int = flag(
        "Number of random exchanges of the annotations, which show what chance gives.",
        100,
        allowed=at_least(20),
    )
    seed: int = shared.seed("Seed of the draw, the exchanges and the masks.")
    device: str = shared.device()
