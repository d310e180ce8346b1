"""Global batches, crops and masks are bitwise identical for any ranks and workers."""

from dataclasses import fields, replace
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

from protlm.data.batching.mixture import Mixture
from protlm.data.batching.plan import BatchStream, Curriculum, Progress, RankSlice
from protlm.data.batching.strategies import LengthBuckets, Packing
from protlm.data.dataset import FILLER, Batch, SequenceDataset
from protlm.data.masking import MaskingRule
from protlm.data.shards.data_set import open_clusters, open_split

STAGES = Curriculum([[0, 40], [45, 100]])
RULES = {
    "sequences": LengthBuckets(500, 100, window=15, crop="random", curriculum=STAGES),
    "concatenated": Packing(500, 100, window=15, curriculum=STAGES),
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
    splits = [open_split(folder, "train") for folder in folders]
    if request.param == "sequences":
        return Mixture(splits, [2, 3])
    return Mixture(splits, [2, 3], [open_clusters(folder, "train") for folder in folders])


def identity(batch):
    return batch


def load(mixture, rule, objective, *, num_workers=0, num_batches=NUM_BATCHES, **options):
    stream = BatchStream(
        mixture.lengths_of, mixture.order(seed=5), rule, num_batches=num_batches, **options
    )
    return DataLoader(
        SequenceDataset(mixture, objective=objective, masking=MaskingRule(), seed=5),
        sampler=stream,
        batch_size=None,
        collate_fn=identity,
        num_workers=num_workers,
        multiprocessing_context="forkserver" if num_workers else None,
        prefetch_factor=8 if num_workers else None,
    )


def assert_equal(one: Batch, other: Batch) -> None:
    for field in fields(Batch):
        mine, its = getattr(one, field.name), getattr(other, field.name)
        if field.name == "joined_N":
            # Each rank lists the samples of its own rows.
            mine, its = mine.sort().values, its.sort().values
        is_same = torch.equal(mine, its) if isinstance(mine, torch.Tensor) else mine == its
        assert is_same, field.name


def together(parts: list[Batch]) -> Batch:
    """The global batch of the ranks' slices, without filler rows."""
    merged = {}
    for name in ("tokens_BL", "targets_BL", "mask_BL", "samples_B"):
        rows = torch.stack([getattr(part, name) for part in parts], dim=1).flatten(0, 1)
        filling = torch.stack([part.samples_B for part in parts], dim=1).flatten() == FILLER
        merged[name] = rows[~filling]
    (after,) = {part.after for part in parts}
    joined_N = torch.cat([part.joined_N for part in parts])
    return Batch(**merged, after=after, joined_N=joined_N)


@pytest.mark.parametrize("objective", ["masked", "causal"])
@pytest.mark.parametrize("mode", RULES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_change_nothing(mixture, mode, objective, world_size):
    whole = load(mixture, RULES[mode], objective)
    ranks = [
        load(mixture, RULES[mode], objective, share=RankSlice(rank, world_size))
        for rank in range(world_size)
    ]
    count = 0
    for batch, *parts in zip(whole, *ranks, strict=True):
        assert_equal(together(parts), batch)
        count += 1
    assert count == NUM_BATCHES


# Of a machine with one core.
@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")
@pytest.mark.slow
@pytest.mark.parametrize("mode", RULES)
@pytest.mark.parametrize("num_workers, world_size", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_workers_change_nothing(mixture, mode, num_workers, world_size):
    for rank in range(world_size):
        share = RankSlice(rank, world_size)
        alone = load(mixture, RULES[mode], "masked", share=share)
        helped = load(mixture, RULES[mode], "masked", share=share, num_workers=num_workers)
        for one, other in zip(alone, helped, strict=True):
            assert_equal(one, other)


def test_a_worker_changes_nothing(mixture):
    alone = load(mixture, RULES["sequences"], "masked", num_batches=12)
    helped = load(mixture, RULES["sequences"], "masked", num_batches=12, num_workers=1)
    for one, other in zip(alone, helped, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("mode", RULES)
def test_resuming_changes_nothing(mixture, mode):
    whole = list(load(mixture, RULES[mode], "masked"))
    assert whole[-1].after[0] >= 1
    for done in (1, 7, 8, 23):
        start = Progress(*whole[done - 1].after)
        rest = load(mixture, RULES[mode], "masked", start=start, done=done)
        for one, other in zip(islice(whole, done, None), rest, strict=True):
            assert_equal(one, other)


def test_a_row_does_not_depend_on_its_batch(mixture):
    """The budget determines only which rows are in a batch together."""

    def rows(rule):
        found = {}
        for batch in load(mixture, rule, "masked", num_batches=None):
            tensors = (batch.samples_B, batch.tokens_BL, batch.targets_BL, batch.mask_BL)
            for sample, tokens_L, targets_L, mask_L in zip(*tensors, strict=True):
                row = (tuple(tokens_L[mask_L].tolist()), tuple(targets_L[mask_L].tolist()))
                found.setdefault(int(sample), set()).add(row)
        return found

    rule = RULES["sequences"]
    assert rows(rule) == rows(replace(rule, tokens_per_batch=1_300))


def test_every_pass_is_masked_differently(mixture):
    rule = LengthBuckets(500, 300, window=15)
    seen = {}
    for batch in load(mixture, rule, "masked", num_batches=100):
        for sample, tokens_L in zip(batch.samples_B.tolist(), batch.tokens_BL, strict=True):
            seen.setdefault(sample, []).append(tuple(tokens_L.tolist()))
    many = [rows for rows in seen.values() if len(rows) > 2 and sum(r != 1 for r in rows[0]) > 60]
    assert len(many) > 5
    assert all(len(set(rows)) == len(rows) for rows in many)
