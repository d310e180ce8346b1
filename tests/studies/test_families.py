"""The study of families: what it runs, and the parts that compute something themselves."""

import gzip
import json
import re
import shutil
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protlm.build import load_initial_weights
from protlm.checkpoints.format import shipped_models
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.evaluation.base import NO_SPLIT
from protlm.model.transformer import build_network
from protlm.system.paths import conf_dir
from studies import families
from studies.alignments import factored_attention, inverse_covariance, potts
from studies.families import (
    interval,
    perplexities,
    perplexity_table,
    report,
    structure_file,
    write_clusters,
)

MODEL = "performer-relu-3m"
# Residues that are 24 or 25 apart are in contact, and none that are farther apart.
LENGTH, PERIOD, PITCH = 40, 24, 6.0


def write_structure(path: Path) -> None:
    """Writes alanines on a helix of 24 residues a turn."""
    lines = []
    for number in range(LENGTH):
        angle = 2 * np.pi * number / PERIOD
        for atom, size in (("N", 15.2), ("CA", 14.5), ("C", 13.8), ("CB", 14.5)):
            x, y, z = size * np.cos(angle), size * np.sin(angle), PITCH * number / PERIOD
            lines.append(
                f"ATOM  {len(lines) + 1:5d}  {atom:<3s} ALA A{number + 1:4d}    "
                f"{x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00           {atom[0]}\n"
            )
    with gzip.open(path, "wt") as file:
        file.write("".join(lines) + "END\n")


def write_evaluation(settings: dict[str, str]) -> None:
    """Writes what `protlm evaluate` does; of an adapted model all is better than of another."""
    is_adapted = settings["checkpoint"].endswith("1ABC_A/run")
    contacts = {"model": {"long": {"P@L": {"mean": 0.4 if is_adapted else 0.1}}}}
    perplexity = {"perplexity": 9.5 if is_adapted else 16.0}
    masked: dict[str, Any] = {"sequences": 4, "interval": {"perplexity": [9.0, 17.0]}}
    masked |= {name: {"perplexity": 17.0} for name in ("three_mers", "empirical")}
    results = {
        NO_SPLIT: dict.fromkeys(families.METHODS, contacts),
        settings["split"]: {"masked": {**masked, "model": perplexity}},
    }
    Path(settings["output"]).write_text(json.dumps({"results": results}))


@pytest.fixture
def commands(
    tmp_path: Path, tiny_clusters: Path, monkeypatch: pytest.MonkeyPatch
) -> list[list[str]]:
    """The commands of protlm that the study runs, which write tiny results."""
    for folder in ("msa", "pdb"):
        (tmp_path / folder).mkdir()
    write_structure(tmp_path / "pdb" / "1abc_A.pdb.gz")
    with gzip.open(tmp_path / "msa" / "1ABC_A.a3m.gz", "wt") as file:
        file.write(f">query\n{'A' * LENGTH}\n")
    ran: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> None:
        assert check and command[1:3] == ["-m", "protlm"]
        ran.append(command[3:])
        name, *words = command[3:]
        if name == "prepare":
            shutil.copytree(tiny_clusters, words[words.index("--out") + 1])
        if name == "data":
            counts = {"train_sequences": 30, "splits": {"valid": {"near": 3}}}
            Path(words[words.index("--json") + 1]).write_text(json.dumps(counts))
        if name == "evaluate":
            write_evaluation(dict(word.split("=", 1) for word in words))

    monkeypatch.setattr(subprocess, "run", run)
    # The fits take minutes, and have their own tests.
    for name in families.ALIGNMENT_METHODS:
        monkeypatch.setitem(families.ALIGNMENT_METHODS, name, lambda rows: np.eye(rows.shape[1]))
    return ran


def study(tmp_path: Path, *options: str) -> None:
    """Runs the study of one protein."""
    inputs = ("GENERAL", str(tmp_path), "--proteins", "1ABC_A", "--model", MODEL)
    families.main([*inputs, "--steps", "8", "--out", str(tmp_path / "out"), *options])


def test_a_model_is_compared_before_and_after(
    tmp_path: Path, commands: list[list[str]], capsys: pytest.CaptureFixture
) -> None:
    study(tmp_path)
    shown = capsys.readouterr().out
    assert "| 1ABC_A | 30 | 4 | 3 | 16.0 (9.0 to 17.0) | 9.5 (9.0 to 17.0) | 17.0 | 17.0 |" in shown
    assert "contacts, after less before: 30.0% (range 30.0% to 30.0%)" in shown
    assert "jacobian, after less before: 30.0% (range 30.0% to 30.0%)" in shown
    family = tmp_path / "out" / "1ABC_A" / "data"
    for command in commands:
        if command[0] == "evaluate":
            assert {f"data.dir={family}", "split=valid"} <= set(command)
            table = family.parent / "held_out_clusters.tsv"
            assert f"evaluation.masked.groups={table}" in command and table.exists()
            assert "evaluation.masked.column=cluster" in command
    names = [command[0] for command in commands]
    assert names == ["prepare", "data", "evaluate", "train", "evaluate"]
    # Finished parts are not repeated; a run of training that is there is complete at once.
    study(tmp_path)
    assert [command[0] for command in commands[5:]] == ["train"]
    assert capsys.readouterr().out == shown


def test_baselines_are_of_pairs_at_long_range(
    tmp_path: Path, commands: list[list[str]], capsys: pytest.CaptureFixture
) -> None:
    study(tmp_path)
    shown = capsys.readouterr().out
    # Of 16 + 15 + ... + 1 pairs the 16 + 15 that are nearest in sequence are in contact.
    assert f"| all pairs | {31 / 136:.1%} |" in shown
    assert f"| nearest in sequence | {31 / 40:.1%} |" in shown


def test_methods_have_their_names() -> None:
    assert families.ALIGNMENT_METHODS["Potts model"] is potts
    assert families.ALIGNMENT_METHODS["factored attention"] is factored_attention
    assert families.ALIGNMENT_METHODS["inverse covariance"] is inverse_covariance


@pytest.mark.parametrize("model", [folder.name for folder in shipped_models()])
def test_shipped_models_can_be_adapted(
    model: str, tmp_path: Path, commands: list[list[str]]
) -> None:
    study(tmp_path, "--model", model)
    settings = next(command[1:] for command in commands if command[0] == "train")
    config = compose(TrainConfig, settings)
    network = build_network(config.model, config.attention, seed=0)
    load_initial_weights(network, config.model, config.attention, Path(model))
    # The header of the experiment says what to type without the study.
    header = (conf_dir() / "experiment" / "family.yaml").read_text()
    typed = re.findall(rf"With model\.init_from={model}, type (.*)\.\n", header)
    config = compose(TrainConfig, ["experiment=family", *" ".join(typed).split()])
    network = build_network(config.model, config.attention, seed=0)
    load_initial_weights(network, config.model, config.attention, Path(model))


def test_intervals_are_over_the_clusters_of_held_out_homologs(
    tmp_path: Path, tiny_clusters: Path
) -> None:
    write_clusters(tiny_clusters, tmp_path / "clusters.tsv")
    header, *lines = (tmp_path / "clusters.tsv").read_text().splitlines()
    assert header == "accession\tcluster"
    found = dict(line.split("\t") for line in lines)
    rows = [
        line.split("\t") for line in (tiny_clusters.parent / "cluster.tsv").read_text().splitlines()
    ]
    cluster_of = {name: first for first, name in rows if name in found}
    assert len(found) == len(lines) == len(cluster_of) > len(set(cluster_of.values())) > 1
    pairs = {(found[name], cluster_of[name]) for name in found}
    assert len(pairs) == len(set(found.values())) == len(set(cluster_of.values()))


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
