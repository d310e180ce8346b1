"""The benchmark of training: equal work for all, the batches it speaks of, turns, the report."""

import csv
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import training, training_rounds
from benchmarks.language_models import ESM, OURS, Esm, Ours, Sizes, models, performer_lm
from benchmarks.peers import UnavailableError
from benchmarks.same_work import examine
from benchmarks.training_batches import (
    Proteins,
    batches,
    bucketed,
    full_rows,
    padded_to_the_longest,
)
from benchmarks.training_rounds import REAL, Race, Round, Workload, workloads
from protlm.data.dataset import Batch
from protlm.data.masking import IGNORE
from protlm.data.vocabulary import VOCABULARY

SIZES = Sizes(num_layers=2, model_dim=64, num_heads=2, feedforward_dim=128, max_length=1024)


@pytest.fixture(scope="module")
def proteins() -> Proteins:
    root = Path(__file__).resolve().parents[2]
    return Proteins(root / "data_prep" / "sample" / "uniprot_tiny.fasta.gz")


def first(proteins: Proteins, length: int = 64) -> Batch:
    return next(batches(proteins, full_rows(2 * length, length)))


@pytest.mark.parametrize("name", [*OURS, ESM])
def test_all_do_the_same_work(name: str, proteins: Proteins) -> None:
    model = models(SIZES)[name]()
    work = examine(model, first(proteins), torch.bfloat16)
    in_blocks = sum(
        p.numel()
        for label, p in model.named_parameters()
        if p.ndim == 2 and ("blocks." in label or "encoder.layer." in label)
    )
    assert in_blocks == SIZES.num_layers * 4 * 64 * 64 + SIZES.num_layers * 2 * 64 * 128
    # Each weight is multiplied with a token once forward and twice backward.
    assert sum(work.flops.values()) >= 6 * in_blocks
    # Features are float32 in ours: it is no advantage.
    low_share = work.share_of(torch.bfloat16)
    assert low_share == 1.0 if name in ("softmax", ESM) else 0.2 < low_share < 1.0
    assert not work.is_random
    assert work.padding_effect < 1e-3


@pytest.mark.parametrize("name", ["softmax", ESM])
def test_the_loss_is_over_the_targets_alone(name: str, proteins: Proteins) -> None:
    batch, model = first(proteins), models(SIZES)[name]()
    if isinstance(model, Ours):
        logits = model.network(batch.tokens_BL, batch.mask_BL, causal=False).logits_BLV
    else:
        assert isinstance(model, Esm)
        logits = model.model(input_ids=batch.tokens_BL).logits
    chosen = batch.targets_BL != IGNORE
    assert 0.05 < chosen.float().mean() < 0.3
    expected = F.cross_entropy(logits[chosen], batch.targets_BL[chosen])
    torch.testing.assert_close(model(batch), expected)


class Careless(nn.Module):
    """Draws dropout, looks at padding, multiplies in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY), 8)
        self.weight = nn.Parameter(torch.randn(8, len(VOCABULARY)))

    def forward(self, batch: Batch) -> Tensor:
        x_BLD = self.embedding(batch.tokens_BL)
        x_BLD = F.dropout(x_BLD + x_BLD.sum(dim=1, keepdim=True), 0.5)
        with torch.autocast("cpu", enabled=False):
            logits = (x_BLD @ self.weight).flatten(0, 1)
        return F.cross_entropy(logits, batch.targets_BL.flatten(), ignore_index=IGNORE)


def test_other_work_is_seen(proteins: Proteins) -> None:
    torch.manual_seed(0)
    work = examine(Careless(), first(proteins), torch.bfloat16)
    assert work.parameters == 2 * 8 * len(VOCABULARY)
    assert work.flops == {torch.float32: 6 * 8 * len(VOCABULARY)}
    assert work.share_of(torch.bfloat16) == 0
    assert work.is_random
    assert work.padding_effect > 0.01


def test_peers_that_are_missing_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("transformers", "performer_pytorch"):
        monkeypatch.setitem(sys.modules, package, None)
    for name in (ESM, performer_lm(64), performer_lm(256)):
        with pytest.raises(UnavailableError, match="make bench-training"):
            models(SIZES)[name]()


def some(proteins: Proteins, rule: training_rounds.BatchRule, count: int) -> list[Batch]:
    return list(islice(batches(proteins, rule), count))


def test_random_batches_are_padded_to_the_longest(proteins: Proteins) -> None:
    for batch in some(proteins, padded_to_the_longest(8, 1024), len(proteins) // 8):
        assert len(batch.tokens_BL) == 8
        lengths = batch.mask_BL.sum(dim=1)
        assert lengths.max() == batch.tokens_BL.shape[1] <= 1024


def test_full_rows_have_no_padding(proteins: Proteins) -> None:
    for batch in some(proteins, full_rows(512, 128), 5):
        assert batch.tokens_BL.shape == (4, 128) and batch.mask_BL.all()


def test_each_rule_gives_every_protein_once_in_an_epoch(proteins: Proteins) -> None:
    for rule in (bucketed(2048, 512), padded_to_the_longest(4, 512)):
        seen: list[int] = []
        for batch in batches(proteins, rule):
            seen += batch.samples_B.tolist()
            if len(seen) >= len(proteins):
                break
        assert sorted(seen) == list(range(len(proteins)))


def workload(label: str, length: int = 64) -> Workload:
    rule = full_rows(length, length)
    return Workload(label, rule, rule, tokens_per_turn=1)


@pytest.fixture
def race(proteins: Proteins, monkeypatch: pytest.MonkeyPatch) -> Iterator[Race]:
    def missing() -> nn.Module:
        raise UnavailableError("is not installed")

    entrants = {"careless": Careless, "missing": missing}
    monkeypatch.setattr(training_rounds, "models", lambda sizes: entrants)
    monkeypatch.setattr(training_rounds, "_SECONDS_OF_A_ROUND", 0.0)
    yield Race(SIZES, proteins)


def test_everyone_is_measured_in_each_turn_or_named(race: Race) -> None:
    held = race.hold(workload("L=64"))
    assert list(held.rates) == ["careless"]
    assert len(held.rates["careless"]) == training_rounds._FEWEST_TURNS
    assert held.left_out == {"missing": "is not installed"}


def test_what_would_take_too_long_is_left_out(race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    race.hold(workload("L=64"))
    monkeypatch.setattr(training_rounds, "MOST_SECONDS", 0.0)
    held = race.hold(workload("L=128", 128))
    assert not held.rates
    assert held.left_out["careless"].startswith("a step would take about")


def test_the_ratio_is_the_median_over_the_turns() -> None:
    rates = {"ours": [10.0, 30.0, 90.0], "peer": [5.0, 10.0, 10.0]}
    held = Round(workload("L=64"), rates)
    assert held.times("ours", "peer") == 3.0
    assert held.times("ours", "nobody") is None


def test_the_bars_are_judged_where_they_were_measured() -> None:
    held = Round(workload("L=4,096"), {"performer_relu": [60.0], ESM: [10.0]})
    other = Round(workload(REAL), {"performer_relu": [30.0], "softmax": [30.0], ESM: [10.0]})
    judged = {bar.what: (bar.measured, bar.met) for bar in training.bars([held, other])}
    assert judged == {
        f"L=4,096: performer_relu against {ESM}": (6.0, True),
        f"{REAL}: performer_relu against {ESM}": (3.0, False),
        f"{REAL}: softmax against {ESM}": (3.0, True),
    }


def test_the_peers_have_as_many_of_the_longest_rows() -> None:
    *rows, real = workloads([512, 16_384], tokens=4096)
    assert [each.ours.tokens_per_batch for each in rows] == [4096, 16_384]
    assert real.ours.tokens_per_batch == 8192 and real.ours.max_length == 1024
    assert real.peers.window == 8


@pytest.mark.slow
def test_a_small_run_prints_and_writes_everything(
    tmp_path: Path,
    tiny_fasta: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Whether performer-pytorch is installed here or not, this run goes without.
    monkeypatch.setitem(sys.modules, "performer_pytorch", None)
    monkeypatch.setattr(training_rounds, "_SECONDS_OF_A_ROUND", 0.0)
    table = tmp_path / "all.csv"
    options = ["--quick", "--lengths", "64", "128", "--fasta", str(tiny_fasta)]
    monkeypatch.setattr(sys, "argv", ["benchmarks.training", *options, "--csv", str(table)])
    training.main()
    printed = capsys.readouterr().out
    for heading in ("The same work?", "per second", f"Times as fast as {ESM}", "asked", "halted"):
        assert heading in printed
    with table.open() as file:
        rows = list(csv.DictReader(file))
    measured = {(row["workload"], row["model"]) for row in rows if row["tokens_per_second"]}
    assert measured == {(label, name) for label in ("L=64", "L=128", REAL) for name in (*OURS, ESM)}
    assert {row["model"] for row in rows if row["left_out"]} == {
        performer_lm(64),
        performer_lm(256),
    }
