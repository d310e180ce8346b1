"""Softmax under masks that are built from the sets of the papers, and hybrid heads."""

import torch
from torch import Tensor

from tests.attention.cases import (
    NEVER,
    REFERENCES,
    Given,
    Options,
    logits,
    outputs,
    shipped_options,
    visible_softmax,
)


@outputs(
    {"window": 16, "num_global": 0},
    # Residues in the window of the first tokens and far from it, one beyond many samples.
    {
        "window": 10,
        "dilation": 3,
        "dilated_heads": 1,
        "num_global": 2,
        "global_positions": [40, 3, 71],
    },
    further=[
        {"window": 16, "num_global": 3},
        {"window": 150, "num_global": 2},
        # Farther than some samples reach.
        {"window": 4, "dilation": 100, "dilated_heads": 1, "num_global": 0},
    ],
    # Rows of global tokens have their own values, from the hidden input.
    linear=lambda options: options["num_global"] == 0 and not options["global_positions"],
)
def longformer(given: Given) -> Tensor:
    """arXiv 2004.05150, section 3: windows, and rows of global tokens by their own projections."""
    options = given.options
    number_BL = (given.mask_BL.cumsum(1) - 1).masked_fill(~given.mask_BL, -1)
    chosen = [*range(options["num_global"]), *options["global_positions"]]
    is_global_BL = torch.isin(number_BL, torch.tensor(chosen, dtype=torch.int64))
    back, ahead = (options["window"], 0) if given.causal else (options["window"] // 2,) * 2
    steps = [options["dilation"]] * options["dilated_heads"] + [1] * given.q_BHLK.shape[1]
    distance_LL = given.distances()
    in_window_HLL = torch.stack(
        [
            (distance_LL % d == 0) & (distance_LL <= back * d) & (distance_LL >= -ahead * d)
            for d in steps[: given.q_BHLK.shape[1]]
        ]
    )
    among = is_global_BL[:, None, :, None] | is_global_BL[:, None, None] | in_window_HLL
    visible = given.visible() & among
    out_BHLC = visible_softmax(given.logits(), visible) @ given.v_BHLC
    if not chosen:
        return out_BHLC
    own = [
        x + (given.hidden_BLD @ given.tensors[name]).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
        for name, x in zip(("query_global", "key_global", "value_global"), given[:3], strict=True)
    ]
    own_BHLC = visible_softmax(own[0] @ own[1].mT / given.head_dim**0.5, visible) @ own[2]
    return torch.where(is_global_BL[:, None, :, None], own_BHLC, out_BHLC)


@logits(
    # ITC: blocks at both ends are global.
    {"block_size": 8, "random_blocks": 2},
    # All at once, a window that reaches two blocks to either side, and residues in the first block,
    # in a middle one and beyond many samples.
    {
        "block_size": 4,
        "window_blocks": 5,
        "global_blocks": 2,
        "num_global": 13,
        "random_blocks": 5,
        "global_positions": [50, 5, 90],
    },
    further=[
        # ETC: the first tokens are global.
        {"block_size": 8, "global_blocks": 0, "num_global": 11, "random_blocks": 0},
        # Residues alone.
        {"block_size": 8, "global_blocks": 0, "global_positions": [33, 12]},
        # Only the block itself and random ones.
        {"block_size": 16, "window_blocks": 1, "global_blocks": 0, "random_blocks": 3},
    ],
)
def bigbird(given: Given) -> Tensor:
    """arXiv 2007.14062: softmax under a mask that is built from the sets of the paper."""
    keys = given.tensors["hash_key"].tolist()
    samples = [
        torch.stack([sees(key, mask_L, given.options, causal=given.causal) for key in keys])
        for mask_L in given.mask_BL
    ]
    return given.logits().masked_fill(~torch.stack(samples), NEVER)


def hash32(x: int) -> int:
    """The 32-bit hash `prospector32`."""
    x = (x ^ (x >> 15)) * 0x2C1B3C6D % 2**32
    x = (x ^ (x >> 12)) * 0x297A2D39 % 2**32
    return x ^ (x >> 15)


def drawn(key: int, candidates: list[int], size: int) -> set[int]:
    """Floyd's sample of some candidates, all of them if they are few."""
    chosen: set[int] = set()
    for last in range(max(0, len(candidates) - size), len(candidates)):
        turn = last - (len(candidates) - size)
        pick = hash32((key + turn) % 2**32) * (last + 1) // 2**32
        chosen.add(last if pick in chosen else pick)
    return {candidates[number] for number in chosen}


def blocks_seen(key: int, row: int, number: int, options: Options, *, causal: bool) -> set[int]:
    """The blocks that block `row` of a sequence sees: its window, and random ones."""
    first, last = max(options["global_blocks"], options["num_global"] // options["block_size"]), 0
    window = set(range(row - options["window_blocks"] + 1, row + 1))
    if causal:
        number = row + 1
    else:
        last, half = options["global_blocks"], options["window_blocks"] // 2
        window = set(range(row - half, row + half + 1))
    candidates = [block for block in range(first, number - last) if block not in window]
    row_key = hash32((hash32((key + number) % 2**32) + row) % 2**32)
    seen = window | drawn(row_key, candidates, options["random_blocks"])
    return {block for block in seen if block >= 0}


def sees(key: int, mask_L: Tensor, options: Options, *, causal: bool) -> Tensor:
    """Which position sees which in one sample and head, before padding and causality: LL."""
    size, true = options["block_size"], mask_L.nonzero().flatten().tolist()
    number = true[-1] // size + 1 if true else 0
    seen_LL = torch.zeros(len(mask_L), len(mask_L), dtype=torch.bool)
    for row in range(number):
        for block in blocks_seen(key, row, number, options, causal=causal):
            of_keys = slice(block * size, (block + 1) * size)
            seen_LL[row * size : (row + 1) * size, of_keys] = True
    # First tokens and residues, first blocks and, unless causal, last ones.
    ends = options["global_blocks"]
    blocks = {*range(ends), *(range(0) if causal else range(number - ends, number))}
    everyone = {position for position in true if position // size in blocks}
    everyone |= {true[n] for n in options["global_positions"] if n < len(true)}
    everyone |= set(true[: options["num_global"]])
    seen_LL[:, sorted(everyone)] = seen_LL[sorted(everyone)] = True
    return seen_LL


@logits(
    {"chunk": 8, "num_hashes": 1, "num_buckets": 6},
    {"chunk": 8, "num_hashes": 3, "num_buckets": 2, "redraw_every": 10},
    further=[
        {"chunk": 16, "num_hashes": 2, "num_buckets": 1},
        {"chunk": 1, "num_hashes": 2, "num_buckets": 8},
        {"chunk": 24},
    ],
)
def reformer(given: Given) -> Tensor:
    """arXiv 2001.04451, section 2, with chunks counted within buckets.

    One softmax over the positions of all rounds, with unit keys, and self if alone.
    """
    q_BHLK, options = given.q_BHLK, given.options
    seen_BHLL = torch.zeros(*q_BHLK.shape[:3], given.length, dtype=torch.bool)
    # In float32 as in the mechanism: a tie would fall otherwise.
    for rotations_HKR in given.tensors["rotations"].float():
        rotated_BHLR = q_BHLK.detach().float() @ rotations_HKR
        buckets_BHL = torch.cat([rotated_BHLR, -rotated_BHLR], dim=-1).argmax(dim=-1)
        if options["num_buckets"] == 1:
            buckets_BHL = torch.zeros_like(buckets_BHL)
        seen_BHLL |= seen_in_a_round(buckets_BHL, given.mask_BL[:, None], options["chunk"])
    is_self_LL = torch.eye(given.length, dtype=torch.bool)
    seen_BHLL = seen_BHLL & given.visible() & ~is_self_LL
    seen_BHLL = seen_BHLL | (is_self_LL & ~seen_BHLL.any(dim=-1, keepdim=True))
    k_BHLK = q_BHLK / (q_BHLK.square().sum(dim=-1, keepdim=True) + 1e-12).sqrt()
    return (q_BHLK @ k_BHLK.mT).masked_fill(~seen_BHLL, NEVER)


def seen_in_a_round(buckets_BHL: Tensor, is_true_B1L: Tensor, size: int) -> Tensor:
    """Which j is, in the bucket of i, in the chunk of i or in the one before it: BHLL."""
    same_BHLL = (buckets_BHL[..., :, None] == buckets_BHL[..., None, :]) & is_true_B1L[..., None, :]
    chunk_BHL = same_BHLL.tril(-1).sum(dim=-1) // size
    behind_BHLL = chunk_BHL[..., :, None] - chunk_BHL[..., None, :]
    return same_BHLL & ((behind_BHLL == 0) | (behind_BHLL == 1))


@outputs(
    {"window": 16},
    {"window": 150, "options": {"num_features": 20, "kernel_epsilon": 0.25, "redraw_every": 10}},
    {"window": 16, "options": {"decay": "selective"}},
    further=[
        {"window": 16, "mechanism": name, "options": options}
        for name, options in {
            "performer_generalized": {"kernel": "elu", "kernel_epsilon": 0.0, "num_features": None},
            "performer_softmax": {"num_features": 20},
            "rfa": {"gate": True, "num_features": 20},
            "aft_simple": {},
            "linear": {},
            "performer_relu": {"decay": "learned"},
        }.items()
    ],
    linear=lambda options: not options["mechanism"].startswith("aft"),
    # Some sums of RFA are at its floor.
    sums_to_one=lambda options: options["mechanism"] != "rfa",
)
def hybrid(given: Given) -> Tensor:
    """Softmax of a band in the first heads, the linear mechanism in the others."""
    local, name = given.options["local_heads"], given.options["mechanism"]
    reach = given.options["window"] if given.causal else given.options["window"] // 2
    near = given.distances().abs() <= reach
    weights = visible_softmax(given.logits()[:, :local], given.visible() & near)
    others = given._replace(
        **{field: getattr(given, field)[:, local:] for field in ("q_BHLK", "k_BHLK", "v_BHLC")},
        options=shipped_options(name) | given.options["options"],
        tensors={key.removeprefix("linear."): x for key, x in given.tensors.items()},
    )
    return torch.cat([weights @ given.v_BHLC[:, :local], REFERENCES[name].of(others)], dim=1)


@logits({"window": 16}, further=[{"window": 2}, {"window": 150}])
def window(given: Given) -> Tensor:
    """arXiv 2004.05150, section 3.1: half of the window on either side, or all of it before."""
    reach = given.options["window"]
    back, ahead = (reach, 0) if given.causal else (reach // 2, reach // 2)
    distance_LL = given.distances()
    return given.logits().masked_fill((distance_LL > back) | (distance_LL < -ahead), NEVER)
