"""The proteins of an evaluation that reads no split: structures, or a sequence file."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from protlm.analysis.structures import Structure, contact_map, read_folder
from protlm.data.records import Tally, read_records
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import sample_dir


class Protein(NamedTuple):
    """A sequence, with its structure where it is known."""

    identifier: str
    sequence: str
    structure: Structure | None = None

    def contacts(self) -> np.ndarray:
        """Returns the `contact_map`."""
        assert self.structure is not None
        return contact_map(self.structure)


@final
class ProteinChoice:
    """The settings that choose proteins.

    The first ones are taken, and relatives among them are not left out, while intervals and
    p-values over proteins treat them as independent: give a file or folder without close homologs.

    Args:
        structures: a folder of structures; `sample` is the shipped one.
        sequences: a sequence file that is read instead.
        max_proteins: only the first of them.
        max_residues: longer proteins are excluded, as are those longer than the model accepts.
        shipped: which of the shipped folders of structures is meant by `sample`, `test` or `fit`.
    """

    def __init__(
        self,
        *,
        structures: str,
        sequences: str | None,
        max_proteins: int,
        max_residues: int,
        shipped: str = "test",
    ) -> None:
        for name, value in (("max_proteins", max_proteins), ("max_residues", max_residues)):
            if value < 1:
                raise UserError(f"{name}={value} excludes every protein; give 1 or more")
        folder = sample_dir() / "structures" / shipped
        self.structures = folder if structures == "sample" else Path(structures)
        self.sequences = None if sequences is None else Path(sequences)
        self.max_proteins = max_proteins
        self.max_residues = max_residues

    def read(self, model: PretrainedModel) -> list[Protein]:
        """Reads the proteins."""
        limit = min(self.max_residues, model.max_residues or self.max_residues)
        if self.sequences is None:
            found, _ = read_folder(self.structures, limit)
            return [Protein(s.identifier, s.sequence, s) for s in found[: self.max_proteins]]
        tally = Tally()
        records = read_records(self.sequences, tally)
        short = (r for r in records if len(r.sequence) <= limit)
        proteins = [Protein(r.identifier, r.sequence) for r in islice(short, self.max_proteins)]
        tally.warn_of_rejected(self.sequences)
        if not proteins:
            raise InputDataError(
                f"{self.sequences} has no protein of at most {limit} residues; give shorter ones "
                "or raise max_residues"
            )
        return proteins


def sequences_of(proteins: Sequence[Protein]) -> list[str]:
    """Returns the sequences."""
    return [protein.sequence for protein in proteins]
