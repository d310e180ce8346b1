"""The schema of all settings: a misspelled key or a wrong type fails before anything is built."""

from dataclasses import dataclass, field
from typing import Any

from protlm.config.data import (
    Alignment,
    Batching,
    DataConfig,
    EvaluationDataConfig,
    MixtureConfig,
    Mode,
    Sampling,
)
from protlm.config.fields import Checked, at_least, setting
from protlm.config.model import (
    Activation,
    Frame,
    HeadKind,
    ModelConfig,
    Norm,
    NormOrder,
    Positions,
    QueryKeyWidth,
    Relatives,
    RelativesPositions,
    RelativesSum,
)
from protlm.config.training import (
    BestMetric,
    DecayShape,
    DistillationStage,
    LoggerConfig,
    Objective,
    ObjectiveConfig,
    OnSaveError,
    Optimizer,
    OptimizerConfig,
    Schedule,
    ScheduleConfig,
    TrainerConfig,
    WandbMode,
)
from protlm.system.errors import UserError


@dataclass
class TrainConfig(Checked):
    """One training run."""

    run_dir: str = field(
        metadata={
            "help": "the folder of the run; the same command continues the run in it",
            "decides": False,
        }
    )
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    trainer: TrainerConfig
    attention: dict[str, Any] = field(default_factory=dict)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    seed: int = setting(
        "seed of weights, order, crops, masks, dropout and projections", 0, allowed=at_least(0)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective.mask_fraction_decays and self.schedule.name is not Schedule.wsd:
            raise UserError(
                "objective.mask_fraction_decays=true follows the decay of schedule=wsd, and the "
                f"schedule is {self.schedule.name}; type schedule=wsd"
            )


@dataclass
class EvaluateConfig(Checked):
    """One call of `protlm evaluate`."""

    checkpoint: str | None = setting(
        "a run, a checkpoint, an exported or foreign model, or a name that `protlm models` lists; "
        "`null`: hybrid-6m",
        None,
    )
    evaluation: dict[str, Any] = field(default_factory=dict)
    data: EvaluationDataConfig = field(default_factory=EvaluationDataConfig)
    split: Any = setting(
        "the split, or a list of splits; `null`: `test` or `test_iid`, whichever the data set has",
        None,
    )
    relatives: str | None = setting(
        "relatives of each sequence of the split, by its name, for `masked`, `causal` and "
        "`relatives`: a folder of alignments or a table of members; `null`: sequences alone",
        None,
    )
    whole_relatives: str | None = setting("the sequence file of the members of a table", None)
    contexts: int | None = setting("number of contexts that are averaged; `null`: 4", None)
    relatives_tokens: int | None = setting(
        "most tokens of a context; `null`: those of a family in training", None
    )
    alignment: Alignment = setting(
        "how relatives without an alignment are aligned, for models of aligned positions: "
        "`pairwise`, with gaps, or by one `shift` each",
        Alignment.pairwise,
    )
    allow_none: bool = setting("read sequences without relatives alone", False)
    force_relatives: bool = setting("use a model that was trained without relatives", False)
    output: str | None = setting("a JSON file for the results", None)
    device: str = setting("`auto`, `cpu` or `cuda`", "auto")
