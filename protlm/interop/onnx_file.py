"""Models of protlm as ONNX files, which programs without PyTorch run.

The file is compared with the model before it gets its name. Its metadata have the model's
description, and a tokenizer.
"""

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protlm import __version__
from protlm.attention import mechanism, names
from protlm.attention.layers import attention_label
from protlm.interop.hugging_face import tokenizer_of
from protlm.model.pretrained import PretrainedModel, TokenBatch
from protlm.model.transformer import padded_at_the_end
from protlm.system.errors import UserError, one_of
from protlm.system.paths import complete_file

INPUTS, OUTPUTS = ("input_ids", "attention_mask"), ("last_hidden_state", "logits")
_OPSET = 20
# What protocol buffers can hold, less some room for the graph.
MOST_BYTES = 2_000_000_000
# Residues of the proteins that the file is checked with: within and beyond chunks and windows.
_CHECKED = (5, 130, 600)
# Of the largest value. The rounding of 36 layers is some 1e-6.
TOLERANCE = 1e-4
_RESIDUES = "LAGVSERTIDPKQNFYMHWC"


class Graph(nn.Module):
    """A network with the inputs and outputs of the file; logits are left out without a head.

    Rows of the mask that are not ones followed by zeros are NaN in all outputs.
    """

    def __init__(self, model: PretrainedModel) -> None:
        super().__init__()
        self.network, self.causal = model.network, model.causal

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        mask_BL, last = attention_mask != 0, self.network.num_layers
        out = self.network(input_ids, mask_BL, causal=self.causal, layers=[last])
        out = out.only(padded_at_the_end(mask_BL))
        return tuple(x for x in (out.hidden[last], out.logits) if x is not None)


def export(model: PretrainedModel, output: Path) -> str:
    """Writes a model in float32 to a new file; returns a sentence on how it was checked."""
    _refuse(model)
    graph = Graph(model).eval()
    with complete_file(output) as temporary:
        program = _program(graph, model)
        program.model.metadata_props.update(_metadata(model))
        program.save(temporary, external_data=False)
        name, run = _runtime(temporary)
        found = {}
        for batch in _batches(model, _CHECKED):
            length = batch.tokens_BL.shape[1]
            found[length] = difference(graph, run, batch)
            if not found[length] <= TOLERANCE:
                raise UserError(
                    f"{output} was not written: at {length} positions {name} differs from torch by "
                    f"{found[length]:.1g} of the largest value; use --format hf"
                )
    return (
        f"checked with {name} at {', '.join(map(str, found))} positions: the largest difference "
        f"from torch is {max(found.values()):.1g} of the largest value"
    )


def difference(graph: Graph, run: Callable[..., Any], batch: TokenBatch) -> float:
    """Returns the largest difference between torch and a file, relative to the largest value."""
    given = batch.tokens_BL.long(), batch.mask_BL.long()
    with torch.no_grad():
        expected = [x.numpy() for x in graph(*given)]
    found = run({name: x.numpy() for name, x in zip(INPUTS, given, strict=True)})
    pairs = zip(expected, found, strict=True)
    return max(float(abs(x - y).max() / abs(x).max()) for x, y in pairs)


def _refuse(model: PretrainedModel) -> None:
    """Refuses a model that cannot be such a file, and missing packages."""
    described, network = model.description, model.network
    what = f"attention={attention_label(described.attention_config)}"
    exports = all(network.mechanism(number + 1).exports for number in range(network.num_layers))
    if network.relative is not None:
        what, exports = "model.positions=relative", False
    if not exports:
        able = [name for name in names() if mechanism(name).exports]
        raise UserError(
            f"--format onnx has no graph of any length for {what}: it takes {one_of(able)}, "
            "without decay or biases; type --format hf"
        )
    size = sum(x.numel() * x.itemsize for x in network.state_dict().values())
    if size > MOST_BYTES:
        raise UserError(
            f"the weights have {size / 1e9:.1f} GB, and an ONNX file at most 2 GB; type --format hf"
        )
    if not all(map(find_spec, ("onnx", "onnxscript"))):
        raise UserError(
            "--format onnx needs onnx and onnxscript, which are not installed; type: "
            "pip install 'protlm[onnx]' onnxruntime"
        )


def _program(graph: Graph, model: PretrainedModel) -> Any:
    (batch,) = _batches(model, (9,))
    given = batch.tokens_BL.long(), batch.mask_BL.long()
    dim = torch.export.Dim
    axes = {0: dim("batch"), 1: dim("length", max=model.max_length)}
    # They are about packages that are not needed, and about the names of axes.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.onnx.export(
            graph,
            given,
            dynamo=True,
            dynamic_shapes=(axes, axes),
            input_names=INPUTS,
            output_names=OUTPUTS[: len(graph(*given))],
            opset_version=_OPSET,
            verbose=False,
        )


def _metadata(model: PretrainedModel) -> dict[str, str]:
    described = model.description
    return {
        "protlm_version": __version__,
        "protlm": json.dumps(described.to_plain()),
        "tokenizer.json": tokenizer_of(described.frame),
        "max_length": str(model.max_length or "unbounded"),
    }


def _batches(model: PretrainedModel, sizes: tuple[int, ...]) -> Iterator[TokenBatch]:
    """Yields two proteins of each number of residues or, if it is less, that of the model."""
    for size in sizes:
        most = min(size, model.max_residues or size)
        letters = _RESIDUES * (most // len(_RESIDUES) + 1)
        yield model.tokenize([letters[:most], letters[1 : most * 2 // 3 + 1]])


def _runtime(path: Path) -> tuple[str, Callable[..., Any]]:
    """Returns the name of what runs the file, and its function of the inputs."""
    if find_spec("onnxruntime"):
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return f"onnxruntime {onnxruntime.__version__}", partial(session.run, None)
    from onnx.reference import ReferenceEvaluator

    name = "onnx's reference evaluator (pip install onnxruntime: with that)"
    return name, partial(ReferenceEvaluator(path).run, None)
