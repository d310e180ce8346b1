"""What a run derives from its settings: decided once, before anything is built."""

import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from protlm.attention.layers import mechanisms_of
from protlm.config import (
    Batching,
    Mode,
    ModelConfig,
    Objective,
    Relatives,
    RelativesPositions,
    TrainConfig,
    TrainerConfig,
)
from protlm.data.batching.plan import BatchingStrategy, RankBatches
from protlm.data.batching.relatives import WholeFamilies
from protlm.data.batching.strategies import Concatenation, LengthBuckets, WholeProteins
from protlm.data.masking import MaskingRule
from protlm.system.errors import UserError
from protlm.training.launch import (
    check_trainer,
    is_first_rank,
    resolved_accelerator,
    resolved_precision,
)
from protlm.training.schedule import check_schedule, decay_steps

# Padded lengths of a compiled model, a graph for each.
_COMPILED_LENGTHS = 10


@dataclass(frozen=True)
class RunPlan:
    """What a run does on this machine.

    What builds, prints and trains a run takes it from here. Settings that do not fit each other, or
    do not fit the machine, are refused when the plan is made.
    """

    config: TrainConfig

    def __post_init__(self) -> None:
        trainer = self.config.trainer
        check_trainer(trainer)
        check_schedule(self.config.schedule, max_steps=trainer.max_steps)
        # Fractions and relatives are checked.
        _ = self.masking, self.model
        size, longest = self.config.data.tokens_per_batch, self.batching.longest_row
        if longest > max(size, self.batching.max_length):
            raise UserError(
                f"rows of data.tokens_per_row={longest} do not fit into "
                f"data.tokens_per_batch={size}; type data.tokens_per_row={size}"
            )
        rows = max(size // longest, 1)
        if rows < self.num_devices and is_first_rank():
            warnings.warn(
                f"data.tokens_per_batch={size} holds {rows} of the longest rows, of {longest} "
                f"tokens, so some of the {self.num_devices} devices will wait for the others; "
                f"type data.tokens_per_batch={self.num_devices * longest}, or use fewer devices",
                stacklevel=2,
            )

    @property
    def run_dir(self) -> Path:
        """The folder of the run."""
        return Path(self.config.run_dir)

    @property
    def is_causal(self) -> bool:
        """Whether the next residue is predicted."""
        return self.config.objective.name is Objective.causal

    @cached_property
    def model(self) -> ModelConfig:
        """The model; one that is trained on families sees all of them, or, if causal, in order."""
        model, are_related = self.config.model, self.config.data.batching is Batching.relatives
        layers = mechanisms_of(self.config.attention, model.num_layers)
        has_windows = any(one.options.get("relatives_window") is not None for one in layers)
        if self.config.optimizer.only_relatives and not (
            are_related and model.relatives_heads and model.init_from
        ):
            raise UserError(
                "optimizer.only_relatives=true trains heads of relatives beside a trained model; "
                "type data.batching=relatives model.relatives_heads=1 model.init_from=MODEL"
            )
        if self.config.optimizer.only_relatives and (
            model.relatives_numbers or self.config.data.relatives_alone == 1
        ):
            raise UserError(
                "optimizer.only_relatives=true trains no table of model.relatives_numbers, and "
                "nothing on proteins alone; type model.relatives_numbers=0 data.relatives_alone=0"
            )
        if model.relatives_heads and has_windows:
            raise UserError(
                "model.relatives_heads see relatives in place of all other heads, and of "
                "attention.relatives_window; type attention.relatives_window=null, or "
                "model.relatives_heads=0"
            )
        if not are_related:
            for name, without in (("relatives", "null"), ("relatives_heads", 0)):
                if value := getattr(model, name):
                    raise UserError(
                        f"model.{name}={value} has no effect without rows of relatives; type "
                        f"data.batching=relatives, or model.{name}={without}"
                    )
            if has_windows:
                raise UserError(
                    "attention.relatives_window has no effect without rows of relatives; type "
                    "data.batching=relatives, or attention.relatives_window=null"
                )
            return model
        if 0 < model.relatives_numbers < self.config.data.relatives:
            raise UserError(
                f"model.relatives_numbers={model.relatives_numbers} must be at least "
                f"data.relatives={self.config.data.relatives}, or 0 for no table"
            )
        if self.is_causal and model.relatives is Relatives.full:
            raise UserError(
                "model.relatives=full shows a protein those after it, which objective=causal "
                "predicts; type model.relatives=ordered"
            )
        if self.is_causal and model.relatives_positions is RelativesPositions.aligned:
            raise UserError(
                "model.relatives_positions=aligned places a protein by all of its residues, which "
                "objective=causal predicts; type model.relatives_positions=restart"
            )
        if self.is_causal and model.relatives_heads:
            raise UserError(
                "model.relatives_heads does not support objective=causal; choose "
                "objective=mask_only, or attention=hybrid attention.relatives_window=8"
            )
        if self.config.objective.stage is not None:
            raise UserError(
                f"objective.stage={self.config.objective.stage} imitates a model of single "
                "proteins; type data.batching=packed"
            )
        default = Relatives.ordered if self.is_causal else Relatives.full
        return replace(model, relatives=model.relatives or default)

    @property
    def num_devices(self) -> int:
        """The devices of all machines."""
        return self.config.trainer.devices * self.config.trainer.num_nodes

    @cached_property
    def trainer(self) -> TrainerConfig:
        """The settings of the trainer, with an accelerator and a precision in place of `auto`."""
        trainer = self.config.trainer
        device = resolved_accelerator(trainer.accelerator)
        return replace(
            trainer, accelerator=device, precision=resolved_precision(trainer.precision, device)
        )

    @property
    def tokens_per_step(self) -> int:
        """The size of an optimizer step, with padding."""
        trainer, size = self.config.trainer, self.config.data.tokens_per_batch
        return trainer.tokens_per_step or trainer.accumulate_grad_batches * size

    @cached_property
    def batching(self) -> BatchingStrategy:
        """How samples become batches; with `trainer.tokens_per_step`, a batch is a step."""
        trainer, data = self.config.trainer, self.config.data
        size = (trainer.tokens_per_step or data.tokens_per_batch, data.max_length)
        if data.mode is Mode.concatenated:
            return Concatenation(*size)
        if data.batching is Batching.packed:
            return WholeProteins(*size, crop=data.crop, row=data.tokens_per_row)
        if data.batching is Batching.relatives:
            # A causal target does not hide anything from the relatives after it.
            alone, last = data.relatives_alone, 0.0 if self.is_causal else data.relatives_last
            if alone + last > 1:
                raise UserError(
                    f"data.relatives_alone={alone} and data.relatives_last={last} are fractions of "
                    "the same documents, and more than 1 together; type smaller ones, such as "
                    "data.relatives_last=0"
                )
            return WholeFamilies(
                *size,
                row=data.tokens_per_row,
                members=data.relatives,
                tokens=data.relatives_tokens,
                alone=alone,
                last=last,
                positions=self.model.relatives_positions,
            )
        return LengthBuckets(
            *size, crop=data.crop, even=_COMPILED_LENGTHS if trainer.compile else 0
        )

    @cached_property
    def share(self) -> RankBatches:
        """The micro-batches of a batch, and the batches of a step.

        The size of a step does not depend on that of a micro-batch, which has whole rows.
        """
        trainer, longest = self.config.trainer, self.batching.longest_row
        rows_of_step = max((trainer.tokens_per_step or 1) // longest, 1)
        rows_at_a_time = max(self.config.data.tokens_per_batch // longest, 1)
        return RankBatches(
            micro_batches=-(-rows_of_step // rows_at_a_time),
            fill=trainer.compile,
            batches_per_step=trainer.accumulate_grad_batches,
        )

    @cached_property
    def masking(self) -> MaskingRule | None:
        """The masks of training; None for the causal objective."""
        if self.is_causal:
            return None
        objective, max_steps = self.config.objective, self.config.trainer.max_steps
        bounds = objective.mask_fraction_range
        decay = decay_steps(self.config.schedule, max_steps=max_steps)
        return MaskingRule(
            mask_fraction=objective.mask_fraction,
            mask_prob=objective.mask_prob,
            random_prob=objective.random_prob,
            mask_fraction_range=None if bounds is None else (bounds[0], bounds[1]),
            narrowing=(max_steps - decay, max_steps) if objective.mask_fraction_decays else None,
        )
