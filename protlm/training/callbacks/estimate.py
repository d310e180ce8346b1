"""Monitors how well the Performers of a run estimate softmax attention."""

import warnings
from itertools import chain
from typing import Any, NamedTuple, Self

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from protlm.attention.hybrid import Hybrid
from protlm.attention.layers import mechanisms_of
from protlm.attention.linearized.variance import (
    SquareNorms,
    deciding_norm,
    pair_sums,
    relative_error,
)
from protlm.attention.performer_softmax import LARGEST_OPTIMAL_FOR, Estimator, PerformerSoftmax
from protlm.bounds import taken
from protlm.checkpoints.description import ModelDescription
from protlm.data.dataset import FILLER, Batch
from protlm.model.transformer import ProteinLM
from protlm.training.callbacks.hooks import LoopCallback, log
from protlm.training.module import LanguageModeling, Training

# An estimate whose standard deviation equals the weight carries no information about it.
_USELESS = 1.0
# The estimators that `attention.optimal_for` applies to.
_STRETCHABLE = (Estimator.positive, Estimator.hyperbolic)


class WatchEstimates(LoopCallback):
    """Logs the mean |q̂ + k̂|² of each layer and the relative error that it predicts for a weight.

    Both values are those of the layer's worst head. They are measured on the last batch before
    each log, summed over the ranks, by hooks that exist only during its forward pass; other
    batches cost nothing. A layer whose estimate is useless causes one warning per run. Layers
    without a softmax Performer are ignored.
    """

    def __init__(self, network: ProteinLM, *, every: int) -> None:
        # The Performer may be a part of a hybrid mechanism.
        self._layers = {
            number: part
            for number in range(1, network.num_layers + 1)
            for part in network.mechanism(number).modules()
            if isinstance(part, PerformerSoftmax)
        }
        self._network, self._every = network, every
        self.columns = [name for number in self._layers for name in _names(number)]
        self._sums: dict[int, Tensor] = {}
        self._hooks = list[RemovableHandle]()
        self._warned: set[int] = set()

    def state_dict(self) -> dict[str, Any]:
        return {"warned": sorted(self._warned)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._warned = set(state_dict["warned"])

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        is_last = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if is_last and (trainer.global_step + 1) % self._every == 0:
            mask_BL = batch.mask_BL & (batch.samples_B != FILLER)[:, None]
            for number, mechanism in self._layers.items():
                self._look_once(number, mechanism, mask_BL)

    def on_step_end(self, trainer: Trainer, module: Training, batch: Batch) -> None:
        # Layers that sum over a family in order are not looked at.
        while self._hooks:
            self._hooks.pop().remove()
        if not self._sums:
            return
        found, self._sums = dict(sorted(self._sums.items())), {}
        sums_N3H = module.all_ranks(torch.stack([*found.values()])).cpu()
        worst = {
            number: _WorstHead.of(self._layers[number], sums_3H)
            for number, sums_3H in zip(found, sums_N3H, strict=True)
        }
        figures = chain(*((head.square_norm, head.error) for head in worst.values()))
        log(trainer, dict(zip(chain(*map(_names, found)), figures, strict=True)))
        useless = {number: head for number, head in worst.items() if head.error > _USELESS}
        if (news := useless.keys() - self._warned) and trainer.is_global_zero:
            assert isinstance(module, LanguageModeling)
            self._warn({number: worst[number] for number in sorted(news)}, module.description)
        self._warned |= useless.keys()

    def _look_once(self, number: int, mechanism: PerformerSoftmax, mask_BL: Tensor) -> None:
        def look(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            # Activation checkpointing runs the layer a second time in the backward pass.
            hook.remove()
            q_BHLK, k_BHLK, _, context, bounds = inputs
            rows: list[tuple[Tensor, ...]] = [(q_BHLK, k_BHLK, mask_BL)]
            with torch.no_grad():
                if bounds is not None:
                    given = q_BHLK, k_BHLK, mask_BL.view(1, 1, -1, 1)
                    parts = (([taken(x, at) for x in given], m) for at, m in bounds.padded_rows())
                    rows = [(q, k, seen[:, 0, :, 0] & mask) for (q, k, seen), mask in parts]
                sums = [pair_sums(*row, causal=context.causal) for row in rows]
            self._sums[number] = torch.stack(sums).sum(0)

        hook = mechanism.register_forward_pre_hook(look)
        self._hooks.append(hook)

    def _warn(self, useless: dict[int, "_WorstHead"], described: ModelDescription) -> None:
        number = max(useless, key=lambda number: useless[number].error)
        head, mechanism = useless[number], self._layers[number]
        is_stretchable = (
            mechanism.optimal_for is None
            and mechanism.estimator in _STRETCHABLE
            and head.norm <= LARGEST_OPTIMAL_FOR
        )
        whole = self._network.mechanism(number)
        # As a part of a hybrid mechanism, a Performer follows other heads, and has its settings one
        # level down.
        local = whole.local_heads if isinstance(whole, Hybrid) else 0
        chosen = mechanisms_of(described.attention_config, described.model.num_layers)
        group = chosen[number - 1].group + (".options" if local else "")
        stretch = f"{group}.optimal_for={head.norm:.3g} and " if is_stretchable else ""
        # Bounded norms help most; the other settings matter only once norms are bounded.
        advice = (
            f"{stretch}more {group}.num_features lower the error"
            if described.model.qk_norm
            else "model.qk_norm=true bounds the norm"
        )
        layers = "layer" if len(useless) == 1 else "layers"
        sign = "-" if mechanism.estimator is Estimator.trigonometric else "+"
        warnings.warn(
            f"FAVOR+ cannot estimate softmax attention in {layers} {', '.join(map(str, useless))}: "
            f"in head {head.number + local} of layer {number} the mean |q{sign}k|²/√K is "
            f"{head.norm:.3g}, so that a weight of {mechanism.num_features} features is off by "
            f"{head.error:.2g} times itself; in a run with another run_dir= {advice}",
            stacklevel=2,
        )


class _WorstHead(NamedTuple):
    """The head of a layer with the largest error, and the mean square norm that determines it.

    `square_norm` is the largest mean |q̂ + k̂|² of the layer.
    """

    number: int
    norm: float
    error: float
    square_norm: float

    @classmethod
    def of(cls, mechanism: PerformerSoftmax, sums_3H: Tensor) -> Self:
        norms = SquareNorms.of(sums_3H)
        norm_H, error_H = deciding_norm(mechanism, norms), relative_error(mechanism, norms)
        head = int(norm_H.argmax())
        return cls(head + 1, float(norm_H[head]), float(error_H[head]), float(norms.sum_H.max()))


def _names(number: int) -> tuple[str, str]:
    return f"square_norm_layer_{number}", f"relative_error_layer_{number}"
