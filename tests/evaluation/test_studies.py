"""The evaluations of studies: one run each."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.analysis.structures import ProteinChoice
from protlm.evaluation.base import NO_SPLIT, Evaluation
from studies.ablation import Ablation
from studies.annotations import Annotations
from studies.favor_vs_softmax import FavorVsSoftmax
from studies.similarity import Similarity
from tests.evaluation.test_annotations import entry
from tests.small_models import small_model, structure_folder


def annotations(folder: str, tmp_path: Path) -> Evaluation:
    path = tmp_path / "x.dat"
    path.write_text(entry("BINDING         3", "DISULFID        6..11"))
    return Annotations(structures=folder, uniprot=str(path))


def ablation(folder: str, tmp_path: Path) -> Evaluation:
    return Ablation(structures=folder, fit_structures=structure_folder(tmp_path, "fit", 2))


def similarity(folder: str, tmp_path: Path) -> Evaluation:
    return Similarity(structures=folder)


def replaced_attention(folder: str, tmp_path: Path) -> Evaluation:
    made = FavorVsSoftmax(structures=folder, features=[16, 64], draws=2)
    made.fit = ProteinChoice(structure_folder(tmp_path, "fit", 2), 10, 400)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("create", [annotations, ablation, similarity, replaced_attention])
def test_it_runs_and_fills_its_table(
    create: Callable[[str, Path], Evaluation], tmp_path: Path
) -> None:
    made = create(structure_folder(tmp_path, "test", 3), tmp_path)
    values = json.loads(json.dumps(made.run(small_model("softmax"), None), allow_nan=False))
    table = made.table({NO_SPLIT: values})
    assert table.rows and {len(row) for row in table.rows} == {len(table.columns)}
