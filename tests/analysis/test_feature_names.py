"""Names of features, by hand and against chance; states that are replaced; concepts of files."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from protlm.analysis.features.naming import Concepts, compare
from protlm.analysis.features.splice import splice_losses, spliced
from protlm.data.records import Tally, read_records
from protlm.downstream.concepts import contexts, read_concepts
from protlm.model.pretrained import PretrainedModel
from tests.analysis.test_features import perfect, settings_of
from tests.data.test_relatives import random_sequences
from tests.evaluation.test_annotations import entry
from tests.fixtures.commands import Command, read_table


@pytest.mark.parametrize("make", [np.asarray, csr_array])
def test_figures_are_those_by_hand(make) -> None:
    """Proteins 0 and 2 choose the threshold 0.5; of 1 and 3, which are reported, 1 has it."""
    #            choose    reported            choose    reported
    present = [1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0]
    activity = [1, 1, 0.4, 0.4, 1, 0, 0, 0, 0, 0.4, 0, 0, 0.7, 0, 0]
    protein = np.repeat([0, 1, 2, 3], [4, 6, 2, 3])
    concepts = Concepts(["site"], np.array(present, bool)[:, None], protein)
    values = make(np.array([activity, [0.0] * 15], np.float32).T)
    (figures,) = compare(values, concepts, 20, seed=0)
    # One of four residues and of two runs; another active residue is in the protein without any.
    expected = {"precision": 1 / 2, "recall": 1 / 4, "recall of domains": 1 / 2}
    expected |= {"F1": 1 / 3, "F1 of domains": 1 / 2, "threshold": 0.5, "feature": 0}
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert figures["chosen"] and (figures["concept"], figures["named"]) == ("site", False)


def test_names_are_beyond_chance() -> None:
    """A feature of every residue, of special tokens alone, or of a terminus gets none."""
    rng = np.random.default_rng(0)
    protein = np.repeat(np.arange(40), rng.integers(40, 60, 40))
    size, place = len(protein), np.concatenate([np.arange(n) for n in np.bincount(protein)])
    random = [rng.random(size) < rate for rate in (0.1, 0.1, 0.7)]
    present = np.stack([*random, place < 5], axis=1)
    concepts = Concepts(["marked", "unmarked", "common", "first 5"], present, protein)
    noise = (rng.random((30, size)) < 0.1) * rng.random((30, size))
    marks = present[:, 0] & (rng.random(size) < 0.9)
    values = np.stack([marks, np.ones(size), np.zeros(size), place < 5, *noise], axis=1)
    site, unmarked, common, first = compare(values, concepts, 20, seed=0)
    assert [x["named"] for x in (site, unmarked, common, first)] == [True, False, False, False]
    assert site["chosen"] and site["low"] < site["F1"] < site["high"] < 1
    found = [(x["concept"], x["feature"]) for x in (site, common, first)]
    assert found == [("marked", 0), ("common", 1), ("first 5", 3)]
    assert common["F1"] > 0.7 and first["F1"] == 1 <= first["by chance"]


@pytest.mark.slow
def test_tables_without_relation_seldom_have_a_name() -> None:
    """One in 20: of 30 tables of 40 concepts at most 4, which is two deviations more."""
    rng, named, protein = np.random.default_rng(0), 0, np.repeat(np.arange(20), 10)
    for _ in range(30):
        present = rng.random((200, 40)) < 0.05
        present[[0, 10]] = True
        concepts = Concepts([""] * 40, present, protein)
        values = 1.0 * (rng.random((200, 1)) < 0.3)
        named += any(row["named"] for row in compare(values, concepts, 20, seed=0))
    assert named <= 4


def test_a_name_is_what_is_furthest_from_chance() -> None:
    """Not the more common concept, whose F1 is higher by chance."""
    rng = np.random.default_rng(0)
    protein = np.repeat(np.arange(40), 50)
    rare = rng.random(2000) < 0.05
    present = np.stack([rng.random(2000) < 0.8, rare], axis=1)
    values = (rare | (rng.random(2000) < 0.15))[:, None].astype(np.float32)
    found = compare(values, Concepts(["common", "rare"], present, protein), 20, seed=0)
    assert [(x["concept"], x["named"]) for x in found] == [("common", False), ("rare", True)]


def test_annotations_are_exchanged_between_proteins_of_a_half() -> None:
    """Each protein has those of another of its half, from both of its termini."""
    lengths = np.array([9, 8, 5, 8, 9, 7])
    protein = np.repeat(np.arange(6), lengths)
    concepts = Concepts([""] * len(protein), np.eye(len(protein), dtype=bool), protein)
    found = concepts.exchanged(np.random.default_rng(1))
    starts, seen = np.cumsum(lengths) - lengths, []
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        sources = found.present[start : start + length].argmax(axis=1)
        other = protein[sources[0]]
        assert other != number and other % 2 == number % 2
        half = -(-length // 2)
        first = [starts[other] + n for n in range(half)]
        last = [starts[other] + lengths[other] - n for n in range(length - half, 0, -1)]
        assert sources.tolist() == first + last
        seen.append(other)
    assert sorted(seen) == list(range(6))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_perfect_autoencoder_changes_no_prediction(model: PretrainedModel, layer: int) -> None:
    autoencoder = perfect(64, settings_of(model, layer, latents=128, k=128))
    batch = model.tokenize(["MKTAYIAKQR"])
    before = model(batch, [0, 1, 2])
    with spliced(model, layer, lambda x_BLD: autoencoder(x_BLD.flatten(0, 1)).view_as(x_BLD)):
        assert torch.equal(model(batch).logits_BLV, before.logits_BLV)
    with spliced(model, layer, torch.zeros_like):
        after = model(batch, [0, 1, 2])
    assert not torch.equal(after.logits_BLV, before.logits_BLV)
    state, own = (x.hidden[layer][0] for x in (after, before))
    assert not state[1:-1].any() and torch.equal(state[[0, -1]], own[[0, -1]])
    losses = splice_losses(model, autoencoder, ["MKTAYIAKQR" * 3] * 3, seed=0)
    assert losses["intact"] == losses["reconstructed"] != losses["mean"]
    assert losses["recovered"] == 1 and losses["bypasses"] == []


def test_sequences_have_contexts() -> None:
    found = {name: np.flatnonzero(x).tolist() for name, x in contexts("MCAACPNGSSSS").items()}
    assert found["CxxC"] == [1, 2, 3, 4] and found["after P"] == [6]
    assert found["sequon"] == [6, 7, 8, 9] and found["last 5"] == [7, *found["repeat of 4"]]


def test_uniprot_features_have_the_names_of_their_notes(tmp_path: Path) -> None:
    path = tmp_path / "x.dat"
    indent = " " * 16
    lines = ["BINDING         3..5", f'{indent}/ligand="ATP"', "DOMAIN          6..9"]
    lines += [f'{indent}/note="Protein', f'{indent}kinase, 1"']
    path.write_text(entry(*lines, "DISULFID        2..11", "HELIX           1..4"))
    (one,), left_out = read_concepts(path, None, max_proteins=5, max_residues=100, seed=0)
    found = {name: np.flatnonzero(x).tolist() for name, x in one.present.items()}
    assert found["binding_site"] == found["binding_site: ATP"] == [2, 3, 4]
    assert found["domain: Protein kinase"] == [5, 6, 7, 8] and not left_out
    assert found["disulfide_bond"] == [1, 10] and found["helix"] == [0, 1, 2, 3]


@pytest.mark.parametrize("labels", ["HE?" * 20, ";".join(["0.5", "1.5", "?"] * 20)])
def test_labels_without_relatives(labels: str, tmp_path: Path) -> None:
    """Of numbers the extreme fifths, of letters each; masked residues are not known."""
    sequences, path = random_sequences(3, 60), tmp_path / "x.tsv"
    rows = "".join(f"P{n}\t{one}\t{labels}\n" for n, one in enumerate([*sequences, sequences[0]]))
    path.write_text(f"identifier\tsequence\tlabel\n{rows}")
    found, left_out = read_concepts(path, None, max_proteins=9, max_residues=60, seed=0)
    assert len(found) == 3 and left_out == {"relatives": 1, "residues masked": 60}
    assert found[0].places.tolist() == [n for n in range(60) if n % 3 < 2]
    second, first = (found[0].present[name].tolist() for name in sorted(found[0].present))
    assert (first, second) == ([True, False] * 20, [False, True] * 20)


@pytest.mark.slow
def test_the_command_describes(
    workplace: Path, tiny_fasta: Path, protlm_in_process: Command
) -> None:
    def run(line: str, code: int = 0) -> str:
        done = protlm_in_process(*line.split(), cwd=workplace, code=code)
        return done.stdout + done.stderr

    train = "features train -m run --layer 1 --data data --latents 32 --k 4 --residues 3000"
    run(f"{train} -o sae")
    run(f"{train} --random-weights 0 -o random")
    proteins = {x.identifier: x.sequence for x in read_records(tiny_fasta, Tally())}
    short = {name: one for name, one in proteins.items() if len(one) < 200}
    rows = "".join(f">{name}\n{re.sub('[^CY]', 'N', one)}\n" for name, one in short.items())
    (workplace / "labels.fasta").write_text(rows)
    describe = f"features describe sae -m run --annotations labels.fasta --proteins {tiny_fasta}"
    assert "--random-weights" in run(f"{describe} --random sae -o names", 2)
    shown = run(f"{describe} --random random --permutations 20 -o names")
    results = json.loads((workplace / "names" / "results.json").read_text())
    assert len(results["predictors"]) == 6 and "left out" in shown and results["splice"]
    assert re.search(r"chance: 20 permutations; all predictors took [\d,]+ s", shown)
    table = read_table(workplace / "names" / "names.tsv")
    assert {row["predictor"] for row in table} == set(results["predictors"])
    of = {(row["predictor"], row["concept"]): row for row in table}
    assert ("neurons", "label C") in of
    assert float(of["three residues", "after A"]["F1"]) > 0.95
    identifier, place, _ = of["features", "hydrophobic"]["examples"].split("; ")[0].split()
    assert proteins[identifier][int(place[1:]) - 1] == place[0]
