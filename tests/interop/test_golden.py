"""Logits of tiny models that Hugging Face transformers has computed: checked without it.

`golden.npz` has the logits at the tokens of `ROWS`, in the order of each model's own alphabet.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from protlm.data.vocabulary import VOCABULARY
from protlm.interop.alphabet import source_tokens
from protlm.model.transformer import ProteinLM
from tests.interop.conftest import write_folder
from tests.interop.test_bert import ALPHABET, SETTINGS, SPECIAL, bert_tensors
from tests.interop.test_esm import batch

GOLDEN = Path(__file__).with_name("golden.npz")
ROWS = ["MKTVRQERL", "A<mask>CD<mask>W"]
FAMILIES = ["bert", "esm"]


@pytest.fixture
def write(tmp_path: Path, write_esm: Callable[..., Path]) -> Callable[[str], Path]:
    """Writes the model of a family."""

    def folder(family: str) -> Path:
        if family == "esm":
            return write_esm()
        path = write_folder(tmp_path / "bert", SETTINGS, bert_tensors())
        (path / "vocab.txt").write_text("\n".join(ALPHABET))
        return path

    return folder


def theirs(family: str) -> Tensor:
    """The number in the model's alphabet of each token of protlm."""
    if family == "esm":
        return torch.arange(len(VOCABULARY))
    return torch.tensor(source_tokens(Path("x"), ALPHABET, SPECIAL, {}))


def peer_logits(family: str, folder: Path) -> Tensor:
    """What transformers computes; it is saved under the family's name in `golden.npz`."""
    from transformers import BertForMaskedLM, EsmForMaskedLM

    peers = {"bert": BertForMaskedLM, "esm": EsmForMaskedLM}
    peer = peers[family].from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    tokens_BL, mask_BL = batch(ROWS)
    with torch.no_grad():
        out = peer.eval()(input_ids=theirs(family)[tokens_BL], attention_mask=mask_BL.long())
    return out.logits[mask_BL]


@pytest.mark.peers
@pytest.mark.parametrize("family", FAMILIES)
def test_the_stored_logits_are_those_of_hugging_face(
    family: str, write: Callable[[str], Path]
) -> None:
    expected = torch.from_numpy(np.load(GOLDEN)[family])
    found = peer_logits(family, write(family))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_probabilities_are_those_of_the_stored_logits(
    family: str, write: Callable[[str], Path], in_double: Callable[[Path], ProteinLM]
) -> None:
    tokens_BL, mask_BL = batch(ROWS)
    network = in_double(write(family))
    with torch.no_grad():
        logits_BLV = network(tokens_BL, mask_BL, causal=False).logits_BLV
    found_NV = logits_BLV[mask_BL].log_softmax(-1)
    expected_NV = torch.from_numpy(np.load(GOLDEN)[family]).log_softmax(-1)
    # A token that several of ours are read as has the sum of their probabilities.
    summed_NV = torch.stack(
        [
            found_NV[:, theirs(family) == token].logsumexp(-1)
            for token in range(expected_NV.shape[1])
        ],
        dim=-1,
    )
    torch.testing.assert_close(summed_NV, expected_NV, rtol=0, atol=1e-10)
