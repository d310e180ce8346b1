"""Sapiens: logits are those of the original library on fairseq."""

import os
from pathlib import Path

import numpy as np
import pytest

import protlm
from protlm.data.vocabulary import STANDARD, VOCABULARY

DATA = os.environ.get("PROTLM_DATA")
PRETRAINED = Path(DATA or "") / "pretrained"


@pytest.mark.skipif(
    DATA is None, reason="PROTLM_DATA, the folder of data outside the project, is not set"
)
@pytest.mark.parametrize("chain", ["vh", "vl"])
def test_logits_are_those_of_the_original_library(chain: str) -> None:
    golden = np.load(PRETRAINED / "sapiens_golden.npz")
    alphabet = golden["alphabet"].tolist()
    model = protlm.load(PRETRAINED / f"sapiens_{chain}.safetensors")
    assert model.max_length == {"vh": 144, "vl": 128}[chain]
    ours = [VOCABULARY[residue] for residue in STANDARD]
    theirs = [alphabet.index(residue) for residue in STANDARD]
    chosen = [n for n, name in enumerate(golden["chain"]) if name.lower() == chain]
    assert len(chosen) == 10
    for number in chosen:
        length = golden["num_tokens"][number]
        for tokens, logits in (("tokens", "logits"), ("masked_tokens", "masked_logits")):
            letters = [alphabet[token] for token in golden[tokens][number, 1 : length - 1]]
            # The original library reads X as <mask>.
            sequence = "".join("X" if letter == "<mask>" else letter for letter in letters)
            found_LV = model(model.tokenize([sequence])).logits_BLV[0, :, ours].numpy()
            expected_LV = golden[logits][number, :length][:, theirs]
            np.testing.assert_allclose(found_LV, expected_LV, rtol=0, atol=1e-4)
