"""`protlm contacts PROTEIN -m MODEL -o OUT.h5`: contact probabilities from attention maps."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protlm.build import load_model
from protlm.data.records import Record
from protlm.errors import UserError
from protlm.evaluation.contacts import ContactRegression, head_features
from protlm.evaluation.structures import Structure, contact_map, read_structure, structure_files
from protlm.model.pretrained import PretrainedModel
from protlm.paths import check_output, existing_file, sample_dir
from protlm.plots import contact_figure, save_figure
from protlm.progress import JobProgress
from protlm.protein_file import ProteinFile, entry_bytes, protein_file
from protlm.proteins import Proteins

_STRUCTURE = (".pdb", ".ent", ".cif")


@dataclass(frozen=True)
class ContactOptions:
    """The settings of `protlm contacts`; `fit` holds the structures the regression is fitted on."""

    fit: Path | None = None
    chain: str | None = None
    device: str = "auto"
    figure: Path | None = None


def contacts(protein: Path, model_path: Path, output: Path, options: ContactOptions) -> None:
    """Writes `ID/probabilities`, L × L, for each protein, and `ID/contacts` where they are known.

    Raises:
        UserError: a figure of more than one protein.
        InputDataError: a file that cannot be read.
        OutputError: an output exists or cannot be written.
    """
    check_output(output)
    if options.figure is not None:
        check_output(options.figure)
    fit_files = structure_files(options.fit or sample_dir() / "structures" / "fit")
    model = load_model(model_path, device=options.device)
    longest = None if model.max_length is None else model.max_length - 2
    structure, proteins = _read(protein, options.chain, longest)
    if options.figure is not None and len(proteins) != 1:
        raise UserError(f"--figure draws one protein; {protein} has {len(proteins)}")
    regression = _fit(model, fit_files)
    truth_LL = None if structure is None else contact_map(structure)
    num_values = sum(len(record.sequence) ** 2 for record in proteins)
    size = entry_bytes(2 * len(proteins), 2 * num_values, "float32")
    with protein_file(output, model, num_bytes=size) as file:
        for record in proteins:
            probabilities_LL = regression.predict(head_features(model, record.sequence))
            attributes: dict[str, object] = {"heads_used": regression.num_heads_used}
            _write(file, record, "probabilities", probabilities_LL, "float32", attributes)
            if truth_LL is not None:
                _write(file, record, "contacts", truth_LL, "int8", {})
            if options.figure is not None:
                figure = contact_figure(probabilities_LL, truth_LL, title=record.identifier)
                save_figure(figure, options.figure)
    if isinstance(proteins, Proteins):
        proteins.report("predicted")
    if not regression.num_heads_used:
        print("no head carries contacts: all pairs are equally probable", file=sys.stderr)
    print(output)


def _write(
    file: ProteinFile,
    record: Record,
    name: str,
    values_LL: np.ndarray,
    dtype: str,
    attributes: dict[str, object],
) -> None:
    dataset = file.add(record, name, shape=values_LL.shape, dtype=dtype, attributes=attributes)
    dataset[...] = values_LL


def _read(
    path: Path, chain: str | None, longest: int | None
) -> tuple[Structure | None, Proteins | list[Record]]:
    existing_file(path, "a sequence file or a structure")
    name = path.name.lower().removesuffix(".gz")
    if not name.endswith(_STRUCTURE):
        return None, Proteins(path, max_residues=longest)
    structure = read_structure(path, chain)
    return structure, [Record(structure.identifier, path.name, structure.sequence, 1)]


def _fit(model: PretrainedModel, files: list[Path]) -> ContactRegression:
    def examples() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with JobProgress("fitting contacts", len(files)) as progress:
            for done, file in enumerate(files, start=1):
                structure = read_structure(file)
                if model.max_length is None or len(structure) <= model.max_length - 2:
                    yield head_features(model, structure.sequence), contact_map(structure)
                progress.update(done)

    return ContactRegression().fit(examples())
