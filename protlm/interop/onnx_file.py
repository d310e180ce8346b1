"""Models of protlm as ONNX files, which programs without PyTorch run.

A file is compared with the model before it gets its name. Its metadata have the description of the
model, and its tokenizer.
"""

import json
import logging
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from protlm import __version__
from protlm.attention import mechanism, names
from protlm.attention.layers import attention_label
from protlm.interop.hugging_face import tokenizer_of
from protlm.model.layers import only, padded_at_the_end
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import UserError, one_of
from protlm.system.paths import complete_file

INPUTS, OUTPUTS = ("input_ids", "attention_mask"), ("last_hidden_state", "logits")
# What protocol buffers can hold, less some room for the graph.
MOST_BYTES = 2_000_000_000
# Of the largest value. The rounding of 36 layers is some 1e-6.
TOLERANCE = 1e-4
# Residues of the proteins that a file is checked with: within chunks and windows, and beyond them.
_CHECKED = (5, 130, 600)
_PROTEIN = "LAGVSERTIDPKQNFYMHWC" * (max(_CHECKED) // 20)


class Graph(nn.Module):
    """A model with the inputs and outputs of its file; there are no logits without a head.

    Rows whose mask is not ones followed by zeros are NaN.
    """

    def __init__(self, model: PretrainedModel) -> None:
        super().__init__()
        self.network, self.causal = model.network, model.causal

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        mask_BL, last = attention_mask != 0, self.network.num_layers
        out = self.network(input_ids, mask_BL, causal=self.causal, layers=[last])
        found = (x for x in (out.hidden[last], out.logits) if x is not None)
        return tuple(only(padded_at_the_end(mask_BL), x) for x in found)


def export(model: PretrainedModel, output: Path) -> str:
    """Writes a model in float32 to a new file; returns how well it agrees with torch."""
    _refuse(model)
    import onnxruntime

    graph, found = Graph(model), dict[int, float]()
    with complete_file(output) as temporary:
        _write(graph, model, temporary)
        session = onnxruntime.InferenceSession(temporary)
        for size in _CHECKED:
            given = _inputs(model, size)
            found[given[0].shape[1]] = difference(graph, session, given)
        said = (
            f"onnxruntime {onnxruntime.__version__} at {', '.join(map(str, found))} positions "
            f"differs from torch by at most {np.max([*found.values()]):.1g} of the largest value"
        )
        if not all(x <= TOLERANCE for x in found.values()):
            raise UserError(f"{output} was not written: {said}", {"format": "hf"})
    return said


def difference(graph: Graph, session: Any, given: tuple[Tensor, Tensor]) -> float:
    """Returns the largest difference of a session from torch, relative to the largest value."""
    with torch.no_grad():
        expected = [x.numpy() for x in graph(*given)]
    found = session.run(None, {n: x.numpy() for n, x in zip(INPUTS, given, strict=True)})
    pairs = zip(expected, found, strict=True)
    # A maximum of Python's would pass over NaN.
    return float(np.max([abs(x - y).max() / abs(x).max() for x, y in pairs]))


def _refuse(model: PretrainedModel) -> None:
    """Refuses a model that cannot be a file, and missing packages."""
    parts = [model.network.mechanism(number + 1) for number in range(model.num_layers)]
    if model.network.relative is not None or not all(one.exports for one in parts):
        described = model.description
        able = [name for name in names() if mechanism(name).exports]
        raise UserError(
            "ONNX needs a graph for any length, which there is not for "
            f"attention={attention_label(described.attention_config)} with model.positions="
            f"{described.model.positions}: only for {one_of(able)}, without decay, and not for "
            "relative positions",
            {"format": "hf"},
        )
    size = sum(x.numel() * x.itemsize for x in model.network.state_dict().values())
    if size > MOST_BYTES:
        raise UserError(
            f"the weights have {size / 1e9:.1f} GB, and an ONNX file at most 2 GB", {"format": "hf"}
        )
    if not all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))):
        raise UserError(
            "ONNX needs onnx, onnxscript and onnxruntime; type: pip install 'protlm[onnx]'"
        )


def _write(graph: Graph, model: PretrainedModel, path: Path) -> None:
    given, dim, described = _inputs(model, 9), torch.export.Dim, model.description
    axes = {0: dim("batch"), 1: dim("length", max=model.max_length)}
    # Both are about packages that are not needed, and about the names of the axes.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        program: Any = torch.onnx.export(
            graph,
            given,
            dynamo=True,
            dynamic_shapes=(axes, axes),
            input_names=INPUTS,
            output_names=OUTPUTS[: len(graph(*given))],
            opset_version=20,
            verbose=False,
        )
    about = {"version": __version__, "max_positions": model.max_length, **described.to_plain()}
    program.model.metadata_props["protlm"] = json.dumps(about)
    program.model.metadata_props["tokenizer.json"] = tokenizer_of(described.frame)
    program.save(path, external_data=False)


def _inputs(model: PretrainedModel, size: int) -> tuple[Tensor, Tensor]:
    """Returns the tokens and the mask of two proteins, the longer one of a number of residues."""
    longer = _PROTEIN[: min(size, model.max_residues or size)]
    batch = model.tokenize([longer, longer[: len(longer) * 2 // 3 + 1]])
    return batch.tokens_BL.long(), batch.mask_BL.long()
