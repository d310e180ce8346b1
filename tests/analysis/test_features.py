"""Sparse features: a planted dictionary, exact resumption, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import protlm
from protlm.analysis.features import training
from protlm.analysis.features.autoencoder import SparseAutoencoder, SparseSettings, read_features
from protlm.analysis.features.training import StateStream, figures_of, is_dead, learn, train
from protlm.checkpoints.format import read_facts, save
from protlm.data.batching.order import EpochOrder
from protlm.data.shards.data_set import open_split
from protlm.data.vocabulary import VOCABULARY
from protlm.model.pretrained import PretrainedModel
from protlm.options.features import Sparsity
from protlm.system.errors import InputDataError, TrainingDivergedError, UserError
from protlm.system.parts import new_part
from tests.fixtures.commands import Command

HASH = "0" * 64
ATOMS, WIDTH = 24, 16


def settings_of(model: PretrainedModel | None = None, layer: int = 1, **changed) -> SparseSettings:
    """Settings of features of a layer, few and trained on few residues."""
    hashes = (HASH, HASH) if model is None else (model.identity, model.vocabulary.hash)
    of = {"model": hashes[0], "vocabulary": hashes[1], "layer": layer}
    return SparseSettings(**of, **{"latents": 32, "k": 4, "residues": 3000, **changed})


def planted(residues: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Atoms of norm 1, and states: two of them, of size 0.5 to 1.5, and an offset."""
    atoms = torch.nn.functional.normalize(
        torch.randn(ATOMS, WIDTH, generator=torch.Generator().manual_seed(7)), dim=1
    )
    generator = torch.Generator().manual_seed(seed)
    active = torch.rand(residues, ATOMS, generator=generator).topk(2, dim=1).indices
    sizes = 0.5 + torch.rand(residues, 2, generator=generator)
    return atoms, torch.zeros(residues, ATOMS).scatter(1, active, sizes) @ atoms + 2


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", Sparsity)
def test_a_planted_dictionary_is_recovered(sparsity: Sparsity) -> None:
    settings = settings_of(latents=48, k=3, residues=200_000, sparsity=sparsity)
    model = SparseAutoencoder(WIDTH, settings)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for block in range(2):
        learn(model, optimizer, planted(100_000, block)[1], 256)
    atoms, states = planted(10_000, 99)
    cosine = (atoms @ model.decoder.T).amax(1)
    assert (cosine >= 0.95).float().mean() >= 0.95
    assert figures_of(model, states)["unexplained"] < 0.1
    torch.testing.assert_close(model.decoder.norm(dim=1), torch.ones(48), atol=1e-6, rtol=0)


def test_a_dead_feature_returns() -> None:
    """It is active nowhere at first, and the auxiliary loss alone can change its weights."""
    model = SparseAutoencoder(WIDTH, settings_of(residues=60_000))
    with torch.no_grad():
        model.encoder[0] *= 0.01
        model.idle[0] = 1e6
    learn(model, torch.optim.Adam(model.parameters(), fused=True), planted(40_000, 0)[1], 256)
    assert not is_dead(model)[0]


@pytest.fixture(scope="module")
def stream(tiny_run: Path, tiny_data: Path) -> StateStream:
    """The states after the first block of the tiny model."""
    return StateStream(protlm.load(tiny_run), 1, open_split(tiny_data, "train"), seed=0)


def test_states_are_those_of_residues_alone(stream: StateStream) -> None:
    """Those of the first proteins in the order, each once, of which the long ones are cropped."""
    _, place = stream.block(0, 1000)
    order = EpochOrder(len(stream.split), seed=0, epoch=0)[np.arange(place)]
    texts = [VOCABULARY.decode(stream.split[int(sample)]) for sample in order]
    total = sum(min(len(text), 126) for text in texts)
    states, same = stream.block(0, total)
    assert (len(states), same) == (total, place)
    model, short = stream.model, [text for text in texts if len(text) <= 126]
    rows = torch.cat([model(model.tokenize([one]), [1]).hidden[1][0, 1:-1] for one in short])
    exact = "donot_use_mm_for_euclid_dist"
    assert len(rows) and torch.cdist(rows, states, compute_mode=exact).amin(1).max() < 1e-3
    assert (torch.cdist(states, states, compute_mode=exact) < 1e-3).sum() == total


def test_a_resumed_training_is_the_same(
    stream: StateStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "BLOCK", 1000)

    def run(name: str, stop_at: int = -1) -> dict[str, torch.Tensor]:
        model = SparseAutoencoder(64, settings_of(stream.model, sparsity=Sparsity.batch_topk))

        def stop(seen: int) -> None:
            if seen == stop_at:
                raise KeyboardInterrupt

        train(model, stream, tmp_path / name, stop)
        return model.state_dict()

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("other", 2000)
    again = run("other")
    assert whole["progress"][0] == 3000 and whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def trained(stream: StateStream, folder: Path, **changed) -> dict[str, torch.Tensor]:
    """The weights of a training whose state is in a folder."""
    model = SparseAutoencoder(64, settings_of(stream.model, **changed))
    train(model, stream, folder / "state.ckpt", lambda seen: None)
    return model.state_dict()


@pytest.mark.parametrize("change", ["flip", "nan", "moment", "beyond"])
def test_a_state_that_no_training_has_is_not_continued(
    change: str, stream: StateStream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged one is replaced; another one would be the result, or never end."""
    state, whole = tmp_path / "state.ckpt", trained(stream, tmp_path, residues=2_048)
    if change == "flip":
        content = bytearray(state.read_bytes())
        content[999] ^= 1
        state.write_bytes(content)
        again = trained(stream, tmp_path, residues=2_048)
        assert f"{state} is damaged" in capsys.readouterr().err
        assert all(torch.equal(whole[name], again[name]) for name in whole)
        return
    found = read_facts(state, mmap=False)
    moment = found["optimizer"]["state"][0]["exp_avg"]
    changed = {"nan": found["autoencoder"]["bias"], "moment": moment[0]}
    changed.get(change, found["autoencoder"]["progress"])[0] = (
        9_999 if change == "beyond" else np.nan
    )
    with new_part(state) as temporary:
        save(found, temporary)
    words = rf"{state} has numbers that are not finite, or more residues .*: remove {tmp_path} to"
    with pytest.raises(InputDataError, match=words):
        trained(stream, tmp_path, residues=2_048)


@pytest.mark.parametrize(("size", "words"), [(np.nan, "are not finite"), (1e30, "too large for")])
def test_states_that_are_not_finite_are_of_the_model(
    size: float, words: str, stream: StateStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = PretrainedModel.hidden_states

    def changed(self: PretrainedModel, *given) -> dict[int, torch.Tensor]:
        return {layer: states * size for layer, states in hidden(self, *given).items()}

    monkeypatch.setattr(PretrainedModel, "hidden_states", changed)
    with pytest.raises(InputDataError, match=f"^models/mine: .*{words}"):
        trained(stream._replace(name="models/mine"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_training_that_diverges_names_seed_and_step(
    stream: StateStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of the rest of a sum that is 0; or by a weight that overflows."""
    states = torch.ones(5000, WIDTH)
    settings = settings_of(residues=5000, seed=7)
    model = SparseAutoencoder(WIDTH, settings)
    model.idle.fill_(1e6)
    with pytest.raises(TrainingDivergedError, match=r"^seed 7, step 1: the loss or a weight"):
        learn(model, torch.optim.Adam(model.parameters()), states)
    monkeypatch.setattr(training, "_RATE", 1e38)
    with pytest.raises(TrainingDivergedError, match=r"^seed 0, step [12]: .* no features are writ"):
        trained(stream, tmp_path)
    assert not list(tmp_path.iterdir())


def perfect(width: int, settings: SparseSettings) -> SparseAutoencoder:
    """Features that are each component, and its negative."""
    model, sides = SparseAutoencoder(width, settings), torch.eye(width)
    for weights in (model.encoder, model.decoder):
        weights.data.copy_(torch.cat([sides, -sides]))
    return model


def test_figures_of_the_mean_and_of_everything() -> None:
    states, model = planted(500, 0)[1], perfect(WIDTH, settings_of())
    model.mean.copy_(states.mean(0))
    figures = figures_of(model, states)
    assert figures["unexplained_by_k"][16] < 1e-9 < figures["unexplained_by_k"][8]
    assert figures["active"] == pytest.approx(4)
    model.decoder.data.zero_()
    assert figures_of(model, states)["unexplained"] == 1


def test_features_are_those_of_each_residue(tiny_run: Path, tmp_path: Path) -> None:
    model = protlm.load(tiny_run)
    SparseAutoencoder(64, settings_of(model)).write(tmp_path)
    sequences = ["MKTAYIAKQRQISFVKSHFSRQ", "MKV"]
    for one, sequence in zip(model.features(sequences, tmp_path), sequences, strict=True):
        states = model(model.tokenize([sequence]), [1]).hidden[1][0, 1:-1]
        expected = read_features(tmp_path).encode(states).detach().numpy()
        assert one.shape == (len(sequence), 32) and one.format == "csr"
        assert (np.diff(one.indptr) <= 4).all()
        np.testing.assert_allclose(one.toarray(), expected, atol=1e-5)


def test_other_models_layers_and_damaged_folders_are_refused(
    tiny_run: Path, tmp_path: Path
) -> None:
    model = protlm.load(tiny_run)
    settings = settings_of(model)
    foreign = SparseSettings(model=model.identity, vocabulary=HASH, layer=1)
    for of, given, told in (
        (settings, [model.with_random_weights(3)], "trained on the model"),
        (settings, [model, 2], "trained on the layer 1, and this is 2"),
        (foreign, [model], "trained on the vocabulary"),
    ):
        with pytest.raises(UserError, match=told):
            of.check(*given)
    with pytest.raises(InputDataError, match="protlm features train has written"):
        model.features(["MKV"], tmp_path)
    SparseAutoencoder(64, settings).write(tmp_path)
    (tmp_path / "features.json").write_text("{}")
    with pytest.raises(InputDataError, match=r"features\.json is damaged"):
        model.features(["MKV"], tmp_path)


def test_the_command_trains_and_measures(workplace: Path, protlm_in_process: Command) -> None:
    words = ["features", "train", "-m", "run", "--layer", "-1", "--data", "data", "-o", "sae"]
    words += ["--latents", "32", "--k", "4", "--residues", "3000"]
    done = protlm_in_process(*words, cwd=workplace)
    assert "unexplained" in done.stdout, done.stderr
    found = read_features(workplace / "sae")
    assert (found.settings.layer, found.settings.k, found.progress[0]) == (2, 4, 3000)
    figures = json.loads((workplace / "sae" / "figures.json").read_text())
    assert figures["measured_on"] == "valid" and 0 < figures["unexplained"] < 2
    assert (workplace / "sae" / "reconstruction.png").stat().st_size > 1000
    assert not (workplace / "sae.partial").exists()
    protlm_in_process(*words, cwd=workplace, code=4)
    done = protlm_in_process(*words[:-1], "2047", cwd=workplace, code=2)
    assert "--residues" in done.stderr and "2048" in done.stderr
