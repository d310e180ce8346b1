"""Exported graphs and ONNX files: any batch and length, the same values, or a refusal by name."""

import json
from dataclasses import replace
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
import torch
from tokenizers import Tokenizer
from torch.export import Dim

from protlm.checkpoints import format as checkpoints
from protlm.config import Frame, HeadKind, Objective, Positions
from protlm.interop import onnx_file
from protlm.interop.onnx_file import INPUTS, OUTPUTS, Graph, difference
from protlm.loading import load_model, model_of
from protlm.model.layers import padded_at_the_end
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import build_network
from protlm.system.errors import UserError
from tests.interop.test_hugging_face import model_with

MASKED, CAUSAL = Objective.masked, Objective.causal
VALID, INVALID = [[1, 1, 1], [1, 1, 0], [0, 0, 0]], [[0, 1, 1], [1, 0, 1], [0, 1, 0]]
MASKS_BL, TOKENS_BL = torch.tensor(VALID + INVALID), torch.full((6, 3), 5)
ROWS: dict[str, Any] = {"num_features": 12}
TABLE = {"positions": Positions.sinusoidal, "max_length": 400}
# The lengths are within one window and beyond it.
NESTED = {"window": 64, "mechanism": "performer_softmax"}
CASES: dict[str, tuple[str, Objective, dict[str, Any], dict[str, Any]]] = {
    "softmax": ("softmax", MASKED, {}, {}),
    "causal softmax": ("softmax", CAUSAL, {}, {"feedforward_chunk": 5}),
    "encoder": ("softmax", MASKED, {}, {"head": HeadKind.none, "norm_order": "post"}),
    "ReLU": ("performer_relu", MASKED, {}, {"convolution": 3, "value_embedding": True}),
    "causal ReLU": ("performer_relu", CAUSAL, ROWS, {}),
    "FAVOR+": ("performer_softmax", MASKED, ROWS, {"token_dropout": True}),
    "causal FAVOR+": ("performer_softmax", CAUSAL, ROWS, {}),
    "hybrid": ("hybrid", MASKED, {"window": 64}, {}),
    "causal hybrid": ("hybrid", CAUSAL, NESTED, {}),
    "linear": ("linear", MASKED, {}, TABLE),
    "causal linear": ("linear", CAUSAL, {}, {}),
    "alternating": ("alternating", MASKED, {}, {"num_layers": 3}),
}


def model_of_case(
    name: str, objective: Objective, options: dict[str, Any], more: dict[str, Any]
) -> PretrainedModel:
    made = model_with(name, objective=objective, **{"num_layers": 1, **more})
    options = {**made.description.attention_options, **options}
    described = replace(made.description, attention_options=options)
    network = build_network(described.model, described.attention_config, seed=0)
    return model_of(checkpoints.Checkpoint(made.path, described, network.state_dict()))


def rows(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens_BL = torch.arange(len(lengths) * max(lengths)).view(len(lengths), -1) ** 2 % 20 + 4
    return tokens_BL, (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def assert_only_valid(found: Any) -> None:
    valid, invalid = torch.as_tensor(found).detach().tensor_split([len(VALID)])
    assert valid.isfinite().all()
    assert invalid.isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_file_computes_any_batch_and_length(case, tmp_path):
    model = model_of_case(*CASES[case])
    onnx_file.export(model, path := tmp_path / "x.onnx")
    session = onnxruntime.InferenceSession(path)
    for lengths in [(1,), (7,), (130,), (300,), (300, 3, 65, 128)]:
        assert difference(Graph(model), session, rows(*lengths)) <= 1e-5
    found = session.run(None, {INPUTS[0]: TOKENS_BL.numpy(), INPUTS[1]: MASKS_BL.numpy()})
    assert len(found) == (1 if case == "encoder" else 2)
    for x in found:
        assert_only_valid(x)


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize("case", ["softmax", "causal ReLU", "causal FAVOR+", "hybrid"])
def test_torch_exports_a_model_of_transformers(case):
    from protlm.interop.remote_code import modeling_protlm as code

    described = model_of_case(*CASES[case]).description
    model = code.ProtlmForMaskedLM(code.ProtlmConfig(described.to_plain(), pad_token_id=1)).eval()
    axes = {0: Dim("batch"), 1: Dim("length")}
    given = dict(zip(INPUTS, rows(9, 4), strict=True))
    program = torch.export.export(model, (), given, dynamic_shapes=dict.fromkeys(given, axes))
    graph = program.module()
    for lengths in [(5,), (300, 70, 1)]:
        tokens_BL, mask_BL = rows(*lengths)
        found, expected = (
            one(input_ids=tokens_BL, attention_mask=mask_BL).logits.detach()
            for one in (graph, model)
        )
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert_only_valid(graph(input_ids=TOKENS_BL, attention_mask=MASKS_BL).logits)
    with pytest.raises(ValueError, match="padding only on the right"):
        model(TOKENS_BL, MASKS_BL)


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_the_check_of_the_mask_does_not_break_a_compiled_graph():
    from protlm.interop.remote_code import modeling_protlm as code

    described = model_of_case(*CASES["softmax"]).description
    model = code.ProtlmForMaskedLM(code.ProtlmConfig(described.to_plain(), pad_token_id=1)).eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        out = compiled(TOKENS_BL, MASKS_BL, labels=TOKENS_BL, output_attentions=True)
    assert_only_valid(out.logits)
    assert_only_valid(out.attentions[0])
    assert out.loss.isnan()


def test_only_rows_of_ones_and_then_zeros_are_padded_at_the_end():
    assert padded_at_the_end(MASKS_BL.bool()).tolist() == [True] * 3 + [False] * 3


@pytest.fixture
def saved(tmp_path):
    frame = Frame(("<bos>", "1"), ("2", "<eos>"), ("<bos>", "1", "2"))
    model = model_with("linear", frame=frame, positions=Positions.learned, num_layers=1)
    checkpoints.export(model, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_the_command_writes_one_file_with_its_tokenizer(saved, protlm_in_process, tmp_path):
    command = ["checkpoint", "export", saved, "--format", "onnx", "-o", "x.onnx"]
    done = protlm_in_process(*command, cwd=tmp_path)
    assert done.stdout == "x.onnx\n"
    assert f"onnxruntime {onnxruntime.__version__} at 9, 64 positions" in done.stderr
    assert {one.name for one in tmp_path.iterdir()} == {"model", "x.onnx"}
    session, model = onnxruntime.InferenceSession(tmp_path / "x.onnx"), load_model(saved)
    inputs, outputs = session.get_inputs(), session.get_outputs()
    assert [(x.name, x.shape) for x in inputs] == [(name, ["batch", "length"]) for name in INPUTS]
    assert {x.type for x in inputs} == {"tensor(int64)"}
    assert tuple(x.name for x in outputs) == OUTPUTS
    metadata = session.get_modelmeta().custom_metadata_map
    about = {**model.description.to_plain(), "max_positions": 64}
    assert json.loads(metadata["protlm"]).items() >= json.loads(json.dumps(about)).items()
    tokens = Tokenizer.from_str(metadata["tokenizer.json"]).encode("MKTV").ids
    assert tokens == model.tokenize(["MKTV"]).tokens_BL[0].tolist()
    with pytest.raises(Exception, match=r"65"):
        session.run(None, {name: x.numpy() for name, x in zip(INPUTS, rows(65), strict=True)})
    protlm_in_process(*command, cwd=tmp_path, code=4)


@pytest.mark.slow
def test_a_file_that_differs_gets_no_name(saved, monkeypatch, tmp_path):
    monkeypatch.setattr(onnx_file, "TOLERANCE", -1.0)
    with pytest.raises(UserError, match=r"was not written: onnxruntime .* differs"):
        onnx_file.export(load_model(saved), tmp_path / "x.onnx")
    assert [one.name for one in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("factor", "most"), [((1, 1 + 3e-4), 3e-4), ((1, nan), nan), ((nan, 1), nan)]
)
def test_the_largest_difference_of_any_output_is_found(factor, most):
    graph, given = Graph(model_of(model_with("softmax", num_layers=1))), rows(7, 5)
    values = [y.detach().numpy() * x for y, x in zip(graph(*given), factor, strict=True)]
    session = SimpleNamespace(run=lambda *_: values)
    assert difference(graph, session, given) == pytest.approx(most, rel=0.1, nan_ok=True)


@pytest.mark.parametrize(
    ("name", "options", "more", "said"),
    [
        ("bigbird", {}, {}, "attention=bigbird"),
        ("performer_relu", {"decay": "learned"}, {}, "performer_relu with learned decay"),
        ("hybrid", {"options": {"decay": "selective"}}, {}, "hybrid with selective decay"),
        ("softmax", {}, {"positions": Positions.relative}, "model.positions=relative"),
    ],
)
def test_what_has_no_graph_is_refused_by_name(name, options, more, said, tmp_path):
    with pytest.raises(UserError, match=f"{said}.*linear") as error:
        onnx_file.export(model_of_case(name, MASKED, options, more), tmp_path / "x.onnx")
    assert error.value.options == {"format": "hf"}


def test_large_weights_and_missing_packages_are_refused(saved, monkeypatch):
    monkeypatch.setattr(onnx_file, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'protlm\[onnx\]'"):
        onnx_file.export(load_model(saved), Path("x.onnx"))
    monkeypatch.setattr(onnx_file, "MOST_BYTES", 1000)
    with pytest.raises(UserError, match="at most 2 GB"):
        onnx_file.export(load_model(saved), Path("x.onnx"))
