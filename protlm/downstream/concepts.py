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
from protlm.downstream.tasks import guess_task, state_labels, targets_of
from protlm.options.labels import Task
from protlm.system.errors import InputDataError, UserError

# Concepts of fewer proteins in a half are left out.
LEAST = 10
RESIDUE = "residue "
_HYDROPHOBIC = "ACFILMV"
_FROM_ENDS = (1, 2, 3, 5, 10, 20, 30, 50, 100)
_MOTIFS = {
    "CxxC": "C..C",
    "GxGxxG": "G.G..G",
    "P-loop": "[AG].{4}GK[ST]",
    "sequon": "N[^P][ST][^P]",
    "repeat of 4": r"(.)\2{3}",
}


class ConceptProtein(NamedTuple):
    """A protein, its residues that are not masked, and which of these have concepts, by name."""

    identifier: str
    sequence: str
    places: np.ndarray
    present: Mapping[str, np.ndarray]


def read_concepts(
    path: Path, sequences: Path | None, *, max_proteins: int, max_residues: int, seed: int
) -> tuple[list[ConceptProtein], dict[str, int]]:
    """Draws proteins without relatives, and returns them with counts of what is left out.

    The path is a flat file or XML of UniProt, a file of labels of residues, or a folder of
    structures, whose secondary structure is computed.
    """
    left_out = Counter[str]()
    if path.is_dir():
        found = _labeled(
            [(s.identifier, s.sequence, state_labels(s)) for s in read_folder(path)[0]]
        )
    elif _is_uniprot(path):
        if sequences is not None:
            raise UserError(f"{path} has the sequences of its entries; leave {sequences} out")
        drawn = read_annotated(
            path, max_proteins=max_proteins, max_residues=max_residues, seed=seed, detailed=True
        )
        lost = {
            "not drawn": drawn.num_in_file - drawn.num_drawn,
            "relatives": drawn.num_drawn - len(drawn.proteins),
        }
        left_out.update(drawn.left_out | lost)
        found = [_of_uniprot(one) for one in drawn.proteins]
    else:
        labeled = read_labeled_proteins(path, sequences=sequences, per_residue=True)
        left_out.update(labeled.left_out)
        found = _labeled([(one.identifier, one.sequence, one.label) for one in labeled.examples])
    short = [one for one in found if len(one.sequence) <= max_residues]
    order = np.random.default_rng(seed).permutation(len(short))
    taken = unrelated((short[at].sequence for at in order), limit=max_proteins)
    if not taken:
        raise InputDataError(f"{path} has no protein of at most {max_residues} residues")
    drawn = taken[-1] + 1 if len(taken) == max_proteins else len(short)
    kept = [short[order[at]] for at in taken]
    masked = sum(len(one.sequence) - len(one.places) for one in kept)
    left_out.update(
        {
            "longer": len(found) - len(short),
            "not drawn": len(short) - drawn,
            "relatives": drawn - len(taken),
            "residues masked": masked,
        }
    )
    return kept, +left_out


def _is_uniprot(path: Path) -> bool:
    with ByteSource(path, "a file of annotations") as source:
        return next(source.blocks()).startswith((b"ID   ", b"<"))


def _of_uniprot(protein: AnnotatedProtein) -> ConceptProtein:
    places, present = np.arange(len(protein.sequence)), {}
    for name, spans in protein.features.items():
        is_bond = name.startswith(BOND)
        members = [[a, b] if is_bond else range(a, b + 1) for a, b in spans]
        present[name] = np.isin(places, [x for one in members for x in one])
    return ConceptProtein(protein.accession, protein.sequence, places, present)


def _labeled(rows: Sequence[tuple[str, str, str]]) -> list[ConceptProtein]:
    labels = [label for *_, label in rows]
    targets = targets_of(labels, guess_task(labels, per_residue=True))
    assert targets.places is not None
    kinds = {f"label {name}": targets.values == n for n, name in enumerate(targets.classes)}
    if targets.task is Task.residue_numbers:
        low, high = np.quantile(targets.values, [0.2, 0.8])
        kinds = {"lowest fifth": targets.values <= low, "highest fifth": targets.values >= high}
    ends = np.cumsum([len(places) for places in targets.places])[:-1]
    present = zip(*(np.split(x, ends) for x in kinds.values()), strict=True)
    return [
        ConceptProtein(name, sequence, places, dict(zip(kinds, values, strict=True)))
        for (name, sequence, _), places, values in zip(rows, targets.places, present, strict=True)
    ]


def contexts(sequence: str) -> dict[str, np.ndarray]:
    """Returns concepts that the sequence alone decides, bool L by name."""
    letters, places = np.array([*sequence], dtype="U1"), np.arange(len(sequence))
    found = {
        **{f"{RESIDUE}{one}": letters == one for one in STANDARD},
        **{f"after {one}": np.append(False, letters[:-1] == one) for one in STANDARD},
        "hydrophobic": np.isin(letters, [*_HYDROPHOBIC]),
    }
    found["first 5"], found["last 5"] = places < 5, places >= len(sequence) - 5
    for name, motif in _MOTIFS.items():
        matches = re.finditer(f"(?=({motif}))", sequence)
        found[name] = np.isin(places, [x for one in matches for x in range(*one.span(1))])
    return found


def concepts_of(proteins: Sequence[ConceptProtein]) -> Concepts:
    """Returns the concepts that ten proteins or more of either half have."""
    every = [
        {**one.present, **{name: x[one.places] for name, x in contexts(one.sequence).items()}}
        for one in proteins
    ]
    counts = [Counter(n for x in every[side::2] for n in x if x[n].any()) for side in (0, 1)]
    names = [name for name in counts[0] if min(one[name] for one in counts) >= LEAST]
    if not names:
        raise InputDataError(f"no concept is in {LEAST} of either half of {len(proteins)} proteins")
    present = [
        np.stack([having.get(name, np.zeros(len(one.places), bool)) for name in names], axis=1)
        for one, having in zip(proteins, every, strict=True)
    ]
    protein = np.repeat(np.arange(len(proteins)), [len(one.places) for one in proteins])
    return Concepts(names, np.concatenate(present), protein)


def positions(proteins: Sequence[ConceptProtein]) -> np.ndarray:
    """Returns whether residues are among the first or the last few of their protein."""
    nearest = np.hstack([[one.places, len(one.sequence) - 1 - one.places] for one in proteins])
    return np.concatenate([nearest < number for number in _FROM_ENDS]).T.astype(np.float32)


def three_residues(proteins: Sequence[ConceptProtein], concepts: Concepts) -> np.ndarray:
    """Returns the probability of each concept from a residue and its neighbors, by naive Bayes.

    It is fitted to the half in which everything is chosen; [residues, concepts].
    """
    sequences, places = [one.sequence for one in proteins], [one.places for one in proteins]
    windows = residue_baseline(sequences, places, flank=1).astype(np.float32)
    rows = concepts.rows(0)
    sides = [x[rows] for x in (concepts.present, ~concepts.present)]
    rates = [(windows[rows].T @ x + 0.5) / (x.sum(axis=0) + 1) for x in sides]
    logits = windows @ np.log(rates[0] / rates[1]) + np.log(sides[0].sum(0) / (sides[1].sum(0) + 1))
    return 1 / (1 + np.exp(-logits))
