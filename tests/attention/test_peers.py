"""Mechanisms with the weights of Hugging Face's layers compute what those do."""

from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention import Attention, create, reformer
from protlm.attention.ops.block_sparse import FixedBlocks, draw_blocks, hash_keys

pytestmark = pytest.mark.peers
HEAD_DIM = 8


def made(name: str, options: dict[str, Any], *, num_heads: int = 2) -> Any:
    sizes = {"num_heads": num_heads, "head_dim": HEAD_DIM, "model_dim": num_heads * HEAD_DIM}
    return create(name, options, **sizes, max_length=256, seed=1).double()


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def output(
    mechanism: Attention,
    projections: list[Any],
    hidden_BLD: Tensor,
    mask_BL: Tensor | None = None,
    *,
    causal: bool = False,
) -> Tensor:
    """The output, BLD, for queries, keys and values by the projections of a peer."""
    heads = [x(hidden_BLD).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for x in projections]
    if mask_BL is None:
        mask_BL = torch.ones(hidden_BLD.shape[:2], dtype=torch.bool)
    out_BHLC = mechanism(*heads, hidden_BLD=hidden_BLD, mask_BL=mask_BL, causal=causal)
    return out_BHLC.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("num_global", [0, 1, 5])
@pytest.mark.parametrize("length", [64, 192])
def test_longformer(num_global, length):
    """Theirs accepts multiples of its window only, ours any length."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    torch.manual_seed(0)
    config = LongformerConfig(
        hidden_size=32, num_attention_heads=4, attention_window=[16], num_hidden_layers=1
    )
    theirs = LongformerSelfAttention(config, layer_id=0).double().eval()
    mask_BL = torch.arange(length) < torch.tensor([length, length - 23])[:, None]
    hidden = draw(2, length, 32)
    is_global = torch.arange(length).expand(2, -1) < num_global
    # The library codes padding as -10000, local tokens as 0 and global ones as 10000.
    code = torch.where(mask_BL, 0.0, -10000.0).double().masked_fill(is_global, 10000.0)
    local = [theirs.query, theirs.key, theirs.value]
    own = [theirs.query_global, theirs.key_global, theirs.value_global]
    ours = made("longformer", {"window": 16, "num_global": num_global}, num_heads=4)
    # It scales the output of its query projection in place, which does not allow gradients.
    with torch.no_grad():
        for one, other, weights in zip(local, own, ours.parameters(), strict=False):
            # Our weights are the difference, without a bias.
            other.bias.copy_(one.bias)
            weights.copy_((other.weight - one.weight).mT)
        (expected, *_) = theirs(
            hidden,
            attention_mask=code,
            is_index_masked=~mask_BL,
            is_index_global_attn=is_global,
            is_global_attn=num_global > 0,
        )
        found = output(ours, local, hidden, mask_BL)
    # Its softmax is in float32, whatever its inputs are in.
    torch.testing.assert_close(found[mask_BL], expected[mask_BL], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding", [0, 3])
def test_bigbird(padding, monkeypatch):
    from transformers import BigBirdConfig
    from transformers.models.big_bird import modeling_big_bird as library

    size, number, num_random = 4, 14, 2
    config = BigBirdConfig(
        hidden_size=16,
        num_attention_heads=2,
        block_size=size,
        num_random_blocks=num_random,
        max_position_embeddings=size * number,
    )
    theirs = library.BigBirdBlockSparseAttention(config, seed=0).double().eval()
    hidden_BLD = draw(2, size * number, 16)
    mask_BL = (torch.arange(size * number) < size * number - padding).expand(2, -1)
    # In eval mode the library draws nothing: its "random" blocks are all block 0, counted again. In
    # training mode it reseeds NumPy's global generator. So it is given our blocks.
    blocks = torch.full((1, number), number)
    ours = draw_blocks(hash_keys(1, 2), blocks, FixedBlocks(1, 1, 1, 1), num_random)
    plan = list(ours[0, :, 1:-1].numpy())
    monkeypatch.setattr(theirs, "_bigbird_block_rand_mask_with_head", lambda **_: plan)
    in_blocks, band, *masks = library.BigBirdModel.create_masks_for_block_sparse_attn(
        mask_BL.double(), size
    )
    expected, _ = theirs(hidden_BLD, band, *masks, in_blocks, in_blocks)
    mechanism = made("bigbird", {"block_size": size, "random_blocks": num_random})
    found = output(mechanism, [theirs.query, theirs.key, theirs.value], hidden_BLD, mask_BL)
    torch.testing.assert_close(found[mask_BL], expected[mask_BL], rtol=1e-9, atol=1e-9)


def nystromformers(num_heads: int, conv_kernel: int | None) -> tuple[Any, Any, list[Any]]:
    """Our mechanism, the layer of Hugging Face, and its projections.

    It takes inputs of one length, is exact softmax where there are as many landmarks, and masks
    only one of its three softmaxes, so it is compared without padding.
    """
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    config = NystromformerConfig(
        hidden_size=8 * num_heads,
        num_attention_heads=num_heads,
        num_landmarks=16,
        segment_means_seq_len=64,
        conv_kernel_size=conv_kernel or 1,
        inv_coeff_init_option=False,
    )
    theirs = NystromformerSelfAttention(config).double().eval()
    # Their module works without a convolution, but their config rejects null.
    theirs.conv_kernel_size = conv_kernel
    options = {"num_landmarks": 16, "conv_kernel": conv_kernel}
    ours = made("nystromformer", options, num_heads=num_heads)
    if conv_kernel is not None:
        ours.load_state_dict({"conv_weight": theirs.conv.weight[:, 0, :, 0]})
    return ours, theirs, [theirs.query, theirs.key, theirs.value]


@pytest.mark.parametrize("conv_kernel", [None, 65])
def test_nystromformer(conv_kernel):
    ours, theirs, projections = nystromformers(2, conv_kernel)
    # `inv_coeff_init_option=True`, the start of every matrix by its own norm, ends in a TypeError
    # in their constructor; the missing attributes are set here.
    theirs.init_option = "exact"
    hidden_BLD = 3 * draw(2, 64, 16)
    torch.testing.assert_close(output(ours, projections, hidden_BLD), theirs(hidden_BLD)[0])


def assert_reformers_agree(
    options: dict[str, Any],
    length: int,
    mask_BL: Tensor | None = None,
    *,
    causal: bool,
    buckets: Tensor | None = None,
    **theirs: Any,
) -> None:
    """Compares a Reformer with Hugging Face's.

    It divides keys by √(|q|² + 1e-6 K), so that results differ by some 1e-6.
    """
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    config = ReformerConfig(
        attn_layers=["lsh"],
        hidden_size=16,
        num_attention_heads=2,
        attention_head_size=HEAD_DIM,
        lsh_attention_probs_dropout_prob=0.0,
        is_decoder=causal,
        **theirs,
    )
    torch.manual_seed(0)
    layer = LSHSelfAttention(config).double().eval()
    hidden_BLD = 4 * draw(3, length, 16)
    expected = layer(hidden_BLD, attention_mask=mask_BL, buckets=buckets).hidden_states
    projections = [layer.query_key, layer.query_key, layer.value]
    found = output(made("reformer", options), projections, hidden_BLD, mask_BL, causal=causal)
    is_true_BL = torch.ones(3, length, dtype=torch.bool) if mask_BL is None else mask_BL
    torch.testing.assert_close(found[is_true_BL], expected[is_true_BL], rtol=1e-4, atol=1e-5)


def test_reformer_in_one_bucket_of_several_chunks():
    """Causally only: there the first chunk also sees the last, which only causality hides."""
    # Buckets are numbered through from round to round. With one bucket both rounds are the same,
    # so that it does not matter that pairs that both rounds have are counted twice there.
    buckets = torch.tensor([0, 2]).repeat_interleave(64).expand(3, 2, 128)
    theirs = {"lsh_attn_chunk_length": 16, "num_hashes": 2, "num_buckets": 2}
    options = {"chunk": 16, "num_hashes": 2, "num_buckets": 1}
    assert_reformers_agree(options, 64, causal=True, buckets=buckets, **theirs)


@pytest.mark.parametrize("causal", [False, True])
def test_reformer_with_fixed_buckets(causal, monkeypatch):
    """Rows and columns of a square as the buckets of two rounds.

    In Hugging Face's layer a chunk sees its neighbors regardless of their buckets, and a pair that
    occurs in two rounds counts twice. Therefore each bucket here is one chunk, none looks back, and
    a row and a column have one position in common.
    """
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    buckets_TL = torch.stack([shuffled // 8, shuffled % 8])
    fixed = buckets_TL[:, None, None].expand(-1, 3, 2, -1)
    monkeypatch.setattr(reformer, "hash_buckets", lambda *_: fixed)
    numbered = (buckets_TL + torch.tensor([[0], [8]])).flatten().expand(3, 2, 128)
    theirs = {"lsh_attn_chunk_length": 8, "num_hashes": 2, "num_buckets": 8}
    theirs |= {"lsh_num_chunks_before": 0}
    options = {"chunk": 8, "num_hashes": 2, "num_buckets": 8}
    assert_reformers_agree(options, 64, causal=causal, buckets=numbered, **theirs)
