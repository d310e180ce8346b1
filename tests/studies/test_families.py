"""The parts of the study of families that compute something themselves."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

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
