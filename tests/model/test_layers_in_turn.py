"""Models whose layers have mechanisms in turn, `attention=alternating`, by layer and as a whole."""

from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protlm.attention import mechanism
from protlm.attention.layers import attention_label, meaning, option_differences
from protlm.bounds import Bounds
from protlm.build import describe
from protlm.checkpoints.format import Checkpoint, export
from protlm.config import Objective, TrainConfig
from protlm.config.composition import compose
from protlm.conversion import convert
from protlm.loading import load_model, model_of
from protlm.model.selfattention import FreeNorm, NormsByKind
from protlm.model.transformer import build_network
from protlm.system.errors import InputDataError, UserError
from tests.attention.cases import Given, find_case
from tests.model.test_decoding import parallel, stepped_in_turns
from tests.model.test_layers import by_pairs
from tests.model.test_transformer import EXTRAS, logits, trained
from tests.small_models import network_of, random_tokens

# The mechanisms of 4 layers, the last of which begins the pattern anew, and the options of one.
LOCAL = (["window", "window", "hybrid", "window"], "window", 6)
CONTROL = (["hybrid", "hybrid", "softmax", "hybrid"], "hybrid", 4)
PATTERNS = pytest.mark.parametrize("pattern", [LOCAL, CONTROL], ids=["local", "control"])


def typed(layers: list[str], name: str, window: int) -> list[str]:
    names = f"attention.layers=[{','.join(layers[:3])}]"
    return ["attention=alternating", names, f"+attention.options.{name}.window={window}"]


def alternating(*settings: str, **model: Any) -> Any:
    """A model of 4 layers in float64."""
    made = network_of("attention=alternating", *settings, **{"num_layers": 4, **model})
    return trained(made.double())


def checkpoint(*settings: str) -> Checkpoint:
    """An untrained model of 4 layers, as it is read from a file."""
    settings = ("model=tiny", "model.num_layers=4", "run_dir=run", *settings)
    config = compose(TrainConfig, ["attention=alternating", *settings])
    weights = build_network(config.model, config.attention, seed=1).state_dict()
    return Checkpoint(Path("x"), describe(config), weights)


def by_hand(
    model: Any, pattern: Any, tokens_BL: Tensor, causal: bool, position_L: Tensor, base: float
) -> Tensor:
    """The logits by the formulas of the papers, in O(L²) and one layer after the other.

    Each second layer has a rotary base.
    """

    def normed(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    layers, changed, window = pattern
    w, mask_BL = model.state_dict(), tokens_BL != 1
    x = w["embedding.weight"][tokens_BL]
    for n, name in enumerate(layers):
        at = {key.removeprefix(f"blocks.{n}."): value for key, value in w.items()}
        h = normed(x) * at["attention_norm.weight"]
        q, k, v = (
            (h @ at[f"attention.{part}.weight"].T).unflatten(-1, (2, -1)).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        case = find_case(name, **{"window": window} if name == changed else {})
        q, k = (by_pairs(one, position_L, base if n % 2 else 1e4) for one in (q, k))
        given = Given(q, k, v, h, mask_BL, causal, case.options, {})
        mixed_BLHC = case.reference.of(given).transpose(1, 2)
        x = x + mixed_BLHC.flatten(2) @ at["attention.output.weight"].T
        h = normed(x) * at["feedforward_norm.weight"]
        gate, up, down = (at[f"feedforward.{part}.weight"].T for part in ("gate", "up", "down"))
        x = x + (h @ gate * (h @ gate).sigmoid() * (h @ up)) @ down
    return normed(x) * w["final_norm.weight"] @ w["head.weight"].T + w["head.bias"]


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize(("every", "base"), [(0, 1e4), (2, 50.0)], ids=["one base", "two bases"])
@PATTERNS
def test_a_model_is_the_formulas_of_its_layers_in_turn(pattern, every, base, causal):
    """All heads of a layer have its rotary base."""
    model = alternating(*typed(*pattern), global_every=every, global_base=base)
    tokens_BL, _ = random_tokens(31)
    tokens_BL[1, 19:] = 1
    given = pattern, tokens_BL, causal, torch.arange(31), base
    expected = by_hand(model, *given)[tokens_BL != 1]
    found = logits(model, tokens_BL, tokens_BL != 1, causal=causal)[tokens_BL != 1]
    # Tables of angles are in float32.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_family_is_the_formulas_at_the_columns_of_its_proteins():
    """Which repeat and jump; also in windows, which see the protein alone."""
    model = alternating(*typed(*CONTROL), relatives="full", relatives_positions="aligned")
    # Tokens and columns of three proteins.
    lengths, generator = [11, 9, 13], torch.Generator().manual_seed(0)
    columns = torch.randint(20, (33,), generator=generator).split(lengths)
    both_2L = torch.stack([random_tokens(33)[0][0], torch.cat([x.sort().values for x in columns])])
    spans = [*pairwise(accumulate(lengths, initial=0))]
    bounds = Bounds.of(spans, (1, 33), longest=13, families=[3], aligned=both_2L[1].numpy())
    # Padding keeps windows from other proteins.
    apart_2L = torch.cat([F.pad(x, (0, 5), value=1) for x in both_2L.split(lengths, dim=1)], dim=1)
    expected = by_hand(model, CONTROL, apart_2L[:1], False, apart_2L[1], 1e4)
    found = model(both_2L[:1], both_2L[:1] > 0, causal=False, bounds=bounds).logits_BLV[0]
    torch.testing.assert_close(found, expected[apart_2L[:1] != 1], rtol=1e-5, atol=1e-5)


@PATTERNS
def test_decoding_is_the_forward_pass_of_all_layers(pattern):
    model, tokens_BL = alternating(*typed(*pattern), **EXTRAS), random_tokens(29)[0]
    rows = torch.tensor([1, 0, 1])
    decoded = stepped_in_turns(model, tokens_BL, rows)
    torch.testing.assert_close(decoded, parallel(model, tokens_BL)[rows], rtol=1e-9, atol=1e-9)


def test_a_saved_model_has_its_pattern_and_the_maps_of_each_layer(tmp_path):
    original = checkpoint(*typed(*LOCAL), "+attention.options.hybrid.options.decay=selective")
    export(original, tmp_path / "new")
    model = load_model(tmp_path / "new")
    described = model.description
    assert (described, model.hash) == (original.description, model_of(original).hash)
    label = attention_label(described.attention_config)
    assert label == "alternating [window,window,hybrid with selective decay]"
    maps = model.attention_maps(model.tokenize(["MKTAYIAKQRQISFVKSHFSRQ"]))
    far = torch.ones(24, 24).tril(-4).bool()
    for layer, name in enumerate(LOCAL[0], start=1):
        torch.testing.assert_close(maps[layer].sum(-1), torch.ones(1, 2, 24))
        assert (maps[layer][0, 1][far] == 0).all() == (name == "window")
    weight, other = "the weight of value j in output i", mechanism("hybrid").map_meaning
    means = f"in layers of window, {weight}; in layers of hybrid, {other}"
    assert meaning(described.attention_config, 4) == means
    options = {**described.attention_options, "layers": [["window"], 7]}
    broken = replace(original, description=replace(described, attention_options=options))
    with pytest.raises(InputDataError, match=r"impossible model: attention.layers=.* contains"):
        model_of(broken)


def test_parameters_are_shared_by_mechanism_and_options_and_norms_are_of_a_layer():
    model = alternating("attention.layers=[softmax,linformer]", num_layers=5, max_length=48)
    tables = {id(p) for n, p in model.named_parameters(remove_duplicate=False) if "mechanism" in n}
    assert (len(tables), model.max_length, alternating().max_length) == (1, 48, None)
    windows = "+attention.options.longformer.window=[2,4,6,8]"
    model = alternating("attention.layers=[longformer,hybrid]", windows, qk_norm=True)
    assert [model.mechanism(number).window for number in (1, 3)] == [2, 6]
    norms = [type(block.attention.query_norm) for block in model.blocks]
    assert norms == [FreeNorm, NormsByKind] * 2


REFUSED = [
    ("layers=[]", "attention.layers=[] is empty; give a list of mechanisms: aft_conv"),
    ("layers=[window,sotfmax]", "attention.layers=[window,sotfmax] contains sotfmax; give a list"),
    ("layers=[alternating]", "attention.layers=[alternating] contains alternating; give a list"),
    ("layers=window", "attention.layers=window must be a list"),
    ("layers=[window,window,window,window,hybrid]", "attention.layers has 5 mechanisms, but the "),
    ("options.softmax.bounded_qk_norm=true", "attention.options.softmax has no effect with "),
    ("options.window=8", "attention.options.window=8 must be a group of settings"),
    ("options.window.window=7", "attention.options.window.window=7 must be even and at least 2"),
    ("options.hybrid.options.num_features=0", "attention.options.hybrid.options.num_features=0 mu"),
    ("options.hybrid.mechanism=softmax", "attention.options.hybrid.mechanism=softmax is not a l"),
    ("window=8", "attention.window is not a setting of alternating; it has: layers, options"),
]


@pytest.mark.parametrize(("setting", "sentence"), REFUSED)
def test_impossible_patterns_are_refused(setting, sentence):
    added = "" if setting.startswith("layers") else "+"
    with pytest.raises(UserError) as error:
        alternating(f"{added}attention.{setting}")
    assert str(error.value).startswith(sentence)


def test_patterns_are_compared_by_what_their_layers_compute():
    plain, turned = ({"layers": layers} for layers in (["window", "hybrid"], ["hybrid", "window"]))
    same = {**plain, "options": {"window": {"window": 256}, "hybrid": {"local_heads": 1}}}
    other = {**plain, "options": {"hybrid": {"local_heads": 2}}}
    assert option_differences("alternating", plain, same) == []
    assert option_differences("alternating", other, same) == [("options.hybrid.local_heads", 2, 1)]
    (difference,) = option_differences("alternating", plain, turned)
    assert difference == ("layers", plain["layers"], turned["layers"])


def test_a_model_is_converted_to_a_pattern_and_back():
    original = checkpoint("attention=softmax", "model.qk_norm=true")
    pattern = {"name": "alternating", "layers": ["window", "softmax"], "options": {}}
    done = convert(original, pattern, seed=None)
    back = convert(done.checkpoint, {"name": "softmax"}, seed=None)
    assert (done.initialized, done.left_out, back.initialized) == ((), (), ())
    assert all(torch.equal(back.checkpoint.weights[n], x) for n, x in original.weights.items())
    decaying = checkpoint("attention=performer_relu", "attention.decay=selective")
    settings = {**decaying.description.attention_config, "kernel_epsilon": 1}
    wider = convert(decaying, settings, seed=7)
    assert attention_label(settings) == "performer_relu with selective decay"
    assert (wider.initialized, wider.left_out) == ((), ())
    assert all(torch.equal(wider.checkpoint.weights[n], x) for n, x in decaying.weights.items())
    described = replace(original.description, objective=Objective.causal)
    causal = replace(original, description=described)
    for start, layers, sentence in (
        (done.checkpoint, ["window", "softmax"], "already has attention=alternating with these"),
        (done.checkpoint, ["window", "reformer"], "the keys of reformer are its queries"),
        (causal, ["window", "linformer"], "attention.layers=linformer does not support objective"),
    ):
        with pytest.raises(UserError, match=sentence):
            convert(start, {**pattern, "layers": layers}, seed=None)


def test_a_pattern_with_one_mechanism_that_cannot_decode_does_not_generate():
    found = checkpoint("attention.layers=[window,reformer]", "objective=causal")
    with pytest.raises(UserError, match=r"attention.layers=reformer cannot generate one residue"):
        next(model_of(found).generate(1))
    with pytest.raises(UserError, match="a pattern of mechanisms; choose"):
        mechanism("alternating")
