"""The studies do not mix results of different settings in one folder."""

import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from studies import alignments, families, labels, linearize, recipe, results, twins

TWINS = ["TRAIN", "TEST", "--groups", "TABLE", "--sample", "SAMPLE"]
MISSING = r"[Nn]o such|has no manifest"
STUDIES = {
    "families": (families.main, ["GENERAL", "STRUCTURES"], ["--steps", "240"]),
    "labels": (labels.main, ["MODEL", "--swissprot", "S", "--structures", "T"], ["--chains", "3"]),
    "linearize": (linearize.main, ["MODEL", "DATA", "CLUSTERS"], ["--sampled", "OTHER"]),
    "recipe": (recipe.main, ["DATA", "VALID"], ["--steps", "9"]),
    "recipe, jobs": (recipe.main, ["DATA", "VALID"], ["--jobs", "1"]),
    "results": (results.main, ["MODEL", "--sample", "S"], ["--swissprot50", "OTHER"]),
    "twins": (twins.main, TWINS, ["--length", "4096"]),
    "linearize, steps": (linearize.main, ["MODEL", "DATA", "CLUSTERS"], ["--steps", "9", "300"]),
}


def test_results_of_unknown_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"has no settings\.json"):
        families.main(["GENERAL", "STRUCTURES", "--out", str(tmp_path)])


CONSTANTS = [(alignments, name) for name in ("HEAD_DIM", "ROWS", "LEARNING_RATE", "PENALTY")]
CONSTANTS += [(alignments, "ALIKE"), (alignments, "SHRINKAGE"), (families, "MIN_SHARED")]


@pytest.mark.parametrize(("module", "name"), CONSTANTS)
def test_results_of_other_constants_are_refused(
    module: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["GENERAL", "STRUCTURES", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(families, "DEEPEST", ())
    families.main(given)
    monkeypatch.setattr(module, name, 7)
    with pytest.raises(SystemExit, match=r"has results of .*; choose another --out"):
        families.main(given)


@pytest.mark.parametrize("study", STUDIES)
def test_results_of_other_settings_are_refused(
    study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, given, changed = STUDIES[study]

    def command(*_: object, **__: object) -> None:
        raise FileNotFoundError("no such input")

    monkeypatch.setattr(subprocess, "run", command)
    given = [*given, "--out", str(tmp_path / "out")]
    # The inputs do not exist: a study keeps its settings before it reads anything.
    with pytest.raises(Exception, match=MISSING):
        main(given)
    kept = json.loads((tmp_path / "out" / "settings.json").read_text())
    with pytest.raises(SystemExit, match=r"has results of .*; choose another --out"):
        main([*given, *changed])
    assert json.loads((tmp_path / "out" / "settings.json").read_text()) == kept
    with pytest.raises(Exception, match=MISSING):
        main(given)
