"""Exported graphs and ONNX files: any batch and length, the same values, or a refusal by name."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from tokenizers import Tokenizer

from protlm import attention
from protlm.checkpoints import format as checkpoints
from protlm.config import Frame, HeadKind, Objective, Positions
from protlm.interop import onnx_file
from protlm.interop.onnx_file import Graph
from protlm.loading import load_model, model_of
from protlm.model.transformer import build_network, padded_at_the_end
from protlm.system.errors import UserError
from tests.interop.test_hugging_face import model_with

VALID, INVALID = [[1, 1, 1], [1, 1, 0], [0, 0, 0]], [[0, 1, 1], [1, 0, 1], [0, 1, 0]]
FEATURES = {"num_features": 12}
# With windows, lengths are within one window and beyond it.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "softmax": ("softmax", {}, {}),
    "encoder": ("softmax", {}, {"head": HeadKind.none, "feedforward_chunk": 5}),
    "relu": ("performer_relu", {}, {"convolution": 3, "value_embedding": True}),
    "projected": ("performer_relu", FEATURES, {"token_dropout": True}),
    "favor": ("performer_softmax", FEATURES, {"norm_order": "post"}),
    "hybrid": ("hybrid", {"window": 64}, {}),
    "nested": ("hybrid", {"window": 64, "mechanism": "performer_softmax"}, {}),
    "linear": ("linear", {}, {"positions": Positions.sinusoidal, "max_length": 400}),
    "alternating": ("alternating", {}, {"num_layers": 3}),
}
BOTH = [Objective.masked, Objective.causal]
FEWER = [(name, one) for name in ("softmax", "favor", "hybrid", "linear") for one in BOTH]


def checkpoint(
    name: str, options: dict[str, Any], more: dict[str, Any], objective: Objective = BOTH[0]
) -> checkpoints.Checkpoint:
    made = model_with(name, objective=objective, **{"num_layers": 1, **more})
    options = {**made.description.attention_options, **options}
    described = replace(made.description, attention_options=options)
    network = build_network(described.model, described.attention_config, seed=0)
    return checkpoints.Checkpoint(made.path, described, network.state_dict())


def tokens_of(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    shape = len(lengths), max(lengths)
    tokens_BL = torch.randint(4, 24, shape, generator=torch.Generator().manual_seed(0))
    return tokens_BL, (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()


def run(path: Path, tokens_BL: torch.Tensor, mask_BL: torch.Tensor) -> list[np.ndarray]:
    given = {"input_ids": tokens_BL.numpy(), "attention_mask": mask_BL.numpy()}
    return onnxruntime.InferenceSession(path).run(None, given)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("objective", BOTH)
@pytest.mark.parametrize("case", CASES)
def test_a_file_computes_any_batch_and_length(case, objective, tmp_path):
    model = model_of(checkpoint(*CASES[case], objective))
    onnx_file.export(model, path := tmp_path / "x.onnx")
    for lengths in [(1,), (7,), (130,), (300,), (300, 3, 65, 128)]:
        given = tokens_of(lengths)
        with torch.no_grad():
            expected = Graph(model)(*given)
        found = run(path, *given)
        assert len(found) == (1 if case == "encoder" else 2)
        for x, y in zip(found, expected, strict=True):
            assert_near(torch.from_numpy(x), y)
    for row in (*VALID, *INVALID):
        for x in run(path, torch.full((2, 3), 5), torch.tensor([[1, 1, 1], row])):
            assert np.isfinite(x[0]).all()
            assert (np.isnan(x[1]) == (row in INVALID)).all()


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize(("case", "objective"), FEWER)
def test_torch_exports_a_model_of_transformers(case, objective):
    from protlm.interop.remote_code import modeling_protlm as code

    described = checkpoint(*CASES[case], objective).description
    cls = code.ProtlmForCausalLM if objective is Objective.causal else code.ProtlmForMaskedLM
    model = cls(code.ProtlmConfig(protlm=described.to_plain(), pad_token_id=1)).eval()
    dim = torch.export.Dim
    axes = {0: dim("batch"), 1: dim("length", max=400)}
    given = dict(zip(onnx_file.INPUTS, tokens_of((9, 4)), strict=True))
    program = torch.export.export(
        model, (), given, dynamic_shapes=dict.fromkeys(given, axes)
    ).module()
    for lengths in [(5,), (300, 70, 1)]:
        tokens_BL, mask_BL = tokens_of(lengths)
        expected = model(tokens_BL, mask_BL).logits
        assert_near(program(input_ids=tokens_BL, attention_mask=mask_BL).logits, expected)
    tokens_BL, mask_BL = torch.full((6, 3), 5), torch.tensor(VALID + INVALID)
    logits_BLV = program(input_ids=tokens_BL, attention_mask=mask_BL).logits
    assert logits_BLV[:3].isfinite().all()
    assert logits_BLV[3:].isnan().all()
    with pytest.raises(ValueError, match="padding only on the right"):
        model(tokens_BL, mask_BL)


@pytest.mark.peers
@pytest.mark.slow
def test_the_check_of_the_mask_does_not_break_a_compiled_graph():
    from protlm.interop.remote_code import modeling_protlm as code

    described = checkpoint(*CASES["softmax"]).description
    model = code.ProtlmModel(code.ProtlmConfig(protlm=described.to_plain(), pad_token_id=1)).eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        found = compiled(
            torch.full((6, 3), 5), torch.tensor(VALID + INVALID), output_attentions=True
        )
    for x in (found.last_hidden_state, found.attentions[0]):
        assert x[:3].isfinite().all()
        assert x[3:].isnan().all()


def test_only_rows_of_ones_and_then_zeros_are_padded_at_the_end():
    assert (
        padded_at_the_end(torch.tensor(VALID + INVALID).bool()).tolist() == [True] * 3 + [False] * 3
    )
    assert padded_at_the_end(torch.ones(2, 1).bool()).all()


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
    assert (done.returncode, done.stdout) == (0, "x.onnx\n"), done.stderr
    assert f"onnxruntime {onnxruntime.__version__} at 9, 64 positions" in done.stderr
    assert {one.name for one in tmp_path.iterdir()} == {"model", "x.onnx"}
    session, model = onnxruntime.InferenceSession(tmp_path / "x.onnx"), load_model(saved)
    shapes = [(x.name, x.type, x.shape) for x in session.get_inputs()]
    assert shapes == [(name, "tensor(int64)", ["batch", "length"]) for name in onnx_file.INPUTS]
    assert [x.name for x in session.get_outputs()] == ["last_hidden_state", "logits"]
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["protlm"]) == json.loads(json.dumps(model.description.to_plain()))
    assert metadata["max_length"] == "64"
    tokens = Tokenizer.from_str(metadata["tokenizer.json"]).encode("MKTV").ids
    assert tokens == model.tokenize(["MKTV"]).tokens_BL[0].tolist()
    with pytest.raises(Exception, match=r"broadcast|dimension"):
        run(tmp_path / "x.onnx", *tokens_of((65,)))
    again = protlm_in_process(*command, cwd=tmp_path)
    assert again.returncode == 4
    assert "exists already" in again.stderr


@pytest.mark.slow
def test_a_file_that_differs_gets_no_name(saved, monkeypatch, tmp_path):
    """Checked by the evaluator of onnx, where onnxruntime is not installed."""
    monkeypatch.setattr(onnx_file, "find_spec", lambda x: x != "onnxruntime" and find_spec(x))
    monkeypatch.setattr(onnx_file, "TOLERANCE", -1.0)
    with pytest.raises(UserError, match=r"9 positions onnx's reference evaluator .* differs"):
        onnx_file.export(load_model(saved), tmp_path / "x.onnx")
    assert [one.name for one in tmp_path.iterdir()] == ["model"]


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
    with pytest.raises(UserError, match=f"{said}.*linear.*--format hf"):
        onnx_file.export(model_of(checkpoint(name, options, more)), tmp_path / "x.onnx")


def test_large_weights_and_missing_packages_are_refused(saved, monkeypatch, tmp_path):
    model = load_model(saved)
    monkeypatch.setattr(onnx_file, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'protlm\[onnx\]'"):
        onnx_file.export(model, tmp_path / "x.onnx")
    monkeypatch.setattr(onnx_file, "MOST_BYTES", 1000)
    with pytest.raises(UserError, match="at most 2 GB"):
        onnx_file.export(model, tmp_path / "x.onnx")


def test_these_mechanisms_are_exported():
    able = {name for name in attention.names() if attention.mechanism(name).exports}
    assert able >= {"softmax", "performer_relu", "performer_softmax", "hybrid", "linear", "window"}
