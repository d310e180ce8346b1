"""Rows and batches: functions of seed and position, the same for any ranks and workers."""

import re
from collections.abc import Iterable
from copy import copy
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from protlm.bounds import Bounds
from protlm.data.batching.mixture import Mixture
from protlm.data.batching.plan import BatchPlan, BatchStream, Progress, RankBatches
from protlm.data.batching.relatives import Families, FamiliesRow, WholeFamilies
from protlm.data.batching.strategies import (
    ConcatenatedRow,
    Concatenation,
    LengthBuckets,
    ProteinsRow,
    SequenceRow,
)
from protlm.data.dataset import FILLER, Batch, SequenceDataset, collate
from protlm.data.masking import IGNORE, MaskingRule
from protlm.data.shards.data_set import open_clusters, open_split
from protlm.data.vocabulary import STANDARD, VOCABULARY

MAX_LENGTH = 100
BERT = MaskingRule()


@pytest.fixture
def reader(data_set):
    return open_split(data_set, "train")


def dataset(reader, objective="masked", seed=5, masking=BERT, positions=None):
    return SequenceDataset(
        reader, objective=objective, masking=masking, seed=seed, positions=positions
    )


def plan(*samples, length=MAX_LENGTH, repeat=0, crop="random"):
    rows = tuple(
        None if sample is None else SequenceRow(sample, repeat, MAX_LENGTH, crop)
        for sample in samples
    )
    return BatchPlan(rows, length, Progress(repeat, len(samples)))


def test_a_batch_has_the_documented_shapes_and_types(reader):
    batch = dataset(reader)[plan(3, 4, None)]
    for tensor, dtype in (
        (batch.tokens_BL, torch.int64), (batch.targets_BL, torch.int64), (batch.mask_BL, torch.bool)
    ):  # fmt: skip
        assert tensor.shape == (3, MAX_LENGTH)
        assert tensor.dtype == dtype
    assert batch.samples_B.tolist() == [3, 4, FILLER]
    assert batch.samples_B.dtype == torch.int64
    assert batch.joined_N.tolist() == [3, 4]
    assert batch.after == (0, 3, 0)
    # A filler row has one token and no target.
    for objective in ("masked", "causal"):
        filler = dataset(reader, objective)[plan(None, length=8)]
        assert filler.joined_N.tolist() == []
        assert filler.joined_N.dtype == batch.joined_N.dtype == torch.int64
        assert filler.tokens_BL.tolist() == [[VOCABULARY.cls] + [VOCABULARY.pad] * 7]
        assert filler.mask_BL.tolist() == [[True] + [False] * 7]
        assert (filler.targets_BL == IGNORE).all()


@pytest.mark.parametrize("objective", ["masked", "causal"])
@pytest.mark.parametrize("crop", ["prefix", "random"])
def test_a_row_is_cls_residues_and_the_true_end(reader, proteins, objective, crop):
    data = dataset(reader, objective, masking=MaskingRule(mask_fraction=1e-9))
    ends = {True: 0, False: 0}
    for repeat in range(20):
        for sample, (_, sequence) in enumerate(proteins):
            batch = data[plan(sample, repeat=repeat, crop=crop)]
            text = VOCABULARY.decode(batch.tokens_BL[0][batch.mask_BL[0]].numpy())
            assert text.startswith("<cls>")
            residues = text.removeprefix("<cls>").removesuffix("<eos>")
            assert len(residues) == min(len(sequence), MAX_LENGTH - 2)
            assert residues in sequence
            if crop == "prefix":
                assert sequence.startswith(residues)
            if len(sequence) > MAX_LENGTH - 2:
                ends[text.endswith("<eos>")] += 1
                assert not text.endswith("<eos>") or sequence.endswith(residues)
            else:
                assert text == f"<cls>{sequence}<eos>"
    assert (ends[True] > 0) == (crop == "random")
    assert ends[False] > 0


def test_masked_targets_are_residues_alone(reader, proteins):
    lengths = np.array([len(sequence) for _, sequence in proteins])
    batch = dataset(reader, masking=MaskingRule(mask_fraction=1))[plan(*range(40))]
    is_target_BL = batch.targets_BL != IGNORE
    assert is_target_BL.sum(1).tolist() == np.minimum(lengths, MAX_LENGTH - 2).tolist()
    assert not is_target_BL[:, 0].any()
    assert VOCABULARY.is_residue[batch.targets_BL[is_target_BL].numpy()].all()
    # Other tokens are unchanged.
    assert (batch.tokens_BL[:, 0] == VOCABULARY.cls).all()
    others = batch.tokens_BL[batch.mask_BL & ~is_target_BL].tolist()
    assert set(others) <= {VOCABULARY.cls, VOCABULARY.eos}
    # Padding is neither a token nor a target.
    assert (batch.tokens_BL[~batch.mask_BL] == VOCABULARY.pad).all()
    assert not is_target_BL[~batch.mask_BL].any()
    # A cropped sequence may lack <eos>.
    num_tokens = batch.mask_BL.sum(1).numpy()
    assert (np.abs(np.minimum(lengths + 2, MAX_LENGTH) - num_tokens) <= 1).all()


def stretch(*samples, skip=0, num_tokens=MAX_LENGTH - 1):
    return BatchPlan(
        (ConcatenatedRow(0, 0, samples, skip, num_tokens),), MAX_LENGTH, Progress(0, 1)
    )


def test_causal_targets_are_the_next_tokens(reader):
    data = dataset(reader, "causal")
    for batch in (data[plan(*range(40))], data[stretch(3, 4, 5)]):
        for tokens_L, targets_L, mask_L in zip(
            batch.tokens_BL, batch.targets_BL, batch.mask_BL, strict=True
        ):
            tokens, targets = tokens_L[mask_L].tolist(), targets_L[mask_L].tolist()
            assert targets == [following for _, following in pairwise(tokens)] + [IGNORE]


def test_in_joined_sequences_no_special_token_is_masked(reader, proteins):
    sequences = [sequence for _, sequence in proteins]
    batch = dataset(reader, masking=MaskingRule(1, 1, 0))[stretch(0, 1, 5, skip=1)]
    joined = f"{sequences[0]}<eos>{sequences[1]}<eos>{sequences[5]}<eos>"
    seen = VOCABULARY.decode(batch.tokens_BL[0].numpy())
    expected = f"<cls>{joined[1:]}".replace("<eos>", " ")
    expected = re.sub("[A-Z]", ".", expected).replace(" ", "<eos>")
    assert expected.startswith(seen.replace("<mask>", "."))
    assert seen.count("<eos>") == 2


def test_passes_and_seeds_corrupt_differently(reader):
    found = [
        dataset(reader, seed=seed)[plan(*range(40), repeat=repeat)].tokens_BL
        for seed, repeat in ((5, 0), (5, 0), (5, 1), (6, 0))
    ]
    assert [torch.equal(found[0], other) for other in found[1:]] == [True, False, False]


def test_collate_keeps_whole_sequences():
    sequences = ["MKV", "W", ""]
    tokens_BL, mask_BL = collate([VOCABULARY.encode(sequence) for sequence in sequences])
    assert tokens_BL.shape == mask_BL.shape == (3, 5)
    for tokens_L, mask_L, sequence in zip(tokens_BL, mask_BL, sequences, strict=True):
        assert VOCABULARY.decode(tokens_L[mask_L].numpy()) == f"<cls>{sequence}<eos>"
    assert (tokens_BL[~mask_BL] == VOCABULARY.pad).all()


RULES = {
    "sequences": LengthBuckets(500, 100, block=15, crop="random"),
    "concatenated": Concatenation(500, 100, block=15),
    "relatives": WholeFamilies(
        800, 100, block=5, row=200, members=4, alone=0.3, last=0.4, positions="aligned"
    ),
}
NUM_BATCHES = 40


@pytest.fixture(params=["sequences", "clusters"])
def mixture(request, make_data_set, proteins):
    parts = {"one": proteins[:17], "other": proteins[17:]}
    # Most clusters have one or two sequences, the first has five.
    folders = [
        make_data_set(some, name, [max(0, i // 2 * 2 - 2 + i % 3 // 2) for i in range(len(some))])
        for name, some in parts.items()
    ]
    indexes = [open_clusters(folder, "train") for folder in folders]
    splits = [open_split(folder, "train") for folder in folders]
    rule = RULES.get(request.node.callspec.params.get("mode"))
    if isinstance(rule, WholeFamilies):
        return Families(splits, [2, 3], indexes, rule)
    return Mixture(splits, [2, 3], indexes if request.param == "clusters" else None)


def load(mixture, rule, objective, *, num_workers=0, num_batches=NUM_BATCHES, **options):
    stream = BatchStream(
        mixture.lengths_of, mixture.order(seed=5), rule, num_batches=num_batches, **options
    )
    return DataLoader(
        dataset(mixture, objective, positions=getattr(rule, "positions", None)),
        sampler=stream,
        batch_size=None,
        collate_fn=copy,
        num_workers=num_workers,
        multiprocessing_context="forkserver" if num_workers else None,
        prefetch_factor=8 if num_workers else None,
    )


def assert_equal(one: Batch, other: Batch) -> None:
    for field in fields(Batch):
        mine, its = getattr(one, field.name), getattr(other, field.name)
        if field.name == "bounds":
            mine, its = layout(one), layout(other)
        if field.name == "joined_N":
            # Each rank lists the samples of its own rows.
            mine, its = mine.sort().values, its.sort().values
        is_same = torch.equal(mine, its) if isinstance(mine, torch.Tensor) else mine == its
        assert is_same, field.name


def layout(batch: Batch) -> torch.Tensor | None:
    """The places of tokens in proteins and families, and the starts of these in rows, BL3."""
    if not isinstance(batch.bounds, Bounds):
        return batch.bounds
    own, above, length = batch.bounds, batch.bounds.families, batch.tokens_BL.shape[1]
    start_L = above.cu_seqlens[above.segment_L] % length
    places = torch.stack([own.position_L, above.position_L, start_L], dim=-1)
    return places.unflatten(0, (-1, length))


def together(parts: list[Batch]) -> Batch:
    """The global batch of the ranks' slices, without filler rows."""
    given = {"bounds": [layout(part) for part in parts if part.bounds]}
    given |= {
        name: [getattr(part, name) for part in parts]
        for name in ("tokens_BL", "targets_BL", "mask_BL", "samples_B")
    }
    filling = torch.stack(given["samples_B"], dim=1).flatten() == FILLER
    merged = {
        name: torch.stack(some, dim=1).flatten(0, 1)[~filling] if some else None
        for name, some in given.items()
    }
    (after,) = {part.after for part in parts}
    joined_N = torch.cat([part.joined_N for part in parts])
    return Batch(**merged, after=after, joined_N=joined_N)


def assert_all_equal(ones: Iterable[Batch], others: Iterable[Batch]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("objective", ["masked", "causal"])
@pytest.mark.parametrize("mode", RULES)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_change_nothing(mixture, mode, objective, world_size):
    whole = list(load(mixture, RULES[mode], objective))
    ranks = [
        load(mixture, RULES[mode], objective, share=RankBatches(rank, world_size))
        for rank in range(world_size)
    ]
    assert len(whole) == NUM_BATCHES
    assert_all_equal((together(list(parts)) for parts in zip(*ranks, strict=True)), whole)


# Of a machine with one core.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create . worker processes")
@pytest.mark.parametrize(("num_workers", "world_size"), [(3, 1), (1, 2)])
@pytest.mark.parametrize("mode", RULES)
def test_workers_change_nothing(mixture, mode, num_workers, world_size):
    for rank in range(world_size):
        options = {"share": RankBatches(rank, world_size), "num_batches": 12 * num_workers}
        alone = load(mixture, RULES[mode], "masked", **options)
        helped = load(mixture, RULES[mode], "masked", num_workers=num_workers, **options)
        assert_all_equal(alone, helped)


def test_a_row_does_not_depend_on_its_batch(mixture):
    """The budget determines only which rows are in a batch together."""

    def rows(rule):
        found = {}
        for batch in load(mixture, rule, "masked", num_batches=None):
            for sample, tokens_L, targets_L, mask_L in zip(
                batch.samples_B, batch.tokens_BL, batch.targets_BL, batch.mask_BL, strict=True
            ):
                row = (tuple(tokens_L[mask_L].tolist()), tuple(targets_L[mask_L].tolist()))
                found.setdefault(int(sample), set()).add(row)
        return found

    rule = RULES["sequences"]
    assert rows(rule) == rows(replace(rule, tokens_per_batch=1_300))


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_packed_proteins_are_those_of_padded_rows(reader, objective):
    """Their tokens and targets; the rest is padding, and a filler row one token."""
    data = dataset(reader, objective)
    alone = [data[plan(sample)] for sample in (3, 4, 5)]
    parts = plan(3, 4, 5).rows
    rows = ProteinsRow(parts[:2]), ProteinsRow(parts[2:]), None
    batch = data[BatchPlan(rows, 250, Progress(0, 3), longest=MAX_LENGTH)]
    assert (batch.joined_N.tolist(), batch.samples_B.tolist()) == ([3, 4, 5], [3, 5, FILLER])
    assert batch.mask_BL.shape == (3, 250) and batch.bounds is not None
    *spans, filler = batch.bounds.spans.tolist()
    for (start, end), one in zip(spans, alone, strict=True):
        for name in ("tokens_BL", "targets_BL"):
            found = getattr(batch, name).flatten()[start:end]
            assert torch.equal(found, getattr(one, name)[one.mask_BL])
    assert (
        filler == [500, 501] and batch.mask_BL.sum() == sum(one.mask_BL.sum() for one in alone) + 1
    )
    assert not (batch.targets_BL != IGNORE)[~batch.mask_BL].any()
    assert (batch.tokens_BL[~batch.mask_BL] == VOCABULARY.pad).all()


def family_plan():
    """Two rows: of proteins 3 to 7 in three families, and of 8; and a filler row."""
    proteins = [SequenceRow(n, 0, MAX_LENGTH, "prefix") for n in range(3, 9)]
    rows = (
        FamiliesRow(tuple(proteins[:5]), (3, 1, 1), (False, False, True, True, True)),
        FamiliesRow((proteins[5],), (1,), (True,)),
        None,
    )
    return BatchPlan(rows, 500, Progress(0, 3), longest=MAX_LENGTH)


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_proteins_without_targets_are_read_as_they_are(reader, objective):
    """And those with targets as if they were alone."""
    data = dataset(reader, objective, positions="restart")
    batch = data[family_plan()]
    spans = batch.bounds.spans.tolist()
    for number, (start, end) in zip(range(3, 9), spans, strict=False):
        alone = data[plan(number, crop="prefix")]
        tokens, targets = (
            batch.tokens_BL.flatten()[start:end],
            batch.targets_BL.flatten()[start:end],
        )
        if number in (3, 4):
            text = VOCABULARY.decode(reader[number][: MAX_LENGTH - 2])
            assert VOCABULARY.decode(tokens.numpy()).startswith(f"<cls>{text}")
            assert (targets == IGNORE).all()
        else:
            assert torch.equal(tokens, alone.tokens_BL[alone.mask_BL])
            assert torch.equal(targets, alone.targets_BL[alone.mask_BL])
            assert (targets != IGNORE).any()
    assert (batch.joined_N.tolist(), len(spans)) == ([3, 4, 5, 6, 7, 8], 7)


def test_the_bounds_of_families_are_those_of_their_proteins(reader):
    batch = dataset(reader, positions="restart")[family_plan()]
    families = batch.bounds.families
    spans = batch.bounds.spans.tolist()
    joined = [[spans[0][0], spans[2][1]], *spans[3:]]
    assert families.spans.tolist() == joined and joined[-1] == [1_000, 1_001]
    assert torch.equal(families.position_L, batch.bounds.position_L)
    running = dataset(reader, positions="run")[family_plan()].bounds.families.position_L
    for start, end in joined:
        assert running[start:end].tolist() == list(range(end - start))
    assert dataset(reader)[family_plan()].bounds.families is None


@pytest.mark.parametrize(
    ("fraction", "starts"), [(0.1, [20, 29, 0, 20, 0]), (1.0, [0] * 5)], ids=["some", "all"]
)
def test_aligned_positions_are_those_of_the_first_protein(make_data_set, fraction, starts):
    """A stranger and another family begin at 0; hidden residues do not count."""
    rng = np.random.default_rng(0)
    text = "".join(rng.choice([*STANDARD], 40))
    others = ["".join(rng.choice([*STANDARD], 30)) for _ in range(2)]
    stored = [text, text[9:], others[0][:20] + text, others[1], text]
    folder = make_data_set([(f"p{n}", one) for n, one in enumerate(stored)])
    rows = tuple(SequenceRow(n, 0, MAX_LENGTH, "prefix") for n in range(5))
    row = FamiliesRow(rows, (4, 1), (True,) * 5)
    made = BatchPlan((row,), 300, Progress(0, 2), longest=MAX_LENGTH)
    data = dataset(
        open_split(folder, "train"), masking=MaskingRule(fraction, 1, 0), positions="aligned"
    )
    bounds = data[made].bounds
    for (start, end), first in zip(bounds.spans.tolist(), starts, strict=True):
        expected = list(range(first, first + end - start))
        assert bounds.families.position_L[start:end].tolist() == expected
