"""Rows of a batch: pure functions of the seed and the data position."""

import re
from itertools import pairwise

import numpy as np
import pytest
import torch

from protlm.data.batching.plan import BatchPlan, Progress
from protlm.data.batching.strategies import PackedRow, SequenceRow
from protlm.data.dataset import FILLER, SequenceDataset, collate
from protlm.data.masking import IGNORE, MaskingRule
from protlm.data.shards.data_set import open_split
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import UserError

MAX_LENGTH = 100
BERT = MaskingRule()
EVERY = MaskingRule(mask_fraction=1)
NONE = MaskingRule(mask_fraction=1e-9)


@pytest.fixture
def reader(data_set):
    return open_split(data_set, "train")


@pytest.fixture
def lengths(proteins):
    return np.array([len(sequence) for _, sequence in proteins])


def dataset(reader, objective="masked", seed=5, masking=BERT):
    return SequenceDataset(reader, objective=objective, masking=masking, seed=seed)


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
    empty = dataset(reader)[plan(None)].joined_N
    assert empty.tolist() == [] and empty.dtype == batch.joined_N.dtype == torch.int64
    assert batch.after == (0, 3, 0)


@pytest.mark.parametrize("objective", ["masked", "causal"])
@pytest.mark.parametrize("crop", ["prefix", "random"])
def test_a_row_is_cls_residues_and_the_true_end(reader, proteins, objective, crop):
    data = dataset(reader, objective, masking=NONE)
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


def test_padding_is_neither_a_token_nor_a_target(reader, lengths):
    batch = dataset(reader, masking=EVERY)[plan(*range(40))]
    assert (batch.tokens_BL[~batch.mask_BL] == VOCABULARY.pad).all()
    assert (batch.targets_BL[~batch.mask_BL] == IGNORE).all()
    # A cropped sequence may lack <eos>.
    num_tokens = batch.mask_BL.sum(1).numpy()
    assert (np.abs(np.minimum(lengths + 2, MAX_LENGTH) - num_tokens) <= 1).all()


def test_masked_targets_are_residues_alone(reader, lengths):
    batch = dataset(reader, masking=EVERY)[plan(*range(40))]
    is_target_BL = batch.targets_BL != IGNORE
    assert is_target_BL.sum(1).tolist() == np.minimum(lengths, MAX_LENGTH - 2).tolist()
    assert not is_target_BL[:, 0].any()
    assert VOCABULARY.is_residue[batch.targets_BL[is_target_BL].numpy()].all()
    # Other tokens are unchanged.
    assert (batch.tokens_BL[:, 0] == VOCABULARY.cls).all()
    others = batch.tokens_BL[batch.mask_BL & ~is_target_BL].tolist()
    assert set(others) <= {VOCABULARY.cls, VOCABULARY.eos}


def stretch(*samples, skip=0, num_tokens=MAX_LENGTH - 1):
    return BatchPlan((PackedRow(0, 0, samples, skip, num_tokens),), MAX_LENGTH, Progress(0, 1))


def test_causal_targets_are_the_next_tokens(reader):
    data = dataset(reader, "causal")
    for batch in (data[plan(*range(40))], data[stretch(3, 4, 5)]):
        parts = zip(batch.tokens_BL, batch.targets_BL, batch.mask_BL, strict=True)
        for tokens_L, targets_L, mask_L in parts:
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


def test_a_filler_row_has_one_token_and_no_target(reader):
    for objective in ("masked", "causal"):
        batch = dataset(reader, objective)[plan(None, length=8)]
        assert batch.tokens_BL.tolist() == [[VOCABULARY.cls] + [VOCABULARY.pad] * 7]
        assert batch.mask_BL.tolist() == [[True] + [False] * 7]
        assert (batch.targets_BL == IGNORE).all()


def test_passes_and_seeds_corrupt_differently(reader):
    def tokens(seed, repeat):
        return dataset(reader, seed=seed)[plan(*range(40), repeat=repeat)].tokens_BL

    assert torch.equal(tokens(5, 0), tokens(5, 0))
    assert not torch.equal(tokens(5, 0), tokens(5, 1))
    assert not torch.equal(tokens(5, 0), tokens(6, 0))


def test_an_unknown_objective_is_rejected(reader):
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
