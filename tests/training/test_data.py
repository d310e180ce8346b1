"""Data of a run: joined sequences, mixtures, curricula, masks; and batches of labeled proteins."""

import math
import re
import shutil
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from protlm.build import build_data, open_data
from protlm.config import DataConfig, MixtureConfig, TrainConfig
from protlm.config.composition import compose
from protlm.data.batching.mixture import SampleOrder
from protlm.data.batching.plan import BatchPlan, BatchStream
from protlm.data.batching.relatives import WholeFamilies
from protlm.data.batching.strategies import Concatenation, LengthBuckets
from protlm.data.dataset import Batch, SequenceDataset
from protlm.data.masking import IGNORE, MaskingRule
from protlm.data.records import Tally, read_records
from protlm.data.shards.data_set import open_clusters, open_split
from protlm.data.vocabulary import VOCABULARY
from protlm.data_prep.clusters import ClusterSplit, ClusterTable
from protlm.data_prep.prepare import prepare
from protlm.data_prep.split import HashSplit
from protlm.system.errors import UserError
from protlm.training.datamodule import SequenceData
from protlm.training.labels import Batches, LabeledTokens, TokenRows
from protlm.training.module import LanguageModeling
from protlm.training.run_plan import RunPlan
from tests.fixtures.runs import rows_of

STEPS = 8
FALLING = (
    "objective.mask_fraction_range=[0.1,0.6]",
    "objective.mask_fraction_decays=true",
    "schedule=wsd",
    "schedule.decay_fraction=0.5",
    "schedule.warmup_steps=1",
    "trainer.accumulate_grad_batches=2",
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=100",
    "trainer.valid_every=4",
    "data.crop=random",
    f"trainer.max_steps={STEPS}",
)


def build(tiny_data: Path, *settings: str) -> SequenceData:
    given = [f"data.dir={tiny_data}", "data.max_length=128", "data.tokens_per_batch=1024"]
    config = compose(TrainConfig, [*given, *settings])
    return build_data(RunPlan(config))


def plan_of(*settings: str) -> RunPlan:
    return RunPlan(compose(TrainConfig, settings))


def mixture(one: Path, other: Path) -> list[str]:
    parts = f"{{dir: {one}, weight: 2}},{{dir: {other}, weight: 1, split: test}}"
    return ["data.dir=null", f"data.mixture=[{parts}]"]


@pytest.mark.slow
def test_a_run_resumes_after_its_data_have_moved(train, tiny_data, other_data, tmp_path):
    run = train("run", *mixture(tiny_data, other_data), "trainer.max_steps=2")
    moved = Path(shutil.copytree(other_data, tmp_path / "moved"))
    train(run, *mixture(tiny_data, moved), "trainer.max_steps=3")


def test_a_run_by_clusters_reads_a_member_of_each(tiny_clusters):
    """An epoch has one row per cluster; validation reads every sequence, as always."""
    settings = [f"data.dir={tiny_clusters}", "data.sampling=cluster", "data.max_length=64"]
    config = compose(TrainConfig, settings)
    index = open_clusters(tiny_clusters, "train")
    clusters = index.members(np.arange(len(index)), np.zeros(len(index), np.uint64), 0)
    data = build_data(RunPlan(config))
    assert data.train.num_clusters == len(clusters) < len(data.train)
    rows = 0
    for batch in data.train_dataloader():
        rows += len(batch.samples_B)
        if batch.after[0] == 1:
            break
    assert rows == len(clusters)
    assert sum(len(batch.samples_B) for batch in data.val_dataloader()) == len(data.valid)


def test_the_start_describes_an_epoch(train, tiny_clusters, capsys):
    train("run", "data.max_length=32", "trainer.max_steps=2")
    said = capsys.readouterr().err
    assert "cropped" in said
    assert "of the positions of a batch are padding" in said
    assert "clusters" not in said
    settings = (f"data.dir={tiny_clusters}", "data.sampling=cluster", "trainer.max_steps=2")
    train("clusters", *settings)
    split, index = open_split(tiny_clusters, "train"), open_clusters(tiny_clusters, "train")
    said = f"{len(split)} sequences in {len(index)} clusters; an epoch draws one"
    assert said in capsys.readouterr().err


def test_configs_become_rules():
    cropped, joined = (plan_of(f"data={x}", "data.dir=x") for x in ("trembl", "concatenated"))
    assert cropped.batching == LengthBuckets(131_072, 1_024, crop="prefix")
    assert joined.batching == Concatenation(131_072, 8_192)


def test_the_first_batches_of_validation_are_not_selected_by_length():
    lengths = np.random.default_rng(0).lognormal(5.8, 0.6, 20_000).astype(np.int64)
    order = SampleOrder([len(lengths)], shuffle=False)
    stream = BatchStream(lengths.take, order, LengthBuckets(16_384, 4_096))
    first = np.array([lengths[row.sample] for plan in islice(stream, 60) for row in plan.rows])
    # All rows of a batch have one length, so the mean over 60 batches is rough.
    assert 0.75 < first.mean() / lengths.mean() < 1.35


def test_data_sets_with_another_split_rule_cause_a_warning(tiny_data, tiny_fasta, tmp_path):
    other = tmp_path / "other"
    prepare([tiny_fasta], other, split_rule=HashSplit(0.3, 0.3))
    with pytest.warns(UserWarning, match=rf"{other} was split by another rule than {tiny_data}"):
        open_data(compose(TrainConfig, mixture(tiny_data, other)).data)
    with pytest.warns(UserWarning, match="split by another rule than .* fractions, and with one"):
        open_data(DataConfig(dir=str(tiny_data), valid_dir=str(other)))
    # Warnings are errors in the tests.
    open_data(DataConfig(dir=str(tiny_data), valid_dir=str(tiny_data)))


def test_a_mixture_is_composed(tiny_data, other_data):
    config = compose(TrainConfig, ["data=mixture", *mixture(tiny_data, other_data)[1:]]).data
    assert config.mixture == [
        MixtureConfig(str(tiny_data), 2.0),
        MixtureConfig(str(other_data), 1.0, "test"),
    ]
    train, valid = open_data(config)
    one, _ = open_data(DataConfig(dir=str(tiny_data)))
    test, _ = open_data(DataConfig(dir=str(tiny_data), train_split="test"))
    assert len(train) == len(one) + len(test)
    assert len(valid) > 0
    # Validation can be in another data set.
    elsewhere = DataConfig(dir=str(tiny_data), valid_dir=str(other_data), valid_split="test")
    assert len(open_data(elsewhere)[1]) == len(test)


def test_validation_always_has_one_sequence_per_row(tiny_data):
    """And, with one fraction of masks, the same targets."""
    expected = list(build(tiny_data).val_dataloader())
    for extra in (["data.mode=concatenated"], ["data.crop=random"], FALLING):
        for one, other in zip(expected, build(tiny_data, *extra).val_dataloader(), strict=True):
            assert torch.equal(one.tokens_BL, other.tokens_BL)
            assert torch.equal(one.targets_BL, other.targets_BL)


def test_packed_rows_that_a_batch_does_not_hold_are_refused(tiny_data):
    """As a step of several batches would have room for them."""
    packed = ("data.batching=packed", "trainer.tokens_per_step=4096")
    told = r"data\.tokens_per_row=1025 do not fit into data\.tokens_per_batch=1024; type .*=1024$"
    with pytest.raises(UserError, match=told):
        build(tiny_data, *packed, "data.tokens_per_row=1025")
    build(tiny_data, *packed, "data.tokens_per_row=1024")


RELATIVES = ("data.batching=relatives", "data.tokens_per_row=512", "data.relatives=3")
# Half of the tiny sample is longer than 300 residues.
LONG = (*RELATIVES, "data.max_length=512")
ALONE, LAST = "data.relatives_alone", "data.relatives_last"
ONLY = "optimizer.only_relatives=true", "model.relatives_heads=1", "model.init_from=hybrid-6m"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.mode=concatenated"], r"cuts them; type data\.mode=sequences$"),
        (["data.sampling=cluster"], r"one member of each; type data\.sampling=uniform$"),
        ([f"{ALONE}=0.5", f"{LAST}=0.6"], rf"{ALONE}=0\.5 and {LAST}=0\.6 .* more than 1 together"),
        ([f"{LAST}=-1"], r"relatives_last=-1\.0 must be at least 0 and at most 1"),
        (["data.relatives=1"], r"data\.relatives=1 must be at least 2"),
        (["data.relatives_tokens=513"], r"=513 must be at least data\.max_length=128.* 512 tokens"),
        (["data.relatives_tokens=127"], r"=127 must be at least data\.max_length=128"),
        (["data.tokens_per_row=1025", "trainer.tokens_per_step=4096"], r"do not fit into"),
        (["data.max_length=3"], r"no protein of the first [\d,]+ documents fits into .*=3; type"),
        (["data.relatives_from=valid"], r"is the validation split itself; type another one"),
        (["data.relatives_from=other"], r"has no split 'other'; it has: test, train, valid"),
        (["model.relatives_numbers=2"], r"_numbers=2 must be at least data\.relatives=3, or 0"),
        (["objective=causal", "model.relatives=full"], r"after it, .*elatives=ordered$"),
        (["objective=causal", "model.relatives_positions=aligned"], r"_positions=restart$"),
        (["objective=causal", "model.relatives_heads=1"], r"does not support objective=causal"),
        ([*ONLY, f"{ALONE}=1", f"{LAST}=0"], r"nothing on proteins alone; type .*_alone=0$"),
        ([*ONLY, "model.relatives_numbers=9"], r"type model\.relatives_numbers=0 data\."),
        (
            ["model.relatives_heads=1", "attention=hybrid", "attention.relatives_window=8"],
            r"type attention\.relatives_window=null, or model\.relatives_heads=0$",
        ),
        (["data.batching=packed", "model.relatives_heads=1"], r"or model\.relatives_heads=0$"),
        (["optimizer.only_relatives=true"], r"type .* model\.relatives_heads=1 model\.init_from=M"),
        (["data.dir={tiny_data}"], r"{tiny_data} was prepared without clusters"),
        (["data.valid_dir={tiny_data}"], r"{tiny_data} was prepared without clusters"),
    ],
)  # fmt: skip
def test_relatives_that_a_run_cannot_have_are_refused(tiny_clusters, tiny_data, settings, message):
    settings = [one.replace("{tiny_data}", str(tiny_data)) for one in settings]
    with (
        pytest.raises(UserError, match=message.replace("{tiny_data}", str(tiny_data))),
        warnings.catch_warnings(),
    ):
        # Of another split rule.
        warnings.simplefilter("ignore")
        next(iter(build(tiny_clusters, *RELATIVES, *settings).train_dataloader()))


@pytest.mark.parametrize("settings", ["hybrid attention", "alternating +attention.options.window"])
def test_a_window_over_relatives_needs_rows_of_them(tiny_data, settings):
    told = r"relatives_window has no effect.*=relatives, or attention\.relatives_window=null$"
    with pytest.raises(UserError, match=told):
        build(tiny_data, *f"attention={settings}.relatives_window=4".split())


def test_settings_of_relatives_become_rules(tiny_clusters):
    settings = ["data.relatives_tokens=200", f"{ALONE}=0.2", f"{LAST}=0.3", "data.crop=prefix"]
    data = build(tiny_clusters, *RELATIVES, *settings, "trainer.tokens_per_step=2048")
    expected = WholeFamilies(2_048, 128, row=512, members=3, tokens=200, alone=0.2, last=0.3)
    assert data.rule == expected
    assert data.valid_batching == replace(expected, tokens_per_batch=1_024, alone=0, last=0)
    causal = build(tiny_clusters, *RELATIVES, "objective=causal", f"{ALONE}=1").rule
    assert isinstance(causal, WholeFamilies) and causal.last == 0
    for other in ("null", "train"):
        settings = f"{ALONE}=1", f"{LAST}=0", f"data.relatives_from={other}"
        alone = build(tiny_clusters, *LONG, *settings).valid_batching
        assert isinstance(alone, WholeFamilies) and alone.alone == 1
    assert build(tiny_clusters, *RELATIVES).rule.block_size == 2_048


@pytest.mark.parametrize("context", [None, "train"])
def test_validation_has_the_same_documents_every_time(tiny_clusters, context):
    """The families of its split, or each protein after relatives of another split."""
    settings = (f"data.relatives_from={context or 'null'}", *FALLING[:5])
    data = build(tiny_clusters, *LONG, *settings)
    one, other = (list(data.val_dataloader()) for _ in range(2))
    for mine, its in zip(one, other, strict=True):
        assert torch.equal(mine.tokens_BL, its.tokens_BL)
        assert torch.equal(mine.targets_BL, its.targets_BL)
    split = open_split(tiny_clusters, "valid")
    num_context = len(data.valid) - len(split)
    read = torch.cat([batch.joined_N for batch in one]) - num_context
    short = np.flatnonzero(split.lengths_of(np.arange(len(split))) <= 510).tolist()
    assert sorted(read[read >= 0].tolist()) == short
    assert (num_context > 0) == (read < 0).any() == (context == "train")
    if context is None:
        return
    for batch in one:
        spans, samples = batch.bounds.spans.tolist(), batch.joined_N.tolist()
        for (start, end), sample in zip(spans, samples, strict=True):
            has_targets = (batch.targets_BL.flatten()[start:end] != IGNORE).any()
            assert has_targets or sample < num_context


def test_a_split_by_clusters_has_no_relatives_in_another(tiny_fasta, tmp_path):
    names = [record.identifier for record in read_records(tiny_fasta, Tally())]
    rows = [f"{names[number // 3 * 3]}\t{name}\n" for number, name in enumerate(names)]
    (tmp_path / "cluster.tsv").write_text("".join(rows))
    table = ClusterTable(tmp_path / "cluster.tsv")
    rule = ClusterSplit(table, HashSplit(0.2, 0.1))
    prepare([tiny_fasta], tmp_path / "data", split_rule=rule, clusters=table)
    told = r"relatives_from=train: .* no cluster with members in both train and valid"
    with pytest.raises(UserError, match=told):
        build(tmp_path / "data", *RELATIVES, "data.relatives_from=train")


def test_the_start_describes_the_documents(train, tiny_clusters, capsys):
    settings = [f"data.dir={tiny_clusters}", *LONG, "trainer.max_steps=2"]
    train("run", *settings, "data.relatives_from=train")
    split, index = open_split(tiny_clusters, "train"), open_clusters(tiny_clusters, "train")
    number = int((-(-index.sizes(slice(None)) // 3)).sum())
    said = capsys.readouterr().err
    assert (
        f"{len(split)} sequences in {len(index)} clusters; an epoch draws {number} documents of at "
        "most 3 members of a cluster"
    ) in said
    assert re.search(
        rf"; \d+ of the first {number} documents have relatives, \d\.\d proteins", said
    )
    assert re.search(r"\d+ proteins longer than data\.max_length", said)
    assert re.search(r"validation: \d+ of the first \d+ documents have relatives.* padding", said)


def test_devices_without_a_row_cause_a_warning(train, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 9)
    settings = ["trainer.devices=9", "data.max_length=128", "data.dir=null"]
    with (
        pytest.warns(UserWarning, match=r"8 of the longest rows.*tokens_per_batch=1152"),
        pytest.raises(UserError, match=r"data\.mixture"),
    ):
        train("run", *settings)
    # One row per device is enough; warnings are errors in the tests.
    with pytest.raises(UserError, match=r"data\.mixture"):
        train("run", "trainer.devices=8", *settings[1:])


def test_there_are_no_more_workers_than_processors(tiny_data, monkeypatch):
    for processors, workers in ((2, 2), (None, 1)):
        monkeypatch.setattr("os.cpu_count", lambda found=processors: found)
        data = build(tiny_data, "data.num_workers=4")
        assert data.train_dataloader().num_workers == workers


@pytest.mark.slow
def test_a_part_of_the_validation_split_is_not_its_start(train, look_at):
    seen: list[list[int]] = []
    look_at(
        *(LanguageModeling, "validation_step"),
        lambda _, batch, *rest: seen[-1].extend(batch.samples_B.tolist()),
    )
    settings = ("data.valid_split=train", "trainer.max_steps=2", "trainer.valid_every=1")
    for batches in ("1", "null"):
        seen.append([])
        train(batches, *settings, f"trainer.valid_batches={batches}")
    part, whole = seen
    first, again = part[: len(part) // 2], part[len(part) // 2 :]
    assert first == again
    assert len(whole) == 2 * len(set(whole))
    # Without shuffling, the part would be the first batch of the whole.
    assert set(first) != set(whole[: len(first)])


def test_batches_for_a_gpu_are_page_locked(tiny_data, monkeypatch):
    data = build(tiny_data)
    assert not data.train_dataloader().pin_memory
    for device, is_pinned in (("cpu", False), ("cuda:0", True)):
        trainer = SimpleNamespace(
            strategy=SimpleNamespace(root_device=torch.device(device)),
            **{"global_step": 0, "global_rank": 0, "world_size": 1, "limit_val_batches": 1.0},
        )
        monkeypatch.setattr(data, "trainer", trainer)
        assert data.train_dataloader().pin_memory == is_pinned
        assert data.val_dataloader().pin_memory == is_pinned


def test_pinning_a_batch_pins_its_tensors(tiny_data, monkeypatch):
    batch = next(iter(build(tiny_data).train_dataloader()))
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    copy = vars(batch.pin_memory())
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            assert copy[name] is not value and torch.equal(copy[name], value)
        else:
            assert copy[name] == value


@pytest.mark.slow
def test_plans_have_the_step_that_they_are_trained_in(train, tmp_path, monkeypatch):
    """Also after a skipped step, which counts as a step, and in a resumed run."""
    planned: dict[tuple[int, int, int], int] = {}
    trained: list[tuple[int, int]] = []
    make, work = SequenceDataset.__getitem__, LanguageModeling.training_step

    def make_and_note(self: SequenceDataset, plan: BatchPlan) -> Batch:
        batch = make(self, plan)
        planned[batch.after] = plan.step
        return batch

    def work_and_note(self: LanguageModeling, batch: Batch, index: int) -> Any:
        trained.append((self.trainer.global_step, planned[batch.after]))
        out = work(self, batch, index)
        # The second batch of the third step.
        if len(trained) == 6:
            out["loss"] = out["loss"] * math.nan
        return out

    monkeypatch.setattr(SequenceDataset, "__getitem__", make_and_note)
    monkeypatch.setattr(LanguageModeling, "training_step", work_and_note)
    run = tmp_path / "run"
    with pytest.warns(UserWarning, match="step 3 was skipped"):
        train(run, *FALLING, "trainer.max_steps=5")
    with pytest.warns(UserWarning, match="after step 5 the learning rate goes from"):
        train(run, *FALLING)
    assert trained == [(step, step) for step in range(STEPS) for _ in range(2)]


def test_measured_fractions_are_those_of_the_step(tiny_data):
    """Rows of about 100 residues with varying fractions: the z-score is over rows."""
    data = build(tiny_data, *FALLING, "trainer.max_steps=80")
    rows: dict[int, list[float]] = defaultdict(list)
    for number, batch in enumerate(islice(data.train_dataloader(), 160)):
        for tokens_L, targets_L in zip(batch.tokens_BL, batch.targets_BL, strict=True):
            is_residue_L = VOCABULARY.is_residue[tokens_L] | (tokens_L == VOCABULARY.mask).numpy()
            share = (targets_L != IGNORE).numpy()[is_residue_L].mean()
            rows[number // 2].append(float(share))
    # The decay begins with step 40 and ends with step 80, at 0.15.
    for first, last, done in ((0, 40, 0.0), (40, 50, 0.1125), (70, 80, 0.8625)):
        shares = np.array([share for step in range(first, last) for share in rows[step]])
        expected = (1 - done) * 0.35 + done * 0.15
        z = (shares.mean() - expected) / (shares.std() / np.sqrt(len(shares)))
        assert abs(z) < 4, (first, z)
        spread = (1 - done) * 0.5 / np.sqrt(12)
        assert shares.std() == pytest.approx(np.hypot(spread, 0.045), rel=0.25)


def test_configs_become_schedules_of_masks():
    assert plan_of().masking == MaskingRule()
    assert plan_of("objective=causal").masking is None
    rule = plan_of("objective=mask_only", *FALLING, "trainer.max_steps=100").masking
    assert rule == MaskingRule(0.15, 1.0, 0.0, (0.1, 0.6), narrowing=(50, 100))
    rule = plan_of("schedule=wsd_linear", "trainer.max_steps=10000", *FALLING[:2]).masking
    assert rule is not None and rule.narrowing == (6_000, 10_000)


@pytest.mark.parametrize("objective", ["masked", "mask_only", "causal"])
def test_the_log_has_the_unigram_loss(objective, train, tiny_data, capsys):
    run = train("run", f"objective={objective}", "trainer.valid_every=2")
    rows = rows_of(run, "valid_loss")
    data = build(tiny_data, f"objective={objective}")
    # Frequencies from the text of the training sequences, cropped as in validation.
    counts = np.where(VOCABULARY.is_residue, 1.0, 0.0)
    for sample in range(len(data.train)):
        np.add.at(counts, data.train[sample][:126], 1)
    f = counts / counts.sum()
    nats = []
    for batch in data.val_dataloader():
        chosen = (batch.targets_BL != IGNORE) & (batch.targets_BL != VOCABULARY.eos)
        pairs = torch.stack([batch.tokens_BL[chosen], batch.targets_BL[chosen]], dim=1)
        for seen, target in pairs.tolist():
            if objective == "masked" and seen != VOCABULARY.mask:
                joint = 0.1 * f[seen] * (seen == target) + 0.1 * f[target] / 25
                nats.append(-np.log(joint / (0.1 * f[seen] + 0.1 / 25)))
            else:
                nats.append(-np.log(f[target]))
    assert [row["valid_unigram_loss"] for row in rows] == pytest.approx([np.mean(nats)] * 2)
    told = [line for line in capsys.readouterr().err.splitlines() if "validation loss" in line]
    loss, accuracy = rows[1]["valid_loss"], 100 * rows[1]["valid_accuracy"]
    unigram = np.mean(nats)
    assert told[1] == (
        f"step 4: validation loss {loss:.3f}, perplexity {np.exp(loss):.1f}, "
        f"accuracy {accuracy:.1f} % (unigram: loss {unigram:.3f}, perplexity {np.exp(unigram):.1f})"
    )


SEQUENCES = ["MKTAY", "MKT", "WWSGKWL", "ACD", "MKTAYIA"]
PLACES = [np.array([0, 4]), np.array([1]), np.array([2, 3, 6]), np.arange(3), np.array([6])]


@pytest.fixture
def labeled() -> LabeledTokens:
    """Labels that say their protein and their position: 10 · protein + position."""
    values = np.concatenate([10 * row + places for row, places in enumerate(PLACES)])
    return LabeledTokens([VOCABULARY.encode(one) for one in SEQUENCES], values, PLACES)


def all_of(batches: Batches) -> Iterator[TokenRows]:
    return (batches[number] for number in range(len(batches)))


def test_labels_are_those_of_their_residues(labeled):
    for batch in all_of(Batches(labeled, 2, seed=3)):
        letters = [
            VOCABULARY.decode(tokens[is_label].numpy())
            for tokens, is_label in zip(batch.tokens_BL, batch.is_label_BL, strict=True)
        ]
        values = batch.values.tolist()
        assert "".join(letters) == "".join(SEQUENCES[n // 10][n % 10] for n in values)
        assert labeled.values[batch.rows].tolist() == values
        assert labeled.groups[batch.rows].tolist() == [n // 10 for n in values]


def test_processes_divide_each_batch(labeled):
    whole = Batches(labeled, 2, seed=3)
    parts = [Batches(labeled, 2, seed=3, share=(rank, 2)) for rank in range(2)]
    for batch, *mine in zip(all_of(whole), *map(all_of, parts), strict=True):
        used = [one.rows for one in mine if one.is_used]
        assert sorted(batch.rows) == sorted(np.concatenate(used))
    # The last batch has one protein: the other process computes it too, and it does not count.
    assert [part[2].is_used for part in parts] == [True, False]
    assert len(parts[1][2].values)


def test_each_epoch_has_all_proteins_in_another_order(labeled):
    batches = Batches(labeled, 2, seed=3)
    first, second = ([batches[n].rows.tolist() for n in ns] for ns in (range(3), range(3, 6)))
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(len(labeled.values)))
    assert first != second
    assert [batches[n].place for n in (0, 2, 4)] == [(0, 0, 0), (0, 2, 0), (1, 1, 0)]


def test_proteins_have_one_label_each():
    tokens = [VOCABULARY.encode(one) for one in SEQUENCES]
    batch = Batches(LabeledTokens(tokens, np.arange(5)), 4, seed=None)[0]
    assert batch.is_label_BL is None
    assert batch.values.tolist() == [0, 1, 2, 3]
