"""Checkpoints, runs and data sets that an earlier version has written."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import protlm
from protlm.checkpoints import format as checkpoints
from protlm.checkpoints.checksums import write_sum, write_sums
from protlm.data.records import Tally, read_records
from protlm.data.shards.data_set import open_split
from protlm.data.vocabulary import VOCABULARY
from protlm.model.pretrained import PretrainedModel
from protlm.model.selfattention import BoundedNorm
from protlm.system.errors import InputDataError

OLD = Path(__file__).resolve().parent / "old"
PROTEIN = "MALWMRLLPLLALLALWGPDPAAAFVNQHL"


def logits(model: PretrainedModel) -> torch.Tensor:
    return model(model.tokenize([PROTEIN])).logits_BLV[0]


@pytest.mark.parametrize("name", ["performer_relu", "softmax"])
def test_an_old_model_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    """From the run, and from what is exported of it."""
    checkpoints.export(checkpoints.read(OLD / name), tmp_path / "exported")
    expected = torch.from_numpy(np.load(OLD / name / "logits.npy"))
    for path in (OLD / name, tmp_path / "exported"):
        model = protlm.load(path)
        # Rounding errors scale with the unit roundoff, so those of float32 tell those of float64.
        error = (logits(model).double() - expected).abs().max()
        assert error < 1e-3 * expected.abs().max()
        bound = 10 * error * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        model.network.double()
        assert (logits(model) - expected).abs().max() <= bound


def test_old_norms_of_queries_and_keys_stay_bounded() -> None:
    model = protlm.load(OLD / "softmax")
    for network in (model.network, model.with_random_weights(1).network):
        norms = [module for module in network.modules() if isinstance(module, BoundedNorm)]
        assert len(norms) == 2


def test_old_norms_of_a_mechanism_that_has_none_now_are_rejected(tmp_path: Path) -> None:
    """Such a mechanism was computed in another way, and would give other results."""
    checkpoints.export(checkpoints.read(OLD / "softmax"), tmp_path / "old")
    config = tmp_path / "old" / "config.json"
    config.write_text(config.read_text().replace('"softmax"', '"aft_simple"'))
    write_sums(tmp_path / "old")
    with pytest.raises(InputDataError, match="trained by an earlier version"):
        protlm.load(tmp_path / "old")


def test_what_was_trained_with_reversible_residuals_is_refused_by_name(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """The old files above have the setting, too, but off."""
    run = Path(shutil.copytree(OLD / "softmax", tmp_path / "run"))
    checkpoints.export(checkpoints.read(run), tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    assert "reversible" not in config.read_text()
    config.write_text(
        config.read_text().replace('"num_layers"', '"reversible": true, "num_layers"')
    )
    write_sums(tmp_path / "model")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("reversible: false", "reversible: true"))
    message = "was trained with model.reversible=true, which protlm no longer has; use the version"
    with pytest.raises(InputDataError, match=rf"/model\S* {message} that wrote it$"):
        protlm.load(tmp_path / "model")
    with pytest.raises(InputDataError, match=rf"/config.yaml {message} that wrote it$"):
        train_tiny(run)


@pytest.mark.parametrize("linear", ["performer_relu", "rfa", "hedgehog"])
def test_a_hybrid_whose_exact_heads_had_other_norms_is_refused_by_name(
    linear: str, train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """Loaded, as first weights and continued; but not where all norms were free, as now."""
    settings = ("attention=hybrid", f"attention.mechanism={linear}", "model.qk_norm=true")
    run = train_tiny(tmp_path / "run", *settings, "trainer.max_steps=2")
    checkpoint = checkpoints.latest(run)
    assert checkpoint is not None
    contents = torch.load(checkpoint, weights_only=True)
    weights = contents["state_dict"]
    for exact in [name for name in weights if name.endswith("_norm.exact.gain")]:
        del weights[exact]
        if (scale_H := weights.pop(exact.replace("exact.gain", "linear.scale"), None)) is not None:
            weights[exact.replace("exact.gain", "scale")] = scale_H.repeat(2)
    torch.save(contents, checkpoint)
    write_sum(checkpoint, contents=checkpoint)
    uses: list[Callable[[], object]] = [
        lambda: protlm.load(run),
        lambda: train_tiny(tmp_path / "new", *settings, f"model.init_from={run}"),
        lambda: train_tiny(run, *settings, "trainer.max_steps=3"),
    ]
    for use in uses:
        if linear == "hedgehog":
            use()
            continue
        with pytest.raises(InputDataError, match=r"attention=hybrid with .* of an earlier version"):
            use()


def test_an_old_data_set_holds_its_sequences() -> None:
    records = list(read_records(OLD / "two.fasta", Tally()))
    for split, record in zip(("train", "valid"), records, strict=True):
        reader = open_split(OLD / "data", split, verify="full")
        assert [reader.identifier(0)] == [record.identifier]
        assert VOCABULARY.decode(reader[0]) == record.sequence


def test_an_old_run_is_continued(train_tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Its settings have old names, and one of the present defaults is another."""
    run = Path(shutil.copytree(OLD / "performer_relu", tmp_path / "run"))
    settings = [
        "model.model_dim=16",
        "model.num_layers=1",
        "model.feedforward_dim=8",
        "model.qk_norm=true",
        "data.tokens_per_batch=256",
        "optimizer.learning_rate=0.1",
        "trainer.precision=32-true",
        "trainer.max_steps=3",
    ]
    train_tiny(run, *settings, f"data.dir={OLD / 'data'}")
    assert checkpoints.latest(run) == run / "checkpoints" / checkpoints.checkpoint_name(3)
