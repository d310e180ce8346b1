"""`protlm contacts PROTEIN... -m MODEL -o OUT.h5`: contact probabilities from attention maps."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from protlm.analysis.contact_regression import BYTES_PER_PAIR, SavedFit, digest, fit_contacts
from protlm.analysis.precision import SEPARATIONS, precision_at
from protlm.analysis.structures import (
    Structure,
    contact_map,
    is_repeat,
    read_chain,
    structure_files,
    structures_folder,
)
from protlm.commands.hdf5_output import entry_bytes, entry_name, protein_file
from protlm.commands.outputs import HDF5, check_suffix
from protlm.data.records import Record
from protlm.data.records.proteins import Proteins
from protlm.loading import load_model
from protlm.model.embedding import unless_full
from protlm.model.memory import Room
from protlm.model.relatives import InContexts, drawn_beside, in_contexts, models_of
from protlm.options.look import ContactOptions
from protlm.options.shared import new_figure
from protlm.plots import contact_figure, save_figure
from protlm.system.errors import InputDataError, UserError, interrupt_explained
from protlm.system.json_file import to_json, write_json
from protlm.system.paths import all_or_none, check_output
from protlm.system.terminal import JobProgress, print_table, printable

_MOST_FIGURES = 100
# Of a figure that is drawn, for each pair of residues.
_FIGURE_BYTES = 120


@dataclass(frozen=True)
class _Input:
    """The proteins of one file, and the contact map of a structure."""

    path: Path
    records: Proteins | list[Record]
    contacts_LL: np.ndarray | None = None
    too_large: list[tuple[str, str]] = field(default_factory=list)


@interrupt_explained("nothing was written; the same command starts again")
def contacts(
    sources: Sequence[Path], model_path: Path, output: Path, options: ContactOptions
) -> None:
    """Writes `ID/probabilities`, L × L, for each protein, and `ID/contacts` of structures."""
    check_suffix(output, *HDF5)
    saved_fit = None
    if options.fit is None or not options.fit.is_file():
        saved_fit = output.with_suffix(".fit.json")
        check_output(saved_fit)
        structure_files(options.fit or structures_folder("sample", "fit"))
    model = load_model(model_path, device=options.device)
    figure_bytes = _FIGURE_BYTES if options.figure is not None else 0
    room = Room(model, per_pair=4 * model.num_heads + BYTES_PER_PAIR + figure_bytes)
    files = [y for x in sources for y in (structure_files(x, tells=True) if x.is_dir() else [x])]
    seen: dict[str, tuple[Path, Structure]] = {}
    inputs = [one for path in files if (one := _read(path, options, room, seen)) is not None]
    figures = _figures(inputs, options.figure)
    queries = [(one.identifier, one.sequence) for some in inputs for one in some.records]
    contexts = in_contexts(model, options.relatives, (name for name, _ in queries))
    if contexts is not None:
        # Relatives are read before the fit, which takes longer.
        for query in queries:
            contexts.draws(*query)
    fit = fit_contacts(model, options.fit)
    with drawn_beside(contexts, output, queries), all_or_none() as written:
        if saved_fit is not None:
            write_json(saved_fit, to_json(fit))
            written.append(saved_fit)
        rows = _predict(room, fit, inputs, figures, output, written, contexts)
    for one in inputs:
        if isinstance(one.records, Proteins):
            if len(inputs) > 1:
                print(f"{one.path}:", file=sys.stderr)
            one.records.report("predicted", further=one.too_large)
        else:
            for name, reason in one.too_large:
                print(printable(f"skipped {name}: {reason}"), file=sys.stderr)
    if not fit.regression.num_heads_used:
        print("no head carries contacts: all pairs are equally probable", file=sys.stderr)
    if saved_fit is not None:
        print(f"fit saved: --fit {saved_fit} uses it again", file=sys.stderr)
    print_table(("protein", "residues", "long-range P@L", "by chance"), rows)
    print(output, *written, sep="\n")


def _predict(
    room: Room,
    fit: SavedFit,
    inputs: Sequence[_Input],
    figures: dict[str, Path],
    output: Path,
    written: list[Path],
    contexts: InContexts | None,
) -> list[tuple[str, ...]]:
    """Writes the predictions, and adds the figures to `written`; returns the rows of the table."""
    lengths = [len(record.sequence) for one in inputs for record in one.records]
    pairs = sum(length**2 for length in lengths)
    size = entry_bytes(2 * len(lengths), 2 * pairs, "float32")
    proteins = [one.records for one in inputs if isinstance(one.records, Proteins)]
    skipped = [
        *(row for one in proteins for row in one.without_entry()),
        *(row for one in inputs for row in one.too_large),
    ]
    renamed = {new: old for one in proteins for new, old in one.renamed.items()}
    rows, regression, model = [], fit.regression, room.model
    with (
        protein_file(output, model, num_bytes=size, skipped=skipped, renamed=renamed) as file,
        JobProgress("residue pairs predicted", pairs) as progress,
    ):
        for one in inputs:
            for record in one.records:
                models = models_of(model, contexts, (record.identifier, record.sequence))
                predicted_LL = unless_full(
                    partial(regression.predict_averaged, models, record.sequence)
                )
                progress.advance(len(record.sequence) ** 2)
                if predicted_LL is None:
                    reason = room.reason(len(record.sequence))
                    skipped.append((record.identifier, reason))
                    one.too_large.append((record.identifier, reason))
                    continue
                file.add(
                    record,
                    "probabilities",
                    {"heads_used": regression.num_heads_used},
                    data=predicted_LL.astype(np.float32),
                )
                if one.contacts_LL is not None:
                    file.add(record, "contacts", {}, data=one.contacts_LL)
                name = printable(record.identifier)
                if record.identifier in figures:
                    figure = contact_figure(predicted_LL, one.contacts_LL, title=name)
                    save_figure(figure, figures[record.identifier])
                    written.append(figures[record.identifier])
                shown = _precision(predicted_LL, one.contacts_LL)
                fitted_to = fit.fitted_to or ()
                if one.contacts_LL is not None and digest(record.sequence) in fitted_to:
                    # Its contacts were seen, so that a precision would flatter.
                    shown = ("in the fit", shown[1])
                rows.append((name, f"{len(record.sequence):,}", *shown))
        if not rows:
            raise InputDataError(f"no protein can be used: {': '.join(skipped[-1])}")
    return rows


def _precision(predicted_LL: np.ndarray, contacts_LL: np.ndarray | None) -> tuple[str, str]:
    """Returns the long-range P@L, and that of a random order."""
    if contacts_LL is None:
        return "", ""
    found = precision_at(predicted_LL, contacts_LL, SEPARATIONS["long"])
    pairs = contacts_LL[np.triu_indices_from(contacts_LL, SEPARATIONS["long"][0])]
    pairs = pairs[pairs >= 0]
    return (
        "no pair" if np.isnan(found) else f"{found:.1%}",
        f"{pairs.mean():.1%}" if pairs.size else "",
    )


def _read(
    path: Path, options: ContactOptions, room: Room, seen: dict[str, tuple[Path, Structure]]
) -> _Input | None:
    """Returns the proteins of a file, None for a structure that was seen in another file."""
    longest, structure = room.model.max_residues, read_chain(path, options.chain)
    if structure is None:
        return _Input(path, Proteins(path, longest, options.duplicates, refuse=room.refusal))
    if is_repeat(path, structure, seen):
        return None
    if longest is not None and len(structure) > longest:
        raise UserError(
            f"{path} has {len(structure):,} residues, more than the {longest:,} that this model "
            "accepts; leave it out"
        )
    if reason := room.refusal(len(structure)):
        return _Input(path, [], too_large=[(structure.identifier, reason)])
    record = Record(structure.identifier, path.name, structure.sequence, 1)
    return _Input(path, [record], contact_map(structure))


def _figures(inputs: Sequence[_Input], figure: Path | None) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for one in inputs:
        for record in one.records:
            if record.identifier in files:
                raise InputDataError(
                    f"{one.path}: the identifier {record.identifier} is also in "
                    f"{files[record.identifier]}; rename one of them"
                )
            files[record.identifier] = one.path
    if figure is None:
        return {}
    if len(files) > _MOST_FIGURES:
        raise UserError(
            f"--figure draws at most {_MOST_FIGURES} proteins, and there are {len(files):,}; "
            "omit --figure, or give fewer proteins"
        )
    several = len(files) > 1
    figures = {
        name: figure.with_stem(f"{figure.stem}.{entry_name(name)}") if several else figure
        for name in files
    }
    for path in figures.values():
        new_figure(path)
    return figures
