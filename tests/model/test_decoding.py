"""Decoding: steps equal the parallel form, and samples follow the model and the seed; sweeps."""

from itertools import product
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from protlm.attention import mechanism, names
from protlm.attention.base import Recurrent
from protlm.attention.ops.key_value_cache import KeyValueCache
from protlm.config import NormOrder, Positions
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.model.decoding import STANDARD_TOKENS, Ended, GeneratedSequence, generate, probabilities
from protlm.model.gibbs import resample
from protlm.model.positions import rotate
from protlm.model.selfattention import BoundedNorm, FreeNorm
from protlm.model.transformer import DecodingState, ModelOutput, ProteinLM
from protlm.options.generate import Sampling, Sweeps
from protlm.system.errors import UserError
from tests.marks import slow_but
from tests.model.test_transformer import EXTRAS, trained
from tests.rounding import condition_of, error_bound
from tests.small_models import network_of, random_tokens, small_model

RECURRENT = [name for name in names() if issubclass(mechanism(name), Recurrent)]
RESIDUES = [VOCABULARY[letter] for letter in STANDARD]


def network(attention: str = "performer_relu", **changes: Any) -> ProteinLM:
    return network_of(f"attention={attention}", **changes)


def example(length: int) -> Tensor:
    return random_tokens(length)[0]


@torch.inference_mode()
def stepped(
    model: ProteinLM, tokens_BL: Tensor, state: DecodingState | None = None
) -> tuple[DecodingState, Tensor]:
    """The state after all tokens, and the logits at each."""
    state, logits = model.initial_state() if state is None else state, []
    for tokens_B in tokens_BL.unbind(dim=1):
        state, logits_BV = model.step(state, tokens_B)
        logits.append(logits_BV)
    return state, torch.stack(logits, dim=1)


def stepped_in_turns(model: ProteinLM, tokens_BL: Tensor, rows: Tensor) -> Tensor:
    """The logits of rows of a batch, which are chosen in the middle."""
    middle = tokens_BL.shape[1] // 2
    state, first_BLV = stepped(model, tokens_BL[:, :middle])
    assert state.length == middle
    _, last_BLV = stepped(model, tokens_BL[rows, middle:], state[rows])
    return torch.cat([first_BLV[rows], last_BLV], dim=1)


@torch.inference_mode()
def parallel(model: ProteinLM, tokens_BL: Tensor) -> Tensor:
    """The logits at each position by the causal forward pass."""
    mask_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
    return model(tokens_BL, mask_BL, causal=True).logits_BLV


@torch.inference_mode()
def condition_of_weights(model: ProteinLM, tokens_BL: Tensor) -> float:
    """How many times relative errors of all the weights are in the logits."""
    names, weights = zip(*model.named_parameters(), strict=True)

    def logits(*moved: Tensor) -> list[Tensor]:
        model.load_state_dict(dict(zip(names, moved, strict=True)), strict=False)
        return [parallel(model, tokens_BL)]

    before = [weight.clone() for weight in weights]
    (condition,) = condition_of(logits, before)
    logits(*before)
    return condition


def sampled(model: ProteinLM, number: int, **changes: Any) -> list[GeneratedSequence]:
    """Generated sequences, in order."""
    settings: dict[str, Any] = {"max_residues": 40, "seed": 0, "batch_size": 8, **changes}
    prefix = VOCABULARY.encode(settings.pop("prefix", ""))
    sampling = settings.pop("sampling", Sampling())
    sequences = generate(model, prefix, sampling, number=number, **settings)
    return sorted(sequences, key=lambda sequence: sequence.number)


def bias(model: ProteinLM, tokens: list[int], value: float) -> ProteinLM:
    """Makes tokens more probable at all positions."""
    model.head.bias.data[tokens] += value
    return model


PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "extras": {**EXTRAS, "num_layers": 4, "global_every": 2, "qkv_clip": 0.5},
    # Of imported models.
    "imported": {
        "attention_bias": True,
        "embedding_norm": True,
        "tied_head": True,
        "head": "dense_norm",
        "token_dropout": True,
    },
}


def models() -> list[Any]:
    """Every way to build a model with one mechanism; each way once with every other one."""
    orders = list(NormOrder)
    places = [at for at in Positions if at is not Positions.relative]
    found = list(product(["performer_relu"], places, orders, [False, True], ["plain"]))
    ways = [(at, orders[n % len(orders)], n > 0, "plain") for n, at in enumerate(places)]
    others = [attention for attention in RECURRENT if attention != "performer_relu"]
    found += [(attention, *way) for attention in others for way in ways]
    plain = (Positions.rotary, NormOrder.pre, False)
    found += [(name, *plain, "extras") for name in RECURRENT] + [("softmax", *plain, "imported")]
    found.append(("softmax", Positions.relative, NormOrder.post, True, "plain"))
    fast = [("aft_conv", *plain, "extras"), ("performer_relu", *plain, "plain")]
    return slow_but(found, found[-1], *fast)


@pytest.mark.parametrize(("attention", "positions", "order", "qk_norm", "parts"), models())
def test_steps_are_the_causal_forward_pass(attention, positions, order, qk_norm, parts):
    """Also after samples have left the batch, changed places and were doubled."""
    choices = {"positions": positions, "norm_order": order, "qk_norm": qk_norm}
    model = trained(network(attention, **choices, **PARTS[parts]))
    tokens_BL, rows = example(70 if parts == "plain" else 23), torch.tensor([1, 0, 1])
    low = stepped_in_turns(model, tokens_BL, rows), parallel(model, tokens_BL)[rows]
    model.double()
    expected_BLV = parallel(model, tokens_BL)[rows]
    stepped_BLV = stepped_in_turns(model, tokens_BL, rows)
    torch.testing.assert_close(stepped_BLV, expected_BLV, rtol=1e-10, atol=1e-10)
    # Every product rounds as if its weights were rounded; it is a sum over the width.
    bound = error_bound(torch.float32, condition_of_weights(model, tokens_BL), 64**0.5)
    for logits_BLV in low:
        assert (logits_BLV - expected_BLV).norm() <= bound * expected_BLV.norm()


def test_float64_is_not_rounded_in_between():
    """Otherwise the difference between batch sizes could change a draw."""
    x_BHLK = torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(0)).double() / 3
    no_angle = torch.ones(5, 8), torch.zeros(5, 8)
    assert torch.equal(rotate(x_BHLK, *no_angle), x_BHLK)
    for norm in (BoundedNorm, FreeNorm):
        normed_BHLK = norm(num_heads=2).double()(x_BHLK)
        normed_BHLK = normed_BHLK * (x_BHLK.norm(dim=-1) / normed_BHLK.norm(dim=-1))[..., None]
        torch.testing.assert_close(normed_BHLK, x_BHLK, rtol=1e-12, atol=0)


def test_more_positions_than_the_table_has_are_a_user_error():
    model = network(positions=Positions.learned, max_length=16)
    stepped(model, example(16))
    with pytest.raises(UserError, match="17 positions exceed the 16"):
        stepped(model, example(17))


def logits_like(seed: int, batch: int = 50) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits_BV = 3 * torch.randn(batch, 33, generator=generator, dtype=torch.float64)
    logits_BV[:, 5:9] = -torch.inf
    return logits_BV


GREEDY = {
    "temperature 0": Sampling(0.0),
    "temperature 0 among few": Sampling(0.0, top_k=3, top_p=0.9),
    "the least temperature": Sampling(5e-324),
    "one token": Sampling(top_k=1),
    "one token at a high temperature": Sampling(9.0, top_k=1),
    "next to no mass": Sampling(top_p=1e-9),
}


@pytest.mark.parametrize("case", GREEDY)
def test_the_limits_are_greedy(case):
    logits_BV = logits_like(2)
    best_BV = torch.nn.functional.one_hot(logits_BV.argmax(-1), 33).double()
    torch.testing.assert_close(probabilities(logits_BV, GREEDY[case]), best_BV)


def test_top_k_keeps_k_of_several_equal_tokens():
    found = probabilities(torch.zeros(1, 33, dtype=torch.float64), Sampling(top_k=2))
    assert found[0].tolist() == [0.5, 0.5] + [0.0] * 31


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 2, 7, 29, 33, 500])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.5, 0.9, 0.999, 1.0])
def test_the_most_probable_are_kept_and_the_temperature_divides_logits(top_p, top_k, temperature):
    """Of 29 tokens: the first k of them, and of these the smallest set with the mass p."""
    logits_BV = logits_like(3)
    probable_BV = (logits_BV / temperature).softmax(-1)
    found_BV = probabilities(logits_BV, Sampling(temperature, top_k, top_p))
    first_BK = probable_BV.topk(min(top_k or 29, 29)).values
    for probable, found, first in zip(probable_BV, found_BV, first_BK, strict=True):
        kept = found > 0
        mass = (probable[kept] / first.sum()).sum()
        assert mass >= (top_p or 1) - 1e-12
        assert top_p is not None or kept.sum() == len(first)
        smaller = mass - found[kept].min() * mass
        assert top_p in (None, 1.0) or smaller < top_p, "the set is not the smallest"
        assert probable[kept].min() >= probable[~kept].max()
        torch.testing.assert_close(found, probable * kept / probable[kept].sum())


WRONG: list[tuple[Any, str, list[float]]] = [
    (Sampling, "temperature", [-0.1, np.nan, np.inf]),
    (Sampling, "top_k", [0]),
    (Sampling, "top_p", [0.0, 1.5, np.nan]),
]


@pytest.mark.parametrize(("kind", "setting", "values"), WRONG)
def test_settings_out_of_range_are_a_user_error(kind, setting, values):
    for value in values:
        with pytest.raises(UserError, match=f"{setting}={value} must be"):
            kind(**{setting: value})


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.6, top_k=12)], ids=["plain", "top_k"])
def test_frequencies_are_the_probabilities(sampling):
    """z-scores of 20 counts of 4,000 draws each, after the same prefix."""
    model, number = network(), 4_000
    found = sampled(model, number, prefix="MK", max_residues=3, sampling=sampling, batch_size=2_000)
    tokens_1L = torch.tensor([[VOCABULARY.cls, *VOCABULARY.encode("MK")]])
    logits_1V = parallel(model.double(), tokens_1L)[:, -1]
    allowed = [*RESIDUES, VOCABULARY.eos]
    only_allowed = torch.full_like(logits_1V, -torch.inf)
    only_allowed[:, allowed] = logits_1V[:, allowed]
    expected = probabilities(only_allowed, sampling)[0]
    tokens = [VOCABULARY[s.sequence[2]] if s.num_sampled else VOCABULARY.eos for s in found]
    counts = np.bincount(tokens, minlength=33)
    for token, probability in enumerate(expected.tolist()):
        spread = np.sqrt(number * probability * (1 - probability))
        assert abs(counts[token] - number * probability) <= 4.5 * spread


@pytest.mark.parametrize("attention", slow_but(RECURRENT, "softmax"))
def test_the_batch_size_changes_nothing(attention):
    model = bias(network(attention), [VOCABULARY.eos], -2.0)
    whole = sampled(model, 8, prefix="MK", batch_size=8)
    assert len({s.sequence for s in whole}) == 8
    assert {s.ended for s in whole} == {Ended.eos, Ended.length}
    for number, batch_size in ((3, 1), (8, 5)):
        found = sampled(model, number, prefix="MK", batch_size=batch_size)
        # The sum of nats differs in its last digits, as products of matrices do.
        assert [(s.number, s.sequence, s.ended) for s in found] == [
            (s.number, s.sequence, s.ended) for s in whole[:number]
        ]
        nats = [s.nats for s in whole[:number]]
        assert np.allclose([s.nats for s in found], nats, rtol=1e-12)


def test_a_sequence_depends_on_its_seed_and_number_and_the_model_stays_as_it_is():
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    whole = sampled(model, 8)
    assert sampled(model, 8) == whole
    assert sampled(model, 3, batch_size=3)[2].sequence == whole[2].sequence
    assert not {s.sequence for s in sampled(model, 8, seed=1)} & {s.sequence for s in whole}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.head.weight.dtype == torch.float32


def test_only_standard_residues_are_drawn():
    model = bias(network(), sorted(set(range(33)) - {*RESIDUES, VOCABULARY.eos}), 30.0)
    for sequence in sampled(model, 20, prefix="MXBUZO"):
        assert set(sequence.sequence[6:]) <= set(STANDARD)


def test_a_sequence_has_at_least_one_residue():
    model = bias(network(), [VOCABULARY.eos], 60.0)
    for sequence in sampled(model, 10):
        assert (len(sequence.sequence), sequence.ended) == (1, Ended.eos)
    for sequence in sampled(model, 10, prefix="MK"):
        assert (sequence.sequence, sequence.num_sampled) == ("MK", 0)
        assert np.isnan(sequence.perplexity)


def test_a_sequence_ends_at_the_maximum_length():
    model = bias(network(), [VOCABULARY.eos], 1.0)
    found = sampled(model, 40, prefix="MK", max_residues=12)
    assert {s.ended for s in found} == {Ended.eos, Ended.length}
    for sequence in found:
        assert sequence.sequence.startswith("MK")
        assert sequence.num_sampled == len(sequence.sequence) - 2
        assert (len(sequence.sequence) == 12) == (sequence.ended is Ended.length)


def test_the_probability_is_that_of_the_model():
    """For any sampling, nats are those of the forward pass over the complete sequence."""
    model = network("performer_softmax")
    found = sampled(model, 6, prefix="MKT", sampling=Sampling(0.5, top_k=5))
    model.double()
    for sequence in found:
        tokens = torch.from_numpy(VOCABULARY.encode(sequence.sequence).astype(np.int64))
        logits_1LV = parallel(model, torch.cat([torch.tensor([0]), tokens])[None])
        nats = torch.nn.functional.cross_entropy(logits_1LV[0, 3:-1], tokens[3:], reduction="sum")
        assert sequence.nats == pytest.approx(nats.item(), rel=1e-10)
        assert sequence.perplexity == pytest.approx(np.exp(nats.item() / len(tokens[3:])))


# The joint distribution of two residues that are A or C, and always differ but for a tenth.
JOINT = torch.tensor([[0.05, 0.6], [0.3, 0.05]], dtype=torch.float64)
LETTERS = [VOCABULARY["A"], VOCABULARY["C"]]


class TwoResidues(nn.Module):
    """Predicts a masked residue by the conditionals of `JOINT`, if the other one is visible."""

    vocabulary = VOCABULARY

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1, 1)

    def forward(self, tokens_BL: Tensor, mask_BL: Tensor, *, causal: bool) -> ModelOutput:
        assert not causal
        assert mask_BL.all()
        logits_BLV = torch.full((*tokens_BL.shape, len(VOCABULARY)), -30.0, dtype=torch.float64)
        # A token that is not a residue is the likeliest of all.
        logits_BLV[..., VOCABULARY.eos] = 9.0
        for row, (_, one, other, _) in enumerate(tokens_BL.tolist()):
            assert (one == VOCABULARY.mask) + (other == VOCABULARY.mask) == 1
            if one == VOCABULARY.mask:
                logits_BLV[row, 1, LETTERS] = JOINT[:, LETTERS.index(other)].log()
            else:
                logits_BLV[row, 2, LETTERS] = JOINT[LETTERS.index(one)].log()
        return ModelOutput(logits_BLV, {})


class Recording(nn.Module):
    """Predicts W everywhere, and records the rows that it sees; copies record in one list."""

    vocabulary = VOCABULARY
    seen: ClassVar[list[Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1, 1)
        self.seen.clear()

    def forward(self, tokens_BL: Tensor, mask_BL: Tensor, *, causal: bool) -> ModelOutput:
        self.seen.append(tokens_BL.clone())
        logits_BLV = torch.zeros(*tokens_BL.shape, len(VOCABULARY), dtype=torch.float64)
        logits_BLV[..., VOCABULARY["W"]] = 50.0
        return ModelOutput(logits_BLV, {})


def resampled(
    network: nn.Module,
    starts: list[str],
    sweeps: Sweeps,
    sampling: Sampling = Sampling(),  # noqa: B008
    *,
    seed: int = 0,
    batch_size: int = 64,
) -> list[str]:
    given = (cast("ProteinLM", network), starts, sampling)
    found = dict(resample(*given, sweeps=sweeps, seed=seed, batch_size=batch_size))
    assert sorted(found) == list(range(len(starts)))
    return [found[index] for index in range(len(starts))]


@pytest.mark.slow
def test_known_conditionals_give_their_joint_distribution():
    number = 2000
    found = resampled(TwoResidues(), ["AA"] * number, Sweeps(8, 0.5), batch_size=500)
    pairs = [f"{one}{other}" for one in "AC" for other in "AC"]
    assert set(found) <= set(pairs)
    expected = JOINT.flatten().numpy() / JOINT.sum().item()
    rates = np.array([found.count(pair) / number for pair in pairs])
    # Five standard errors. Residues drawn together would be independent: 0.27 for AA.
    assert np.all(np.abs(rates - expected) < 5 * np.sqrt(expected * (1 - expected) / number))


@pytest.mark.parametrize(
    "fraction, passes", [(0.1, 10), (0.15, 7), (0.5, 2), (1.0, 1), (1e-9, 20), (0.3, 4)]
)
def test_a_sweep_masks_every_residue_once(fraction, passes):
    network = Recording()
    assert resampled(network, [STANDARD, "M"], Sweeps(3, fraction)) == ["W" * 20, "W"]
    assert len(network.seen) == 3 * passes
    # The shorter sequence comes first.
    for sweep in range(3):
        turns = torch.stack(network.seen[sweep * passes : (sweep + 1) * passes])
        is_masked = turns == VOCABULARY.mask
        assert is_masked[:, 1, 1:21].sum(0).tolist() == [1] * 20
        assert is_masked[:, 0].sum(0).tolist() == [0, 1, *[0] * 20]
        assert int(is_masked[:, 1].sum(1).max()) == -(-20 // passes)
    assert network.seen[0][:, 0].tolist() == [VOCABULARY.cls] * 2
    assert network.seen[-1][0, 2:].tolist() == [VOCABULARY.eos, *[VOCABULARY.pad] * 19]


def test_the_draws_depend_on_the_seed_and_not_on_the_batch():
    network = small_model("performer_relu").network.float()
    starts = ["MKTAYIAKQR", "GSHM", "MXBZUO", "MKTAYIAKQR"]
    found = resampled(network, starts, Sweeps(2, 0.3))
    assert found == resampled(network, starts, Sweeps(2, 0.3), batch_size=1)
    assert found[:2] == resampled(network, starts[:2], Sweeps(2, 0.3))
    assert found != resampled(network, starts, Sweeps(2, 0.3), seed=1)
    assert found[0] != found[3]
    assert [len(one) for one in found] == [10, 4, 6, 10]
    assert set("".join(found)) <= set(STANDARD)
    # The network itself stays in float32.
    assert network.embedding.weight.dtype is torch.float32


def test_temperature_0_takes_the_most_probable_residue():
    network = small_model("softmax").network
    (found,) = resampled(network, ["MKTAY"], Sweeps(1, 1.0), sampling=Sampling(temperature=0))
    tokens_BL = torch.full((1, 7), VOCABULARY.mask)
    tokens_BL[0, 0], tokens_BL[0, -1] = VOCABULARY.cls, VOCABULARY.eos
    with torch.no_grad():
        logits_BLV = network(tokens_BL, tokens_BL != VOCABULARY.pad, causal=False).logits_BLV
    best = logits_BLV[0, 1:-1, STANDARD_TOKENS].argmax(-1)
    assert found == "".join(STANDARD[index] for index in best)


def test_slots_after_a_long_context_do_not_double():
    k, v = torch.ones(1, 1, 3_000, 2), torch.ones(1, 1, 3_000, 3)
    cache = KeyValueCache(k, v, 3_000).append(k[:, :, 0], v[:, :, 0], slot=3_000)
    assert 3_000 < cache.slots < 4_100 and cache.length == 3_001
