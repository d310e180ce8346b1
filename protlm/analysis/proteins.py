"""The proteins of an evaluation that reads no split: structures, or a sequence file."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from protlm.analysis.structures import Structure, contact_map, read_folder
from protlm.data.records import Tally, read_records
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import sample_dir


def structures_folder(setting: str, shipped: str = "test") -> Path:
    """Returns the folder of structures of a setting: `sample` is a shipped one, `test` or `fit`."""
    return sample_dir() / "structures" / shipped if setting == "sample" else Path(setting)


def check_limit(name: str, value: int) -> None:
    """Refuses a limit that no protein is within."""
    if value < 1:
        raise UserError(f"{name}={value} excludes every protein; give 1 or more")


def longest_read(model: PretrainedModel, max_residues: int) -> int:
    """Returns the largest number of residues that a setting and the model allow."""
    return min(max_residues, model.max_residues or max_residues)


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
@dataclass(frozen=True)
class ProteinChoice:
    """The settings that choose proteins: the first ones of structures, or of a sequence file.

    Relatives among them are not left out, while intervals and p-values over proteins treat them as
    independent: give a file or folder without close homologs. Longer proteins are excluded, as are
    those longer than the model accepts. `shipped` is as for `structures_folder`.
    """

    structures: str
    max_proteins: int
    max_residues: int
    sequences: str | None = None
    shipped: str = "test"

    def __post_init__(self) -> None:
        check_limit("max_proteins", self.max_proteins)
        check_limit("max_residues", self.max_residues)

    def read(self, model: PretrainedModel) -> list[Protein]:
        """Reads the proteins."""
        limit = longest_read(model, self.max_residues)
        if self.sequences is None:
            found, _ = read_folder(structures_folder(self.structures, self.shipped), limit)
            return [Protein(s.identifier, s.sequence, s) for s in found[: self.max_proteins]]
        tally, path = Tally(), Path(self.sequences)
        short = (r for r in read_records(path, tally) if len(r.sequence) <= limit)
        proteins = [Protein(r.identifier, r.sequence) for r in islice(short, self.max_proteins)]
        tally.warn_of_rejected(path)
        if not proteins:
            raise InputDataError(
                f"{path} has no protein of at most {limit} residues; give shorter ones or raise "
                "max_residues"
            )
        return proteins


def sequences_of(proteins: Sequence[Protein]) -> list[str]:
    """Returns the sequences."""
    return [protein.sequence for protein in proteins]
