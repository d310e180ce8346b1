"""The parts of the study of families that compute something themselves."""

import gzip
import json
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protlm.analysis.structures import read_structure
from protlm.checkpoints.shipped import DEFAULT
from protlm.evaluation.base import NO_SPLIT
from protlm.loading import load_model
from protlm.paths import sample_dir
from studies import alignments, families
from studies.families import (
    interval,
    perplexities,
    perplexity_table,
    report,
    structure_file,
)


def test_the_report_compares_each_protein_with_itself() -> None:
    methods = {"contacts, before": 0.1, "contacts, after": 0.2, "jacobian, before": 0.1}
    alignments = {"Potts model": 0.2, "factored attention": 0.1}
    one = {**methods, "jacobian, after": 0.3, **alignments, "inverse covariance": 0.25}
    other = {**one, "contacts, after": 0.4, "inverse covariance": 0.35}
    lines = report({"1ABC_A": one, "2ABC_A": other}).splitlines()
    assert lines[3] == "| contacts, after | 20.0% | 40.0% | 30.0% (range 20.0% to 40.0%) |"
    assert "contacts, after less before: 20.0% (range 10.0% to 30.0%)" in lines
    expected = "jacobian, after less inverse covariance: 0.0% (range -5.0% to 5.0%)"
    assert expected in lines
    assert "jacobian, after less Potts model: 10.0% (range 10.0% to 10.0%)" in lines


def test_perplexities_are_of_the_held_out_homologs(tmp_path: Path) -> None:
    folder = tmp_path / "1ABC_A"
    folder.mkdir()
    counts = {"train_sequences": 1200, "splits": {"valid": {"near": 3}}}
    (folder / "leakage.json").write_text(json.dumps(counts))
    for name, perplexity in (("before", 16.0), ("after", 9.5)):
        masked: dict[str, Any] = {"sequences": 71, "interval": {"perplexity": [9.0, 10.0]}}
        for who, value in (("model", perplexity), ("three_mers", 11.7), ("empirical", 17.0)):
            masked[who] = {"perplexity": value}
        content = {"results": {"valid": {"masked": masked}}}
        (folder / f"{name}.json").write_text(json.dumps(content))
    row = perplexities("1ABC_A", Namespace(out=tmp_path))
    assert row[:4] == ["1ABC_A", "1,200", "71", "3"]
    assert row[4:] == ["16.0 (9.0 to 10.0)", "9.5 (9.0 to 10.0)", "11.7", "17.0"]
    header, rule, line = perplexity_table([row]).splitlines()
    assert header.count("|") == rule.count("|") == line.count("|") == 9


def test_a_structure_has_the_lower_case_identifier_of_its_alignment() -> None:
    assert structure_file(Path("x"), "1EGA_B") == Path("x/pdb/1ega_B.pdb.gz")


def test_few_proteins_have_no_interval() -> None:
    assert interval([0.2, 0.4]) == "30.0% (range 20.0% to 40.0%)"
    assert interval([0.2, 0.4] * 3).startswith("30.0% (2")


def write_alignment(path: Path, sequence: str) -> None:
    path.parent.mkdir()
    with gzip.open(path, "wt") as file:
        file.write(f">query\n{sequence}\n" * 3)


@pytest.fixture
def structures(tmp_path: Path) -> Path:
    """A folder of the study with one shipped structure, 1ABC_A, and an alignment of it."""
    folder = tmp_path / "structures"
    shipped = sorted((sample_dir() / "structures" / "test").glob("*.pdb.gz"))[0]
    (folder / "pdb").mkdir(parents=True)
    (folder / "pdb" / "1abc_A.pdb.gz").write_bytes(shipped.read_bytes())
    write_alignment(folder / "msa" / "1ABC_A.a3m.gz", read_structure(shipped).sequence)
    return folder


def test_baselines_rank_pairs_of_long_range(
    structures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = len(read_structure(structure_file(structures, "1ABC_A")))
    separation_LL = np.abs(np.arange(length)[:, None] - np.arange(length))
    contacts_LL = np.isin(separation_LL, [10, 24, 25]).astype(np.int8)
    monkeypatch.setattr(families, "contact_map", lambda _: contacts_LL)
    signs = {"Potts model": 1.0, "factored attention": 0.0, "inverse covariance": -1.0}
    assert set(signs) == set(families.ALIGNMENT_METHODS)
    for name, sign in signs.items():
        scores_LL = sign * contacts_LL
        monkeypatch.setitem(families.ALIGNMENT_METHODS, name, lambda _, found=scores_LL: found)
    found = families._baselines("1ABC_A", structures)
    # There are more than `length` pairs 24 and 25 apart, all of them contacts.
    assert found["nearest in sequence"] == found["Potts model"] == 1
    assert found["inverse covariance"] == 0
    num_pairs = (length - 24) * (length - 23) / 2
    assert found["all pairs"] == pytest.approx((length - 24 + length - 25) / num_pairs)


def test_methods_of_alignments_are_called_by_their_names() -> None:
    assert families.ALIGNMENT_METHODS["Potts model"] is alignments.potts
    assert families.ALIGNMENT_METHODS["factored attention"] is alignments.factored_attention
    assert families.ALIGNMENT_METHODS["inverse covariance"] is alignments.inverse_covariance


def test_held_out_homologs_and_contacts_are_evaluated_before_and_after(
    structures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> None:
        assert check
        commands.append(command[3:])
        if command[3:5] == ["data", "leakage"]:
            content = {"train_sequences": 9, "splits": {"valid": {"near": 1}}}
            Path(command[command.index("--json") + 1]).write_text(json.dumps(content))
        settings = dict(word.split("=", 1) for word in command if "=" in word)
        if command[3] == "evaluate":
            adapted = settings["checkpoint"].endswith("1ABC_A/run")
            Path(settings["output"]).write_text(json.dumps(report_of(0.4 if adapted else 0.1)))

    monkeypatch.setattr(subprocess, "run", run)
    fixed = dict.fromkeys(["inverse covariance", "Potts model", "factored attention"], 0.2)
    monkeypatch.setattr(families, "_baselines", lambda *_: fixed)
    out = tmp_path / "out"
    given = ["GENERAL", str(structures), "--proteins", "1ABC_A", "--steps", "240"]
    families.main([*given, "--out", str(out)])
    before, after = (one for one in commands if one[0] == "evaluate")
    assert f"checkpoint={DEFAULT}" in before
    assert f"checkpoint={out / '1ABC_A' / 'run'}" in after
    for one in (before, after):
        assert "split=valid" in one and f"data.dir={out / '1ABC_A' / 'data'}" in one
        assert f"evaluation.jacobian.structures={out / '1ABC_A' / 'structure'}" in one
    (train,) = (one for one in commands if one[0] == "train")
    assert {f"model.init_from={DEFAULT}", "trainer.max_steps=240"} <= set(train)
    assert f"attention={load_model(Path(DEFAULT)).description.attention}" in train


def report_of(hits: float) -> dict[str, Any]:
    """What `protlm evaluate` writes, as far as the study reads it."""
    who = {name: {"perplexity": 9.0} for name in ("model", "three_mers", "empirical")}
    masked = {**who, "sequences": 7, "interval": {"perplexity": [8.0, 10.0]}}
    contacts = {"model": {"long": {"P@L": {"mean": hits}}}}
    return {
        "results": {
            NO_SPLIT: {"contacts": contacts, "jacobian": contacts},
            "valid": {"masked": masked},
        }
    }


def test_the_methods_of_alignments_decide_which_results_are_kept(
    structures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["GENERAL", str(structures), "--proteins", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(families, "DEEPEST", ())
    families.main(given[:2] + given[3:])
    monkeypatch.setitem(families.SETTINGS, "penalty", 1.0)
    with pytest.raises(SystemExit, match="choose another --out"):
        families.main(given[:2] + given[3:])
