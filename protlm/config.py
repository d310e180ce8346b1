"""The schema of every setting: a misspelt key or a wrong type fails before anything is built.

Enum members carry the names that stand in the YAML files.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from protlm.errors import UserError


class Positions(StrEnum):
    """How the model knows where a residue stands."""

    learned = "learned"
    sinusoidal = "sinusoidal"
    rotary = "rotary"


class Norm(StrEnum):
    """LayerNorm or RMSNorm."""

    layer = "layer"
    rms = "rms"


class NormOrder(StrEnum):
    """Normalise before a sublayer, or after its residual sum."""

    pre = "pre"
    post = "post"


class Activation(StrEnum):
    """The feed-forward non-linearity; SwiGLU has a third, gating matrix."""

    relu = "relu"
    gelu = "gelu"
    swiglu = "swiglu"


class Objective(StrEnum):
    """What the model predicts: masked residues, or the next one."""

    masked = "masked"
    causal = "causal"


class Crop(StrEnum):
    """Which residues of an over-long sequence a sample holds."""

    prefix = "prefix"
    random = "random"


class Mode(StrEnum):
    """A row of a batch: one sequence, or a stretch of sequences joined by `<eos>`."""

    sequences = "sequences"
    concatenated = "concatenated"


class Verify(StrEnum):
    """How shards are checked at start: by hash, or by size alone."""

    full = "full"
    sizes = "sizes"


class Schedule(StrEnum):
    """The learning rate after warm-up."""

    constant = "constant"
    cosine = "cosine"
    wsd = "wsd"


class DecayShape(StrEnum):
    """How the rate of a warmup-stable-decay schedule falls: in a line, or as 1 - √."""

    linear = "linear"
    sqrt = "sqrt"


class Optimizer(StrEnum):
    """AdamW for everything, or Muon for the matrices of the blocks and AdamW for the rest."""

    adamw = "adamw"
    muon = "muon"


class Strategy(StrEnum):
    """How ranks share the work: `ddp` where there are several, or `fsdp`, which shards weights."""

    auto = "auto"
    ddp = "ddp"
    fsdp = "fsdp"


class BestMetric(StrEnum):
    """What makes a checkpoint a good one: a small loss, or a high accuracy, on validation."""

    valid_loss = "valid_loss"
    valid_accuracy = "valid_accuracy"


class OnSaveError(StrEnum):
    """What a run does when a checkpoint cannot be saved: train on with a warning, or end."""

    warn = "warn"
    stop = "stop"


class WandbMode(StrEnum):
    """Whether Weights & Biases is used, and whether it may use the network."""

    off = "off"
    offline = "offline"
    online = "online"


def _check(section: str, config: Any, claim: str, names: str) -> None:
    """Refuses numbers for which a claim such as "at least 1" is not true."""
    holds = {
        "at least 0": lambda value: value >= 0,
        "at least 1": lambda value: value >= 1,
        "at least 3": lambda value: value >= 3,
        "above 0": lambda value: value > 0,
        "at least 0 and below 1": lambda value: 0 <= value < 1,
        "at least 0 and at most 1": lambda value: 0 <= value <= 1,
    }[claim]
    for name in names.split():
        value = getattr(config, name)
        if value is not None and not holds(value):
            raise UserError(f"{section}{name}={value} must be {claim}")


@dataclass
class ModelConfig:
    """The transformer around an attention mechanism.

    `reversible` blocks keep no activations, `feedforward_chunk` positions are all that the
    feed-forward looks at at a time: with both, memory grows neither with the depth nor with F.
    """

    num_layers: int
    num_heads: int
    model_dim: int
    feedforward_dim: int
    max_length: int = 1024
    positions: Positions = Positions.learned
    norm: Norm = Norm.layer
    norm_order: NormOrder = NormOrder.pre
    activation: Activation = Activation.relu
    qk_norm: bool = False
    dropout: float = 0.0
    reversible: bool = False
    feedforward_chunk: int | None = None

    def __post_init__(self) -> None:
        names = "num_layers num_heads model_dim feedforward_dim feedforward_chunk"
        _check("model.", self, "at least 1", names)
        _check("model.", self, "at least 3", "max_length")
        _check("model.", self, "at least 0 and below 1", "dropout")
        if self.reversible and self.norm_order is not NormOrder.pre:
            raise UserError(
                f"model.reversible=true cannot have model.norm_order={self.norm_order}: a norm "
                "after the sum cannot be undone; type model.norm_order=pre"
            )


@dataclass
class ObjectiveConfig:
    """What is predicted, and for `masked` how the input is corrupted (BERT: 15 %, 80/10/10)."""

    name: Objective = Objective.masked
    fraction: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1


@dataclass
class MixtureConfig:
    """A data set of a mixture, and its weight beside the others."""

    dir: str
    weight: float
    split: str = "train"

    def __post_init__(self) -> None:
        _check("data.mixture.", self, "above 0", "weight")


@dataclass
class DataConfig:
    """Which shards, and how they become batches.

    Either `dir` is a data set or `mixture` lists several; `valid_dir` is where the validation
    split is, by default in `dir` or the first of the mixture. `curriculum` lists pairs: from so
    many samples on, rows of at most so many tokens.
    """

    dir: str | None = None
    mixture: list[MixtureConfig] = field(default_factory=list)
    train_split: str = "train"
    valid_split: str = "valid"
    valid_dir: str | None = None
    mode: Mode = Mode.sequences
    max_length: int = 1024
    crop: Crop = Crop.prefix
    curriculum: list[list[int]] = field(default_factory=list)
    tokens_per_batch: int = 16_384
    num_workers: int = 0
    verify: Verify = Verify.full

    def __post_init__(self) -> None:
        _check("data.", self, "at least 1", "tokens_per_batch")
        _check("data.", self, "at least 3", "max_length")
        _check("data.", self, "at least 0", "num_workers")
        if self.dir is not None and self.mixture:
            raise UserError(
                f"data.dir={self.dir} and data.mixture cannot both be: type data.dir=null, or "
                "leave the mixture out"
            )


@dataclass
class OptimizerConfig:
    """AdamW, or Muon with AdamW for what it is not for; decay acts on matrices only.

    `momentum` is Muon's.
    """

    learning_rate: float
    name: Optimizer = Optimizer.adamw
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-9
    weight_decay: float = 0.1
    momentum: float = 0.95

    def __post_init__(self) -> None:
        _check("optimizer.", self, "above 0", "learning_rate eps")
        _check("optimizer.", self, "at least 0 and below 1", "beta1 beta2 momentum")
        _check("optimizer.", self, "at least 0", "weight_decay")


@dataclass
class ScheduleConfig:
    """Linear warm-up, then a rate that ends at `final_share` of the peak at `max_steps`.

    `decay_share` is the part of the run in which `wsd` falls, as `decay_shape` says.
    """

    name: Schedule = Schedule.constant
    warmup_steps: int = 0
    final_share: float = 0.1
    decay_share: float = 0.2
    decay_shape: DecayShape = DecayShape.sqrt

    def __post_init__(self) -> None:
        _check("schedule.", self, "at least 0 and at most 1", "final_share decay_share")


@dataclass
class TrainerConfig:
    """How long, on what, and what is written down on the way.

    `tokens_per_step` is the padded size of an optimiser step; without it a step is `accumulate`
    batches of `data.tokens_per_batch`. `ema_decay` keeps an average of the weights. `peak_tflops`
    is what a device could do, where the program does not know it.

    A step whose loss or gradient is not finite, or whose gradient norm is more than `spike_guard`
    times the usual one, is left out; `max_bad_steps` of them in a row end the run. A rank waits
    `timeout_minutes` for the others.

    A checkpoint is saved every `checkpoint_every` steps and `checkpoint_minutes`. The newest
    `keep_checkpoints` stay, and the best `keep_best` by `best_metric` besides.
    """

    max_steps: int
    accelerator: str = "auto"
    devices: int = 1
    num_nodes: int = 1
    strategy: Strategy = Strategy.auto
    precision: str = "32-true"
    accumulate: int = 1
    tokens_per_step: int | None = None
    gradient_clip: float = 0.5
    ema_decay: float | None = None
    activation_checkpointing: bool = False
    compile: bool = False
    peak_tflops: float | None = None
    max_bad_steps: int = 10
    spike_guard: float | None = None
    timeout_minutes: float = 10.0
    log_every: int = 10
    valid_every: int = 500
    valid_batches: int | None = None
    checkpoint_every: int = 500
    checkpoint_minutes: float | None = None
    keep_checkpoints: int = 3
    keep_best: int = 0
    best_metric: BestMetric = BestMetric.valid_loss
    on_save_error: OnSaveError = OnSaveError.warn

    def __post_init__(self) -> None:
        names = "max_steps devices num_nodes accumulate log_every valid_every checkpoint_every"
        _check("trainer.", self, "at least 1", f"{names} keep_checkpoints valid_batches")
        _check("trainer.", self, "at least 0", "gradient_clip keep_best")
        _check("trainer.", self, "at least 1", "max_bad_steps spike_guard tokens_per_step")
        _check("trainer.", self, "at least 0 and below 1", "ema_decay")
        _check("trainer.", self, "above 0", "checkpoint_minutes timeout_minutes peak_tflops")
        if self.tokens_per_step is not None and self.accumulate > 1:
            raise UserError(
                f"trainer.tokens_per_step={self.tokens_per_step} already says how much a step is; "
                f"leave trainer.accumulate={self.accumulate} out"
            )


@dataclass
class LoggerConfig:
    """Logs beside the CSV file, which is always written."""

    tensorboard: bool = False
    wandb: WandbMode = WandbMode.off
    wandb_project: str = "protlm"


@dataclass
class TrainConfig:
    """One training run."""

    run_dir: str
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    trainer: TrainerConfig
    attention: dict[str, Any] = field(default_factory=dict)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        _check("", self, "at least 0", "seed")


@dataclass
class EvaluationDataConfig:
    """The shards an evaluation reads."""

    dir: str | None = None
    train_split: str = "train"
    tokens_per_batch: int = 16_384
    verify: Verify = Verify.full

    def __post_init__(self) -> None:
        _check("data.", self, "at least 1", "tokens_per_batch")


@dataclass
class EvaluateConfig:
    """One call of `protlm evaluate`: checkpoint, evaluations, splits, where the result goes."""

    checkpoint: str
    evaluation: dict[str, Any] = field(default_factory=dict)
    data: EvaluationDataConfig = field(default_factory=EvaluationDataConfig)
    split: Any = "test_iid"
    output: str | None = None
    device: str = "auto"
