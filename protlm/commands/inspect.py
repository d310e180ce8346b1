"""`protlm inspect PROTEIN -m MODEL -o PAGE.html`: one page that shows a model on a protein."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from protlm.analysis.contact_regression import SavedFit, read_fit
from protlm.analysis.structures import read_chain
from protlm.data.records.proteins import one_protein
from protlm.data.records.source import STANDARD_INPUT
from protlm.loading import load_model
from protlm.model.relatives import drawn_beside, in_contexts, models_of
from protlm.options.look import InspectOptions
from protlm.report.content import InspectedModel, page_content
from protlm.report.features import read_inspected
from protlm.report.page import assemble, check_size
from protlm.report.protein import InspectedProtein
from protlm.system.errors import UserError
from protlm.system.paths import complete_file


def inspect(
    source: Path, model_paths: Sequence[Path], output: Path, options: InspectOptions
) -> None:
    """Writes the page of one protein, by one model or two."""
    if output.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{output}: the output is an HTML page; type: -o {output.stem}.html")
    if len(model_paths) > 2:
        raise UserError(f"a page compares two models, and {len(model_paths)} are given with -m")
    protein = _read_protein(source, options.chain)
    fits = {path: read_fit(path) for path in options.fits}
    models = [_load(path, fits, options) for path in model_paths]
    hashes = {one.model.hash for one in models}
    for path, fit in fits.items():
        if fit.model_hash not in hashes:
            raise UserError(
                f"{path} was fitted to another model; fit this one: protlm contacts writes "
                "NAME.fit.json"
            )
    if options.features is not None:
        if options.relatives.relatives is not None:
            raise UserError("features are of proteins alone; leave out --features or --relatives")
        sparse = read_inspected(options.features, options.description, models[0].model)
        models[0] = replace(models[0], features=sparse)
    silent = [one.name for one in models if options.predictions and not one.model.predicts]
    for name in silent:
        print(f"{name} is an encoder: its page has no predictions", file=sys.stderr)
    query = protein.identifier, protein.sequence
    contexts = [
        in_contexts(one.model, options.relatives, query[:1], only_first=True) for one in models
    ]
    models = [
        replace(one, model=models_of(one.model, own, query)[0], draw=own and own.draws(*query)[0])
        for one, own in zip(models, contexts, strict=True)
    ]
    content = page_content(
        protein,
        models,
        is_selection=bool(options.layers or options.heads),
        with_predictions=options.predictions,
    )
    page = assemble(content).encode("utf-8")
    check_size(len(page))
    with drawn_beside(contexts[0], output, [query]), complete_file(output) as temporary:
        temporary.write_bytes(page)
    print(f"the page has {len(page) / 1e6:.1f} MB", file=sys.stderr)
    print(output)


def _read_protein(source: Path, chain: str | None) -> InspectedProtein:
    structure = read_chain(source, chain)
    if structure is not None:
        of = f"{source.name}, chain {structure.chain}" if structure.other_chains else source.name
        return InspectedProtein(structure.identifier, "", of, structure.sequence, structure)
    record = one_protein(source, ", and a page shows one; write one of them to a file")
    name = "standard input" if source == STANDARD_INPUT else source.name
    return InspectedProtein(record.identifier, record.header, name, record.sequence)


def _load(path: Path, fits: dict[Path, SavedFit], options: InspectOptions) -> InspectedModel:
    model = load_model(path, device=options.device)
    layers, heads = model.layers_and_heads(options.layers, options.heads)
    own = [fit.regression for fit in fits.values() if fit.model_hash == model.hash]
    name = path.absolute().name
    return InspectedModel(name, model, sorted(layers), sorted(heads), own[-1] if own else None)
