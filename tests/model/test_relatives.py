"""A network on families: packed, padded, in any order, and after a context that was read before."""

import re
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from protlm.attention.relatives import SeesRelatives
from protlm.bounds import Bounds
from protlm.data.vocabulary import VOCABULARY
from protlm.model.contexts import NetworkInContext, Relative
from protlm.model.transformer import FamilyState, ProteinLM
from protlm.system.errors import UserError
from protlm.training.lora import add_adapters
from tests.model.test_packed import ALIGNED, EXTRAS, gradients, trained
from tests.small_models import network_of

Family = list[Tensor]
LENGTHS = [[9, 40, 12], [7], [33, 10]]
MECHANISMS = ["softmax", "performer_relu", "performer_softmax", "hybrid", ALIGNED]
# A causal model has bounded logits, so that no feature is cut.
SETTINGS = {"positions": "rotary", "qk_norm": True, "output_gate": True, **EXTRAS}


def families(seed: int = 0) -> list[Family]:
    generator = torch.Generator().manual_seed(seed)

    def protein(length: int) -> Tensor:
        residues = torch.randint(4, 24, (length - 2,), generator=generator)
        residues[::7] = VOCABULARY.mask
        ends = torch.tensor([VOCABULARY.cls]), torch.tensor([VOCABULARY.eos])
        return torch.cat([ends[0], residues, ends[1]])

    return [[protein(length) for length in some] for some in LENGTHS]


def network(attention: str = "performer_relu", **relatives: object) -> ProteinLM:
    typed = f"attention={attention}".split()
    return trained(*typed, **{**SETTINGS, **relatives}).double()


def row(some: list[Family], padding: int, running: bool) -> tuple[Tensor, Tensor, Bounds]:
    proteins = [protein for family in some for protein in family]
    spans = [*pairwise(accumulate(map(len, proteins), initial=0))]
    tokens_1L = torch.cat([*proteins, torch.full((padding,), VOCABULARY.pad)])[None]
    sizes = [len(family) for family in some]
    bounds = Bounds.of(spans, (1, tokens_1L.shape[1]), longest=64, families=sizes, running=running)
    return tokens_1L, tokens_1L != VOCABULARY.pad, bounds


def run(
    model: ProteinLM,
    some: list[Family],
    *,
    causal: bool = False,
    padding: int = 0,
    family: FamilyState | None = None,
) -> list[Tensor]:
    """The logits of each protein."""
    tokens_1L, mask_1L, bounds = row(some, padding, model.relatives_positions == "run")
    logits = model(tokens_1L, mask_1L, causal=causal, bounds=bounds, family=family).logits_BLV
    return [logits[0, start:end] for start, end in bounds.spans.tolist()]


def read(
    model: ProteinLM, some: Family, *, causal: bool = False, family: FamilyState | None = None
) -> FamilyState:
    tokens_1L, mask_1L, bounds = row([some], 3, model.relatives_positions == "run")
    return model.read(tokens_1L, mask_1L, causal=causal, bounds=bounds, family=family)


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attention", MECHANISMS)
@pytest.mark.parametrize(
    "relatives",
    [
        {"relatives": "full"},
        {"relatives": "full", "relatives_sum": "apart"},
        {"relatives": "ordered", "relatives_positions": "run"},
        {"relatives": "ordered", "relatives_sum": "apart", "relatives_every": 2},
        {"relatives": "full", "relatives_heads": 2},
    ],
    ids=lambda x: "-".join(map(str, x.values())),
)
def test_a_packed_family_is_as_it_is_alone(attention, relatives):
    if attention == ALIGNED and relatives.get("relatives_positions") == "run":
        relatives = {**relatives, "relatives_positions": "restart"}
    if attention == "softmax" and "relatives_sum" in relatives:
        # It has no form for relatives on both sides apart.
        relatives = {**relatives, "relatives": "ordered"}
    model = network(attention, **relatives)
    packed = run(model, families(), padding=7)
    alone = [one for family in families() for one in run(model, [family])]
    results = (gradients(model, torch.cat(x)) for x in (packed, alone))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    close(packed, alone)


@pytest.mark.parametrize("attention", ["softmax", "performer_relu", ALIGNED])
def test_the_order_of_relatives_has_no_meaning_if_all_see_all(attention):
    model = network(attention, relatives="full")
    first, second, third = families()[0]
    one, two, three = run(model, [[first, second, third]])
    close(run(model, [[third, first, second]]), [three, one, two])


def test_layers_of_the_protein_give_the_result_alone():
    model = network("performer_relu", relatives="full", relatives_every=2)
    # No layer of the family before the last one.
    tokens_1L, mask_1L, bounds = row(families(), 0, False)
    families_or_not = [
        model.hidden_states(tokens_1L, mask_1L, causal=False, layers=[1], bounds=one)[1]
        for one in (bounds, bounds._replace(families=None))
    ]
    assert torch.equal(*families_or_not)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attention", [*MECHANISMS, "performer_softmax attention.decay=selective"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_a_context_is_read_once_for_all_queries(attention, causal, apart, running):
    # Positions that run on are not aligned.
    running, apart = running and attention != ALIGNED, apart or "decay" in attention
    model = network(
        attention,
        relatives="ordered",
        relatives_sum="apart" if apart else "joint",
        relatives_positions="run" if running else "restart",
        relatives_numbers=4,
        # It counts the masked tokens of the whole protein.
        token_dropout=not causal,
    )
    (first, second, query), (other,), _ = families()
    with torch.no_grad():
        whole = run(model, [[first, second, query]], causal=causal)
        state = read(model, [first], causal=causal)
        state = read(model, [second], causal=causal, family=state)
        assert (state.length, state.proteins) == (49, 2)
        found, _ = run(model, [[query], [other]], causal=causal, family=state)
        close([found], [whole[2]])
        # Two queries of one row do not see each other, and the first is the same alone.
        close([found], run(model, [[query]], causal=causal, family=state))
        if not causal:
            return
        after, steps = model.initial_state(state), list[Tensor]()
        for token in query:
            after, logits_BV = model.step(after, token.repeat(2))
            steps.append(logits_BV)
    close([*torch.stack(steps, dim=1)], [whole[2]] * 2)


def test_a_model_trained_alone_starts_unchanged_if_sums_are_apart():
    alone = network("performer_relu")
    model = network("performer_relu", relatives="full", relatives_sum="apart")
    weights = {k: x for k, x in model.state_dict().items() if k.endswith("relatives_factor")}
    model.load_state_dict(
        {**{k: torch.zeros_like(x) for k, x in weights.items()}, **alone.state_dict()}
    )
    assert weights
    found, expected = (run(x, families()) for x in (model, alone))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("attention", ["softmax", "nystromformer", "hybrid"])
def test_heads_of_relatives_are_beside_a_model_of_single_proteins(attention):
    base = {**SETTINGS, "attention_bias": True}
    given = {**base, "relatives": "ordered", "relatives_heads": 3, "relatives_around": 2}
    first, without = (
        network_of(f"attention={attention}", **one).state_dict() for one in (given, base)
    )
    assert all(torch.equal(first[name], x) for name, x in without.items())
    added = [x for name, x in first.items() if name.endswith("relatives.output.weight")]
    assert len(added) == 2 and not torch.cat(added).any()
    alone, model = (network(attention, **one) for one in (base, given))
    first, second, query = families()[0]
    model.load_state_dict({**model.state_dict(), **alone.state_dict()})
    with torch.no_grad():
        found, expected = (run(x, [[first, second, query], [query]]) for x in (model, alone))
    differences = [(one - other).abs().max() for one, other in zip(found, expected, strict=True)]
    # The first protein of a family sees no other.
    assert [float(x) > 0.01 for x in differences] == [False, True, True, False]
    assert differences[0] == differences[3] == 0
    with torch.no_grad():
        state = read(model, [second], family=read(model, [first]))
        close(run(model, [[query]], family=state), found[2:3])
    # Labels are of proteins alone.
    add_adapters(model, rank=1, targets=["query"], seed=0)
    learned = [name for name, x in model.named_parameters() if x.requires_grad]
    assert learned and not any("relatives" in name for name in learned)


@pytest.mark.parametrize("attention", MECHANISMS)
@pytest.mark.parametrize(("relatives", "summed"), [("full", "joint"), ("ordered", "apart")])
def test_checkpoints_change_nothing_and_autocast_only_rounds(attention, relatives, summed):
    def results(dropout: float, recompute: bool, is_mixed: bool) -> list[Tensor]:
        typed = [*f"attention={attention}".split(), f"trainer.activation_checkpointing={recompute}"]
        given = {"relatives": relatives, "relatives_sum": summed, "dropout": dropout}
        model = trained(*typed, **SETTINGS, **given).train()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            logits = torch.cat(run(model, families(), padding=7))
        return gradients(model, logits.float())

    plain, again = (results(0.2, recompute, False) for recompute in (False, True))
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
    exact, mixed = (torch.cat([x.flatten() for x in results(0, x, x)]) for x in (False, True))
    assert (mixed - exact).norm() <= 0.05 * exact.norm()


WINDOW = "window attention.window=8 attention.relatives_window=5"


def test_impossible_settings_are_refused():
    runs = {"relatives_positions": "run"}
    for attention, settings, words in [
        (ALIGNED, runs, "relatives_window=5 is around the same position"),
        ("softmax", {"positions": "relative"}, "model.positions=relative"),
        ("softmax", {"positions": "learned", **runs}, "model.relatives_positions=run"),
        ("softmax", {"relatives_every": 3, "global_every": 2}, "model.relatives_every=3 must be"),
        ("softmax", {"relatives_every": 9}, "no layer sees relatives"),
        (
            "window attention.window=8",
            {},
            "windows with attention.relatives_window; type",
        ),
        (WINDOW, {"relatives_sum": "apart"}, "model.relatives_sum=apart has no effect"),
    ]:
        with pytest.raises(UserError, match=re.escape(words)):
            network(attention, relatives="ordered", **settings)


def in_context(model: ProteinLM, context: Family, tokens_per_batch: int) -> NetworkInContext:
    relatives = [Relative(one[1:-1].numpy(), np.arange(len(one) - 2)) for one in context]
    return NetworkInContext(model, relatives, tokens_per_batch=tokens_per_batch)


@pytest.mark.parametrize("tokens_per_batch", [1, 60, 1000])
@pytest.mark.parametrize("positions", ["restart", "run", "aligned"])
@pytest.mark.parametrize("relatives", ["full", "ordered"])
def test_padded_queries_follow_a_context(relatives, positions, tokens_per_batch):
    model = network("hybrid", relatives=relatives, relatives_positions=positions)
    (first, second, query), (other,), _ = families()
    expected = [run(model, [[first, second, one]])[2] for one in (query, other)]
    tokens_BL = torch.full((2, len(query)), VOCABULARY.pad)
    for own, one in zip(tokens_BL, (query, other), strict=True):
        own[: len(one)] = one
    within = in_context(model, [first, second], tokens_per_batch)
    with torch.no_grad():
        out = within(tokens_BL, tokens_BL != VOCABULARY.pad, causal=False, layers=[1, 2])
    assert out.hidden[1].shape[:2] == tokens_BL.shape
    close([out.logits_BLV[0], out.logits_BLV[1, : len(other)]], expected)
    # Without relatives, a protein is alone.
    alone = in_context(model, [], tokens_per_batch)
    with torch.no_grad():
        logits = alone(query[None], torch.ones(1, len(query)).bool(), causal=False).logits_BLV
    close([logits[0]], run(model, [[query]]))


@pytest.mark.parametrize("relatives", ["full", "ordered"])
@pytest.mark.parametrize(
    ("attention", "given"),
    [
        ("softmax", {}),
        ("performer_softmax", {}),
        ("performer_relu", {"relatives_sum": "apart"}),
        ("hybrid", {}),
        ("hybrid", {"relatives_sum": "apart"}),
        (ALIGNED, {"relatives_sum": "apart"}),
        ("linformer", {"relatives_heads": 3, "relatives_around": 2}),
    ],
)
def test_rows_of_a_map_in_context_are_those_of_the_output(attention, given, relatives):
    settings = {"relatives": relatives, "relatives_every": 2, "output_gate": False}
    model = network(attention, **settings, **given)
    (first, second, query), *_ = families()
    within = in_context(model, [first, second], 100)
    tokens_1L, mask_1L = query[None], torch.ones(1, len(query)).bool()
    kinds: list[bool] = []
    for _, inputs in within.attention_inputs(tokens_1L, mask_1L, causal=False):
        x = inputs.relatives or inputs
        kinds.append(x.view is not None)
        heads = x.q_BHLK, x.k_BHLK, x.v_BHLC
        if x.view is None:
            out = x.mechanism(*heads, x.context)
        else:
            assert isinstance(x.mechanism, SeesRelatives)
            out = x.mechanism.forward_family(heads, x.context, x.view)[0][:, :, x.own :]
        rows = torch.cat([x.map_rows(slice(0, 5)), x.map_rows(slice(5, len(query)))], 2)
        assert rows.shape[-1] == x.own + len(query)
        torch.testing.assert_close(rows @ x.v_BHLC, out, rtol=1e-10, atol=1e-10)
        if inputs.relatives:
            # Of both relatives, the residues that are at most two places away, and nothing else.
            place_LM = torch.cat([torch.arange(len(one)) for one in (first, second)])
            near_LM = (place_LM - torch.arange(len(query))[:, None]).abs() <= 2
            assert torch.equal(rows[0, :, :, : x.own] > 0, near_LM.expand(3, -1, -1))
            assert not rows[..., x.own :].any()
    assert kinds == [False, True]
