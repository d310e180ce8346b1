"""Concepts of residues, which may explain features: annotations, labels and sequence contexts."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protlm.analysis.features.naming import Concepts
from protlm.analysis.structures import read_folder
from protlm.analysis.uniprot_features import BOND, AnnotatedProtein, read_annotated
from protlm.data.records.source import ByteSource
from protlm.data.relatives import unrelated
from protlm.data.vocabulary import STANDARD
from protlm.downstream.labels import read_labeled_proteins
from protlm.downstream.probing import residue_baseline
from protlm.downstream.tasks import Task, guess_task, state_labels, targets_of
from protlm.system.errors import InputDataError, UserError

# Concepts of fewer proteins in a half are left out.
LEAST = 10
RESIDUE = "residue "
_HYDROPHOBIC = "ACFILMV"
_MOTIFS = {
    "CxxC": "C..C",
    "GxGxxG": "G.G..G",
    "P-loop": "[AG].{4}GK[ST]",
    "sequon": "N[^P][ST][^P]",
    "repeat of 4": r"(.)\2{3}",
}


class ConceptProtein(NamedTuple):
    """A protein, which of its residues are annotated or labeled, and how: bool L by name."""

    identifier: str
    sequence: str
    known_L: np.ndarray
    present: Mapping[str, np.ndarray]


def read_concepts(
    path: Path, sequences: Path | None, *, max_proteins: int, max_residues: int, seed: int
) -> tuple[list[ConceptProtein], dict[str, int]]:
    """Draws proteins without relatives, and returns them with counts of what is left out.

    The path is a flat file or XML of UniProt, a file of labels of residues, or a folder of
    structures, whose secondary structure is computed.
    """
    if path.is_dir():
        rows = [(s.identifier, s.sequence, state_labels(s)) for s in read_folder(path)[0]]
        left_out = Counter[str]()
    else:
        with ByteSource(path, "a file of annotations") as source:
            start = next(source.blocks())
        if start.startswith((b"ID   ", b"<")):
            if sequences is not None:
                raise UserError(f"{path} has the sequences of its entries; leave {sequences} out")
            sizes = {"max_proteins": max_proteins, "max_residues": max_residues}
            drawn = read_annotated(path, **sizes, seed=seed, detailed=True)
            lost = {"relatives": drawn.num_drawn - len(drawn.proteins), **drawn.left_out}
            return [_of_uniprot(one) for one in drawn.proteins], +Counter(lost)
        found = read_labeled_proteins(path, sequences=sequences, per_residue=True)
        rows = [(one.identifier, one.sequence, one.label) for one in found.examples]
        left_out = Counter(found.left_out)
    short = [row for row in rows if len(row[1]) <= max_residues]
    order = np.random.default_rng(seed).permutation(len(short))
    taken = unrelated((short[place][1] for place in order), limit=max_proteins)
    if not taken:
        raise InputDataError(
            f"{path} has no protein of at most {max_residues} residues; give others"
        )
    drawn = taken[-1] + 1 if len(taken) == max_proteins else len(short)
    left_out["longer"], left_out["not drawn"] = len(rows) - len(short), len(short) - drawn
    left_out["relatives"] = drawn - len(taken)
    return _labeled([short[order[place]] for place in taken]), +left_out


def _of_uniprot(protein: AnnotatedProtein) -> ConceptProtein:
    present = {}
    for name, spans in protein.features.items():
        present[name] = np.zeros(len(protein.sequence), dtype=bool)
        for first, last in spans:
            is_bond = name.startswith(BOND)
            present[name][[first, last] if is_bond else slice(first, last + 1)] = True
    known_L = np.ones(len(protein.sequence), dtype=bool)
    return ConceptProtein(protein.accession, protein.sequence, known_L, present)


def _labeled(rows: Sequence[tuple[str, str, str]]) -> list[ConceptProtein]:
    labels = [label for *_, label in rows]
    targets = targets_of(labels, guess_task(labels, per_residue=True))
    assert targets.places is not None
    kinds = {f"label {name}": targets.values == n for n, name in enumerate(targets.classes)}
    if targets.task is Task.residue_numbers:
        low, high = np.quantile(targets.values, [0.2, 0.8])
        kinds = {"lowest fifth": targets.values <= low, "highest fifth": targets.values >= high}
    found, start = [], 0
    for (identifier, sequence, _), places in zip(rows, targets.places, strict=True):
        known_L, end = np.isin(np.arange(len(sequence)), places), start + len(places)
        present = {name: np.zeros(len(sequence), dtype=bool) for name in kinds}
        for name, is_kind in kinds.items():
            present[name][places] = is_kind[start:end]
        found.append(ConceptProtein(identifier, sequence, known_L, present))
        start = end
    return found


def contexts(sequence: str) -> dict[str, np.ndarray]:
    """Returns concepts that the sequence alone decides, bool L by name."""
    letters, places = np.array([*sequence], dtype="U1"), np.arange(len(sequence))
    found = {f"{RESIDUE}{one}": letters == one for one in STANDARD}
    found |= {f"after {one}": np.append(False, letters[:-1] == one) for one in STANDARD}
    found["hydrophobic"] = np.isin(letters, [*_HYDROPHOBIC])
    found["first 5"], found["last 5"] = places < 5, places >= len(sequence) - 5
    for name, motif in _MOTIFS.items():
        found[name] = np.zeros(len(sequence), dtype=bool)
        for match in re.finditer(f"(?=({motif}))", sequence):
            found[name][match.start(1) : match.end(1)] = True
    return found


def concepts_of(proteins: Sequence[ConceptProtein]) -> Concepts:
    """Returns the concepts that ten proteins or more of either half have."""
    every = [{**one.present, **contexts(one.sequence)} for one in proteins]
    counts = [Counter(n for x in every[side::2] for n in x if x[n].any()) for side in (0, 1)]
    names = [name for name in {**every[0], **counts[0]} if min(c[name] for c in counts) >= LEAST]
    if not names:
        raise InputDataError(f"no concept is in {LEAST} of either half of {len(proteins)} proteins")
    known, present, of_sequence = [], [], contexts("")
    for one, having in zip(proteins, every, strict=True):
        nothing = np.zeros(len(one.sequence), dtype=bool)
        known.append(np.stack([one.known_L | (name in of_sequence) for name in names], axis=1))
        present.append(np.stack([having.get(name, nothing) for name in names], axis=1))
    protein = np.repeat(np.arange(len(proteins)), [len(one.sequence) for one in proteins])
    return Concepts(names, np.concatenate(known), np.concatenate(present), protein)


def three_residues(sequences: Sequence[str], concepts: Concepts) -> np.ndarray:
    """Returns the probability of each concept from a residue and its neighbors, by naive Bayes.

    It is fitted to the half in which everything is chosen; [residues, concepts].
    """
    places = [np.arange(len(one)) for one in sequences]
    windows = residue_baseline(sequences, places, flank=1).astype(np.float32)
    rows = concepts.rows(0)
    sides = [(concepts.known & x)[rows] for x in (concepts.present, ~concepts.present)]
    rates = [(windows[rows].T @ x + 0.5) / (x.sum(axis=0) + 1) for x in sides]
    logits = windows @ np.log(rates[0] / rates[1]) + np.log(sides[0].sum(0) / (sides[1].sum(0) + 1))
    return 1 / (1 + np.exp(-logits))
