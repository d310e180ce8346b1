"""Settings of the data of training and evaluation."""

from dataclasses import dataclass
from enum import StrEnum

from protlm.config.fields import Checked, above, at_least, setting
from protlm.system.errors import UserError

_OF_RELATIVES = "data.batching=relatives"
# The default padded sizes of batches of which nothing is learned: of `embed`, of other commands.
EMBED_TOKENS, TOKENS_PER_BATCH = 4_096, 16_384
# The part of a sequence that is kept when it is cropped.
Crop = StrEnum("Crop", ["prefix", "random"])
# A row of a batch: one sequence, or several, joined by `<eos>`.
Mode = StrEnum("Mode", ["sequences", "concatenated"])
# Rows of one sequence, padded to lengths that batches share, or rows filled with sequences, or with
# families of them.
Batching = StrEnum("Batching", ["padded", "packed", "relatives"])
# The samples of an epoch: every sequence, or one sequence from every cluster.
Sampling = StrEnum("Sampling", ["uniform", "cluster"])
# How shards are verified at the start: by hash, or by size alone.
Verify = StrEnum("Verify", ["full", "sizes"])
# How relatives that a file does not align are aligned with their query.
Alignment = StrEnum("Alignment", ["pairwise", "shift"])


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
        "an epoch draws every sequence, or one sequence from each cluster",
        Sampling.uniform,
    )
    mode: Mode = setting("rows of one sequence, or of several joined by `<eos>`", Mode.sequences)
    max_length: int = setting(
        "maximum tokens of a row, including special tokens", 1024, allowed=at_least(3)
    )
    crop: Crop = setting(
        "the part of a longer sequence that is kept",
        Crop.prefix,
        used_with="data.mode=sequences data.batching=padded,packed",
    )
    tokens_per_batch: int = setting(
        "padded size of a batch, over all devices together, or one longer row",
        16_384,
        allowed=at_least(1),
    )
    batching: Batching = setting(
        "pads rows of one sequence, or fills rows with whole ones, which do not see each other, or "
        "with families of whole ones, members of a cluster, which do",
        Batching.padded,
        used_with="data.mode=sequences",
    )
    tokens_per_row: int = setting(
        "tokens of a packed row, or `data.max_length` if more",
        16_384,
        allowed=at_least(3),
        used_with="data.batching=packed,relatives",
    )
    relatives: int = setting(
        "most proteins of a family, a document of an epoch",
        32,
        allowed=at_least(2),
        used_with=_OF_RELATIVES,
    )
    relatives_tokens: int | None = setting(
        "most tokens of a family; null: those of a row",
        None,
        allowed=at_least(3),
        used_with=_OF_RELATIVES,
    )
    relatives_alone: float = setting(
        "fraction of the documents whose proteins do not see each other",
        0.1,
        allowed=at_least(0, at_most=1),
        used_with=_OF_RELATIVES,
    )
    relatives_last: float = setting(
        "fraction of the documents of which only the last protein has targets, as in use; of "
        "masked objectives",
        0.25,
        allowed=at_least(0, at_most=1),
        used_with=f"{_OF_RELATIVES} objective.name=masked",
    )
    relatives_from: str | None = setting(
        "a split of the validation's data set with the relatives of each of its proteins; null: "
        "the validation split's own families",
        None,
        decides=False,
        used_with=_OF_RELATIVES,
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
        if self.batching is not Batching.relatives:
            return
        if self.mode is Mode.concatenated:
            raise UserError(
                f"{_OF_RELATIVES} needs whole proteins, and data.mode=concatenated cuts them; type "
                "data.mode=sequences"
            )
        if self.sampling is Sampling.cluster:
            raise UserError(
                f"{_OF_RELATIVES} draws every member of every cluster, and data.sampling=cluster "
                "one member of each; type data.sampling=uniform"
            )


@dataclass
class EvaluationDataConfig(Checked):
    """The shards that an evaluation reads."""

    _section = "data."

    dir: str | None = setting("the data set that `protlm prepare` made", None)
    train_split: str = setting("the split for baselines and probes", "train")
    tokens_per_batch: int = setting("padded size of a batch", 16_384, allowed=at_least(1))
    verify: Verify = setting("verifies shards at the start by hash, or only by size", Verify.full)
