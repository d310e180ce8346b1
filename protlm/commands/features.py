"""Sparse features of a layer: `protlm features train`, and `describe`, which names them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse

from protlm.analysis.features.autoencoder import SparseAutoencoder, SparseSettings, read_features
from protlm.analysis.features.controls import components, neurons, positions
from protlm.analysis.features.naming import Activities, Concepts, compare
from protlm.analysis.features.splice import splice_losses
from protlm.analysis.features.training import BLOCK, StateStream, figures_of, train
from protlm.analysis.structures import longest_read
from protlm.data.shards.data_set import open_split
from protlm.data.shards.manifest import read_manifest
from protlm.data.tables import write_table
from protlm.downstream.concepts import (
    RESIDUE,
    ConceptProtein,
    concepts_of,
    read_concepts,
    three_residues,
)
from protlm.loading import load_model
from protlm.model.embedding import embeddings
from protlm.model.pretrained import PretrainedModel
from protlm.plots import reconstruction, save_figure
from protlm.system.errors import UserError, interrupt_explained
from protlm.system.json_file import to_json, write_json
from protlm.system.paths import check_output, complete_folder
from protlm.system.terminal import JobProgress, print_table, watched
from protlm.system.work_folder import Kind, refuse_finished, unfinished, work_folder

FEATURES, RANDOM = "features", "features of random weights"
# Proteins whose masked residues are predicted, and those that are listed for each feature.
_SPLICED, _EXAMPLES = 200, 5
_TRAINING = Kind("training of features", "being trained", "--output")


def train_features(
    model_path: Path, data: Path, output: Path, typed: dict[str, Any], *, layer: int, device: str
) -> None:
    """Trains an autoencoder, measures it on held-out proteins, and writes a new folder."""
    refuse_finished(output, _TRAINING)
    model = load_model(model_path, device=device)
    if typed["random_weights"] is not None:
        model = model.with_random_weights(typed["random_weights"])
    number = model.layer_number(layer, first=0)
    settings = SparseSettings(model.identity, model.vocabulary.hash, number, **typed)
    if settings.k > settings.latents:
        raise UserError(f"--k {settings.k} must be at most --latents {settings.latents}")
    stream = StateStream(model, number, open_split(data, "train", shuffled=True), settings.seed)
    shards = read_manifest(data).splits
    held_out = [x for x in ("valid", "test") if any(one.sequences for one in shards.get(x, ()))]
    measured = stream._replace(split=open_split(data, [*held_out, "train"][0]))
    begun_with = {**asdict(settings), "the data": stream.split.fingerprint}
    autoencoder = SparseAutoencoder(model.description.model.model_dim, settings).to(model.device)
    folder = unfinished(output)
    advice = f"the same command continues after the last block of residues, from {folder}"
    with interrupt_explained(advice), work_folder(folder, begun_with, _TRAINING) as work:
        with JobProgress("residues", settings.residues) as progress:
            train(autoencoder, stream, folder / "state.ckpt", progress.update)
        lengths = measured.split.length_counts()
        number = min(BLOCK // 2, int(lengths @ np.arange(len(lengths))))
        figures = figures_of(autoencoder, measured.block(0, number)[0])
        seen = float(autoencoder.progress[1]) / len(stream.split)
        figures |= {"measured_on": [*held_out, "train"][0], "epochs": seen}
        with complete_folder(output, check=work.check) as made:
            write_json(made / "figures.json", figures)
            figure = reconstruction(figures["unexplained_by_k"], settings.k)
            save_figure(figure, made / "reconstruction.png")
            autoencoder.write(made)
        work.is_published = True
    by_k = figures.pop("unexplained_by_k")
    figures |= {f"unexplained, k {k}": x for k, x in by_k.items()}
    print_table(["figure", "value"], [[name, f"{x}"[:8]] for name, x in figures.items()])
    print(output)


@dataclass(frozen=True)
class DescribeOptions:
    """The settings of `protlm features describe`; `random` has features of random weights."""

    random: Path | None = None
    max_proteins: int = 1000
    max_residues: int = 1024
    permutations: int = 20
    seed: int = 0
    device: str = "auto"


def describe_features(
    folder: Path,
    model_path: Path,
    annotations: tuple[Path, Path | None],
    output: Path,
    options: DescribeOptions,
) -> None:
    """Compares features and controls with concepts, and writes the pairs into a new folder.

    The annotations are a file of them, and one of the sequences that it lacks.
    """
    check_output(output)
    trained = load_model(model_path, device=options.device)
    folders = {FEATURES: folder, **({RANDOM: options.random} if options.random else {})}
    known = {name: _known(read_features(one), trained) for name, one in folders.items()}
    if RANDOM in known and known[RANDOM][1] is trained:
        raise UserError(
            f"{options.random} was not trained with --random-weights; give one that was"
        )
    proteins, left_out = read_concepts(
        *annotations,
        max_proteins=options.max_proteins,
        max_residues=longest_read(trained, options.max_residues),
        seed=options.seed,
    )
    concepts, rows, summary = concepts_of(proteins), list[dict[str, Any]](), {}
    best = dict.fromkeys(concepts.names, 0.0)
    # Features are the last, after the controls that they have to exceed.
    for name, values in watched("predictors", _predictors(known, proteins, concepts)):
        found = compare(values, concepts, options.permutations, seed=options.seed)
        own = [{"predictor": name, **found.figures(*one, concepts)} for one in found.pairs()]
        columns = values.tocsc() if issparse(values) else values
        for row in own:
            concept = row["concept"]
            is_beyond = name == FEATURES and row["named"] and row["low"] > best[concept]
            row["beyond controls"] = is_beyond
            row["examples"] = _examples(columns, row["feature"], proteins, concepts)
            best[concept] = max(best[concept], row["F1"] if name != FEATURES else 0.0)
        rows, summary[name] = rows + own, _counted(own, found.scores.f1.size)
    autoencoder, model = known[FEATURES]
    losses = None
    if model.predicts:
        texts = [one.sequence for one in proteins[1::2]][:_SPLICED]
        losses = splice_losses(model, autoencoder, texts, seed=options.seed)
    results = {"settings": to_json(autoencoder.settings), "proteins": len(proteins)}
    results |= {"residues": len(concepts.protein), "left_out": left_out}
    with complete_folder(output) as made:
        cells = [
            [str(x) if isinstance(x, str | int) else f"{x:.4f}" for x in row.values()]
            for row in rows
        ]
        write_table(made / "names.tsv", rows[0], cells)
        write_json(made / "results.json", {**results, "predictors": summary, "splice": losses})
    lost = ", ".join(f"{number:,} {why}" for why, number in left_out.items()) or "nothing"
    notes = [f"{len(proteins):,} proteins, {len(concepts.protein):,} residues; left out: {lost}"]
    for what, one in (losses or {}).items():
        is_mean = isinstance(one, dict)
        shown = "{mean:.3f} ({low:.3f} to {high:.3f})".format(**one) if is_mean else str(one)
        notes.append(f"nats a masked residue, {what}: {shown}")
    table = [[name, *map(str, one.values())] for name, one in summary.items()]
    print_table(["predictor", *summary[FEATURES]], table, notes)
    print(output)


def _known(
    features: SparseAutoencoder, model: PretrainedModel
) -> tuple[SparseAutoencoder, PretrainedModel]:
    """Returns features with the model that they are of, perhaps with random weights."""
    seed = features.settings.random_weights
    model = model if seed is None else model.with_random_weights(seed)
    features.settings.check(model)
    return features, model


def _predictors(
    known: Mapping[str, tuple[SparseAutoencoder, PretrainedModel]],
    proteins: Sequence[ConceptProtein],
    concepts: Concepts,
) -> Iterator[tuple[str, Activities]]:
    texts = [one.sequence for one in proteins]
    every = [np.arange(len(one)) for one in texts]
    yield "position", positions(every)
    yield "three residues", three_residues(texts, concepts)
    for name in sorted(known, key=[RANDOM, FEATURES].index):
        features, model = known[name]
        (states,) = embeddings(model, texts, layers=[features.settings.layer], places=every)
        if name == FEATURES:
            yield "neurons", neurons(states)
            yield "principal components", components(states)
        yield name, features.features_of(torch.from_numpy(states))


def _counted(rows: Sequence[Mapping[str, Any]], tests: int) -> dict[str, int]:
    """Counts names; single amino acids, which features of any model have, are left out."""
    found = {"features x concepts": tests}
    for what, flag in (("named", "named"), ("beyond controls", "beyond controls")):
        own = [row for row in rows if row[flag] and not row["concept"].startswith(RESIDUE)]
        for of in ("concept", "feature"):
            found[f"{of}s {what}"] = len({row[of] for row in own})
    return found


def _examples(
    values: Activities, number: int, proteins: Sequence[ConceptProtein], concepts: Concepts
) -> str:
    """Returns the proteins of highest activity, and the residue of each, from 1."""
    column = values[:, [number]]
    activity = (column.toarray() if issparse(column) else column)[:, 0]
    starts = np.searchsorted(concepts.protein, np.arange(len(proteins)))
    highest = np.maximum.reduceat(activity, starts)
    found = []
    for place in np.argsort(-highest, kind="stable")[:_EXAMPLES]:
        at = int(activity[starts[place] :][: len(proteins[place].sequence)].argmax())
        if highest[place] > 0:
            one = proteins[place]
            found.append(f"{one.identifier} {one.sequence[at]}{at + 1} {highest[place]:.3g}")
    return "; ".join(found)
