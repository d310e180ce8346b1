"""The Reformer compared with shared-QK softmax, the paper's sum over rounds, and a peer."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention import create, reformer
from protlm.attention.ops import lsh
from protlm.system.errors import UserError

SIZES = {"num_heads": 2, "head_dim": 8, "model_dim": 16}
ONE_BUCKET = {"chunk": 300, "num_hashes": 2, "num_buckets": 1}


def mechanism(*, seed: int = 1, max_length: int = 256, **options: Any) -> Any:
    """A small Reformer."""
    return create("reformer", options, **SIZES, max_length=max_length, seed=seed)


def attend(made: Any, q_BHLK: Tensor, v_BHLC: Tensor, *, causal: bool = False) -> Tensor:
    """The output without padding."""
    mask_BL = torch.ones(q_BHLK.shape[0], q_BHLK.shape[2], dtype=torch.bool)
    return made(q_BHLK, q_BHLK, v_BHLC, hidden_BLD=q_BHLK[:, 0], mask_BL=mask_BL, causal=causal)


def map_of(made: Any, q_BHLK: Tensor, *, causal: bool = False) -> Tensor:
    """The map without padding."""
    mask_BL = torch.ones(q_BHLK.shape[0], q_BHLK.shape[2], dtype=torch.bool)
    return made.attention_map(
        q_BHLK, q_BHLK, hidden_BLD=q_BHLK[:, 0], mask_BL=mask_BL, causal=causal
    )


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def shared_softmax_map(q_BHLK: Tensor, seen_BHLL: Tensor) -> Tensor:
    """Computes softmax(q·k), k = q/|q|, over the visible keys, or the position itself if none."""
    length = q_BHLK.shape[2]
    self_LL = torch.eye(length, dtype=torch.bool)
    others_BHLL = seen_BHLL & ~self_LL
    logits_BHLL = q_BHLK @ torch.nn.functional.normalize(q_BHLK, dim=-1).mT
    # As in the paper: far below all visible logits, far above the hidden ones.
    logits_BHLL = logits_BHLL.where(others_BHLL, -1e30).masked_fill(self_LL, -1e5)
    return logits_BHLL.softmax(dim=-1)


def fix_buckets(patch: pytest.MonkeyPatch, buckets: list[list[int]]) -> None:
    """Puts every position of every head into the bucket that a list has for it, by round."""

    def fixed(x_BHLK: Tensor, *_: Any) -> Tensor:
        return torch.tensor(buckets)[:, None, None].expand(-1, *x_BHLK.shape[:2], -1)

    patch.setattr(reformer, "hash_buckets", fixed)


@pytest.mark.parametrize("num_buckets", [1, None])
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_chunk_for_all_is_shared_query_key_softmax(
    is_causal: bool, num_buckets: int | None
) -> None:
    options = {**ONE_BUCKET, "num_buckets": num_buckets}
    q_BHLK, v_BHLC = 2 * normal(2, 2, 257, 8), normal(2, 2, 257, 5, seed=1)
    visible_LL = torch.ones(257, 257, dtype=torch.bool)
    if is_causal:
        visible_LL = visible_LL.tril()
    expected = shared_softmax_map(q_BHLK, visible_LL.expand(2, 2, 257, 257)) @ v_BHLC
    outputs = [
        attend(mechanism(**options, seed=seed).double(), q_BHLK, v_BHLC, causal=is_causal)
        for seed in (1, 2)
    ]
    torch.testing.assert_close(outputs[0], expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(*outputs), "hashes matter in a single bucket"


def test_the_logit_is_the_length_of_the_query_times_the_cosine() -> None:
    q_BHLK = torch.tensor([[3.0, 4.0], [0.5, 0.0], [0.0, 2.0]])[None, None].expand(1, 2, 3, 2)
    made = create("reformer", ONE_BUCKET, num_heads=2, head_dim=2, model_dim=4, max_length=8)
    # For the first, of length 5: cosines 0.6 and 0.8 give logits 3 and 4.
    expected = torch.tensor([0.0, 3.0, 4.0]).exp() * torch.tensor([0.0, 1.0, 1.0])
    torch.testing.assert_close(map_of(made, q_BHLK)[0, 0, 0], expected / expected.sum())


def test_a_position_sees_itself_only_as_a_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    # Position 4 is alone in the first round only; 7 is alone in both.
    fix_buckets(monkeypatch, [[0, 0, 0, 0, 1, 0, 0, 2], [0, 1, 0, 1, 1, 0, 0, 2]])
    q_BHLK = 50 * normal(1, 2, 8, 8)
    weights_BHLL = map_of(mechanism(num_hashes=2).double(), q_BHLK)
    diagonal_BHL = weights_BHLL.diagonal(dim1=-2, dim2=-1)
    assert diagonal_BHL[..., 7].eq(1).all()
    assert diagonal_BHL[..., :7].eq(0).all()
    causal_BHLL = map_of(mechanism(num_hashes=2).double(), q_BHLK, causal=True)
    assert causal_BHLL[..., 0, 0].eq(1).all()
    assert causal_BHLL.diagonal(dim1=-2, dim2=-1)[..., 1:7].eq(0).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_fixed_buckets_make_a_known_mask(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its bucket, in its chunk and the one before; the first chunk does not see the last."""
    # Three chunks of two in bucket 0, two in bucket 1, one in bucket 2.
    fix_buckets(monkeypatch, [[0, 0, 1, 0, 1, 0, 0, 1, 0, 2]])
    chunks = {0: (0, 0), 1: (0, 0), 3: (0, 1), 5: (0, 1), 6: (0, 2), 8: (0, 2)}
    chunks |= {2: (1, 0), 4: (1, 0), 7: (1, 1), 9: (2, 0)}
    seen_LL = torch.zeros(10, 10, dtype=torch.bool)
    for i, (bucket, chunk) in chunks.items():
        for j, its in chunks.items():
            seen_LL[i, j] = its in {(bucket, chunk), (bucket, chunk - 1)}
    assert not seen_LL[0, 6], "this case has no chunk beyond the neighbors"
    if is_causal:
        seen_LL = seen_LL.tril()
    q_BHLK = normal(1, 2, 10, 8)
    found = map_of(mechanism(chunk=2, num_hashes=1).double(), q_BHLK, causal=is_causal)
    expected = shared_softmax_map(q_BHLK, seen_LL.expand(1, 2, 10, 10))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rounds_add_up_as_in_the_paper(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ_r exp(z_r - z) o_r, with log N_ij taken off a pair that N_ij rounds have (eq. 6, app. A).

    Not a mean of the rounds, as elsewhere.
    """
    rounds, length = 3, 60
    generator = torch.Generator().manual_seed(0)
    buckets_TL = torch.randint(4, (rounds, length), generator=generator)
    fix_buckets(monkeypatch, buckets_TL.tolist())
    q_BHLK, v_BHLC = 2 * normal(2, 2, length, 8), normal(2, 2, length, 5, seed=1)
    # No bucket has more than 60: one chunk.
    seen_TLL = buckets_TL[:, :, None] == buckets_TL[:, None]
    if is_causal:
        seen_TLL = seen_TLL.tril()
    seen_TLL &= ~torch.eye(length, dtype=torch.bool)
    count_LL = seen_TLL.sum(dim=0)
    assert count_LL.max() == rounds
    logits_BHLL = q_BHLK @ torch.nn.functional.normalize(q_BHLK, dim=-1).mT - count_LL.log()
    z_TBHL = torch.stack([logits_BHLL.where(seen, -torch.inf).logsumexp(-1) for seen in seen_TLL])
    z_BHL = z_TBHL.logsumexp(dim=0)
    expected = torch.zeros_like(v_BHLC)
    for z_round_BHL, seen_LL in zip(z_TBHL, seen_TLL, strict=True):
        weights_BHLL = (logits_BHLL - z_round_BHL[..., None]).exp().where(seen_LL, 0)
        expected += (z_round_BHL - z_BHL).exp()[..., None] * (weights_BHLL @ v_BHLC)
    has_any_L = count_LL.sum(dim=-1) > 0
    out = attend(mechanism(num_hashes=rounds).double(), q_BHLK, v_BHLC, causal=is_causal)
    torch.testing.assert_close(out[:, :, has_any_L], expected[:, :, has_any_L])


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_same_round_again_changes_nothing(
    is_causal: bool, make_inputs: Callable[..., Any]
) -> None:
    inputs = make_inputs(130)
    options = {"chunk": 8, "num_buckets": 4}
    once = mechanism(num_hashes=1, **options).double()
    thrice = mechanism(num_hashes=3, **options).double()
    thrice.rotations.copy_(once.rotations.expand_as(thrice.rotations))
    expected, found = (inputs.run(made, causal=is_causal) for made in (once, thrice))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_more_rounds_come_nearer_to_all_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(24, 8, generator=generator, dtype=torch.float64)
    which = torch.randint(24, (1, 2, 256), generator=generator)
    q_BHLK = 2 * centers[which] + 0.3 * normal(1, 2, 256, 8, seed=1)
    v_BHLC = normal(1, 2, 256, 5, seed=2)
    exact = attend(mechanism(**ONE_BUCKET).double(), q_BHLK, v_BHLC)

    def error(num_hashes: int) -> float:
        options = {"chunk": 32, "num_buckets": 16, "num_hashes": num_hashes}
        outputs = [
            attend(mechanism(**options, seed=seed).double(), q_BHLK, v_BHLC) for seed in range(5)
        ]
        return sum(float((out - exact).norm() / exact.norm()) for out in outputs) / 5

    errors = [error(num_hashes) for num_hashes in (1, 2, 4, 8)]
    assert all(after < 0.85 * before for before, after in pairwise(errors))


def test_keys_that_are_passed_are_not_read(make_inputs: Callable[..., Any]) -> None:
    inputs, made = make_inputs(40), mechanism(chunk=8)
    without_keys = inputs._replace(k_BHLK=torch.full_like(inputs.k_BHLK, torch.nan))
    assert made.shares_query_key
    expected, found = (x.run(made, causal=False) for x in (inputs, without_keys))
    assert torch.equal(found, expected)


def test_a_query_of_zero_has_a_finite_gradient() -> None:
    q_BHLK = normal(1, 2, 20, 8).float()
    q_BHLK[:, :, 3] = 0
    q_BHLK.requires_grad_()
    attend(mechanism(**ONE_BUCKET), q_BHLK, normal(1, 2, 20, 5).float()).square().sum().backward()
    assert q_BHLK.grad is not None
    assert q_BHLK.grad.isfinite().all()


def test_autocast_changes_nothing() -> None:
    q_BHLK, v_BHLC = 2 * normal(1, 2, 130, 8).float(), normal(1, 2, 130, 5).float()
    made = mechanism(chunk=8)
    results = []
    for is_enabled in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q_BHLK, v_BHLC)]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
            out = attend(made, *leaves, causal=False)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_float16_does_not_overflow() -> None:
    q_BHLK, v_BHLC = 30 * normal(1, 2, 130, 8), normal(1, 2, 130, 5)
    made = mechanism(chunk=8)
    out = attend(made, q_BHLK.half(), v_BHLC.half(), causal=True)
    assert out.dtype == torch.float16
    expected = attend(made, q_BHLK.half().double(), v_BHLC.half().double(), causal=True)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)


def test_forward_leaves_the_global_generator_alone(make_inputs: Callable[..., Any]) -> None:
    before = torch.get_rng_state()
    made = mechanism(redraw_every=5)
    made.redraw(1)
    make_inputs(40).run(made, causal=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_redraw_is_a_pure_function_of_seed_and_index_in_place() -> None:
    one, other = mechanism(redraw_every=5), mechanism(redraw_every=5)
    first, storage = one.rotations.clone(), one.rotations.data_ptr()
    one.redraw(3)
    assert not torch.equal(one.rotations, first)
    for index in (5, 3):
        other.redraw(index)
    assert torch.equal(one.rotations, other.rotations)
    one.redraw(0)
    assert torch.equal(one.rotations, first)
    assert one.rotations.data_ptr() == storage


@pytest.mark.parametrize("num_buckets", [32, None])
@pytest.mark.parametrize("is_causal", [False, True])
def test_memory_grows_with_the_length_only(
    is_causal: bool, num_buckets: int | None, largest_tensor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lsh, "_CPU_NUMBERS", 2**14)
    sizes = []
    for length in (1024, 2048):
        q_BHLK, v_BHLC = (normal(1, 2, length, 8, seed=s).float().requires_grad_() for s in (0, 1))
        made = mechanism(chunk=16, num_buckets=num_buckets, max_length=length)
        largest_tensor.numel = 0
        with largest_tensor:
            attend(made, q_BHLK, v_BHLC, causal=is_causal).square().sum().backward()
        sizes.append(largest_tensor.numel)
    assert sizes[1] <= 2.2 * sizes[0]
    assert sizes[1] < 2 * 2048 * 128


@pytest.mark.parametrize(
    ("max_length", "chunk", "num_buckets"),
    [(64, 64, 1), (65, 64, 2), (512, 64, 8), (1024, 64, 16), (1000, 64, 14), (3, 1, 2)],
)
def test_there_is_about_one_bucket_for_each_chunk_of_the_longest_input(
    max_length: int, chunk: int, num_buckets: int
) -> None:
    made = mechanism(max_length=max_length, chunk=chunk)
    assert made.num_buckets == num_buckets
    assert made.rotations.shape == (4, 2, 8, (num_buckets + 1) // 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 0}, "attention.chunk=0 must be at least 1; type attention.chunk=64"),
        ({"num_hashes": 0}, "attention.num_hashes=0 must be at least 1"),
        ({"num_buckets": 0}, "attention.num_buckets=0 must be 1 or an even number"),
        ({"num_buckets": -2}, "attention.num_buckets=-2 must be 1 or an even number"),
        ({"num_buckets": 7}, "attention.num_buckets=7 must be 1 or an even number"),
        ({"redraw_every": 0}, "attention.redraw_every=0 must be at least 1"),
    ],
)
def test_impossible_settings_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mechanism(**options)


class Peer:
    """Hugging Face's layer and its output for a random input.

    It divides keys by √(|q|² + 1e-6 K), so that results differ by some 1e-6.
    """

    def __init__(self, *, length: int, is_causal: bool, chunk: int, **options: Any) -> None:
        from transformers import ReformerConfig
        from transformers.models.reformer.modeling_reformer import LSHSelfAttention

        config = ReformerConfig(
            attn_layers=["lsh"],
            hidden_size=16,
            num_attention_heads=2,
            attention_head_size=8,
            lsh_attn_chunk_length=chunk,
            lsh_attention_probs_dropout_prob=0.0,
            is_decoder=is_causal,
            **options,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = LSHSelfAttention(config).double().eval()
        self.hidden_BLD = 4 * normal(3, length, 16)
        self.is_causal = is_causal

    def assert_agrees(self, made: Any, *, mask_BL: Tensor | None = None, **options: Any) -> None:
        """Compares a mechanism on the peer's queries and values."""
        q_BHLK, v_BHLC = (
            projection(self.hidden_BLD).unflatten(-1, (2, 8)).transpose(1, 2)
            for projection in (self.layer.query_key, self.layer.value)
        )
        expected = self.layer(self.hidden_BLD, attention_mask=mask_BL, **options).hidden_states
        is_true_BL = torch.ones(q_BHLK.shape[0], q_BHLK.shape[2], dtype=torch.bool)
        if mask_BL is not None:
            is_true_BL = mask_BL
        found = made.double()(
            q_BHLK,
            q_BHLK,
            v_BHLC,
            hidden_BLD=self.hidden_BLD,
            mask_BL=is_true_BL,
            causal=self.is_causal,
        )
        found_BLD = found.transpose(1, 2).flatten(2)
        torch.testing.assert_close(
            found_BLD[is_true_BL], expected[is_true_BL], rtol=1e-4, atol=1e-5
        )


@pytest.mark.peers
@pytest.mark.parametrize("is_causal", [False, True])
def test_in_one_chunk_it_is_hugging_face_s(is_causal: bool) -> None:
    mask_BL = torch.arange(50) < torch.tensor([50, 37, 2])[:, None]
    peer = Peer(length=50, is_causal=is_causal, chunk=64)
    peer.assert_agrees(mechanism(**ONE_BUCKET), mask_BL=mask_BL)


@pytest.mark.peers
def test_in_one_bucket_of_several_chunks_it_is_hugging_face_s() -> None:
    """Causally only: there the first chunk also sees the last, which only causality hides."""
    peer = Peer(length=64, is_causal=True, chunk=16, num_hashes=2, num_buckets=2)
    # Buckets are numbered through from round to round. With one bucket both rounds are the same,
    # so that it does not matter that pairs that both rounds have are counted twice there.
    buckets = torch.tensor([0, 2]).repeat_interleave(64).expand(3, 2, 128)
    peer.assert_agrees(mechanism(chunk=16, num_hashes=2, num_buckets=1), buckets=buckets)


@pytest.mark.peers
@pytest.mark.parametrize("is_causal", [False, True])
def test_with_fixed_buckets_it_is_hugging_face_s(
    is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and columns of a square as the buckets of two rounds.

    In Hugging Face's layer a chunk sees its neighbors regardless of their buckets, and a pair that
    occurs in two rounds counts twice. Therefore each bucket here is one chunk, none looks back, and
    a row and a column have one position in common.
    """
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    buckets_TL = torch.stack([shuffled // 8, shuffled % 8])
    fix_buckets(monkeypatch, buckets_TL.tolist())
    peer = Peer(
        length=64,
        is_causal=is_causal,
        chunk=8,
        num_hashes=2,
        num_buckets=8,
        lsh_num_chunks_before=0,
    )
    numbered = (buckets_TL + torch.tensor([[0], [8]])).flatten().expand(3, 2, 128)
    peer.assert_agrees(mechanism(chunk=8, num_hashes=2, num_buckets=8), buckets=numbered)
