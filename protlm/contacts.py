"""`protlm contacts PROTEIN -m MODEL -o OUT.h5`: contact probabilities from attention maps."""

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
from protlm.protein_file import entry_bytes, protein_file
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
    model = load_model(model_path, device=options.device)
    longest = None if model.max_length is None else model.max_length - 2
    proteins = _read(protein, options.chain, longest)
    if options.figure is not None and len(proteins) != 1:
        raise UserError(f"--figure draws one protein; {protein} has {len(proteins)}")
    regression = _fit(model, options.fit or sample_dir() / "structures" / "fit")
    num_values = sum(len(record.sequence) ** 2 for record, _ in proteins)
    size = entry_bytes(2 * len(proteins), 2 * num_values, "float32")
    with protein_file(output, model, num_bytes=size) as file:
        for record, structure in proteins:
            probabilities_LL = regression.predict(head_features(model, record.sequence))
            truth_LL = None if structure is None else contact_map(structure)
            written = {
                "probabilities": (probabilities_LL, "float32"),
                "contacts": (truth_LL, "int8"),
            }
            for name, (values_LL, dtype) in written.items():
                if values_LL is not None:
                    dataset = file.add(
                        record, name, shape=values_LL.shape, dtype=dtype, attributes={}
                    )
                    dataset[...] = values_LL
            if options.figure is not None:
                figure = contact_figure(probabilities_LL, truth_LL, title=record.identifier)
                save_figure(figure, options.figure)
    print(output)


def _read(
    path: Path, chain: str | None, longest: int | None
) -> list[tuple[Record, Structure | None]]:
    existing_file(path, "a FASTA file or a structure")
    name = path.name.lower().removesuffix(".gz")
    if not name.endswith(_STRUCTURE):
        proteins = Proteins(path, max_residues=longest)
        proteins.report("predicted")
        return [(record, None) for record in proteins]
    structure = read_structure(path, chain)
    record = Record(structure.identifier, path.name, structure.sequence, 1)
    return [(record, structure)]


def _fit(model: PretrainedModel, directory: Path) -> ContactRegression:
    files = structure_files(directory)

    def examples() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with JobProgress("fitting contacts", len(files)) as progress:
            for done, file in enumerate(files, start=1):
                structure = read_structure(file)
                if model.max_length is None or len(structure) <= model.max_length - 2:
                    yield head_features(model, structure.sequence), contact_map(structure)
                progress.update(done)

    return ContactRegression().fit(examples())
