"""BigBird: its visible blocks, limits and memory, and a comparison with Hugging Face."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from protlm.attention import Attention, create
from protlm.attention.ops import block_sparse
from protlm.attention.ops.random_blocks import FixedBlocks, draw_blocks, hash_keys
from protlm.system.errors import UserError

HEADS, HEAD_DIM = 2, 8
ITC = {"block_size": 4, "window_blocks": 3, "global_blocks": 1, "random_blocks": 2}
# From appendix D of the paper, with smaller blocks.
ETC = {"block_size": 4, "global_blocks": 0, "num_global": 6, "random_blocks": 0}


def bigbird(*, seed: int = 1, **options: Any) -> Attention:
    sizes = {"num_heads": HEADS, "head_dim": HEAD_DIM, "model_dim": 16, "max_length": 512}
    return create("bigbird", options, **sizes, seed=seed)


def weights(mechanism: Attention, length: int, *, causal: bool = False, seed: int = 0) -> Tensor:
    """The map of one sequence without padding, HLL; all weights alike where queries are 0."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, HEADS, length, HEAD_DIM, generator=generator, dtype=torch.float64)
    mask_BL = torch.ones(1, length, dtype=torch.bool)
    inputs = {"hidden_BLD": q[:, 0], "mask_BL": mask_BL, "causal": causal}
    return mechanism.attention_map(0 * q, k, **inputs)[0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        # More random blocks than there are: all that are left.
        {"block_size": 8, "random_blocks": 1000},
        {"block_size": 8, "window_blocks": 1, "global_blocks": 0, "random_blocks": 1000},
        {"block_size": 4, "global_blocks": 2, "num_global": 9, "random_blocks": 33},
        # A window over everything.
        {"block_size": 8, "window_blocks": 67, "random_blocks": 0, "global_blocks": 0},
        # One block, and global positions that are all there are.
        {"block_size": 512, "random_blocks": 3},
        {"block_size": 8, "num_global": 200, "random_blocks": 0, "global_blocks": 0},
        {"block_size": 8, "global_blocks": 20, "random_blocks": 0},
    ],
    ids=str,
)
def test_when_all_is_seen_it_is_softmax(
    options: dict[str, Any], causal: bool, make_inputs: Callable[..., Any]
) -> None:
    softmax = create("softmax", {}, num_heads=2, head_dim=8, model_dim=16, max_length=512)
    inputs = make_inputs(130)
    out = inputs.run(bigbird(**options), causal=causal)
    expected = inputs.run(softmax, causal=causal)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [1, 4, 5, 11, 12])
def test_a_sequence_of_few_blocks_sees_all(length: int, make_inputs: Callable[..., Any]) -> None:
    """Without random blocks too: the own block, and the first and the last one."""
    inputs = make_inputs(length)
    softmax = create("softmax", {}, num_heads=2, head_dim=8, model_dim=16, max_length=512)
    out = inputs.run(bigbird(**{**ITC, "random_blocks": 0}), causal=False)
    torch.testing.assert_close(out, inputs.run(softmax, causal=False), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_global", [0, 3, 9])
def test_no_position_counts_twice(num_global: int) -> None:
    """Equal weights are 1 / the number of visible positions, even where the parts overlap."""
    options = {**ITC, "num_global": num_global, "window_blocks": 5, "random_blocks": 4}
    for causal in (False, True):
        map_HLL = weights(bigbird(**options), 101, causal=causal)
        number = (map_HLL > 0).sum(-1, keepdim=True)
        torch.testing.assert_close(map_HLL * number, (map_HLL > 0).double(), rtol=1e-9, atol=1e-9)


def test_a_block_in_the_middle_sees_the_blocks_of_the_paper() -> None:
    """{0, i - 1, i, i + 1, last} and r more; in rows 1 and n - 2 the window has a global block."""
    size, number, num_random = 4, 20, 2
    map_HLL = weights(bigbird(**ITC), size * number)
    seen = map_HLL.unflatten(2, (number, size)).unflatten(1, (number, size)) > 0
    assert torch.equal(seen.any(dim=(2, 4)), seen.all(dim=4).all(dim=2))
    seen_HSS = seen.any(dim=(2, 4))
    assert seen_HSS[:, [0, -1]].all() and seen_HSS[:, :, [0, -1]].all()
    for row in range(1, number - 1):
        fixed = {0, row - 1, row, row + 1, number - 1}
        assert seen_HSS[:, row, sorted(fixed)].all()
        assert seen_HSS[:, row].sum(-1).eq(len(fixed) + num_random).all()


def test_etc_is_a_window_and_global_tokens() -> None:
    map_HLL = weights(bigbird(**ETC), 50)
    position = torch.arange(50)
    is_near_LL = (position[:, None] // 4 - position // 4).abs() <= 1
    is_global = position < 6
    expected_LL = is_near_LL | is_global | is_global[:, None]
    assert torch.equal(map_HLL > 0, expected_LL.expand(HEADS, -1, -1))


def test_global_tokens_are_the_first_true_ones(make_inputs: Callable[..., Any]) -> None:
    inputs = make_inputs(65)
    map_BHLL = bigbird(**ETC).attention_map(
        inputs.q_BHLK,
        inputs.k_BHLK,
        hidden_BLD=inputs.hidden_BLD,
        mask_BL=inputs.mask_BL,
        causal=False,
    )
    for map_HLL, mask_L in zip(map_BHLL, inputs.mask_BL, strict=True):
        first, true = mask_L.nonzero()[:6, 0], mask_L.nonzero()[:, 0]
        assert (map_HLL[:, first][..., true] > 0).all()
        assert (map_HLL[:, true][..., first] > 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_chosen_residues_are_global(causal: bool) -> None:
    """Residue n is position n, after `<cls>`; without others, only windows are seen besides."""
    options = {"block_size": 4, "global_blocks": 0, "random_blocks": 0, "global_positions": [9, 30]}
    map_HLL = weights(bigbird(**options), 40, causal=causal)
    position = torch.arange(40)
    distance_LL = position[:, None] // 4 - position // 4
    expected_LL = (distance_LL <= 2) & (distance_LL >= 0) if causal else distance_LL.abs() <= 1
    expected_LL[[9, 30]] = expected_LL[:, [9, 30]] = True
    if causal:
        expected_LL = expected_LL.tril()
    assert torch.equal(map_HLL > 0, expected_LL.expand(HEADS, -1, -1))
    number = (map_HLL > 0).sum(-1, keepdim=True)
    torch.testing.assert_close(map_HLL * number, (map_HLL > 0).double(), rtol=1e-9, atol=1e-9)


def test_the_causal_window_is_before() -> None:
    map_HLL = weights(bigbird(block_size=4, global_blocks=0, random_blocks=0), 40, causal=True)
    position = torch.arange(40)
    block_distance = position[:, None] // 4 - position // 4
    expected_LL = (block_distance <= 2) & (position <= position[:, None])
    assert torch.equal(map_HLL > 0, expected_LL.expand(HEADS, -1, -1))


@pytest.mark.parametrize(
    "options", [ITC, {**ETC, "random_blocks": 3, "global_positions": [62]}], ids=str
)
def test_a_causal_output_does_not_depend_on_how_much_follows(
    options: dict[str, Any], make_inputs: Callable[..., Any]
) -> None:
    mechanism = bigbird(**options)
    inputs = make_inputs(257).without_padding()
    out = inputs.run(mechanism, causal=True)
    for length in (1, 4, 30, 63, 64, 65, 200):
        prefix = type(inputs)(*(x[..., :length, :] for x in inputs[:4]), inputs.mask_BL[:, :length])
        torch.testing.assert_close(
            prefix.run(mechanism, causal=True), out[:, :, :length], rtol=1e-12, atol=1e-12
        )


def test_global_random_generators_are_not_used() -> None:
    """Hugging Face's BigBird reseeds NumPy in every forward pass of training."""
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()
    first, second = (weights(bigbird(**ITC), 60) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert str(numpy_state) == str(np.random.get_state())
    assert not torch.equal(first, weights(bigbird(**ITC, seed=2), 60))


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_make_no_difference(
    causal: bool, make_inputs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism = bigbird(**ITC, num_global=3)
    results = []
    for elements in (1, 20_000, 1 << 20):
        monkeypatch.setattr(block_sparse, "_CPU_ELEMENTS", elements)
        inputs = make_inputs(130).differentiable()
        out = inputs.run(mechanism, causal=causal)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs[:3])])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_memory_grows_with_the_length_only(
    causal: bool, largest_tensor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_sparse, "_CPU_ELEMENTS", 1 << 14)
    mechanism = bigbird(block_size=16, num_global=5)
    largest = []
    for length in (1024, 2048):
        q, k, v = (torch.randn(1, HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(3))
        mask_BL = torch.arange(length)[None] < length - 7
        largest_tensor.numel = 0
        kept: dict[int, int] = {}

        def keep(x: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with largest_tensor, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = mechanism(q, k, v, hidden_BLD=q[:, 0], mask_BL=mask_BL, causal=causal)
        with largest_tensor:
            out.square().sum().backward()
        largest.append(largest_tensor.numel)
        # The keys and the values of every block would be another 16 times the input.
        assert sum(kept.values()) <= 12 * q.untyped_storage().nbytes()
    assert largest[1] <= 2.1 * largest[0]
    assert largest[1] < 2048**2 / 8


def test_many_small_gradients_add_up_in_bfloat16(
    make_inputs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 128 blocks see the global ones; in bfloat16 small gradients would be lost in the sum."""
    monkeypatch.setattr(block_sparse, "_CPU_ELEMENTS", 1)
    inputs = make_inputs(512).without_padding().to(torch.bfloat16).differentiable()
    exact = inputs.to(torch.float64).differentiable()
    gradients = []
    for each in (inputs, exact):
        out = each.run(bigbird(**ITC), causal=True)
        (dv_BHLC,) = torch.autograd.grad(out, each.v_BHLC, torch.ones_like(out))
        gradients.append(dv_BHLC[:, :, :4].double())
    assert (gradients[0] - gradients[1]).norm() <= 1e-2 * gradients[1].norm()


def test_parts_may_differ_in_dtype_under_autocast(make_inputs: Callable[..., Any]) -> None:
    """Norms leave queries and keys in float32, while values are in bfloat16."""
    inputs = make_inputs(65).with_padding(0.0)
    q, k = (x.float().requires_grad_() for x in inputs[:2])
    v = inputs.v_BHLC.bfloat16().requires_grad_()
    mixed = type(inputs)(q, k, v, *inputs[3:])
    with torch.autocast("cpu", torch.bfloat16):
        out = mixed.run(bigbird(**ITC), causal=False)
    found = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert [x.dtype for x in (out, *found)] == [v.dtype, q.dtype, k.dtype, v.dtype]
    exact = inputs.differentiable()
    exact_out = exact.run(bigbird(**ITC), causal=False)
    wanted = torch.autograd.grad(exact_out, exact[:3], torch.ones_like(exact_out))
    for one, other in zip((out, *found), (exact_out, *wanted), strict=True):
        assert (one - other).norm() <= 2e-2 * other.norm()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "attention.block_size=0 must be at least 1"),
        ({"window_blocks": 2}, "attention.window_blocks=2 must be odd"),
        ({"window_blocks": -1}, "attention.window_blocks=-1 must be odd"),
        ({"global_blocks": -1}, "attention.global_blocks=-1 must be at least 0"),
        ({"num_global": -1}, "attention.num_global=-1 must be at least 0"),
        ({"random_blocks": -2}, "attention.random_blocks=-2 must be at least 0"),
        ({"global_positions": [0]}, "attention.global_positions contains 0"),
        (
            {"window_blocks": 1, "global_blocks": 0, "random_blocks": 0},
            "leaves every block to itself; try attention.window_blocks=3",
        ),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        bigbird(**options)


@pytest.mark.peers
@pytest.mark.parametrize("padding", [0, 3])
def test_it_agrees_with_hugging_face(padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import (
        BigBirdBlockSparseAttention,
        BigBirdModel,
    )

    size, number, num_random = 4, 14, 2
    length = size * number
    config = BigBirdConfig(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        block_size=size,
        num_random_blocks=num_random,
        max_position_embeddings=length,
    )
    peer = BigBirdBlockSparseAttention(config, seed=0).double().eval()
    generator = torch.Generator().manual_seed(0)
    hidden_BLD = torch.randn(2, length, 16, generator=generator, dtype=torch.float64)
    mask_BL = (torch.arange(length) < length - padding).expand(2, -1)
    # In eval mode the library draws nothing: its "random" blocks are all block 0, counted again. In
    # training mode it reseeds NumPy's global generator. So it is given our blocks.
    ours = draw_blocks(
        hash_keys(1, HEADS), torch.full((1, number), number), FixedBlocks(1, 1, 1, 1), num_random
    )
    plan = ours[0, :, 1:-1].numpy()
    monkeypatch.setattr(peer, "_bigbird_block_rand_mask_with_head", lambda **_: list(plan))
    in_blocks, band, from_mask, to_mask = BigBirdModel.create_masks_for_block_sparse_attn(
        mask_BL.double(), size
    )
    expected_BLD, _ = peer(hidden_BLD, band, from_mask, to_mask, in_blocks, in_blocks)
    q, k, v = (
        layer(hidden_BLD).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        for layer in (peer.query, peer.key, peer.value)
    )
    mechanism = bigbird(block_size=size, random_blocks=num_random)
    out_BHLC = mechanism(q, k, v, hidden_BLD=hidden_BLD, mask_BL=mask_BL, causal=False)
    found_BLD = out_BHLC.transpose(1, 2).flatten(2)
    torch.testing.assert_close(found_BLD[mask_BL], expected_BLD[mask_BL], rtol=1e-9, atol=1e-9)
