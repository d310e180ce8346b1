"""T5 encoders: outputs are those of transformers, and commands take one. Tokens are by hand."""

import json
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import protlm
from protlm import interop
from protlm.data.dataset import collate
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.system.errors import InputDataError
from tests.interop.test_families import assert_close, in_double
from tests.marks import slow_but
from tests.test_frames import SEQUENCES, run, write_labels

pytestmark = pytest.mark.peers
__all__ = ["in_double", "run"]
START = ("<pad>", "</s>", "<unk>")
ANKH = "ALGVSREDTIPKFQNYMHWCXBOUZ"
PROT_T5 = (*START, *(f"▁{x}" for x in ANKH))
THIRD = ("[NLU]", "[S2S]", "<extra_id_0>", "<extra_id_1>", *"LAGSVERTIDPKNFQYHMCW")
FOLDS = {**{x.lower(): 128 + n for n, x in enumerate(STANDARD)}, "<fold2AA>": 148, "<AA2fold>": 149}
# The pieces, what was added, the feed-forward and buckets, and what precedes residues.
MODELS: dict[str, tuple[Sequence[str], dict[str, int], str, int, list[int]]] = {
    "prott5": (PROT_T5, {}, "relu", 32, []),
    "prostt5": (PROT_T5, FOLDS, "relu", 32, [149]),
    "ankh": ((*START, *ANKH), {}, "gated-gelu", 64, []),
    "ankh3": ((*START, *THIRD), {}, "gated-silu", 64, [3]),
}


def sentencepiece(tokens: Sequence[str]) -> bytes:
    """A SentencePiece model: pieces with scores and kinds, and settings after them."""
    texts = (b"\n" + bytes([len(t.encode())]) + t.encode() for t in tokens)
    pieces = (text + b"\x15" + struct.pack("<f", -2.0) + b"\x18\x01" for text in texts)
    return b"".join(b"\n" + bytes([len(x)]) + x for x in pieces) + b"\x12\x03abc"


def saved(folder: Path, name: str = "prott5", kind: str = "T5EncoderModel") -> Path:
    """Writes a model of transformers with random weights, and biases that matter."""
    import transformers

    tokens, added, proj, buckets, _ = MODELS[name]
    sizes = {"d_model": 24, "d_kv": 8, "num_heads": 4, "d_ff": 40, "num_layers": 3}
    sizes |= {"vocab_size": 160, "relative_attention_num_buckets": buckets}
    config = transformers.T5Config(feed_forward_proj=proj, **sizes)
    model = getattr(transformers, kind)(config).double()
    generator = torch.Generator().manual_seed(0)
    for key, value in model.named_parameters():
        scale = 1.5 if "bias" in key else value.shape[-1] ** -0.5
        value.data.copy_(torch.randn(value.shape, generator=generator) * scale)
    model.save_pretrained(folder)
    if name == "ankh3":
        vocab = {"model": {"vocab": [[token, -2.0] for token in tokens]}}
        (folder / "tokenizer.json").write_text(json.dumps(vocab))
    else:
        (folder / "spiece.model").write_bytes(sentencepiece(tokens))
        (folder / "added_tokens.json").write_text(json.dumps(added))
    return folder


def numbers(name: str, sequence: str) -> list[int]:
    """The row of a sequence in transformers."""
    tokens, _, _, _, before = MODELS[name]
    read = dict.fromkeys("UZOB", "X") if "▁A" in tokens else {}
    place = {token.strip("▁"): number for number, token in enumerate(tokens)}
    return [*before, *(place.get(read.get(x, x), 2) for x in sequence), 1]


@pytest.mark.parametrize("name", slow_but(MODELS, "ankh"))
def test_outputs_are_those_of_transformers(name, tmp_path, in_double, monkeypatch):
    from transformers.models.t5 import modeling_t5

    # Without its rounding to float32.
    norm = "lambda s, x: s.weight * x * (x.square().mean(-1, True) + s.variance_epsilon).rsqrt()"
    monkeypatch.setattr(modeling_t5.T5LayerNorm, "forward", eval(norm))
    folder = saved(tmp_path / name, name)
    given: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "eager"}
    peer = modeling_t5.T5EncoderModel.from_pretrained(folder, **given).eval()
    network = in_double(folder)
    assert network.head is None and not network.vocabulary.frame.has_mask
    sequences = ["MKTUZ", ANKH, "".join(STANDARD[n * n % 19] for n in range(299)) + "B"]
    rows = [torch.tensor(numbers(name, sequence)) for sequence in sequences]
    encoded = [*map(VOCABULARY.encode, sequences)]
    tokens_BL, mask_BL = collate(encoded, vocabulary=network.vocabulary)
    with torch.no_grad():
        ids_BL = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        shown = {"output_hidden_states": True, "output_attentions": True}
        out = peer(ids_BL, attention_mask=mask_BL.long(), **shown)
        states = network.hidden_states(tokens_BL, mask_BL, causal=False, layers=range(4))
        for number, expected_BLD in enumerate(out.hidden_states):
            assert_close(states[number][mask_BL], expected_BLD[mask_BL])
        for number, x in network.attention_inputs(tokens_BL, mask_BL, causal=False):
            found_BHLL = network.mechanism(number).attention_map(x.q_BHLK, x.k_BHLK, x.context)
            assert_close(found_BHLL, out.attentions[number - 1] * mask_BL[:, None, :, None])


@pytest.mark.parametrize("kind", ["T5ForConditionalGeneration", "T5ForTokenClassification"])
def test_the_encoder_of_a_whole_model_is_read_also_from_half_precision(kind, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    found = interop.read(folder := saved(tmp_path / "whole", kind=kind))
    assert (found.description.source or {})["class"] == kind
    assert "left out" in capsys.readouterr().err
    tensors = load_file(folder / "model.safetensors")
    save_file({n: v.half() for n, v in tensors.items()}, folder / "model.safetensors")
    # The query matrix is rounded to float32, not to half precision again.
    half = interop.read(folder).weights["blocks.0.attention.query.weight"]
    (stored,) = (v for n, v in tensors.items() if re.search(r"encoder.block.0.layer.0.*\.q\.", n))
    assert torch.equal(half, (stored.half().double() * 8**0.5).float())


def test_files_that_do_not_fit_are_refused(tmp_path):
    folder = saved(tmp_path / "m")
    config, data = json.loads((folder / "config.json").read_text()), sentencepiece(PROT_T5)
    for changes, pieces, added, message in (
        ({"relative_attention_num_buckets": 64}, data, {}, r"relative.table .*\[32, 4\].*\[64"),
        ({"feed_forward_proj": "gated-relu"}, data, {}, "feed_forward_proj='gated-relu' is not"),
        ({"feed_forward_proj": "gated-gelu"}, data, {}, "lacks 6 tensors"),
        ({"relative_attention_max_distance": 8}, data, {}, "more than a quarter"),
        ({}, data[:4], {}, "lacks '<unk>'"),
        ({}, data[:-5] + b"\n", {}, "is not the alphabet of a model"),
        ({}, data, {"<AA2fold>": 4}, "'<AA2fold>' is not 4"),
        ({}, data, {"<AA2fold>": 10**12}, "is not the alphabet of a model"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        (folder / "spiece.model").write_bytes(pieces)
        (folder / "added_tokens.json").write_text(json.dumps(added))
        with pytest.raises(InputDataError, match=message):
            protlm.load(folder)


@pytest.mark.slow
def test_the_commands_take_an_encoder(tmp_path: Path, run: Callable[..., str]):
    from transformers import T5EncoderModel

    model = protlm.load(saved(tmp_path / "m"))
    run("embed p.fasta -m m -o e.h5")
    peer = T5EncoderModel.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    with h5py.File(tmp_path / "e.h5") as file, torch.no_grad():
        for number, sequence in enumerate(SEQUENCES):
            hidden_LD = peer(torch.tensor([numbers("prott5", sequence)])).last_hidden_state[0]
            # As users of ProtT5 compute it, without `</s>`.
            expected_D = hidden_LD[: len(sequence)].mean(0)
            np.testing.assert_allclose(file[f"P{number}"][:], expected_D, atol=1e-5)
    run("attention p.fasta -m m -o a.h5")
    fit = {"seed": 0, "weights": [1.0] * 12, "intercept": -1.0, "model_hash": model.hash}
    (tmp_path / "f.json").write_text(json.dumps(fit))
    run("contacts p.fasta -m m -o c.h5 --fit f.json")
    write_labels(tmp_path / "l.tsv")
    run("probe l.tsv -m m -o probe")
    run("finetune l.tsv -m m -o tuned --epochs 1")
    assert protlm.load(tmp_path / "tuned" / "model").vocabulary == model.vocabulary
    assert "has no predictions" in run("inspect w.fasta -m m -o x.html")
    for command, message in (
        ("score v.csv --wild-type w.fasta -m m -o s.csv", "an encoder without an output layer"),
        ("embed p.fasta -m m -o f.h5 --compute-dtype float16", "ends at 65,504"),
        ("checkpoint convert m --attention performer_relu -o n", "PerformerRelu has no logits for"),
    ):
        assert message in run(command, code=2), command
