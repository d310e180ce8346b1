"""Rows of a batch: pure functions of seed, epoch and sample."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from protlm.data.batching import FILLER, BatchPlan, BatchRule, BatchStream, Progress
from protlm.data.dataset import SequenceDataset, collate, cropped
from protlm.data.masking import IGNORE, MaskingRule
from protlm.data.shards import open_split
from protlm.data.vocabulary import VOCABULARY
from protlm.errors import UserError

MAX_LENGTH = 100
MASKING = MaskingRule()


@pytest.fixture
def reader(data_set):
    return open_split(data_set, "train")


def dataset(reader, objective="masked", crop="random", seed=5, masking=MASKING):
    return SequenceDataset(
        reader, objective=objective, masking=masking, max_length=MAX_LENGTH, crop=crop, seed=seed
    )


def identity(batch):
    return batch


def rows(batches):
    """What each sample became, without its padding."""
    found = {}
    for batch in batches:
        parts = zip(batch.samples_B, batch.tokens_BL, batch.targets_BL, batch.mask_BL, strict=True)
        for sample, tokens_L, targets_L, mask_L in parts:
            assert (targets_L[~mask_L] == IGNORE).all()
            assert (tokens_L[~mask_L] == VOCABULARY.pad).all()
            if sample != FILLER:
                assert int(sample) not in found
                found[int(sample)] = (tokens_L[mask_L].tolist(), targets_L[mask_L].tolist())
    return found


def stream(reader, tokens_per_batch=500, **options):
    rule = BatchRule(tokens_per_batch=tokens_per_batch, max_length=MAX_LENGTH, seed=5)
    return BatchStream(reader.lengths, rule, **options)


def plan(*samples, length=MAX_LENGTH, epoch=0):
    return BatchPlan(epoch, np.array(samples), length, Progress(epoch, len(samples)))


def test_a_batch_has_the_shapes_and_types_it_says(reader):
    batch = dataset(reader)[plan(3, 4, FILLER)]
    for tensor, dtype in (
        (batch.tokens_BL, torch.int64), (batch.targets_BL, torch.int64), (batch.mask_BL, torch.bool)
    ):  # fmt: skip
        assert tensor.shape == (3, MAX_LENGTH)
        assert tensor.dtype == dtype
    assert batch.samples_B.tolist() == [3, 4, FILLER]
    assert batch.after == (0, 3)


@pytest.mark.parametrize("objective", ["masked", "causal"])
@pytest.mark.parametrize("crop", ["prefix", "random"])
def test_a_row_is_cls_residues_and_the_true_end(reader, proteins, objective, crop):
    data = dataset(reader, objective, crop, masking=MaskingRule(fraction=1e-9))
    ends = {True: 0, False: 0}
    for epoch in range(20):
        for sample, (_, sequence) in enumerate(proteins):
            batch = data[plan(sample, epoch=epoch)]
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


def test_masked_targets_are_residues_alone(reader):
    data = dataset(reader, masking=MaskingRule(fraction=1))
    batch = data[plan(*range(40))]
    is_target_BL = batch.targets_BL != IGNORE
    num_residues = np.minimum(reader.lengths, MAX_LENGTH - 2)
    assert is_target_BL.sum(1).tolist() == num_residues.tolist()
    assert not is_target_BL[:, 0].any()
    assert VOCABULARY.is_residue[batch.targets_BL[is_target_BL].numpy()].all()
    # What is no target stands as it was.
    assert (batch.tokens_BL[:, 0] == VOCABULARY.cls).all()
    others = batch.tokens_BL[batch.mask_BL & ~is_target_BL].tolist()
    assert set(others) <= {VOCABULARY.cls, VOCABULARY.eos}


def test_causal_targets_are_the_next_tokens(reader):
    batch = dataset(reader, "causal")[plan(*range(40))]
    parts = zip(batch.tokens_BL, batch.targets_BL, batch.mask_BL, strict=True)
    for tokens_L, targets_L, mask_L in parts:
        tokens, targets = tokens_L[mask_L].tolist(), targets_L[mask_L].tolist()
        assert targets == [following for _, following in pairwise(tokens)] + [IGNORE]


def test_a_row_that_fills_up_has_one_token_and_no_target(reader):
    for objective in ("masked", "causal"):
        batch = dataset(reader, objective)[plan(FILLER, length=8)]
        assert batch.tokens_BL.tolist() == [[VOCABULARY.cls] + [VOCABULARY.pad] * 7]
        assert batch.mask_BL.tolist() == [[True] + [False] * 7]
        assert (batch.targets_BL == IGNORE).all()


def test_a_row_does_not_depend_on_batch_rank_or_worker(reader):
    def loaded(num_workers=0, **options):
        loader = DataLoader(
            dataset(reader),
            sampler=stream(reader, **options),
            batch_size=None,
            collate_fn=identity,
            num_workers=num_workers,
            multiprocessing_context="forkserver" if num_workers else None,
        )
        return list(loader)

    expected = rows(loaded())
    assert len(expected) == len(reader)
    assert rows(loaded(tokens_per_batch=3_000)) == expected
    assert rows(loaded(world_size=2) + loaded(world_size=2, rank=1)) == expected
    parallel, alone = loaded(num_workers=2), loaded()
    assert [b.after for b in parallel] == [b.after for b in alone]
    assert all(torch.equal(p.tokens_BL, a.tokens_BL) for p, a in zip(parallel, alone, strict=True))
    assert rows(parallel) == expected


def test_epochs_and_seeds_corrupt_anew(reader):
    def tokens(seed, epoch):
        return dataset(reader, seed=seed)[plan(*range(40), epoch=epoch)].tokens_BL

    assert torch.equal(tokens(5, 0), tokens(5, 0))
    assert not torch.equal(tokens(5, 0), tokens(5, 1))
    assert not torch.equal(tokens(5, 0), tokens(6, 0))


def test_an_unknown_objective_is_refused(reader):
    with pytest.raises(UserError, match="masked or causal"):
        dataset(reader, "denoising")


def test_collate_keeps_whole_sequences():
    sequences = ["MKV", "W", ""]
    tokens_BL, mask_BL = collate([VOCABULARY.encode(sequence) for sequence in sequences])
    assert tokens_BL.shape == mask_BL.shape == (3, 5)
    for tokens_L, mask_L, sequence in zip(tokens_BL, mask_BL, sequences, strict=True):
        assert VOCABULARY.decode(tokens_L[mask_L].numpy()) == f"<cls>{sequence}<eos>"
        assert (tokens_L[~mask_L] == VOCABULARY.pad).all()
    assert collate([VOCABULARY.encode("MKV")], length=64)[0].shape == (1, 64)


def test_cropped_counts_what_the_rows_lack(reader):
    sequences, residues = cropped(reader.lengths, MAX_LENGTH)
    batch = dataset(reader, "causal", "prefix")[plan(*range(40))]
    is_residue_BL = torch.from_numpy(VOCABULARY.is_residue)[batch.tokens_BL]
    assert residues == reader.lengths.sum() - int(is_residue_BL.sum())
    assert sequences == (reader.lengths > MAX_LENGTH - 2).sum() > 0
    assert cropped(reader.lengths, 202) == (0, 0)
