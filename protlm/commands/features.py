"""Sparse features of a layer: `protlm features train -m MODEL --layer N --data DIR -o SAE`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from protlm.analysis.features.autoencoder import SparseAutoencoder, SparseSettings
from protlm.analysis.features.training import BLOCK, StateStream, figures_of, train
from protlm.data.shards.data_set import open_split
from protlm.data.shards.manifest import read_manifest
from protlm.loading import load_model
from protlm.plots import reconstruction, save_figure
from protlm.system.errors import UserError
from protlm.system.json_file import write_json
from protlm.system.paths import complete_folder
from protlm.system.terminal import JobProgress, print_table
from protlm.system.work_folder import Kind, refuse_finished, unfinished, work_folder

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
    with work_folder(folder, begun_with, _TRAINING) as work:
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
