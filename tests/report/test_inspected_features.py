"""The sparse features of a page: which are listed, with which numbers, and what is refused."""

import base64
from pathlib import Path

import numpy as np
import pytest

import protlm
from protlm.analysis.features.autoencoder import SparseAutoencoder, read_features
from protlm.data.tables import write_table
from protlm.model.pretrained import PretrainedModel
from protlm.report.features import read_inspected
from protlm.system.errors import InputDataError, UserError
from protlm.system.json_file import write_json
from protlm.system.paths import sha256_of
from tests.analysis.test_features import settings_of

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"
COLUMNS = "predictor,concept,feature,F1,low,high,by chance,named,beyond controls,examples"


def described(folder: Path, model: PretrainedModel, concepts: dict[int, str], f1="0.5") -> None:
    """Writes 64 random features to `sae`, and a table of names of some of them to `names`."""
    autoencoder = SparseAutoencoder(64, settings_of(model, latents=64, k=16))
    for name in ("sae", "names"):
        (folder / name).mkdir()
    autoencoder.write(folder / "sae")
    made = {"features": sha256_of(folder / "sae" / "features.safetensors")}
    write_json(folder / "names" / "results.json", made)
    end = (f1, "0.4", "0.6", "0.1", "True", "False", "P1 K2 3.1; P2 L5 2.0")
    rows = [("features", concept, str(number), *end) for number, concept in concepts.items()]
    # Those below have a lower figure, another predictor, or are not above chance.
    rows += [("features", "worse", "3", "0.2", *end[1:]), ("neurons", "other", "4", *end)]
    rows += [("features", "best of few", "5", *end[:4], "False", *end[5:])]
    write_table(folder / "names" / "names.tsv", COLUMNS.split(","), rows)


def test_named_features_come_first_and_then_the_strongest(tiny_run: Path, tmp_path: Path) -> None:
    model = protlm.load(tiny_run)
    described(tmp_path, model, {3: "helix", 9: "residue W"})
    sae, names = tmp_path / "sae", tmp_path / "names"
    found = read_inspected(sae, names, model).to_plain(model, SEQUENCE)
    (activity,) = model.features([SEQUENCE], sae)
    highest = activity.max(axis=0).toarray().ravel()
    order = [n for n in np.argsort(-highest).tolist() if highest[n] and n != 3]
    assert found["active"] == len(order) + 1 > 40
    assert [one["number"] for one in found["listed"]] == [3, *order][:40]
    known = {one["number"]: one["name"]["concept"] for one in found["listed"] if one["name"]}
    assert known.items() <= {3: "helix", 9: "residue W"}.items() and 3 in known
    for one in found["listed"]:
        codes = np.frombuffer(base64.b64decode(one["activity"]["codes"]), np.uint8)
        shown, known_L = (codes / 255.0) ** 2, activity[:, [one["number"]]].toarray()[:, 0]
        # The step of a code is at most 2 / 255 of the highest activity.
        np.testing.assert_allclose(shown, known_L / known_L.max(), atol=1 / 255 + 1e-5)


def test_names_of_other_features_and_damaged_tables_are_refused(model, tmp_path: Path) -> None:
    described(tmp_path, model, {3: "helix"}, f1="high")
    sae, names = tmp_path / "sae", tmp_path / "names"
    with pytest.raises(UserError, match="trained on the model"):
        read_inspected(sae, None, model.with_random_weights(3))
    with pytest.raises(InputDataError, match=r"names\.tsv, line 2: a number is missing"):
        read_inspected(sae, names, model)
    # Of the same settings, and other weights.
    other = read_features(sae)
    other.mean.add_(1)
    other.write(tmp_path)
    with pytest.raises(UserError, match="describes other features than"):
        read_inspected(tmp_path, names, model)
