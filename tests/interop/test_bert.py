"""BERT over residues: outputs are those of Hugging Face transformers, over its own alphabet."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import protlm
from protlm import interop
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.interop.alphabet import gather_rows, source_tokens
from protlm.model.transformer import ProteinLM
from protlm.system.errors import InputDataError
from tests.interop.conftest import (
    HEADS,
    INNER,
    LAYERS,
    WIDTH,
    attention,
    pairs,
    random,
    write_folder,
)
from tests.interop.test_esm import outputs

ALPHABET = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *STANDARD]
ROWS = 64
SPECIAL = {
    "<cls>": "[CLS]",
    "<pad>": "[PAD]",
    "<eos>": "[SEP]",
    "<unk>": "[UNK]",
    "<mask>": "[MASK]",
}
SETTINGS = {
    "model_type": "bert",
    "vocab_size": len(ALPHABET),
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": ROWS,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}


def bert_tensors() -> dict[str, Tensor]:
    """Also with a pooler, the head of another task, and the tied matrix twice."""
    top = "bert.embeddings"
    shapes = {
        f"{top}.word_embeddings.weight": (len(ALPHABET), WIDTH),
        f"{top}.position_embeddings.weight": (ROWS, WIDTH),
        f"{top}.token_type_embeddings.weight": (2, WIDTH),
        "cls.predictions.bias": (len(ALPHABET),),
        **pairs(
            (f"{top}.LayerNorm", WIDTH, None),
            ("bert.pooler.dense", WIDTH, WIDTH),
            ("cls.species", 6, WIDTH),
            ("cls.predictions.transform.dense", WIDTH, WIDTH),
            ("cls.predictions.transform.LayerNorm", WIDTH, None),
        ),
    }
    for number in range(LAYERS):
        layer = f"bert.encoder.layer.{number}"
        norms = (f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm")
        shapes |= attention(layer) | pairs(*((norm, WIDTH, None) for norm in norms))
    tensors = random(shapes)
    tensors["cls.predictions.decoder.weight"] = tensors[f"{top}.word_embeddings.weight"].clone()
    return tensors


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    folder = write_folder(tmp_path / "bert", SETTINGS, bert_tensors())
    (folder / "vocab.txt").write_text("\n".join(ALPHABET) + "\n")
    return folder


@pytest.mark.peers
def test_outputs_are_those_of_hugging_face(
    bert: Path, in_double: Callable[[Path], ProteinLM]
) -> None:
    from transformers import BertForMaskedLM

    peer = BertForMaskedLM.from_pretrained(
        bert, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    # What a token of protlm is over there.
    tokens_V = torch.tensor(source_tokens(bert, ALPHABET, SPECIAL, {}))
    model = protlm.load(bert)
    batch = model.tokenize(["MKTVRQERLKXIVA", "ACDEFGHIKLMNPQRSTVWYU", "W"])
    batch.tokens_BL[1, 3:5] = VOCABULARY.mask
    mask_BL = batch.mask_BL
    with torch.no_grad():
        expected = peer(
            input_ids=tokens_V[batch.tokens_BL],
            attention_mask=mask_BL.long(),
            output_hidden_states=True,
            output_attentions=True,
        )
        network = in_double(bert)
        out = network(batch.tokens_BL, mask_BL, causal=False, layers=range(LAYERS + 1))
        maps = outputs(network, batch.tokens_BL, mask_BL)["maps"]
    rows = mask_BL[:, None, :, None].expand_as(expected.attentions[0])
    for found, map_BHLL in zip(maps, expected.attentions, strict=True):
        torch.testing.assert_close(found, map_BHLL[rows], rtol=0, atol=1e-10)
    for number, hidden_BLD in enumerate(expected.hidden_states):
        torch.testing.assert_close(
            out.hidden[number][mask_BL], hidden_BLD[mask_BL], rtol=0, atol=1e-10
        )
    log_p_NV = out.logits_BLV[mask_BL].log_softmax(-1)
    # A token that several of ours are read as has the sum of their probabilities.
    found_NV = torch.stack(
        [log_p_NV[:, tokens_V == token].logsumexp(-1) for token in range(len(ALPHABET))], dim=-1
    )
    expected_NV = expected.logits[mask_BL].log_softmax(-1)
    torch.testing.assert_close(found_NV, expected_NV, rtol=0, atol=1e-10)


def test_the_probability_of_unknown_is_divided() -> None:
    tokens = source_tokens(Path("x"), ALPHABET, SPECIAL, {})
    count = Counter(tokens)
    assert count.pop(ALPHABET.index("[UNK]")) == len("XBUZO") + len(["<unk>", ".", "-", "<null_1>"])
    assert set(count.values()) == {1}
    assert [ALPHABET[tokens[VOCABULARY[a]]] for a in STANDARD] == list(STANDARD)


def test_rare_residues_are_read_as_x() -> None:
    """ProtBert was trained so."""
    alphabet = [*ALPHABET, *"XUZOB"]
    tokens = source_tokens(Path("x"), alphabet, SPECIAL, dict.fromkeys("UZOB", "X"))
    assert {alphabet[tokens[VOCABULARY[a]]] for a in "XUZOB"} == {"X"}


def test_the_other_probabilities_keep_their_ratios_without_rare_residues() -> None:
    alphabet = [*ALPHABET, *"XUZOB"]
    tokens = source_tokens(Path("x"), alphabet, SPECIAL, dict.fromkeys("UZOB", "X"))
    generator = torch.Generator().manual_seed(0)
    theirs = {
        "embedding.weight": torch.randn(30, 8, generator=generator, dtype=torch.float64),
        "head.bias": torch.randn(30, generator=generator, dtype=torch.float64),
    }
    weights = dict(theirs)
    gather_rows(weights, tokens)
    hidden_D = torch.randn(8, generator=generator, dtype=torch.float64)
    found_V = (weights["embedding.weight"] @ hidden_D + weights["head.bias"]).log_softmax(-1)
    kept_V = (theirs["embedding.weight"] @ hidden_D + theirs["head.bias"])[:-4]
    ours = [VOCABULARY[residue] for residue in STANDARD]
    expected_A = kept_V.log_softmax(-1)[[alphabet.index(residue) for residue in STANDARD]]
    torch.testing.assert_close(found_V[ours], expected_A, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "alphabet, message",
    [
        (ALPHABET[:-1], "lacks 'Y'"),
        (ALPHABET[1:], r"lacks '\[PAD\]'"),
        ([*ALPHABET, "A"], "repeats a token"),
        ([*ALPHABET, "##ing"], "has 1 tokens that protlm lacks, for instance '##ing'"),
    ],
)
def test_other_alphabets_are_refused(bert: Path, alphabet: list[str], message: str) -> None:
    (bert / "vocab.txt").write_text("\n".join(alphabet))
    with pytest.raises(InputDataError, match=message):
        interop.read(bert)


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("bert.embeddings.word_embeddings.weight", (24, WIDTH), r"embedding.weight .* \[24, 32\]"),
        ("bert.embeddings.word_embeddings.weight", (26, WIDTH), r"need \[25, 32\]"),
        ("bert.embeddings.word_embeddings.weight", (25,), r"embedding.weight .* \[25\]"),
        ("cls.predictions.bias", (), r"head.bias has the shape \[\]"),
        ("cls.predictions.bias", (33,), r"head.bias has the shape \[33\]"),
        ("bert.embeddings.token_type_embeddings.weight", (0, WIDTH), r"need \[at least 1, 32\]"),
        ("bert.embeddings.token_type_embeddings.weight", (2, 1), r"need \[at least 1, 32\]"),
        ("bert.embeddings.position_embeddings.weight", (1, WIDTH), r"need \[64, 32\]"),
    ],
)
def test_tensors_of_other_shapes_are_refused(
    name: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    tensors = bert_tensors() | {name: torch.zeros(shape)}
    del tensors["cls.predictions.decoder.weight"]
    folder = write_folder(tmp_path / "bert", SETTINGS, tensors)
    (folder / "vocab.txt").write_text("\n".join(ALPHABET))
    with pytest.raises(InputDataError, match=message):
        interop.read(folder)


@pytest.mark.parametrize(
    "changes", [{"tie_word_embeddings": False}, {"cls_token_id": 3}, {"eos_token_id": 1}]
)
def test_other_settings_are_refused(changes: dict[str, object], tmp_path: Path) -> None:
    tensors = bert_tensors()
    del tensors["cls.predictions.decoder.weight"]
    folder = write_folder(tmp_path / "bert", SETTINGS | changes, tensors)
    (folder / "vocab.txt").write_text("\n".join(ALPHABET))
    with pytest.raises(InputDataError, match=f"{next(iter(changes))}=.* is not supported"):
        interop.read(folder)


def test_the_alphabet_is_needed(bert: Path) -> None:
    (bert / "vocab.txt").unlink()
    with pytest.raises(InputDataError, match=r"vocab.txt: no such file; give .* the alphabet"):
        interop.read(bert)
    numbers = {token: number for number, token in enumerate(ALPHABET)}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "vocab": numbers}
    model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    (bert / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(InputDataError, match=r"vocab\.txt is missing, .*: python -c") as error:
        interop.read(bert)
    # The command writes the file.
    subprocess.run([sys.executable, "-c", str(error.value).split('"')[1]], check=True)
    interop.read(bert)


def test_a_pickle_of_tensors_is_read(bert: Path) -> None:
    expected = interop.read(bert).weights
    (bert / "model.safetensors").unlink()
    torch.save(bert_tensors(), bert / "pytorch_model.bin")
    found = interop.read(bert).weights
    assert all(torch.equal(found[name], value) for name, value in expected.items())
