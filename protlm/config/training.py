"""Settings of the objective, the optimizer, the schedule, the trainer and the loggers."""

from dataclasses import dataclass
from enum import StrEnum

from protlm.config.fields import Checked, Range, above, at_least, setting
from protlm.system.errors import UserError

# The prediction task: masked residues, or the next residue.
Objective = StrEnum("Objective", ["masked", "causal"])
# What a model learns from its teacher: the outputs of its attention, or its predictions.
DistillationStage = StrEnum("DistillationStage", ["attention", "logits"])
# The learning rate after warm-up.
Schedule = StrEnum("Schedule", ["constant", "cosine", "wsd"])
# The decay of the learning rate of `wsd`: linear, or as 1 - √.
DecayShape = StrEnum("DecayShape", ["linear", "sqrt"])
# AdamW for everything, or Muon for the matrices of the blocks and AdamW for the rest.
Optimizer = StrEnum("Optimizer", ["adamw", "muon"])
# The validation metric by which the best checkpoints are chosen.
BestMetric = StrEnum("BestMetric", ["valid_loss", "valid_accuracy"])
# What a run does when a checkpoint cannot be saved: warn and train on, or stop.
OnSaveError = StrEnum("OnSaveError", ["warn", "stop"])
# Whether Weights & Biases is used, and whether it may use the network.
WandbMode = StrEnum("WandbMode", ["off", "offline", "online"])
_PRECISIONS = ("auto", "32-true", "bf16-mixed")


@dataclass
class ObjectiveConfig(Checked):
    """What is predicted, and for `masked` how the input is corrupted (BERT: 15 %, 80/10/10)."""

    _section = "objective."

    name: Objective = setting("what is predicted", Objective.masked)
    mask_fraction: float = setting(
        "the fraction of the residues that are predicted",
        0.15,
        used_with="objective.name=masked",
    )
    mask_fraction_range: list[float] | None = setting(
        "`[low, high]`: in training each sample draws its fraction from this range; validation "
        "uses `mask_fraction`",
        None,
    )
    mask_fraction_decays: bool = setting(
        "narrows the range to `mask_fraction` during the decay of `schedule=wsd`", False
    )
    mask_prob: float = setting(
        "the fraction of the targets that become `<mask>` in the input",
        0.8,
        used_with="objective.name=masked",
    )
    random_prob: float = setting(
        "the fraction of the targets that become other residues; the rest is left as it is",
        0.1,
        used_with="objective.name=masked",
    )
    stage: DistillationStage | None = setting(
        "what is learned from `teacher`: the outputs of its attention, or its predictions", None
    )
    teacher: str | None = setting(
        "a trained model that the model imitates, if `stage` has a value (docs/linearize.md)",
        None,
        decides=False,
    )
    teacher_weight: float = setting(
        "with `stage=logits`, the weight of the divergence from the teacher's predictions",
        1.0,
        allowed=at_least(0),
        used_with="objective.stage=logits",
    )
    lora_rank: int | None = setting(
        "with `stage=logits`, trains low-rank adapters of the projections of attention only, of "
        "this rank; `null`: all weights",
        None,
        allowed=at_least(1),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_rank is not None and self.stage is not DistillationStage.logits:
            raise UserError(
                f"objective.lora_rank={self.lora_rank} is a setting of the second stage of "
                "distillation; type objective=distillation objective.stage=logits"
            )
        if self.teacher is not None and self.stage is None:
            raise UserError(
                f"objective.teacher={self.teacher} is used with a stage only; type "
                "objective=distillation"
            )
        bounds = self.mask_fraction_range
        if bounds is not None and self.name is Objective.causal:
            raise UserError(
                f"objective.mask_fraction_range={bounds} is a setting of objective=masked: the "
                "causal objective masks nothing"
            )
        if bounds is not None and len(bounds) != 2:
            raise UserError(
                f"objective.mask_fraction_range={bounds} must be two numbers, for instance "
                "[0.1,0.5]"
            )
        if self.mask_fraction_decays and bounds is None:
            raise UserError(
                "objective.mask_fraction_decays=true needs a range to narrow; type for instance "
                "objective.mask_fraction_range=[0.1,0.5]"
            )


@dataclass
class OptimizerConfig(Checked):
    """AdamW, or Muon for the matrices of the blocks and AdamW for the rest."""

    _section = "optimizer."

    name: Optimizer = setting("AdamW, or Muon for the matrices of the blocks", Optimizer.adamw)
    learning_rate: float = setting("the peak learning rate", 1e-3, allowed=above(0))
    beta1: float = setting("β₁: decay of the first moment", 0.9, allowed=at_least(0, below=1))
    beta2: float = setting("β₂: decay of the second moment", 0.98, allowed=at_least(0, below=1))
    beta2_half_life: float | None = setting(
        "half-life of the second moment in tokens; replaces `beta2`", None, allowed=above(0)
    )
    only_relatives: bool = setting(
        "trains new `model.relatives_heads` alone; the weights of `model.init_from` stay as they "
        "are, and with them what it predicts of single proteins",
        False,
        used_with="data.batching=relatives",
    )
    eps: float = setting("ε of AdamW's denominator", 1e-9, allowed=above(0))
    weight_decay: float = setting(
        "decoupled weight decay, of matrices only", 0.1, allowed=at_least(0)
    )
    momentum: float = setting(
        "Muon's momentum",
        0.95,
        allowed=at_least(0, below=1),
        used_with="optimizer.name=muon",
    )


@dataclass
class ScheduleConfig(Checked):
    """Linear warm-up, then a learning rate that ends at a fraction of its peak."""

    _section = "schedule."
    # Says that the warm-up was shortened to fit into the run.
    notice = ""

    name: Schedule = setting("learning rate after the warm-up", Schedule.constant)
    warmup_steps: int = setting("steps from 0 to the peak, linearly", 0, allowed=at_least(0))
    min_lr_ratio: float = setting(
        "learning rate at `trainer.max_steps`, as a fraction of the peak",
        0.1,
        allowed=at_least(0, at_most=1),
        used_with="schedule.name=cosine,wsd",
    )
    decay_fraction: float = setting(
        "the fraction of the run in which `wsd` decays",
        0.2,
        allowed=at_least(0, at_most=1),
        used_with="schedule.name=wsd",
    )
    decay_shape: DecayShape = setting(
        "decay of `wsd`: as 1 - √, or linear",
        DecayShape.sqrt,
        used_with="schedule.name=wsd",
    )


@dataclass
class TrainerConfig(Checked):
    """How long a run trains, on which devices, and what it writes."""

    _section = "trainer."
    _decides = False

    max_steps: int = setting("optimizer steps of the whole run", allowed=at_least(1))
    tokens_per_step: int | None = setting(
        "padded size of a step, split into as many micro-batches as needed",
        None,
        allowed=at_least(1),
        decides=True,
    )
    accumulate_grad_batches: int = setting(
        "micro-batches of a step, if `tokens_per_step` is `null`",
        1,
        allowed=at_least(1),
        decides=True,
    )
    gradient_clip: float = setting(
        "the largest gradient norm; `0` turns clipping off", 0.5, allowed=at_least(0), decides=True
    )
    ema_decay: float | None = setting(
        "decay of an exponential moving average of the weights; `null`: no average",
        None,
        allowed=at_least(0, below=1),
        decides=True,
    )
    max_bad_steps: int = setting(
        "consecutive steps that may be skipped before the run ends", 10, allowed=at_least(1)
    )
    max_gradient_norm_ratio: float | None = setting(
        "skips a step whose gradient norm is more than this multiple of the usual norm",
        None,
        allowed=at_least(1),
    )
    accelerator: str = setting("`auto`, `cpu`, `gpu` or `cuda`", "auto")
    devices: int = setting("devices of each machine; on a CPU, processes", 1, allowed=at_least(1))
    num_nodes: int = setting("machines", 1, allowed=at_least(1))
    precision: str = setting(
        "`bf16-mixed` where the processor has bfloat16 products and `32-true` elsewhere; or one "
        "of the two",
        "auto",
        allowed=Range(
            f"one of {', '.join(_PRECISIONS)}; float16 and bfloat16 weights are not precise enough "
            "for a Performer's features",
            lambda value: value in _PRECISIONS,
        ),
        decides=True,
    )
    activation_checkpointing: bool = setting(
        "recomputes activations in the backward pass instead of storing them", False
    )
    compile: bool = setting("compiles the model, for ten padded lengths", False, decides=True)
    peak_tflops: float | None = setting(
        "peak TFLOP/s of a device, for the utilization, if the device is not in the table",
        None,
        allowed=above(0),
    )
    timeout_minutes: float = setting(
        "minutes that a rank waits for the others; after half of them stacks are printed",
        10.0,
        allowed=above(0),
    )
    log_every: int = setting("steps between two rows of `metrics.csv`", 10, allowed=at_least(1))
    measure_every: int | None = setting(
        "steps between two measurements of contacts and secondary structure, on shipped "
        "structures; `null`: none",
        None,
        allowed=at_least(1),
    )
    measure_assay: str | None = setting(
        "a table of variants in ProteinGym's format, whose zero-shot scores are measured as well",
        None,
    )
    measure_wild_type: str | None = setting(
        "a sequence file of one protein, the wild type of `measure_assay`", None
    )
    valid_every: int = setting("steps between two validations", 500, allowed=at_least(1))
    valid_batches: int | None = setting(
        "batches of a validation, drawn at random, of `data.tokens_per_batch` each; `null`: all",
        None,
        allowed=at_least(1),
    )
    checkpoint_every: int = setting("steps between two checkpoints", 500, allowed=at_least(1))
    checkpoint_minutes: float | None = setting(
        "minutes between two checkpoints, in addition", None, allowed=above(0)
    )
    keep_checkpoints: int = setting(
        "newest checkpoints to keep; never fewer than two", 3, allowed=at_least(1)
    )
    keep_best: int = setting("best checkpoints to keep in addition", 0, allowed=at_least(0))
    best_metric: BestMetric = setting("metric of the best checkpoints", BestMetric.valid_loss)
    on_save_error: OnSaveError = setting("when a checkpoint cannot be saved", OnSaveError.warn)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens_per_step is not None and self.accumulate_grad_batches > 1:
            raise UserError(
                f"trainer.tokens_per_step={self.tokens_per_step} already sets the size of a step; "
                f"leave trainer.accumulate_grad_batches={self.accumulate_grad_batches} out"
            )
        if (self.measure_assay is None) != (self.measure_wild_type is None):
            raise UserError(
                f"trainer.measure_assay={self.measure_assay} and "
                f"trainer.measure_wild_type={self.measure_wild_type} need each other; give both, a "
                "table of variants and a sequence file of their wild type, or neither"
            )
        if self.measure_assay is not None and self.measure_every is None:
            raise UserError(
                f"trainer.measure_assay={self.measure_assay} is never measured with "
                "trainer.measure_every=null; type trainer.measure_every=1000"
            )


@dataclass
class LoggerConfig(Checked):
    """Logs in addition to the CSV file, which is always written."""

    _section = "logger."
    _decides = False

    tensorboard: bool = setting("writes its files to `tensorboard/` in the run folder", False)
    wandb: WandbMode = setting("Weights & Biases", WandbMode.off)
    wandb_project: str = setting(
        "the project at Weights & Biases",
        "protlm",
        used_with="logger.wandb=offline,online",
    )
