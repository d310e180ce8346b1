"""Training of a model with linear attention to imitate a trained model, the teacher.

Two stages, as in Hedgehog (arXiv 2402.04347) and LoLCATs (arXiv 2410.10254): first the parameters
of the new attention alone learn the outputs of the teacher's attention, then all weights learn its
predictions. The teacher is not part of the checkpoint, which contains the hash of its weights.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protlm.checkpoints.description import differences
from protlm.config import DistillationStage, Optimizer, TrainConfig
from protlm.data.dataset import FILLER, Batch
from protlm.data.masking import IGNORE
from protlm.model.block import Block
from protlm.model.objective import TargetSums, target_sums
from protlm.model.pretrained import PretrainedModel
from protlm.model.selfattention import MECHANISM, SelfAttention
from protlm.system.errors import UserError
from protlm.training import lora
from protlm.training.launch import is_first_rank
from protlm.training.module import LanguageModeling

_TEACHER, _ADAPTERS = "teacher", "adapters"
# The layers that get adapters in stage 2, as in LoLCATs.
_ADAPTED = ("query", "key", "value", "output")
# The learning rate of experiment=linearize, for the few parameters of stage 1.
_RATE_OF_STAGE_1 = 1e-2


class Distillation(LanguageModeling, ABC):
    """Training with a teacher, which is frozen; the subclasses have the losses."""

    def learn_from(self, teacher: PretrainedModel, config: TrainConfig) -> None:
        where = f"objective.teacher={config.objective.teacher}"
        if teacher.causal != self.causal:
            raise UserError(
                f"{where} was trained with objective={teacher.description.objective}, and this run "
                f"has objective.name={config.objective.name}; choose another teacher"
            )
        longest = teacher.max_length
        if longest is not None and config.data.max_length > longest:
            raise UserError(
                f"data.max_length={config.data.max_length} is more than the {longest} positions of "
                f"{where}; type data.max_length={longest}"
            )
        self._check(teacher, config)
        # Not a module of this one, whose weights would be saved and trained.
        self._teachers = [teacher]
        self._hash = teacher.hash
        self._weight = config.objective.teacher_weight

    @abstractmethod
    def _check(self, teacher: PretrainedModel, config: TrainConfig) -> None:
        """Rejects a teacher that the stage cannot use."""

    @property
    def teacher(self) -> nn.Module:
        return self._teachers[0].network

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.teacher.to(self.device)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[_TEACHER] = self._hash

    def check_continues(self, checkpoint: Mapping[str, Any]) -> None:
        if checkpoint.get(_TEACHER) != self._hash:
            raise UserError(
                f"objective.teacher has weights with the hash {self._hash[:12]}, and the run was "
                f"trained with the teacher {str(checkpoint.get(_TEACHER))[:12]}; give that model, "
                "or choose another run_dir="
            )

    @torch.no_grad()
    def _teacher_logits(self, batch: Batch) -> Tensor:
        return self._logits(self.teacher, batch)


@final
class AttentionTransfer(Distillation):
    """Stage 1: each layer's attention learns the output of the teacher's on the teacher's inputs.

    The loss is the mean over layers and positions of |y - y'|² / |y|², where y is the output of the
    teacher's attention sublayer and y' that of the model's for the same input. Only the parameters
    of the mechanism are trained.
    """

    def _check(self, teacher: PretrainedModel, config: TrainConfig) -> None:
        stage = f"objective.stage={DistillationStage.attention}"
        if differing := differences(teacher.description.model, config.model):
            name, there, here = differing[0]
            raise UserError(
                f"{stage} needs a teacher of the same architecture: objective.teacher="
                f"{config.objective.teacher} has model.{name}={there}, and this run {here}"
            )
        if config.model.init_from is None:
            raise UserError(
                f"{stage} trains the attention of a converted model; type model.init_from=NEW with "
                "the output of: protlm checkpoint convert"
            )
        for name in ("compile", "activation_checkpointing"):
            if getattr(config.trainer, name):
                raise UserError(f"trainer.{name}=true has no effect in {stage}; leave it out")
        own = [p for block in _attentions(self.network) for p in block.mechanism.parameters()]
        if not own:
            raise UserError(
                f"attention={config.attention['name']} has no parameters, so {stage} has nothing "
                f"to train; type objective.stage={DistillationStage.logits}, or choose "
                "attention=hedgehog"
            )
        self.network.requires_grad_(False)
        for parameter in own:
            parameter.requires_grad_()

    def check_start(self, config: TrainConfig) -> None:
        own, taught = self.network.state_dict(), self.teacher.state_dict()
        # Two mechanisms may differ in the norms of queries and keys that they need.
        common = [name for name in own if MECHANISM not in name and name in taught]
        for name in common:
            if not torch.equal(own[name], taught[name].to(own[name].device)):
                raise UserError(
                    f"model.init_from={config.model.init_from} has other weights than "
                    f"objective.teacher={config.objective.teacher} ({name}), and "
                    f"objective.stage={DistillationStage.attention} trains the attention alone; "
                    f"type model.init_from=NEW with the output of protlm checkpoint convert "
                    f"{config.objective.teacher}, of attention {config.attention['name']}"
                )

    def _losses(self, batch: Batch) -> tuple[Tensor, TargetSums]:
        calls: list[tuple[tuple[Any, ...], Tensor]] = []

        def record(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            calls.append((inputs, output))

        hooks = [a.register_forward_hook(record) for a in _attentions(self.teacher)]
        try:
            self._teacher_logits(batch)
        finally:
            for hook in hooks:
                hook.remove()
        chosen_BL = batch.mask_BL & (batch.samples_B != FILLER)[:, None]
        # The rows of packed proteins are joined.
        chosen_BL = chosen_BL.view(calls[0][1].shape[:2])
        errors: list[Tensor] = []
        for attention, (inputs, output) in zip(_attentions(self.network), calls, strict=True):
            target, estimate = (_at(chosen_BL, x) for x in (output, attention(*inputs)))
            size = target.square().sum(-1)
            errors.append(((estimate - target).square().sum(-1) / size.clamp(min=1e-12)).sum())
        total = torch.stack(errors).sum()
        # There are no predictions to be correct.
        return total, TargetSums(
            total, torch.full_like(total.detach(), torch.nan), chosen_BL.sum() * len(errors)
        )


@final
class LogitDistillation(Distillation):
    """Stage 2: all weights learn the teacher's predictions, and the masked or next residues.

    The loss of a target is its cross-entropy plus `objective.teacher_weight` times the divergence
    KL(teacher, model) of the predictions. The log has the cross-entropy. With
    `objective.lora_rank`, adapters of the projections of attention learn instead of all weights.
    In every checkpoint they are merged into the weights; adapters and unmerged weights are saved
    too, so that the run can be resumed.
    """

    def _check(self, teacher: PretrainedModel, config: TrainConfig) -> None:
        rank = config.objective.lora_rank
        self._has_adapters = rank is not None
        if rank is None:
            rate, optimizer = config.optimizer.learning_rate, config.optimizer.name
            if rate >= _RATE_OF_STAGE_1 and optimizer is Optimizer.adamw and is_first_rank():
                warnings.warn(
                    f"optimizer.learning_rate={rate} suits stage 1, and is high for all weights; "
                    "type for instance optimizer.learning_rate=1e-4",
                    stacklevel=2,
                )
            return
        asked = f"objective.lora_rank={rank}"
        if config.model.init_from is None:
            raise UserError(
                f"{asked} adapts a trained model; type model.init_from=NEW with the output of "
                "stage 1, or of: protlm checkpoint convert"
            )
        if config.trainer.ema_decay is not None:
            raise UserError(f"{asked} has no average of weights; type trainer.ema_decay=null")
        lora.add_adapters(self.network, rank=rank, targets=_ADAPTED, seed=config.seed)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves merged weights, which every command can read, and the adapters."""
        super().on_save_checkpoint(checkpoint)
        if self._has_adapters:
            checkpoint["state_dict"], checkpoint[_ADAPTERS] = lora.merged_state(
                checkpoint["state_dict"]
            )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self._has_adapters:
            checkpoint["state_dict"] = lora.separated_state(
                checkpoint["state_dict"], checkpoint[_ADAPTERS]
            )

    def _losses(self, batch: Batch) -> tuple[Tensor, TargetSums]:
        taught_BLV = self._teacher_logits(batch)
        logits_BLV = self._logits(self.network, batch)
        sums = target_sums(logits_BLV, batch.targets_BL)
        chosen_BL = batch.targets_BL != IGNORE
        # Elsewhere both are uniform, and their divergence is 0.
        divergence = F.kl_div(
            _at(chosen_BL, logits_BLV).log_softmax(-1),
            _at(chosen_BL, taught_BLV).log_softmax(-1),
            reduction="sum",
            log_target=True,
        )
        return sums.nats + self._weight * divergence, sums


STAGES: Mapping[DistillationStage, type[Distillation]] = {
    DistillationStage.attention: AttentionTransfer,
    DistillationStage.logits: LogitDistillation,
}


def _at(chosen_BL: Tensor, values_BLD: Tensor) -> Tensor:
    """Returns values in float32, 0 elsewhere; to take them out, a GPU would be waited for."""
    return values_BLD.float().masked_fill(~chosen_BL[..., None], 0)


def _attentions(network: nn.Module) -> list[SelfAttention]:
    return [module.attention for module in network.modules() if isinstance(module, Block)]
