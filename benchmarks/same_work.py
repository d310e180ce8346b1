"""Whether models that are compared do the same work: parameters, products, dropout, padding."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from protlm.data.dataset import Batch
from protlm.data.masking import IGNORE
from protlm.data.vocabulary import VOCABULARY

aten = torch.ops.aten
# Operators for a CPU that torch's registry of counts leaves out, and those with the same count.
_SAME_COUNT = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}


@dataclass(frozen=True)
class Work:
    """What a model does in a step.

    Attributes:
        parameters: that are trained.
        flops: of the products of forward and backward for a token, by the dtype of the operands.
        is_random: whether two passes over one batch have different losses, as with dropout.
        padding_effect: the relative change of the loss when padding is appended.
    """

    parameters: int
    flops: dict[torch.dtype, float]
    is_random: bool
    padding_effect: float

    def share_of(self, dtype: torch.dtype) -> float:
        """The share of the operations whose operands have the dtype."""
        return self.flops.get(dtype, 0.0) / sum(self.flops.values())


class _Products(TorchDispatchMode):
    """Counts the operations of matrix products by the dtype of what is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        operator = _SAME_COUNT.get(func._overloadpacket, func._overloadpacket)
        if operator in flop_registry:
            self.flops[args[0].dtype] += flop_registry[operator](*args, **kwargs, out_val=out)
        elif operator is torch.ops.mkldnn._linear_pointwise:
            x, w = args[:2]
            self.flops[x.dtype] += 2 * x.numel() * len(w)
        return out


def examine(model: nn.Module, batch: Batch, dtype: torch.dtype) -> Work:
    """Runs a few passes of training under autocast to `dtype`.

    Args:
        model: takes a batch to its loss.
        batch: without padding, on the model's device.
        dtype: of autocast.
    """

    def loss_of(batch: Batch) -> Tensor:
        with torch.autocast(batch.tokens_BL.device.type, dtype=dtype):
            return model(batch)

    model.train()
    with _Products() as products:
        loss_of(batch).backward()
    model.zero_grad()
    with torch.no_grad():
        first, second, padded = loss_of(batch), loss_of(batch), loss_of(_padded(batch))
    tokens = batch.tokens_BL.numel()
    return Work(
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        flops={dtype: count / tokens for dtype, count in products.flops.items()},
        is_random=not torch.equal(first, second),
        padding_effect=float((padded - first).abs() / first),
    )


def _padded(batch: Batch) -> Batch:
    """The same with half as many positions again that are padding."""
    extra = batch.tokens_BL.shape[1] // 2

    def longer(x_BL: Tensor, value: int) -> Tensor:
        return nn.functional.pad(x_BL, (0, extra), value=value)

    return Batch(
        tokens_BL=longer(batch.tokens_BL, VOCABULARY.pad),
        targets_BL=longer(batch.targets_BL, IGNORE),
        mask_BL=longer(batch.mask_BL, 0),
        samples_B=batch.samples_B,
        after=batch.after,
    )
