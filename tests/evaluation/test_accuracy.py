"""Accuracy and perplexity: sums over residues, the same for any batch size."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import protlm
from protlm.data.shards import open_split
from protlm.errors import UserError
from protlm.evaluation import accuracy
from protlm.evaluation.accuracy import Accuracy
from protlm.evaluation.base import EvaluationData
from protlm.model.pretrained import PretrainedModel


@pytest.fixture(scope="module")
def model(tiny_run: Path) -> PretrainedModel:
    return protlm.load(tiny_run)


def num_kept(directory: Path) -> int:
    """Residues of the test split that rows of 128 tokens hold."""
    split = open_split(directory, "test")
    return int(np.minimum(split.lengths_of(np.arange(len(split))), 126).sum())


def data(directory: Path, tokens_per_batch: int = 2048) -> EvaluationData:
    return EvaluationData(
        open_split(directory, "test"), open_split(directory, "train"), tokens_per_batch
    )


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_figures_do_not_move_with_the_batch(
    objective: str, model: PretrainedModel, tiny_data: Path
) -> None:
    small, large = (
        Accuracy(objective=objective).run(model, data(tiny_data, size)) for size in (1, 20_000)
    )
    assert small["targets"] == large["targets"]
    assert small["empirical"] == pytest.approx(large["empirical"])
    assert small["model"]["perplexity"] == pytest.approx(large["model"]["perplexity"], rel=1e-5)


def test_causal_counts_every_residue_once(model: PretrainedModel, tiny_data: Path) -> None:
    found = Accuracy(objective="causal").run(model, data(tiny_data))
    assert found["targets"] == num_kept(tiny_data)


def test_causal_perplexity_is_that_of_one_sequence_at_a_time(
    model: PretrainedModel, tiny_data: Path
) -> None:
    found = Accuracy(objective="causal").run(model, data(tiny_data))
    nats, correct, count = 0.0, 0, 0
    split = open_split(tiny_data, "test")
    for index in range(len(split)):
        residues = torch.from_numpy(split[index][:126].astype(np.int64))
        tokens_BL = torch.cat([torch.tensor([0]), residues])[None]
        with torch.inference_mode():
            logits = model.network(tokens_BL, tokens_BL >= 0, causal=True).logits_BLV[0, :-1]
        log_p = logits.double().log_softmax(-1)
        nats -= log_p.gather(1, residues[:, None]).sum().item()
        correct += int((logits.argmax(-1) == residues).sum())
        count += len(residues)
    assert found["model"]["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-4)
    assert found["model"]["accuracy"] == pytest.approx(correct / count, abs=2 / count)


def test_about_the_fraction_is_masked(model: PretrainedModel, tiny_data: Path) -> None:
    total = num_kept(tiny_data)
    for fraction in (0.15, 0.5):
        found = Accuracy(objective="masked", fraction=fraction).run(model, data(tiny_data))
        sigma = math.sqrt(total * fraction * (1 - fraction))
        assert abs(found["targets"] - fraction * total) < 4 * sigma


def test_another_seed_masks_other_residues(model: PretrainedModel, tiny_data: Path) -> None:
    first, second = (
        Accuracy(objective="masked", seed=seed).run(model, data(tiny_data)) for seed in (0, 1)
    )
    assert first["model"] != second["model"]


def test_the_uniform_baseline_is_twenty(model: PretrainedModel, tiny_data: Path) -> None:
    found = Accuracy(objective="masked").run(model, data(tiny_data))
    assert found["uniform"]["perplexity"] == pytest.approx(20)
    assert found["uniform"]["accuracy"] == pytest.approx(0.05)
    assert 16 < found["empirical"]["perplexity"] < 20


def test_the_baseline_of_a_large_split_is_that_of_a_sample(
    model: PretrainedModel, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = Accuracy(objective="masked")
    whole = evaluation.run(model, data(tiny_data))["empirical"]["perplexity"]
    monkeypatch.setattr(accuracy, "_MOST_COUNTED", 60)
    some = evaluation.run(model, data(tiny_data))["empirical"]["perplexity"]
    assert some != whole
    assert some == pytest.approx(whole, rel=0.01)


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(UserError, match="causal, masked"):
        Accuracy(objective="span")
