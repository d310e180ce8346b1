"""Runs the fused kernels in Triton's interpreter, and prints their errors as lines of JSON.

TRITON_INTERPRET=1 python interpret.py MECHANISM DTYPE MODE K R LENGTH...

MODE is bidirectional, causal or cut: causal, with keys so far above the first one that they are
cut, compared with PyTorch in float32, which cuts at the same height.
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

BATCH, HEADS = 3, 2


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


def draw(length: int, width: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """Queries, keys and values with NaN in the padding, the gradient of the output, the mask."""
    generator = torch.Generator().manual_seed(0)
    shape = BATCH, length, HEADS, width
    drawn = [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for _ in range(4)]
    mask_BL = torch.ones(BATCH, length, dtype=torch.bool)
    mask_BL[1, length // 2 :] = False
    mask_BL[2, : length // 5] = False
    mask_BL[2, length // 3 : length // 3 + length // 6] = False
    padding = ~mask_BL[:, None, :, None]
    return [x.masked_fill(padding, torch.nan) for x in drawn[:3]], drawn[3], mask_BL


def with_gradients(
    mechanism: Any, inputs: list[Tensor], cotangent: Tensor, mask_BL: Tensor, *, causal: bool
) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = mechanism(*leaves, hidden_BLD=None, mask_BL=mask_BL, causal=causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def raise_features(k_BHLK: Tensor, factor: float) -> None:
    """Makes the features of the first keys of sample 0 small: those of later keys rise."""
    k_BHLK[0, 0, :1] *= factor
    k_BHLK[0, 1, : k_BHLK.shape[2] // 2] *= factor


def is_causal(mechanism: Any, inputs: list[Tensor], mask_BL: Tensor, out_BHLC: Tensor) -> bool:
    """Whether outputs are bitwise equal when a later key and later values are other ones."""
    position = mask_BL.shape[1] * 2 // 3
    q, k, v = (x.clone() for x in inputs)
    k[:, :, position] *= 30
    v[:, :, position:] *= 1e4
    out = mechanism(q, k, v, hidden_BLD=None, mask_BL=mask_BL, causal=True)
    return torch.equal(out[:, :, :position], out_BHLC[:, :, :position])


def main() -> None:
    """Prints, for each length, the errors of the output and of the gradients."""
    emulate_bfloat16()
    (name, dtype, mode), (width, features) = sys.argv[1:4], map(int, sys.argv[4:6])
    causal, precise = mode != "bidirectional", torch.float32 if mode == "cut" else torch.float64
    sizes = {"num_heads": HEADS, "head_dim": width, "model_dim": 8, "max_length": 8}
    options = {"num_features": features or None}
    fused = protlm.attention.create(name, options | {"backend": "triton"}, **sizes)
    exact = protlm.attention.create(name, options | {"backend": "torch"}, **sizes).to(precise)
    for length in map(int, sys.argv[6:]):
        inputs, cotangent, mask_BL = draw(length, width, getattr(torch, dtype))
        if causal:
            raise_features(inputs[1], 8 if mode == "cut" else 2)
        found = with_gradients(fused, inputs, cotangent, mask_BL, causal=causal)
        wide = [x.to(precise) for x in inputs]
        wanted = with_gradients(exact, wide, cotangent.to(precise), mask_BL, causal=causal)
        # Gradients of queries and keys are 0 for a single position.
        scales = [y.norm() if y.norm() > 1e-9 else wanted[-1].norm() for y in wanted]
        errors = [
            float((x.double() - y).norm() / scale)
            for x, y, scale in zip(found, wanted, scales, strict=True)
        ]
        padding = [x.transpose(1, 2)[~mask_BL] for x in found]
        is_clear = not any(bool(x.any()) for x in padding)
        report = {"length": length, "errors": errors, "is_clear": is_clear}
        if causal:
            report["is_causal"] = is_causal(fused, inputs, mask_BL, found[0])
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
