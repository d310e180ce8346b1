"""Secondary structure, retrieval and classes of sequences, on a tiny model and planted families."""

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protlm.data.shards.data_set import open_split
from protlm.data.vocabulary import STANDARD
from protlm.downstream.probing import compositions, three_mers
from protlm.evaluation import create
from protlm.evaluation.base import EvaluationData
from protlm.model.embedding import embeddings
from protlm.model.pretrained import PretrainedModel, TokenBatch
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import sample_dir
from tests.small_models import evaluated


def families(seed: int, number: int, members: int) -> list[tuple[str, str, str]]:
    """(accession, family, sequence): members differ from their founder in a tenth of the places."""
    generator = np.random.default_rng(seed)
    rows = []
    for family in range(number):
        founder = generator.choice(list(STANDARD), size=60)
        for member in range(members):
            changed = generator.random(60) < 0.1
            letters = np.where(changed, generator.choice(list(STANDARD), size=60), founder)
            rows.append((f"F{family}M{member}", f"f{family}", "".join(letters)))
    return rows


@pytest.mark.parametrize("of_residues", [False, True])
def test_embeddings_are_those_of_single_proteins_or_refused(
    model: PretrainedModel, monkeypatch: pytest.MonkeyPatch, of_residues: bool
) -> None:
    states, sequences, factor = PretrainedModel.hidden_states, ["MKVW" * 9, "M", "MKV" * 9], 1.0

    def limited(self: PretrainedModel, batch: TokenBatch, layers: Any) -> dict[int, torch.Tensor]:
        if batch.tokens_BL.numel() > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {layer: x * factor for layer, x in states(self, batch, layers).items()}

    def computed(of: list[str]) -> list[np.ndarray]:
        places = [np.arange(0, len(one), 3) for one in of] if of_residues else None
        return embeddings(model, of, layers=[0, 2], tokens_per_batch=150, places=places)

    whole = computed(sequences)
    monkeypatch.setattr("protlm.model.embedding.IN_MEMORY", 10)
    returned: list[int] = []
    monkeypatch.setattr("protlm.model.embedding._GAPS", 2)
    monkeypatch.setattr("protlm.model.embedding.return_freed_memory", lambda: returned.append(1))
    stored = computed(sequences)
    # After none, two and all of the proteins.
    assert len(returned) == 3
    assert all(isinstance(one, np.memmap) and one.dtype == np.float16 for one in stored)
    np.testing.assert_allclose(stored, whole, rtol=1e-3, atol=1e-6)
    for layer, found in zip((0, 2), whole, strict=True):
        alone = []
        for one in sequences:
            hidden_LD = model(model.tokenize([one]), [layer]).hidden[layer][0, 1:-1]
            alone.append(hidden_LD[::3] if of_residues else hidden_LD.mean(0, keepdim=True))
        np.testing.assert_allclose(found, torch.cat(alone), rtol=1e-4, atol=1e-5)
    # Batches that do not fit are halved.
    monkeypatch.setattr(PretrainedModel, "hidden_states", limited)
    factor = 1e6
    with pytest.raises(UserError, match=r"exceed 65,504.* choose other layers$") as caught:
        computed(sequences)
    assert caught.value.options == {"layers": "LAYERS"}
    factor = 1.0
    monkeypatch.setattr("protlm.model.embedding.IN_MEMORY", 2**28)
    np.testing.assert_allclose(computed(sequences), whole, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="a protein of 39 residues does not fit into the memory"):
        computed([*sequences, "MKV" * 13])
    factor = np.inf
    with pytest.raises(UserError, match="a protein of 36 residues are not finite"):
        computed(sequences)


def test_compositions_and_three_mers_by_hand() -> None:
    sequences = ["LLLA", "LLL", "LA", "XXX"]
    (first, *_), lengths = compositions(sequences)[:, :-1], compositions(sequences)[:, -1]
    assert first[:2].tolist() == [0.75, 0.25]
    np.testing.assert_allclose(np.exp(lengths), [4, 3, 2, 3], rtol=1e-6)
    known, asked = three_mers(sequences[:2], sequences)
    assert known.shape == (2, 2)
    assert (asked[2:].toarray() == 0).all()
    np.testing.assert_allclose(np.linalg.norm(asked[:2].toarray(), axis=1), 1, rtol=1e-6)


@pytest.fixture
def planted(tmp_path: Path, make_data_set: Any) -> tuple[EvaluationData, Path]:
    rows = families(1, 12, 6)
    queries = [row for row in rows if row[0].endswith("M0")]
    gallery = [row for row in rows if not row[0].endswith("M0")]
    splits = [
        open_split(make_data_set([(a, s) for a, _, s in some], name), "train")
        for some, name in ((queries, "queries"), (gallery, "gallery"))
    ]
    table = tmp_path / "labels.tsv.gz"
    # The first query has no relative, and the last family no labels.
    labels = [("F0M0", "alone"), *((a, f) for a, f, _ in rows[1:-6])]
    lines = ["accession\tcluster30", *map("\t".join, labels)]
    table.write_bytes(gzip.compress("\n".join(lines).encode()))
    return EvaluationData(splits[0], splits[1], 4096), table


def test_relatives_are_found(planted: tuple[EvaluationData, Path], model: PretrainedModel) -> None:
    data, tsv = planted
    values, table = evaluated("retrieval", model, data, labels=tsv, layer=1)
    assert (values["queries"], values["gallery"], values["without_relative"]) == (10, 55, 1)
    assert values["three_mers"]["top1"]["value"] == values["three_mers"]["map"]["value"] == 1
    assert values["model"]["top1"]["value"] > values["chance"]["top1"]["value"]
    assert values["chance"]["map"]["value"] < 0.4
    assert len(table.rows) == 5
    caption = "layer 1; 1 queries without a relative of the same cluster30 left out"
    assert values["layer"] == 1 and caption in table.caption
    # No sequence is its own neighbor.
    values, _ = evaluated("retrieval", model, replace(data, split=data.train), labels=tsv)
    assert values["queries"] == values["gallery"] == 55
    assert values["chance"]["top1"]["value"] < 0.4 < values["three_mers"]["top1"]["value"]


def test_average_precision_by_hand() -> None:
    from protlm.evaluation.retrieval import _scores

    similarity = np.array([[0.9, 0.8, 0.7, 0.1], [0.9, 0.8, 0.7, 0.1]])
    truth = np.array([[True, False, True, False], [False, True, False, False]])
    scores = _scores(similarity, truth, 0)
    assert scores["top1"]["value"] == 0.5
    assert scores["map"]["value"] == pytest.approx(((1 + 2 / 3) / 2 + 1 / 2) / 2)


def test_a_table_without_relatives_is_refused(
    planted: tuple[EvaluationData, Path], model: PretrainedModel, tmp_path: Path
) -> None:
    (tmp_path / "t.tsv").write_text("accession\tcluster30\nF0M0\tf0\n")
    with pytest.raises(InputDataError, match="no sequence of the split shares its cluster30"):
        evaluated("retrieval", model, planted[0], labels=tmp_path / "t.tsv")
    # Nor is a sequence a relative of itself.
    with pytest.raises(InputDataError, match="no sequence of the split shares its cluster30"):
        alone = replace(planted[0], train=planted[0].split)
        evaluated("retrieval", model, alone, labels=planted[1])


@pytest.mark.slow
def test_a_probe_of_secondary_structure(model: PretrainedModel) -> None:
    values, table = evaluated("secondary_structure", model)
    assert values["proteins"] == {"train": 20, "test": 20}
    q3 = {who: one["metrics"]["accuracy"] for who, one in values["predictors"].items()}
    # The residues around know more than the most common state, by far more than chance allows.
    assert q3["residues_around"]["low"] > q3["constant"]["value"]
    assert 0.3 < q3["model"]["value"] < 0.8
    assert len(table.rows) == len(q3) == 5


@pytest.mark.slow
def test_the_same_proteins_on_both_sides_are_refused(model: PretrainedModel) -> None:
    folder = sample_dir() / "structures" / "fit"
    with pytest.raises(InputDataError, match="fit to other proteins"):
        evaluated("secondary_structure", model, structures=folder)


@pytest.mark.slow
def test_a_structure_without_a_backbone_is_left_out(model: PretrainedModel, tmp_path: Path) -> None:
    shipped = sorted((sample_dir() / "structures" / "fit").glob("*.pdb.gz"))[:3]
    folder = tmp_path / "fit"
    folder.mkdir()
    for path in shipped:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        # Of the first, the Cα atoms alone.
        kept = [x for x in lines if path != shipped[0] or x[12:16].strip() == "CA"]
        (folder / path.name.removesuffix(".gz")).write_text("\n".join(kept) + "\n")
    values, _ = evaluated("secondary_structure", model, fit_structures=folder)
    assert values["proteins"]["train"] == 2
    assert values["left_out"] == [shipped[0].name.removesuffix(".pdb.gz")]
    for path in shipped[1:]:
        (folder / path.name.removesuffix(".gz")).unlink()
    with pytest.raises(InputDataError, match="no structure with a complete residue"):
        evaluated("secondary_structure", model, fit_structures=folder)


# The name of an evaluation and one of its settings, and what is said.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("contacts", {"max_residues": None}, "mine.max_residues=null must be a whole number"),
    ("jacobian", {"bfloat16": "yes"}, "evaluation.mine.bfloat16=yes must be true or false"),
    ("masked", {"mask_fraction": "15%"}, "evaluation.mine.mask_fraction=15% must be a number"),
    ("heads", {"seed": -1}, "evaluation.mine.seed=-1 must be at least 0"),
    ("retrieval", {}, "retrieval.labels=TABLE"),
    ("retrieval", {"labels": "x", "max_gallery": 0}, "evaluation.mine.max_gallery=0 leaves an"),
    ("heads", {"max_proteins": 0}, "evaluation.mine.max_proteins=0 excludes every"),
    ("jacobian", {"max_residues": 0}, "evaluation.mine.max_residues=0 excludes every"),
    ("contacts", {"max_residues": 0}, "evaluation.mine.max_residues=0 excludes every"),
    ("accuracy", {"objective": "span"}, "evaluation.mine.objective=span is not one of"),
    ("masked", {"max_length": 2}, "evaluation.mine.max_length=2 must be at least 3"),
    (
        "masked",
        {"concatenated": True},
        "length of rows; type evaluation.mine.max_length=TOKENS too",
    ),
]
NEEDED = {"contacts": {"structures": "x", "fit_structures": "x"}}
NEEDED["masked"] = {"name": "accuracy", "objective": "masked"}


@pytest.mark.parametrize("name, settings, words", REFUSED)
def test_settings_are_refused(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        create("mine", {"name": name, **NEEDED.get(name, {}), **settings})
    assert words in str(refused.value)
