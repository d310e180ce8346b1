"""Accuracy and perplexity: sums over residues, the same for any batch size."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import protlm
from protlm.analysis.sequence_sums import SequenceSums, by_group, intervals
from protlm.checkpoints.validations import read_metrics
from protlm.data import frequencies
from protlm.data.batching.mixture import SampleOrder
from protlm.data.batching.strategies import SequenceRow
from protlm.data.masking import IGNORE, corrupt
from protlm.data.shards.data_set import SplitReader, open_split
from protlm.data.vocabulary import VOCABULARY
from protlm.evaluation import accuracy
from protlm.evaluation.accuracy import Accuracy
from protlm.evaluation.base import EvaluationData
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import InputDataError, UserError
from tests.fixtures.commands import read_table
from tests.fixtures.runs import Train
from tests.rounding import error_bound


@pytest.fixture(scope="module")
def split(tiny_data: Path) -> SplitReader:
    """The test split, which the model reads whole although it was trained on less."""
    return open_split(tiny_data, "test")


@pytest.fixture(scope="module")
def total(split: SplitReader) -> int:
    """Its residues."""
    return int(split.lengths_of(np.arange(len(split))).sum())


Judge = Callable[..., dict[str, Any]]


@pytest.fixture
def judge(model: PretrainedModel, split: SplitReader, tiny_data: Path) -> Judge:
    """Evaluates the model on the test split, or on another one."""
    train = open_split(tiny_data, "train")

    def run(
        objective: str = "masked", *, size: int = 2048, on: SplitReader = split, **settings: Any
    ) -> dict[str, Any]:
        data = EvaluationData(on, train, size)
        return Accuracy(objective=objective, **settings).run(model, data)

    return run


def sums_of(table: Path, column: str) -> list[float]:
    """A column of the table of sums of each sequence."""
    return [float(row[column]) for row in read_table(table.with_name("sums.split.tsv"))]


@pytest.mark.parametrize(
    ("objective", "settings"),
    [("masked", {}), ("causal", {}), ("masked", {"concatenated": True, "max_length": 300})],
)
def test_figures_do_not_move_with_the_batch(
    objective: str, settings: dict[str, Any], judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "_JOINED", 5)
    monkeypatch.setattr("protlm.data.batching.plan.BatchingStrategy.usual_block", 3)
    monkeypatch.setattr("protlm.data.batching.plan._BLOCK_FOR", 1000)
    small, large = (judge(objective, size=size, **settings) for size in (300, 20_000))
    assert small["targets"] == large["targets"]
    assert small["empirical"] == pytest.approx(large["empirical"], rel=1e-12)
    assert small["model"]["perplexity"] == pytest.approx(large["model"]["perplexity"], rel=1e-5)


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_joined_rows_are_predicted_from_all_of_the_row(
    objective: str,
    judge: Judge,
    model: PretrainedModel,
    split: SplitReader,
    total: int,
    tmp_path: Path,
) -> None:
    table, length = tmp_path / "sums.tsv", 300
    settings = {"max_length": length, "concatenated": True, "per_sequence": str(table)}
    # Masked, every residue is a target, and only the special tokens are left to read.
    found = judge(objective, mask_fraction=1.0, **settings)
    assert found["targets"] == total
    assert found["cropped"] == {"sequences": 0, "residues": 0}
    assert sums_of(table, "targets") == [len(split[i]) for i in range(len(split))]
    stream, owner = [], []
    order = SampleOrder([len(split)], seed=0).draw(0, np.arange(len(split))).samples
    assert order.tolist() != sorted(order)
    for index in order:
        stream += [*split[index].tolist(), VOCABULARY.eos]
        owner += [index] * (len(split[index]) + 1)
    nats = np.zeros(len(split))
    for start in range(0, len(stream), length - 1):
        segment = torch.tensor([VOCABULARY.cls, *stream[start : start + length - 1]])[None]
        read = segment.clone()
        if objective == "masked":
            read[segment > VOCABULARY.eos] = VOCABULARY.mask
        with torch.inference_mode():
            causal = objective == "causal"
            logits = model.network(read, read >= 0, causal=causal).logits_BLV[0]
        logits = logits[:-1] if causal else logits[1:]
        losses = -logits.double().log_softmax(-1).gather(1, segment[0, 1:, None])[:, 0]
        for place, loss in enumerate(losses.tolist()):
            if stream[start + place] != VOCABULARY.eos:
                nats[owner[start + place]] += loss
    assert sums_of(table, "nats") == pytest.approx(nats, rel=1e-4)


def test_joined_rows_have_the_baselines_of_whole_proteins(judge: Judge, total: int) -> None:
    """Both are fitted to whole proteins, and neither reads across the ends of sequences."""
    single = judge("causal")
    for length in (100, 2 * total):
        found = judge("causal", size=2 * total, concatenated=True, max_length=length)
        assert found["empirical"] == pytest.approx(single["empirical"], rel=1e-12)
        same = found["three_mers"] == pytest.approx(single["three_mers"], rel=1e-12)
        # A row that begins within a protein hides the residues before it.
        assert same == (length > total)


def test_causal_perplexity_is_that_of_one_sequence_at_a_time(
    judge: Judge, model: PretrainedModel, split: SplitReader
) -> None:
    found = judge("causal")
    nats, correct, count = 0.0, 0, 0
    for index in range(len(split)):
        residues = torch.from_numpy(split[index].astype(np.int64))
        tokens_BL = torch.cat([torch.tensor([0]), residues])[None]
        with torch.inference_mode():
            logits = model.network(tokens_BL, tokens_BL >= 0, causal=True).logits_BLV[0, :-1]
        log_p = logits.double().log_softmax(-1)
        nats -= log_p.gather(1, residues[:, None]).sum().item()
        correct += int((logits.argmax(-1) == residues).sum())
        count += len(residues)
    assert found["targets"] == count
    assert found["model"]["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-4)
    assert found["model"]["accuracy"] == pytest.approx(correct / count, abs=2 / count)


def test_the_validation_of_a_causal_run_gives_the_same_figures(
    train_tiny: Train, tiny_data: Path, tmp_path: Path
) -> None:
    run = train_tiny(tmp_path / "run", "objective=causal", "data.max_length=512")
    row = read_metrics(run / "metrics.csv")[-1]
    splits = (open_split(tiny_data, name) for name in ("valid", "train"))
    cropped = Accuracy(objective="causal", max_length=512)
    found = cropped.run(protlm.load(run), EvaluationData(*splits, 2048))
    # Nats of up to 1,024 targets are summed in float32.
    bound = error_bound(torch.float32, 1.0, 1024)
    for who, column in (("model", "valid_perplexity"), ("empirical", "valid_unigram_loss")):
        nats = math.log(row[column]) if who == "model" else row[column]
        assert math.log(found[who]["perplexity"]) == pytest.approx(nats, rel=bound)
    assert found["model"]["accuracy"] == pytest.approx(row["valid_accuracy"])
    assert row["valid_end_loss"] > 0


def test_about_the_fraction_is_masked_by_the_seed(judge: Judge, total: int) -> None:
    for fraction in (0.15, 0.5):
        found = judge(mask_fraction=fraction)
        sigma = math.sqrt(total * fraction * (1 - fraction))
        assert abs(found["targets"] - fraction * total) < 4 * sigma
    assert judge(seed=0)["model"] != judge(seed=1)["model"]


@pytest.mark.parametrize("name, is_train", [("train", True), ("test", False)])
def test_the_training_split_is_not_masked_as_in_the_first_epoch(
    name: str, is_train: bool, tiny_data: Path
) -> None:
    """Other splits have the masks of earlier versions, which figures in model cards are of."""
    readers = open_split(tiny_data, name), open_split(tiny_data, "train")
    evaluated = Accuracy(objective="masked", seed=4)
    batch = next(iter(evaluated._batches(EvaluationData(*readers, 2048), None)))
    common = total = 0
    for sample, targets_L in zip(batch.samples_B.tolist(), batch.targets_BL, strict=True):
        ((tokens, rng),) = SequenceRow(sample, 0, 10**6, "prefix").read(readers[0], seed=4)
        _, first = corrupt(tokens, VOCABULARY.is_residue[tokens], evaluated.masking, rng)
        found = targets_L[: len(first)].numpy()
        assert is_train or (found == first).all()
        common += int(((found == first) & (first != IGNORE)).sum())
        total += int((first != IGNORE).sum())
    assert not is_train or common < 0.15 * total + 5 * math.sqrt(0.15 * 0.85 * total)


def test_the_baseline_of_a_large_split_is_that_of_a_sample(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = judge()
    assert found["uniform"]["perplexity"] == pytest.approx(20)
    assert found["uniform"]["accuracy"] == pytest.approx(0.05)
    whole = found["empirical"]["perplexity"]
    assert 16 < whole < 20
    monkeypatch.setattr(frequencies, "_MOST_COUNTED", 60)
    some = judge()["empirical"]["perplexity"]
    assert some != whole
    assert some == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_the_3_mer_baseline_is_between_frequencies_and_certainty(
    objective: str, judge: Judge, tiny_data: Path
) -> None:
    # Judged on the sequences that were counted, neighbors must help.
    found = judge(objective, on=open_split(tiny_data, "train"))
    assert 1 < found["three_mers"]["perplexity"] < found["empirical"]["perplexity"]
    assert found["empirical"]["accuracy"] < found["three_mers"]["accuracy"] < 1


def test_groups_are_figures_of_their_own(judge: Judge, split: SplitReader, tmp_path: Path) -> None:
    names = [split.identifier(number) for number in range(len(split))]
    lines = [f"{name}\t{'PF1' if number % 3 else 'PF2'}" for number, name in enumerate(names[:-1])]
    lines[1] += ",PF3"
    (tmp_path / "t.tsv").write_text("\n".join(["accession\tpfam_family", *lines, ""]))
    asked = {"groups": str(tmp_path / "t.tsv"), "per_sequence": str(tmp_path / "sums.tsv")}
    evaluation, found, alone = Accuracy(objective="masked"), judge(**asked), judge()
    assert found["model"] == alone["model"]
    # A table that covers almost nothing is seen.
    assert found["without_group"] == 1
    note = f"test: 1 of {len(names)} sequences have no pfam_family, each a group by itself"
    assert note in evaluation.table({"test": found}).caption.splitlines()
    assert "pfam_family" not in evaluation.table({"test": alone}).caption
    assert "pfam_family" not in evaluation.table({"test": found | {"without_group": 0}}).caption
    by_group = found["by_group"]
    assert set(by_group) == {"PF1", "PF2", names[-1]}
    assert sum(values["targets"] for values in by_group.values()) == found["targets"]
    # The sequence without a family is a group of one, and does not count in the mean.
    losses = [math.log(by_group[name]["model"]["perplexity"]) for name in ("PF1", "PF2")]
    assert by_group["PF2"]["sequences"] >= 5 and found["macro"]["groups"] == 2
    assert found["macro"]["model"]["perplexity"] == pytest.approx(math.exp(np.mean(losses)))
    total = sum(
        values["targets"] * math.log(values["model"]["perplexity"]) for values in by_group.values()
    )
    assert found["model"]["perplexity"] == pytest.approx(math.exp(total / found["targets"]))
    header, *rows = (tmp_path / "sums.split.tsv").read_text().splitlines()
    assert header.split("\t")[:4] == ["accession", "group", "targets", "nats"]
    assert [row.split("\t")[0] for row in rows] == names
    assert sum(float(row.split("\t")[3]) for row in rows) == pytest.approx(total)
    # Few groups say less than many sequences.
    widths = [np.ptp(values["interval"]["perplexity"]) for values in (found, alone)]
    assert widths[0] > 0 and widths[1] > 0


def test_groups_of_five_count_in_the_mean_over_groups() -> None:
    targets = np.full(9, 50.0)
    sums = SequenceSums(targets, *(np.linspace(100, 120, 9), 0.1 * targets) * 3)
    found = by_group(sums, ["of five"] * 5 + ["of four"] * 4)
    assert set(found["by_group"]) == {"of five", "of four"}
    assert found["macro"]["groups"] == 1
    assert found["macro"]["model"] == pytest.approx(found["by_group"]["of five"]["model"])
    assert "macro" not in by_group(sums, [str(number) for number in range(9)])


def test_an_interval_is_that_of_the_standard_error() -> None:
    targets = np.full(10_000, 50.0)
    nats = 50 * np.random.default_rng(0).normal(2.5, 0.4, size=len(targets))
    some = SequenceSums(targets, *(nats, 0.1 * targets) * 3)
    low, high = intervals(some, [str(n) for n in range(len(targets))], seed=0)["perplexity"]
    assert low < some.figures()["perplexity"] < high
    # The standard error of the mean is 0.4 / √n; an interval has 2 × 1.96 of them.
    assert math.log(high / low) == pytest.approx(3.92 * 0.4 / math.sqrt(len(targets)), rel=0.2)


def test_what_cannot_be_compared_is_refused(
    judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.tsv").write_text("accession\tpfam_family\nX\tPF1\n")
    with pytest.raises(InputDataError, match="no pfam_family for any sequence"):
        judge(groups=str(tmp_path / "t.tsv"))
    # Shorter rows would have other masks than those of another model.
    monkeypatch.setattr(PretrainedModel, "max_length", 64)
    with pytest.raises(UserError, match=r"max_length=100 is more than .*; type max_length=64"):
        judge(concatenated=True, max_length=100)
