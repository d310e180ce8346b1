"""Hashing by angle, and the layout of buckets in chunks."""

import pytest
import torch
from torch import Tensor

from protlm.attention.reformer import Layout, draw_rotations, hash_buckets, lay_out, most_chunks

SIZES = {"num_hashes": 3, "num_heads": 2, "head_dim": 8, "num_buckets": 6}


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_buckets(rounds: int, number: int, num_buckets: int, *, seed: int = 0) -> Tensor:
    """Buckets of very different sizes; some positions have none."""
    generator = torch.Generator().manual_seed(seed)
    likely = torch.rand(num_buckets + 1, generator=generator).pow(3)
    draws = torch.multinomial(likely, rounds * number, replacement=True, generator=generator)
    return draws.view(rounds, number)


def test_the_bucket_is_the_nearest_rotation_or_its_negative() -> None:
    x_BHLK, rotations_THKR = vectors(2, 2, 20, 8), draw_rotations(0, 0, **SIZES)
    found = hash_buckets(x_BHLK, rotations_THKR, 6)
    assert found.shape == (3, 2, 2, 20)
    for round_ in range(3):
        for sample in range(2):
            for head in range(2):
                rotated = x_BHLK[sample, head].double() @ rotations_THKR[round_, head]
                expected = torch.cat([rotated, -rotated], dim=-1).argmax(dim=-1)
                assert torch.equal(found[round_, sample, head], expected)
    assert set(found.unique().tolist()) == set(range(6))


def chunks_of(layout: Layout, number: int) -> list[list[list[int]]]:
    """What each chunk of each round holds."""
    rounds = layout.positions.tolist()
    return [[[p for p in chunk if p < number] for chunk in chunks] for chunks in rounds]


def expected_chunks(buckets: Tensor, num_buckets: int, size: int) -> list[list[int]]:
    """The chunks of one round, by going through the buckets."""
    members = [
        [p for p, its in enumerate(buckets.tolist()) if its == bucket]
        for bucket in range(num_buckets)
    ]
    return [its[start : start + size] for its in members for start in range(0, len(its), size)]


@pytest.mark.parametrize("size", [1, 4, 7, 100])
@pytest.mark.parametrize("number", [1, 5, 64, 90])
def test_chunks_are_filled_bucket_by_bucket_in_order(number: int, size: int) -> None:
    buckets = random_buckets(3, number, 5)
    layout = lay_out(buckets, num_buckets=5, size=size)
    for held, its_buckets in zip(chunks_of(layout, number), buckets, strict=True):
        assert held[0] == []
        chunks = expected_chunks(its_buckets, 5, size)
        assert held[1 : 1 + len(chunks)] == chunks
        assert not any(held[1 + len(chunks) :])
    flat = layout.positions.flatten(1)
    has_slot = buckets < 5
    every = torch.arange(number).expand(3, -1)
    assert torch.equal(flat.gather(1, layout.slots)[has_slot], every[has_slot])
    assert not layout.slots[~has_slot].any()


@pytest.mark.parametrize(("number", "num_buckets", "size"), [(50, 5, 8), (3, 9, 4), (64, 1, 8)])
def test_no_buckets_need_more_than_the_most_chunks(
    number: int, num_buckets: int, size: int
) -> None:
    most = most_chunks(number, num_buckets=num_buckets, size=size)
    for seed in range(50):
        buckets = random_buckets(1, number, num_buckets, seed=seed)
        assert len(expected_chunks(buckets[0], num_buckets, size)) <= most
    # The worst: one in each bucket, and all others in the first.
    worst = torch.arange(number).where(torch.arange(number) < num_buckets, 0)
    assert len(expected_chunks(worst, num_buckets, size)) == most
