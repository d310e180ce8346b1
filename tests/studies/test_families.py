"""The parts of the study of families that compute something themselves."""

import gzip
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from studies.families import (
    aligned_columns,
    interval,
    inverse_covariance,
    perplexities,
    perplexity_table,
    report,
    structure_file,
)


def test_insertions_are_left_out_and_unknown_residues_are_gaps(tmp_path: Path) -> None:
    path = tmp_path / "a.a3m.gz"
    with gzip.open(path, "wt") as file:
        file.write(">query\nACX\n>one\nAkl-\nY\n")
    assert aligned_columns(path).tolist() == [[0, 1, 20], [0, 20, 19]]


def test_an_indirect_coupling_is_weaker_than_the_direct_ones() -> None:
    """Columns 1, 4 and 7 are a chain: 1 and 7 correlate only through 4."""
    generator = np.random.default_rng(0)
    columns_NL = generator.integers(4, size=(3000, 9))
    for target, source in ((4, 1), (7, 4)):
        copied = generator.random(len(columns_NL)) < 0.8
        columns_NL[copied, target] = columns_NL[copied, source]
    scores_LL = inverse_covariance(columns_NL)
    correlation = np.mean(columns_NL[:, 1] == columns_NL[:, 7])
    assert correlation > 0.6
    assert min(scores_LL[1, 4], scores_LL[4, 7]) > 3 * scores_LL[1, 7]
    rest = np.triu(np.ones((9, 9), dtype=bool), 1)
    rest[[1, 4], [4, 7]] = False
    assert min(scores_LL[1, 4], scores_LL[4, 7]) > 3 * scores_LL[rest].max()


def test_the_report_compares_each_protein_with_itself() -> None:
    methods = {"contacts, before": 0.1, "contacts, after": 0.2, "jacobian, before": 0.1}
    one = {**methods, "jacobian, after": 0.3, "inverse covariance": 0.25}
    other = {**one, "contacts, after": 0.4, "inverse covariance": 0.35}
    lines = report({"1ABC_A": one, "2ABC_A": other}).splitlines()
    assert lines[3] == "| contacts, after | 20.0% | 40.0% | 30.0% (range 20.0% to 40.0%) |"
    assert "contacts, after less before: 20.0% (range 10.0% to 30.0%)" in lines
    expected = "jacobian, after less inverse covariance: 0.0% (range -5.0% to 5.0%)"
    assert expected in lines


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
