"""Runs the fused kernels in Triton's interpreter, and prints their errors as lines of JSON.

TRITON_INTERPRET=1 python -m tests.attention.linearized.programs.interpret MECHANISM DTYPE MODE K R
LENGTH...

MODE is bidirectional, causal or cut: causal, with keys so far above the first one that they are
cut, compared with PyTorch in float32, which cuts at the same height. With `packed-` before it, the
rows are those of `test_packed`, whatever the length.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

import protlm.attention
from protlm.bounds import Bounds
from tests.attention.cases import HEADS, Inputs, make_inputs
from tests.attention.test_packed import BOUNDS, SPANS, joined


def emulate_bfloat16() -> None:
    """Lets the interpreter round to nearest, as cards do, and multiply what bfloat16 bits mean.

    It truncates, and multiplies the bits as whole numbers.
    """
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def round_to_nearest(x: Any, given: Any, wanted: Any, mode: Any) -> Any:
        if (given, wanted) != (tl.float32, tl.bfloat16):
            return convert(x, given, wanted, mode)
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        wide = (x.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def multiply(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    interpreter._convert_float = round_to_nearest
    setattr(interpreter.InterpreterBuilder, "create_dot", multiply)  # noqa: B010 (of other types)


def draw(inputs: Inputs) -> Inputs:
    """With heads between positions in memory, as those of a model are."""
    q_BHLK, k_BHLK, v_BHLC = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:3])
    return Inputs(q_BHLK, k_BHLK, v_BHLC, inputs.hidden_BLD, inputs.mask_BL)


def with_gradients(
    mechanism: Any, inputs: Inputs, bounds: Bounds | None, *, causal: bool
) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    leaves = inputs.differentiable()
    out = leaves.run(mechanism, causal=causal, bounds=bounds)
    generator = torch.Generator().manual_seed(3)
    cotangent = torch.randn(out.shape, generator=generator).to(inputs.v_BHLC.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves[:3], cotangent)]


def raise_features(k_BHLK: Tensor, factor: float) -> None:
    """Makes the features of the first keys of sample 0 small: those of later keys rise."""
    k_BHLK[0, 0, :1] *= factor
    k_BHLK[0, 1, : k_BHLK.shape[2] // 2] *= factor


def is_causal(mechanism: Any, inputs: Inputs, out_BHLC: Tensor) -> bool:
    """Whether outputs are bitwise equal when a later key and later values are other ones."""
    position = out_BHLC.shape[2] * 2 // 3
    later = Inputs(*(x.clone() for x in inputs))
    later.k_BHLK[:, :, position] *= 30
    later.v_BHLC[:, :, position:] *= 1e4
    out = later.run(mechanism, causal=True)
    return torch.equal(out[:, :, :position], out_BHLC[:, :, :position])


def is_alone(mechanism: Any, inputs: Inputs, found: list[Tensor], *, causal: bool) -> bool:
    """Whether a packed protein is bitwise the same when its neighbors are 30 times other ones."""
    (start, end), louder = SPANS[3], [30 * x for x in inputs[:4]]
    other = Inputs(*louder, mask_BL=inputs.mask_BL)
    for x, y in zip(other[:4], inputs[:4], strict=True):
        x[..., start:end, :] = y[..., start:end, :]
    again = with_gradients(mechanism, other, BOUNDS, causal=causal)
    pairs = zip(found, again, strict=True)
    return all(torch.equal(x[:, :, start:end], y[:, :, start:end]) for x, y in pairs)


def compare(run: str) -> None:
    """Prints, for each length of a run, the errors of the output and of the gradients."""
    name, dtype, mode, *numbers = run.split()
    width, features, *lengths = map(int, numbers)
    bounds = BOUNDS if mode.startswith("packed-") else None
    mode = mode.removeprefix("packed-")
    causal, precise = mode != "bidirectional", torch.float32 if mode == "cut" else torch.float64
    sizes = {"num_heads": HEADS, "head_dim": width, "model_dim": 8, "max_length": 8}
    options = {"num_features": features or None}
    fused = protlm.attention.create(name, options | {"backend": "triton"}, **sizes)
    exact = protlm.attention.create(name, options | {"backend": "torch"}, **sizes).to(precise)
    for length in lengths:
        drawn = joined(head_dim=width) if bounds else make_inputs(length, head_dim=width)
        inputs = draw(drawn.to(getattr(torch, dtype)))
        if causal and not bounds:
            raise_features(inputs.k_BHLK, 8 if mode == "cut" else 2)
        found = with_gradients(fused, inputs, bounds, causal=causal)
        wanted = with_gradients(exact, inputs.to(precise), bounds, causal=causal)
        # Gradients of queries and keys are 0 for a single position.
        scales = [y.norm() if y.norm() > 1e-9 else wanted[-1].norm() for y in wanted]
        errors = [
            float((x.double() - y).norm() / scale)
            for x, y, scale in zip(found, wanted, scales, strict=True)
        ]
        is_clear = not any(bool(x.transpose(1, 2)[~inputs.mask_BL].any()) for x in found)
        report = {"run": run, "length": length, "errors": errors, "is_clear": is_clear}
        if bounds:
            report["is_alone"] = is_alone(fused, inputs, found, causal=causal)
        elif causal:
            report["is_causal"] = is_causal(fused, inputs, found[0])
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    emulate_bfloat16()
    for run in sys.argv[1:]:
        compare(run)
