"""Settings of the data of training and evaluation."""

from dataclasses import dataclass
from enum import StrEnum

from protlm.config.fields import Checked, above, at_least, setting
from protlm.system.errors import UserError

# The default padded sizes of batches of which nothing is learned: of `embed`, of other commands.
EMBED_TOKENS, TOKENS_PER_BATCH = 4_096, 16_384
# The part of a sequence that is kept when it is cropped.
Crop = StrEnum("Crop", ["prefix", "random"])
# A row of a batch: one sequence, or several, joined by `<eos>`.
Mode = StrEnum("Mode", ["sequences", "concatenated"])
# Rows of one sequence, padded to lengths that batches share, or rows filled with sequences.
Batching = StrEnum("Batching", ["padded", "packed"])
# The samples of an epoch: every sequence, or one sequence from every cluster.
Sampling = StrEnum("Sampling", ["uniform", "cluster"])
# How shards are verified at the start: by hash, or by size alone.
Verify = StrEnum("Verify", ["full", "sizes"])


@dataclass
class MixtureConfig(Checked):
    """One data set of a mixture."""

    _section = "data.mixture."

    dir: str = setting("a data set that `protlm prepare` made")
    weight: float = setting("its weight among the others", allowed=above(0))
    split: str = setting("the split that is trained on", "train")


@dataclass
class DataConfig(Checked):
    """Which shards are read, and how they become batches."""

    _section = "data."

    dir: str | None = setting("the data set that `protlm prepare` made", None, decides=False)
    mixture: list[MixtureConfig] = setting(
        "several data sets, each with `dir`, `weight` and `split`; needs `data.dir=null` "
        "(`data=mixture` sets it)",
        [],
        decides=False,
    )
    train_split: str = setting("the split that is trained on", "train")
    valid_split: str = setting("the split for validation", "valid", decides=False)
    valid_dir: str | None = setting(
        "the data set of the validation split, if not `dir` or the first of the mixture",
        None,
        decides=False,
    )
    sampling: Sampling = setting(
        "an epoch draws every sequence, or one sequence from each cluster", Sampling.uniform
    )
    mode: Mode = setting("rows of one sequence, or of several joined by `<eos>`", Mode.sequences)
    max_length: int = setting(
        "maximum tokens of a row, including special tokens", 1024, allowed=at_least(3)
    )
    crop: Crop = setting(
        "the part of a longer sequence that is kept",
        Crop.prefix,
        used_with="data.mode=sequences",
    )
    tokens_per_batch: int = setting(
        "padded size of a batch, over all devices together, or one longer row",
        16_384,
        allowed=at_least(1),
    )
    batching: Batching = setting(
        "pads rows of one sequence, or fills rows with whole ones, which do not see each other",
        Batching.padded,
        used_with="data.mode=sequences",
    )
    tokens_per_row: int = setting(
        "tokens of a packed row, or `data.max_length` if more",
        16_384,
        allowed=at_least(3),
        used_with="data.batching=packed",
    )
    num_workers: int = setting(
        "loader processes of each rank", 0, allowed=at_least(0), decides=False
    )
    verify: Verify = setting(
        "verifies shards at the start by hash, or only by size", Verify.full, decides=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dir is not None and self.mixture:
            raise UserError(
                f"data.dir={self.dir} and data.mixture exclude each other; type data.dir=null, or "
                "leave data.mixture out"
            )


@dataclass
class EvaluationDataConfig(Checked):
    """The shards that an evaluation reads."""

    _section = "data."

    dir: str | None = setting("the data set that `protlm prepare` made", None)
    train_split: str = setting("the split for baselines and probes", "train")
    tokens_per_batch: int = setting("padded size of a batch", 16_384, allowed=at_least(1))
    verify: Verify = setting("verifies shards at the start by hash, or only by size", Verify.full)
