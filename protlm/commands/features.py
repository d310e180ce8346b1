"""Sparse features of a layer: `protlm features train`, and `describe`, which names them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse

from protlm.analysis.features.autoencoder import (
    FEATURES,
    SparseAutoencoder,
    SparseSettings,
    read_features,
)
from protlm.analysis.features.naming import Activities, Concepts, column, compare
from protlm.analysis.features.splice import splice_losses
from protlm.analysis.features.training import BLOCK, StateStream, figures_of, train
from protlm.analysis.intervals import in_words
from protlm.analysis.structures import longest_read
from protlm.data.shards.data_set import open_split
from protlm.data.shards.manifest import read_manifest
from protlm.data.tables import write_table
from protlm.downstream.concepts import (
    RESIDUE,
    ConceptProtein,
    concepts_of,
    positions,
    read_concepts,
    three_residues,
)
from protlm.loading import load_model
from protlm.model.embedding import embeddings
from protlm.model.pretrained import PretrainedModel
from protlm.options.features import DescribeOptions, FeatureOptions
from protlm.plots import reconstruction, save_figure
from protlm.system.errors import UserError
from protlm.system.json_file import write_json
from protlm.system.paths import complete_folder, sha256_of
from protlm.system.terminal import JobProgress, print_table, watched
from protlm.system.work_folder import Kind, begun_with, refuse_finished, unfinished, work_folder

SPARSE, RANDOM = "features", "features of random weights"
# Proteins whose masked residues are predicted, and those that are listed for each feature.
_SPLICED, _EXAMPLES = 200, 5
_TRAINING = Kind("training of features", "being trained", "--output")


def train_features(
    model_path: Path,
    data: Path,
    output: Path,
    options: FeatureOptions,
    *,
    layer: int,
    device: str,
    break_lock: bool = False,
) -> None:
    """Trains an autoencoder, measures it on held-out proteins, and writes a new folder."""
    refuse_finished(output, _TRAINING)
    model = load_model(model_path, device=device)
    if options.random_weights is not None:
        model = model.with_random_weights(options.random_weights)
    number = model.layer_number(layer, first=0)
    settings = SparseSettings(
        model=model.identity, vocabulary=model.vocabulary.hash, layer=number, **vars(options)
    )
    stream = StateStream(
        model, number, open_split(data, "train", shuffled=True), settings.seed, f"{model_path}"
    )
    shards = read_manifest(data).splits
    held_out = [x for x in ("valid", "test") if any(one.sequences for one in shards.get(x, ()))]
    measured = stream._replace(split=open_split(data, [*held_out, "train"][0]))
    begun = begun_with(
        {**asdict(settings), "the data": stream.split.fingerprint},
        models={"model": settings.model},
    )
    autoencoder = SparseAutoencoder(model.description.model.model_dim, settings).to(model.device)
    with work_folder(unfinished(output), begun, _TRAINING, break_lock=break_lock) as work:
        with JobProgress("residues", settings.residues) as progress:
            state = work.path / "state.ckpt"
            train(autoencoder, stream, state, progress.update, check=work.lock.check)
        lengths = measured.split.length_counts()
        number = min(BLOCK // 2, int(lengths @ np.arange(len(lengths))))
        figures = figures_of(autoencoder, measured.block(0, number)[0]) | {
            "measured_on": [*held_out, "train"][0],
            "epochs": float(autoencoder.progress[1]) / len(stream.split),
        }
        with complete_folder(output, check=work.check) as made:
            write_json(made / "figures.json", figures)
            save_figure(
                reconstruction(figures["unexplained_by_k"], settings.k), made / "reconstruction.png"
            )
            autoencoder.write(made)
        work.is_published = True
    figures |= {f"unexplained, k {k}": x for k, x in figures.pop("unexplained_by_k").items()}
    print_table(["figure", "value"], [[name, f"{x}"[:8]] for name, x in figures.items()])
    print(output)


def describe_features(
    folder: Path, model_path: Path, annotations: Path, output: Path, options: DescribeOptions
) -> None:
    """Compares features and controls with concepts, and writes the pairs into a new folder.

    Losses with features in the place of states are of the half of the proteins that is reported.
    """
    trained = load_model(model_path, device=options.device)
    random, repeats, seed = options.random, options.permutations, options.seed
    known = {RANDOM: _known(random, trained)} if random else {}
    if RANDOM in known and known[RANDOM][1] is trained:
        raise UserError(f"{random} was not trained with --random-weights; give one that was")
    autoencoder, model = known[SPARSE] = _known(folder, trained)
    proteins, left_out = read_concepts(
        annotations,
        options.proteins,
        max_proteins=options.max_proteins,
        max_residues=longest_read(trained, options.max_residues),
        seed=seed,
    )
    concepts, rows, summary = concepts_of(proteins), list[dict[str, Any]](), {}
    begun = time.monotonic()
    # Features are the last, after the controls that they have to exceed.
    for name, values in watched("predictors", _predictors(known, proteins, concepts)):
        rows_of_name = [
            {"predictor": name, **pair} for pair in compare(values, concepts, repeats, seed=seed)
        ]
        columns = values.tocsc() if issparse(values) else values
        for row in rows_of_name:
            controls = [x["F1 of draws"] for x in rows if x["concept"] == row["concept"]]
            exceeds = (row["F1 of draws"].less(x, "F1")["low"] > 0 for x in controls)
            row["beyond controls"] = name == SPARSE and row["named"] and all(exceeds)
            row["examples"] = _examples(column(columns, row["feature"]), proteins, concepts)
        rows += rows_of_name
        summary[name] = _counted(rows_of_name)
    seconds = time.monotonic() - begun
    texts = [protein.sequence for protein in proteins[1::2]][:_SPLICED]
    losses = splice_losses(model, autoencoder, texts, seed=seed) if model.predicts else {}
    results = {
        "features": sha256_of(folder / FEATURES.weights),
        "left_out": left_out,
        "proteins": len(proteins),
        "residues": len(concepts.protein),
        "predictors": summary,
        "splice": losses,
    }
    with complete_folder(output) as made:
        for row in rows:
            del row["F1 of draws"]
        cells = ([f"{x:.4f}" if isinstance(x, float) else f"{x}" for x in r.values()] for r in rows)
        write_table(made / "names.tsv", rows[0], cells)
        write_json(made / "results.json", results)
    lost = ", ".join(f"{number:,} {why}" for why, number in left_out.items()) or "nothing"
    notes = [
        f"{len(proteins):,} proteins, {len(concepts.protein):,} residues; left out: {lost}",
        f"chance: {repeats:,} permutations; all predictors took {seconds:,.0f} s",
        *(
            f"masked residues, {what}: {f'{in_words(x)} nats' if isinstance(x, dict) else x}"
            for what, x in losses.items()
        ),
    ]
    table = [[name, *map(str, counts.values())] for name, counts in summary.items()]
    print_table(["predictor", *summary[SPARSE]], table, notes)
    print(output)


def _known(folder: Path, model: PretrainedModel) -> tuple[SparseAutoencoder, PretrainedModel]:
    """Returns features with the model that they are of, perhaps with random weights."""
    features = read_features(folder)
    seed = features.settings.random_weights
    model = model if seed is None else model.with_random_weights(seed)
    features.settings.check(model)
    return features, model


def _predictors(
    known: Mapping[str, tuple[SparseAutoencoder, PretrainedModel]],
    proteins: Sequence[ConceptProtein],
    concepts: Concepts,
) -> Iterator[tuple[str, Activities]]:
    texts, places = [one.sequence for one in proteins], [one.places for one in proteins]
    yield "position", positions(proteins)
    yield "three residues", three_residues(proteins, concepts)
    for name, (features, model) in known.items():
        (states,) = embeddings(model, texts, layers=[features.settings.layer], places=places)
        if name == SPARSE:
            yield "neurons", _both_signs(states)
            axes = np.linalg.eigh(np.cov(states, rowvar=False, dtype=np.float32))[1]
            yield "principal components", _both_signs(states @ axes)
        yield name, features.features_of(torch.from_numpy(states))


def _both_signs(states_LD: np.ndarray) -> np.ndarray:
    """Returns each component above its mean, and below it, [residues, 2 D]."""
    centered = states_LD - states_LD.mean(axis=0)
    return np.concatenate([centered, -centered], axis=1)


def _counted(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Counts names; single amino acids, which features of any model have, are left out."""
    counted = [row for row in rows if not row["concept"].startswith(RESIDUE)]
    best = [row for row in counted if row["chosen"]]
    return {
        "concepts": len(best),
        "concepts named": sum(row["named"] for row in best),
        "with F1 over 0.5": sum(row["named"] and row["F1"] > 0.5 for row in best),
        "concepts beyond controls": sum(row["beyond controls"] for row in best),
        "features named": len({row["feature"] for row in counted if row["named"]}),
    }


def _examples(activity: np.ndarray, proteins: Sequence[ConceptProtein], concepts: Concepts) -> str:
    """Returns the proteins of highest activity, and the residue of each, from 1."""
    examples = []
    starts = np.searchsorted(concepts.protein, np.arange(len(proteins)))
    highest = np.maximum.reduceat(activity, starts)
    for number in np.argsort(-highest, kind="stable")[:_EXAMPLES]:
        protein, most = proteins[number], highest[number]
        of_protein = activity[starts[number] :][: len(protein.places)]
        place = protein.places[of_protein.argmax()]
        if most > 0:
            examples.append(f"{protein.identifier} {protein.sequence[place]}{place + 1} {most:.3g}")
    return "; ".join(examples)
