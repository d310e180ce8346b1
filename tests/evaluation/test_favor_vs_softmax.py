"""Estimates of softmax: measures by hand, bias and variance apart, and the evaluation."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from protlm.analysis.replacement import (
    FittedContacts,
    compare_estimates,
    favor,
    masked_scores,
    with_attention,
)
from protlm.analysis.structures import ProteinChoice
from protlm.attention.softmax import Softmax
from protlm.evaluation import create
from protlm.evaluation.base import NO_SPLIT
from protlm.evaluation.favor_vs_softmax import FavorVsSoftmax
from protlm.loading import load_model
from protlm.model.pretrained import PretrainedModel
from tests.fixtures.runs import Train
from tests.small_models import evaluated, structure_folder

SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQLEERLG", "GSHMLEDPVEAVLKKWDERRG"]


def random_map(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 12, 30, generator=generator, dtype=torch.float64).softmax(-1)


def test_measures_are_those_of_a_loop_over_rows() -> None:
    exact, draws = random_map(0), [random_map(1), random_map(2)]
    values = torch.randn(2, 30, 4, dtype=torch.float64)
    found = compare_estimates(exact, draws, values)
    for head in range(2):
        rows = [(a, b) for draw in draws for a, b in zip(exact[head], draw[head], strict=True)]
        kl = [(a * (a / b).log()).sum().item() for a, b in rows]
        variation = [0.5 * (a - b).abs().sum().item() for a, b in rows]
        tops = [
            (set(a.topk(10).indices.tolist()), set(b.topk(10).indices.tolist())) for a, b in rows
        ]
        assert found["kl"][head].item() == pytest.approx(np.median(kl))
        assert found["total_variation"][head].item() == pytest.approx(np.median(variation))
        quantile = np.quantile(variation, 0.95)
        assert found["total_variation_95"][head].item() == pytest.approx(quantile)
        overlap = np.mean([len(a & b) / 10 for a, b in tops])
        assert found["top_overlap"][head].item() == pytest.approx(overlap)
        out = exact[head] @ values[head]
        errors = [((d[head] @ values[head] - out).norm() / out.norm()).item() ** 2 for d in draws]
        assert found["output_error"][head].item() == pytest.approx(np.mean(errors) ** 0.5)


def test_bias_and_deviation_are_told_apart() -> None:
    """Draws around a shifted map: the shift is the bias, their spread the deviation."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.full((1, 20, 20), 1 / 20, dtype=torch.float64)
    values = torch.eye(20, dtype=torch.float64)[None]
    shift = 0.02 * torch.randn(1, 20, 20, generator=generator, dtype=torch.float64)
    draws = [
        exact + shift + 0.01 * torch.randn(1, 20, 20, generator=generator, dtype=torch.float64)
        for _ in range(50)
    ]
    found = compare_estimates(exact, draws, values)
    scale = exact.norm().item()
    assert found["bias"].item() == pytest.approx(shift.norm().item() / scale, rel=0.05)
    assert found["deviation"].item() == pytest.approx(0.01 * 20 / scale, rel=0.05)
    squares = found["bias"] ** 2 + found["deviation"] ** 2
    assert squares.item() == pytest.approx(found["output_error"].item() ** 2, rel=1e-9)


def test_unbiased_draws_have_no_bias() -> None:
    exact = random_map(0)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(6, *exact.shape, generator=generator, dtype=torch.float64) * 1e-3
    draws = [*(exact + noise), *(exact - noise)]
    found = compare_estimates(exact, draws, torch.randn(2, 30, 4, dtype=torch.float64))
    assert (found["bias"] == 0).all()
    torch.testing.assert_close(found["deviation"], found["output_error"] * (12 / 11) ** 0.5)


@pytest.fixture(scope="module")
def judged(train_tiny: Train, tmp_path_factory: pytest.TempPathFactory) -> PretrainedModel:
    folder = tmp_path_factory.mktemp("runs") / "softmax"
    return load_model(train_tiny(folder, "attention=softmax", "trainer.max_steps=2"))


@pytest.mark.slow
def test_the_evaluation_reports_errors_and_perplexities(
    judged: PretrainedModel, tmp_path: Path
) -> None:
    fasta = tmp_path / "x.fasta"
    fasta.write_text("".join(f">P{n}\n{s}\n" for n, s in enumerate(SEQUENCES)))
    settings = {"sequences": fasta, "features": [16, 4096], "draws": 2}
    values, table = evaluated("favor_vs_softmax", judged, **settings)
    estimates = values["errors"]["by_estimate"]
    assert list(estimates) == ["rounded", "R = 16", "R = 4096"]
    few, many = (np.array(estimates[f"R = {n}"]["output_error"]) for n in (16, 4096))
    assert few.shape == (judged.num_layers, judged.num_heads)
    assert (many < few).all()
    assert (np.array(estimates["rounded"]["output_error"]) < few).all()
    # Softmax in the place of softmax changes nothing but rounding.
    perplexity = values["perplexity"]
    assert perplexity["softmax"] == pytest.approx(perplexity["own"], rel=1e-5)
    replaced = with_attention(judged, favor(judged, 16, draw=0), [1, 2])
    scored = masked_scores(replaced, SEQUENCES)
    expected = np.exp(scored.nats.sum() / scored.targets.sum())
    assert perplexity["R = 16"]["all"] == pytest.approx(expected)
    assert values["replacement_draws"] == 1 and "contacts" not in values
    assert "of one draw" in table.caption
    assert len(table.rows) == 2 + 3 * (judged.num_layers + 1) + 3


def test_contacts_are_those_of_the_replaced_maps_by_the_own_regression(
    judged: PretrainedModel, tmp_path: Path
) -> None:
    folders = {part: structure_folder(tmp_path, part, 2) for part in ("fit", "test")}
    settings = {"structures": folders["test"], "features": [16], "draws": 2}
    made = create("x", {"name": "favor_vs_softmax", **settings})
    assert isinstance(made, FavorVsSoftmax)
    made.fit = ProteinChoice(folders["fit"], 10, 400)
    values = json.loads(json.dumps(made.run(judged, None), allow_nan=False))
    fit, test = (ProteinChoice(one, 10, 400).read(judged) for one in folders.values())
    fitted = FittedContacts(judged, fit, test, seed=0)
    for layers, place in (([1], "1"), ([1, 2], "all")):
        replaced = with_attention(judged, favor(judged, 16, draw=0), layers)
        kept = [isinstance(b.attention.mechanism, Softmax) for b in replaced.network.blocks]
        assert kept == [number not in layers for number in (1, 2)]
        assert values["contacts"]["R = 16"][place] == pytest.approx(fitted.of(replaced).mean())
    # Softmax in the place of softmax may move pairs of equal probability.
    own = fitted.of(judged).mean()
    assert values["contacts"]["own"] == pytest.approx(own)
    assert values["contacts"]["softmax"] == pytest.approx(own, abs=0.05)
    assert values["contacts"]["R = 16"]["all"] != pytest.approx(own)
    table = made.table({NO_SPLIT: values})
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert table.rows[0][-1] == f"{own:.1%}"
