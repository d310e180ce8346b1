"""Reversible residuals: training with memory independent of the number of blocks.

Two streams run through the model (Gomez et al., arXiv 1707.04585; Reformer, arXiv 2001.04451,
equations 8 and 9). Each sublayer f, norm and dropout included, couples them:

    (x1, x2)  ->  (x2, x1 + f(x2))        and back:        x1 = (x1 + f(x2)) - f(x2)

A block consists of attention and feed-forward: Y1 = X1 + Attention(X2), Y2 = X2 + FeedForward(Y1).
Couplings do not keep their inputs. The backward pass begins with the last streams, and each
coupling computes its input from its output, with one evaluation of f for this and for the
gradients. The memory is that of the streams and of one sublayer.

The streams are float64, and sublayers use the dtype of the embedding. In float32, the reconstructed
x1 would have a rounding error. It is small, but enough to change a rounding to bfloat16, or the
bucket of LSH attention. A float64 sum of float32 numbers is nearly always exact, so that the
backward pass sees the same values as the forward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from protlm.model.block import Block, Sublayer


@dataclass
class _Handover:
    """Passes the output of a coupling to its backward pass; otherwise empty."""

    streams: tuple[Tensor, Tensor] | None = None

    def take(self) -> tuple[Tensor, Tensor]:
        streams, self.streams = self.streams, None
        assert streams is not None
        return streams


class Streams:
    """The two streams between blocks; couplings change them in place.

    Args:
        x_BLD: the embedding, the initial value of both.
        recompute: whether the backward pass inverts the couplings; otherwise activations are kept
            as in any model.
    """

    def __init__(self, x_BLD: Tensor, *, recompute: bool) -> None:
        self._first_BLD = self._second_BLD = x_BLD.double()
        self._dtype = x_BLD.dtype
        self._recompute = recompute
        self._handover: _Handover | None = None

    def read(self) -> Tensor:
        """Returns the input of the next sublayer, BLD, in the dtype of the embedding."""
        return self._second_BLD.to(self._dtype)

    def couple(self, sublayer: Sublayer) -> None:
        """Adds `sublayer(read())` to the first stream, and exchanges the two.

        Args:
            sublayer: a function of one stream and of parameters without side effects, except that
                it may draw dropout.
        """
        # Autograd keeps this function. It must not refer to the streams, which refer to the graph.
        dtype = self._dtype

        def narrow(x_BLD: Tensor) -> Tensor:
            return sublayer(x_BLD.to(dtype))

        if self._recompute:
            out_BLD = self._recoverable_sum(narrow)
        else:
            out_BLD = self._first_BLD + narrow(self._second_BLD)
        self._first_BLD, self._second_BLD = self._second_BLD, out_BLD

    def _recoverable_sum(self, sublayer: Sublayer) -> Tensor:
        """Returns `first + sublayer(second)` without the graph of the sublayer."""
        conditions = _Conditions(self._second_BLD.device)
        second_BLD = self._second_BLD.detach().requires_grad_()
        added_BLD = sublayer(second_BLD)
        parameters = [leaf for leaf in _leaves(added_BLD) if leaf is not second_BLD]
        added_BLD = added_BLD.detach()
        before, self._handover = self._handover, _Handover()
        call = _Call(sublayer, conditions, parameters, before, self._handover)
        return _Coupling.apply(call, self._first_BLD, self._second_BLD, added_BLD, *parameters)

    def mean(self) -> Tensor:
        """Returns the hidden state, BLD: the mean of the two streams.

        Released Reformers use the mean or the concatenation. The mean has the width of the
        embedding, so that the final norm and the output layer are those of any model.
        """
        if self._handover is None:
            mean_BLD = (self._first_BLD + self._second_BLD) / 2
        else:
            mean_BLD = _Mean.apply(self._handover, self._first_BLD, self._second_BLD)
        return mean_BLD.to(self._dtype)


class ReversibleBlock(Block[Streams]):
    """Y1 = X1 + Attention(norm X2), Y2 = X2 + FeedForward(norm Y1), each with dropout."""

    def _attention_input(self, residual: Streams) -> Tensor:
        return self.attention_norm(residual.read())

    def _add(self, residual: Streams, sublayer: Sublayer, norm: nn.Module) -> Streams:
        residual.couple(lambda x_BLD: self.dropout(sublayer(norm(x_BLD))))
        return residual


def _leaves(out: Tensor) -> list[Tensor]:
    """Returns the leaves of autograd's graph that `out` depends on.

    Modules may use parameters of other modules, which their `parameters` would not include.
    """
    waiting, seen = [out.grad_fn], set()
    leaves = []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            leaves.append(leaf)
    return leaves


class _Conditions:
    """The state of random numbers and autocast in a call, to repeat it."""

    def __init__(self, device: torch.device) -> None:
        self._devices = [] if device.type == "cpu" else [device]
        self._type = device.type
        self._state = torch.get_rng_state()
        self._device_states = [
            torch.get_device_module(device).get_rng_state(device) for device in self._devices
        ]
        self._autocast = torch.is_autocast_enabled(device.type)
        self._dtype = torch.get_autocast_dtype(device.type)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restores the state within a context; the global state does not change."""
        autocast = torch.autocast(self._type, dtype=self._dtype, enabled=self._autocast)
        with torch.random.fork_rng(self._devices, device_type=self._type), autocast:
            torch.set_rng_state(self._state)
            for device, state in zip(self._devices, self._device_states, strict=True):
                torch.get_device_module(device).set_rng_state(state, device)
            yield


@dataclass(frozen=True)
class _Call:
    """A call of a sublayer, with the handovers of the streams before and after it."""

    sublayer: Sublayer
    conditions: _Conditions
    parameters: list[Tensor]
    before: _Handover | None
    after: _Handover


class _Coupling(torch.autograd.Function):
    """Computes `first + added`, where added is sublayer(second), and the gradients.

    Each sublayer is one node with its parameters among the inputs. Gradients are therefore ready
    sublayer by sublayer, and DistributedDataParallel can send them while it computes the next.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        first_BLD: Tensor,
        second_BLD: Tensor,
        added_BLD: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        """Keeps only what is needed to call the sublayer again."""
        ctx.call = call
        return first_BLD + added_BLD

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Inverts the coupling, and computes the gradients of the sublayer."""
        call: _Call = ctx.call
        (gradient_BLD,) = grad_outputs
        second_BLD, out_BLD = call.after.take()
        with torch.enable_grad(), call.conditions.again():
            second_BLD = second_BLD.detach().requires_grad_()
            added_BLD = call.sublayer(second_BLD)
        if call.before is not None:
            call.before.streams = out_BLD - added_BLD, second_BLD
        to_second_BLD, *to_parameters = torch.autograd.grad(
            added_BLD, (second_BLD, *call.parameters), gradient_BLD
        )
        return None, gradient_BLD, to_second_BLD, None, *to_parameters


class _Mean(torch.autograd.Function):
    """Computes the mean of the streams, and keeps them for the previous coupling."""

    @staticmethod
    def forward(ctx: Any, handover: _Handover, first_BLD: Tensor, second_BLD: Tensor) -> Tensor:
        """Keeps both streams."""
        ctx.handover = handover
        ctx.save_for_backward(first_BLD, second_BLD)
        return (first_BLD + second_BLD) / 2

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Passes the streams to the previous coupling, which runs after this node."""
        ctx.handover.streams = ctx.saved_tensors
        half_BLD = grad_outputs[0] / 2
        return None, half_BLD, half_BLD
