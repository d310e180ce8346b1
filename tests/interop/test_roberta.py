"""Sapiens: logits are those of the original library on fairseq."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import protlm
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.system.errors import InputDataError

DATA = os.environ.get("PROTLM_DATA")
pytestmark = pytest.mark.skipif(
    DATA is None, reason="PROTLM_DATA, the folder of data outside the project, is not set"
)
PRETRAINED = Path(DATA or "") / "pretrained"


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


def test_the_description_is_needed(tmp_path: Path) -> None:
    weights = shutil.copy(PRETRAINED / "sapiens_vh.safetensors", tmp_path / "a.safetensors")
    with pytest.raises(InputDataError, match=r"has no a\.json beside it"):
        protlm.load(weights)
    settings = json.loads((PRETRAINED / "sapiens_vh.json").read_text())
    for changed, message in (
        ({"alphabet": None}, "alphabet must be a list"),
        ({"alphabet": settings["alphabet"][:-2]}, "alphabet lacks"),
        ({"architecture": {"family": "T5"}}, "type 't5'; protlm reads"),
        ({"architecture": settings["architecture"] | {"layers": 5}}, "num_layers=5, but 4"),
        ({"architecture": settings["architecture"] | {"heads": None}}, "heads=None must be"),
    ):
        Path(tmp_path / "a.json").write_text(json.dumps(settings | changed))
        with pytest.raises(InputDataError, match=message):
            protlm.load(weights)
