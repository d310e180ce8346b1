"""Longformer: its limits, windows, global tokens and settings, and a comparison with a peer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from protlm.attention import Attention, create
from protlm.attention.longformer import Longformer
from protlm.composition import compose
from protlm.config import TrainConfig
from protlm.model.network import build_network
from protlm.system.errors import UserError

HEADS, HEAD_DIM, MODEL_DIM = 2, 8, 16


def longformer(*, num_heads: int = HEADS, **options: Any) -> Attention:
    """A small Longformer in float64."""
    sizes = {"num_heads": num_heads, "head_dim": HEAD_DIM, "model_dim": num_heads * HEAD_DIM}
    return create("longformer", options, **sizes, max_length=4096).double()


def with_own_projections(mechanism: Attention, *, seed: int = 0) -> Attention:
    """The same mechanism with projections of the global rows that are far from copies."""
    generator = torch.Generator().manual_seed(seed)
    for weights in mechanism.parameters():
        drawn = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
        weights.data.copy_(0.3 * drawn)
    return mechanism


def map_of(mechanism: Attention, inputs: Any, *, causal: bool) -> Tensor:
    """The mechanism's map."""
    return mechanism.attention_map(
        *inputs[:2], hidden_BLD=inputs.hidden_BLD, mask_BL=inputs.mask_BL, causal=causal
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 40, 257])
@pytest.mark.parametrize("num_global", [0, 1, 5])
def test_a_window_over_everything_is_softmax(
    length: int, causal: bool, num_global: int, make_inputs: Callable[..., Any]
) -> None:
    """With global tokens too: their projections start as copies."""
    inputs = make_inputs(length)
    softmax = create("softmax", {}, num_heads=2, head_dim=8, model_dim=16, max_length=length)
    expected = inputs.run(softmax, causal=causal)
    # One-sided reach L - 1 is enough.
    reach = max(length - 1, 2) if causal else max(2 * length - 2, 2)
    mechanism = longformer(window=reach + reach % 2, num_global=num_global)
    torch.testing.assert_close(inputs.run(mechanism, causal=causal), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_global", [70, 1000])
def test_all_positions_global_is_softmax(
    causal: bool, num_global: int, make_inputs: Callable[..., Any]
) -> None:
    inputs = make_inputs(70)
    softmax = create("softmax", {}, num_heads=2, head_dim=8, model_dim=16, max_length=70)
    mechanism = longformer(window=2, num_global=num_global)
    expected = inputs.run(softmax, causal=causal)
    torch.testing.assert_close(inputs.run(mechanism, causal=causal), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_every_key_counts_once(causal: bool, make_inputs: Callable[..., Any]) -> None:
    """With equal logits all keys that a row sees have the same weight, local or global."""
    inputs = make_inputs(40)
    inputs = inputs._replace(q_BHLK=torch.zeros_like(inputs.q_BHLK))
    whole = map_of(longformer(window=8, num_global=3), inputs, causal=causal)[0, 0]
    for i in range(40):
        reach = range(i - 8, i + 1) if causal else range(i - 4, i + 5)
        keys = {j for j in reach if 0 <= j < 40} | {0, 1, 2}
        if i < 3:
            keys = set(range(i + 1)) if causal else set(range(40))
        expected = torch.zeros(40, dtype=torch.float64)
        expected[sorted(keys)] = 1 / len(keys)
        torch.testing.assert_close(whole[i], expected)
    on_identity = inputs.without_padding()._replace(
        v_BHLC=torch.eye(40, dtype=torch.float64).expand(3, 2, 40, 40)
    )
    local = longformer(window=8, num_global=0)
    torch.testing.assert_close(
        on_identity.run(local, causal=causal), map_of(local, on_identity, causal=causal)
    )


@pytest.mark.parametrize("causal", [False, True])
def test_global_rows_have_their_own_projections(
    causal: bool, make_inputs: Callable[..., Any]
) -> None:
    length, number = 50, 4
    mechanism = with_own_projections(longformer(window=6, num_global=number))
    inputs = make_inputs(length).without_padding().differentiable()
    query, key, value = mechanism.parameters()

    def heads(weights: Tensor) -> Tensor:
        return (inputs.hidden_BLD @ weights).unflatten(-1, (HEADS, -1)).transpose(1, 2)

    own = [x + heads(w) for x, w in zip(inputs[:3], (query, key, value), strict=True)]
    logits = own[0] @ own[1].mT / HEAD_DIM**0.5
    if causal:
        logits = logits.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    expected = (logits.softmax(-1) @ own[2])[:, :, :number]
    out = inputs.run(mechanism, causal=causal)
    torch.testing.assert_close(out[:, :, :number], expected)
    # Other rows do not use them.
    copy = inputs.run(longformer(window=6, num_global=number), causal=causal)
    assert torch.equal(out[:, :, number:], copy[:, :, number:])
    leaves = [*inputs[:4], query, key, value]
    cotangent = torch.randn(expected.shape, dtype=torch.float64)
    found = torch.autograd.grad(out[:, :, :number], leaves, cotangent)
    wanted = torch.autograd.grad(expected, leaves, cotangent)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("causal", [False, True])
def test_a_map_weighs_the_values_of_either_kind(
    causal: bool, make_inputs: Callable[..., Any]
) -> None:
    """Local rows mix v, global rows v'; padding has neither weight nor projection."""
    inputs = make_inputs(60)
    clean = inputs.with_padding(0.0)
    mechanism = with_own_projections(longformer(window=6, num_global=3))
    whole = map_of(mechanism, inputs, causal=causal)
    value = list(mechanism.parameters())[2]
    own = clean.v_BHLC + (clean.hidden_BLD @ value).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    # The first true positions, wherever padding is.
    is_global = inputs.mask_BL & (inputs.mask_BL.cumsum(1) <= 3)
    rows = torch.where(is_global[:, None, :, None], whole @ own, whole @ clean.v_BHLC)
    torch.testing.assert_close(inputs.run(mechanism, causal=causal), rows)
    blocks = [
        mechanism.attention_map(
            *inputs[:2],
            hidden_BLD=inputs.hidden_BLD,
            mask_BL=inputs.mask_BL,
            causal=causal,
            rows=slice(start, start + 25),
        )
        for start in range(0, 60, 25)
    ]
    torch.testing.assert_close(torch.cat(blocks, dim=2), whole)


def test_global_tokens_are_the_first_true_ones(make_inputs: Callable[..., Any]) -> None:
    inputs = make_inputs(60)
    whole = map_of(longformer(window=4, num_global=2), inputs, causal=False)
    # The third sample begins with 12 padded positions.
    assert inputs.mask_BL[2, :13].tolist() == [False] * 12 + [True]
    true = inputs.mask_BL[2]
    for token in (12, 13):
        assert whole[2, 0, token].gt(0).equal(true)
        assert whole[2, 0, :, token].gt(0).equal(true)
    assert whole[2, 0, 14].gt(0).sum() < 10


@pytest.mark.parametrize("causal", [False, True])
def test_chosen_residues_are_global(causal: bool, make_inputs: Callable[..., Any]) -> None:
    """Residue n is the n-th true position after `<cls>`; short samples do not have all of them."""
    inputs = make_inputs(60)
    mechanism = longformer(window=4, num_global=1, global_positions=[40, 9])
    whole = map_of(mechanism, inputs, causal=causal)
    for map_HLL, mask_L in zip(whole, inputs.mask_BL, strict=True):
        true = mask_L.nonzero().flatten()
        for number in (n for n in (0, 9, 40) if n < len(true)):
            position = true[number]
            before, after = true[: number + 1], true[number:]
            assert map_HLL[0, position, before if causal else true].gt(0).all()
            assert map_HLL[0, after if causal else true, position].gt(0).all()
        local = map_HLL[0, true[20]].gt(0).sum()
        # Its window, the first token, residue 9 and, in one sample, residue 40.
        assert local <= (7 if causal else 8)


@pytest.mark.parametrize("wrong", [[0], [-3], [5, 2.5], ["GXSXG"], [True]])
def test_only_residue_numbers_are_global_positions(wrong: list[Any]) -> None:
    with pytest.raises(UserError, match=r"attention\.global_positions contains .* from 1; type"):
        longformer(global_positions=wrong)


def test_layers_may_have_windows_and_dilations_of_different_sizes() -> None:
    config = compose(
        TrainConfig,
        [
            "model=tiny",
            "attention=longformer",
            "attention.window=[4,8]",
            "attention.dilation=[1,3]",
            "attention.dilated_heads=1",
        ],
    )
    network = build_network(config.model, config.attention, seed=0)
    layers = [network.mechanism(number) for number in (1, 2)]
    assert all(isinstance(layer, Longformer) for layer in layers)
    assert [(layer.window, layer.dilation) for layer in layers] == [(4, 1), (8, 3)]


def test_a_list_of_another_length_than_the_layers_is_refused() -> None:
    config = compose(TrainConfig, ["model=tiny", "attention=longformer", "attention.window=[4]"])
    message = r"attention\.window has 1 values, but the model has 2 layers \(model\.num_layers\)"
    with pytest.raises(UserError, match=message):
        build_network(config.model, config.attention, seed=0)


@pytest.mark.parametrize("position", [1, 2, 30])
def test_no_past_row_sees_a_future_hidden_input(
    position: int, make_inputs: Callable[..., Any]
) -> None:
    inputs = make_inputs(50).without_padding()
    mechanism = with_own_projections(longformer(window=6, num_global=3))
    hidden = inputs.hidden_BLD.clone()
    hidden[:, position:] *= -30
    before = inputs.run(mechanism, causal=True)
    after = inputs._replace(hidden_BLD=hidden).run(mechanism, causal=True)
    assert torch.equal(before[:, :, :position], after[:, :, :position])
    assert torch.equal(before, after) == (position >= 3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dilation", [1, 3])
def test_layers_see_as_many_windows_as_they_are(
    causal: bool, dilation: int, make_inputs: Callable[..., Any]
) -> None:
    length, layers, window, position = 200, 3, 10, 100
    mechanism = longformer(
        window=window, dilation=dilation, dilated_heads=2 if dilation > 1 else 0, num_global=0
    )
    inputs = make_inputs(length).without_padding().differentiable()
    x = inputs
    for _ in range(layers):
        x = x._replace(v_BHLC=x.run(mechanism, causal=causal))
    (gradient,) = torch.autograd.grad(x.v_BHLC[0, :, position].sum(), inputs.v_BHLC)
    reached = gradient[0].abs().sum(dim=(0, 2)).nonzero().flatten().tolist()
    steps = layers * window * dilation // (1 if causal else 2)
    last = position if causal else position + steps
    assert reached == list(range(position - steps, last + 1, dilation))


def test_only_the_first_heads_are_dilated(make_inputs: Callable[..., Any]) -> None:
    inputs = make_inputs(30).without_padding()
    whole = map_of(
        longformer(window=4, dilation=5, dilated_heads=1, num_global=0), inputs, causal=False
    )
    assert whole[0, 0, 15].nonzero().flatten().tolist() == [5, 10, 15, 20, 25]
    assert whole[0, 1, 15].nonzero().flatten().tolist() == [13, 14, 15, 16, 17]


@pytest.mark.parametrize("causal", [False, True])
def test_memory_grows_with_the_length_only(causal: bool, largest_tensor: Any) -> None:
    mechanism = longformer(window=128, dilation=2, dilated_heads=1).float()
    sizes = []
    for length in (1024, 4096):
        q, k, v = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
        hidden_BLD = torch.randn(1, length, 16, requires_grad=True)
        mask_BL = torch.arange(length)[None] < length - 7
        largest_tensor.numel = 0
        with largest_tensor:
            out = mechanism(q, k, v, hidden_BLD=hidden_BLD, mask_BL=mask_BL, causal=causal)
            out.square().sum().backward()
        sizes.append(largest_tensor.numel)
    assert sizes[0] < 1024 * 256
    assert sizes[1] <= 4.2 * sizes[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1}, r"attention\.window=-1 must be even and at least 2"),
        ({"window": 7}, r"attention\.window=7 must be even"),
        ({"dilation": 0}, r"attention\.dilation=0 must be at least 1"),
        ({"dilated_heads": -1, "dilation": 2}, r"attention\.dilated_heads=-1 must be between 0"),
        ({"dilated_heads": 3, "dilation": 2}, r"attention\.dilated_heads=3 .* the 2 heads"),
        ({"dilation": 2}, r"attention\.dilation=2 with attention\.dilated_heads=0 dilates nothing"),
        ({"num_global": -1}, r"attention\.num_global=-1 must be 0 or more"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        longformer(**options)


def test_without_global_tokens_there_are_no_parameters() -> None:
    assert not list(longformer(num_global=0).parameters())
    assert [p.shape for p in longformer(num_global=2).parameters()] == [(16, 16)] * 3
    assert all(p.eq(0).all() for p in longformer(num_global=2).parameters())


@pytest.mark.peers
@pytest.mark.parametrize("num_global", [0, 1, 5])
@pytest.mark.parametrize("length", [64, 192])
def test_it_is_the_longformer_of_hugging_face(num_global: int, length: int) -> None:
    """With the same weights; it accepts multiples of its window only, ours any length."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    torch.manual_seed(0)
    config = LongformerConfig(
        hidden_size=32, num_attention_heads=4, attention_window=[16], num_hidden_layers=1
    )
    theirs = LongformerSelfAttention(config, layer_id=0).double().eval()
    mask_BL = torch.ones(2, length, dtype=torch.bool)
    mask_BL[1, length - 23 :] = False
    hidden = torch.randn(2, length, 32, dtype=torch.float64)
    is_global = torch.arange(length).expand(2, -1) < num_global
    # The library codes padding as -10000, local tokens as 0 and global ones as 10000.
    code = torch.where(mask_BL, 0.0, -10000.0).double().masked_fill(is_global, 10000.0)
    pairs = [
        (theirs.query, theirs.query_global),
        (theirs.key, theirs.key_global),
        (theirs.value, theirs.value_global),
    ]
    ours = longformer(num_heads=4, window=16, num_global=num_global)
    # It scales the output of its query projection in place, which does not allow gradients.
    with torch.no_grad():
        for (local, own), weights in zip(pairs, ours.parameters(), strict=False):
            # Our weights are the difference, without a bias.
            own.bias.copy_(local.bias)
            weights.copy_((own.weight - local.weight).mT)
        (expected, *_) = theirs(
            hidden,
            attention_mask=code,
            is_index_masked=~mask_BL,
            is_index_global_attn=is_global,
            is_global_attn=num_global > 0,
        )
        q, k, v = (local(hidden).unflatten(-1, (4, 8)).transpose(1, 2) for local, _ in pairs)
        out = ours(q, k, v, hidden_BLD=hidden, mask_BL=mask_BL, causal=False)
    out_BLD = out.transpose(1, 2).flatten(2)
    # Its softmax is in float32, whatever its inputs are in.
    torch.testing.assert_close(out_BLD[mask_BL], expected[mask_BL], rtol=1e-5, atol=1e-6)
