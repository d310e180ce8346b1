"""Groups of parameters, AdamW, Muon, learning rates as functions of the step, and the loss."""

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

from protlm.attention import names
from protlm.build import build_module
from protlm.config import (
    DecayShape,
    Optimizer,
    OptimizerConfig,
    Schedule,
    ScheduleConfig,
    TrainConfig,
)
from protlm.config.composition import compose
from protlm.data.masking import IGNORE
from protlm.model import objective
from protlm.model.objective import target_sums
from protlm.model.transformer import build_network
from protlm.system.errors import UserError
from protlm.training.lora import add_adapters
from protlm.training.module import LanguageModeling
from protlm.training.optimization import (
    Muon,
    MuonWithAdamW,
    ParameterKinds,
    adamw,
    build_optimizer,
    check_schedule,
    fitting_warmup,
    rate_factor,
    with_half_life,
)
from tests.fixtures.runs import rows_of
from tests.small_models import network_of

# What activations are not multiplied with as with a matrix.
NEVER_DECAYED = ("gain", "embedding.weight", "positions.table", "norm.weight", ".bias", ".scale")
# Gates, tables of positions and kernels of mechanisms.
OF_MECHANISMS = ("weight", "kernel", "gain", "shift", "scales", "conv_weight")
NEVER_DECAYED += (*(f"mechanism.{name}" for name in OF_MECHANISMS), ".u", ".v")
IN_EVERY_BLOCK = {"query", "key", "value", "output", "up", "down", "gate"}


@pytest.mark.parametrize("name", names())
def test_matrices_decay_and_nothing_else(name):
    made = network_of(f"attention={name}", positions="learned", qk_norm=True)
    kinds = ParameterKinds.of(made)
    listed = {**kinds.hidden, **kinds.matrices, **kinds.rest}
    assert listed.keys() == dict(made.named_parameters()).keys()
    assert len(listed) == len(kinds.hidden) + len(kinds.matrices) + len(kinds.rest)
    assert [rest for rest in kinds.rest if not rest.endswith(NEVER_DECAYED)] == []
    assert not [name for name in (*kinds.hidden, *kinds.matrices) if name.endswith(NEVER_DECAYED)]
    assert "head.weight" in kinds.matrices
    for number in range(2):
        block = {key.split(".")[3] for key in kinds.hidden if key.startswith(f"blocks.{number}.")}
        missing = {"key"} if name == "reformer" else set()
        assert block >= IN_EVERY_BLOCK - missing


@pytest.mark.parametrize("name", Optimizer)
def test_groups_have_the_decay_of_their_kind(name):
    """Adapters decay as matrices do."""
    made, adapted = network_of(), network_of()
    add_adapters(adapted, rank=2, targets=["query"], seed=0)
    config = OptimizerConfig(learning_rate=1e-3, name=name, weight_decay=0.1)
    groups = build_optimizer(made, config).param_groups
    rest = set(map(id, ParameterKinds.of(made).rest.values()))
    found = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert found == {id(p): 0 if id(p) in rest else 0.1 for p in made.parameters()}
    (group,) = build_optimizer(adapted, config).param_groups
    assert group["weight_decay"] == 0.1
    assert sorted(p.shape for p in group["params"]) == sorted([(2, 64), (64, 2)] * 2)


def test_parameters_without_hidden_matrices_have_adamw_alone():
    made = network_of("attention=linformer", max_length=64)
    made.requires_grad_(False)
    for number in (1, 2):
        made.mechanism(number).requires_grad_(True)
    config = OptimizerConfig(learning_rate=1e-3, name=Optimizer.muon)
    groups = build_optimizer(made, config).param_groups
    assert groups and all("betas" in group for group in groups)


@pytest.mark.parametrize("name", Optimizer)
@pytest.mark.parametrize(
    "settings, tokens",
    [
        (["data.tokens_per_batch=5000"], 5_000),
        (["data.tokens_per_batch=5000", "trainer.accumulate_grad_batches=3"], 15_000),
        (["data.tokens_per_batch=5000", "trainer.tokens_per_step=20000"], 20_000),
    ],
)
def test_beta2_forgets_half_after_its_half_life(name, settings, tokens):
    given = [f"optimizer={name}", "optimizer.beta2_half_life=1e6", *settings]
    config = compose(TrainConfig, ["model=tiny", "run_dir=unused", "data.dir=unused", *given])
    module = build_module(build_network(config.model, config.attention, seed=0), config)
    groups = build_optimizer(module.network, module._optimizer).param_groups
    betas = [group["betas"] for group in groups if "betas" in group]
    assert betas
    for beta1, beta2 in betas:
        assert beta1 == config.optimizer.beta1
        assert beta2 ** (1e6 / tokens) == pytest.approx(0.5)


@pytest.mark.parametrize("tokens", [10.0, 1e30])
def test_a_half_life_is_between_one_step_and_what_doubles_can_express(tokens):
    config = OptimizerConfig(learning_rate=1e-3, beta2_half_life=tokens)
    with pytest.raises(UserError, match=r"^optimizer\.beta2_half_life=.* at least a step, 4096,"):
        with_half_life(config, tokens_per_step=4096)
    for steps in (1, 1e12):
        fits = OptimizerConfig(learning_rate=1e-3, beta2_half_life=4096 * steps)
        assert 0.4 < with_half_life(fits, tokens_per_step=4096).beta2 < 1
    unset = OptimizerConfig(learning_rate=1e-3, beta2=0.9)
    assert with_half_life(unset, tokens_per_step=10) is unset


def test_the_fused_optimizer_is_adamw():
    fused, plain = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
    plain.load_state_dict(copy.deepcopy(fused.state_dict()))
    config = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)
    ours = adamw({"weight": fused.weight}, {"bias": fused.bias}, config)
    assert ours.defaults["fused"] is True
    groups = [{"params": [plain.weight]}, {"params": [plain.bias], "weight_decay": 0.0}]
    named = {"betas": (config.beta1, config.beta2), "eps": config.eps, "weight_decay": 0.1}
    theirs = torch.optim.AdamW(groups, lr=1e-2, foreach=False, **named)
    for _ in range(5):
        x = torch.randn(4, 8, dtype=torch.float64)
        for layer, optimizer in ((fused, ours), (plain, theirs)):
            optimizer.zero_grad()
            layer(x).square().sum().backward()
            optimizer.step()
    for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=0)


def test_gradients_are_clipped_but_logged_unclipped(train, look_at):
    norms = []

    def look(module: LanguageModeling, *_: object) -> None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    look_at(LanguageModeling, "lr_scheduler_step", look)
    run = train("run", "trainer.gradient_clip=0.01", "trainer.log_every=1")
    assert norms == pytest.approx([0.01] * 4, rel=1e-3)
    rows = rows_of(run, "gradient_norm")
    assert len(rows) == 4 and min(row["gradient_norm"] for row in rows) > 0.02


@pytest.mark.parametrize("function", [target_sums, objective._sums_everywhere])
def test_loss_is_a_total_over_targets(function):
    """Also as a GPU computes it, at all positions; others have no influence, NaN included."""
    generator = torch.Generator().manual_seed(0)
    logits_BLV = torch.randn(2, 5, 33, generator=generator, dtype=torch.float64)
    logits_BLV[1, 3:] = math.nan
    targets_BL = torch.full((2, 5), IGNORE)
    nothing = function(logits_BLV, targets_BL)
    assert (nothing.nats, nothing.count) == (0, 0)
    best = int(logits_BLV[0, 2].argmax())
    places = ((0, 1, 7), (0, 2, best), (1, 0, 9))
    for b, i, token in places:
        targets_BL[b, i] = token
    sums = function(logits_BLV.requires_grad_(), targets_BL)
    (gradient_BLV,) = torch.autograd.grad(sums.nats, logits_BLV)
    nats, expected_BLV = 0.0, torch.zeros_like(logits_BLV)
    for b, i, token in places:
        p_V = logits_BLV[b, i].detach().softmax(-1)
        nats -= math.log(p_V[token])
        expected_BLV[b, i] = p_V
        expected_BLV[b, i, token] -= 1
    assert (sums.nats.item(), sums.count) == (pytest.approx(nats, rel=1e-6), 3)
    assert sums.correct == sum(int(logits_BLV[b, i].argmax()) == x for b, i, x in places) >= 1
    torch.testing.assert_close(gradient_BLV, expected_BLV, rtol=1e-5, atol=1e-7)


CONFIG = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)


def model_and_optimizer() -> tuple[nn.Sequential, MuonWithAdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3, bias=False))
    matrices = [model[0].weight, model[1].weight]
    muon = Muon(matrices, lr=1e-2, momentum=0.95, weight_decay=0.1)
    return model, MuonWithAdamW([muon, adamw({}, {"bias": model[0].bias}, CONFIG)])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def test_matrices_of_any_shape_and_gradients_of_any_size_are_updated_as_by_torchs_muon():
    """Also those that are orthogonalized together; torch's computes in bfloat16, also on a CPU."""
    torch.manual_seed(0)
    shapes, scales = [(48, 24), (24, 48), (24, 24), (48, 24)], [1.0, 1e-3, 1e3, 1e-3]
    start = [torch.randn(shape) for shape in shapes]
    ours, theirs = ([nn.Parameter(x.clone()) for x in start] for _ in range(2))
    named = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}
    one = Muon(ours, **named)
    others = [torch.optim.Muon([x], **named, adjust_lr_fn="match_rms_adamw") for x in theirs]
    for _ in range(4):
        for mine, other, scale in zip(ours, theirs, scales, strict=True):
            mine.grad = other.grad = scale * torch.randn_like(mine)
        for optimizer in (one, *others):
            optimizer.step()
    for mine, other, before in zip(ours, theirs, start, strict=True):
        assert (mine - other).norm() < 0.03 * (mine - before).norm()


def test_parameters_that_are_not_matrices_are_updated_by_adamw():
    model, optimizer = model_and_optimizer()
    alone = nn.Parameter(model[0].bias.detach().clone())
    other = adamw({}, {"bias": alone}, CONFIG)
    for seed in range(3):
        step(model, optimizer, seed)
        alone.grad = model[0].bias.grad
        other.step()
    assert torch.equal(alone, model[0].bias)
    assert "momentum_buffer" in optimizer.state[model[0].weight]
    assert "exp_avg" in optimizer.state[model[0].bias]


def test_the_closure_is_run_once_and_a_schedule_sets_the_rates_of_both():
    model, optimizer = model_and_optimizer()
    losses = []

    def closure() -> torch.Tensor:
        losses.append(model(torch.ones(2, 6)).sum())
        losses[-1].backward()
        return losses[-1]

    before = [p.detach().clone() for p in model.parameters()]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def wsd(shape: DecayShape = DecayShape.sqrt, **settings: Any) -> ScheduleConfig:
    """A stable rate, and then a decay to 0 if not told otherwise."""
    return ScheduleConfig(Schedule.wsd, decay_shape=shape, **{"min_lr_ratio": 0.0, **settings})


# Schedules, the number of their steps, and factors after some of them.
FACTORS: list[tuple[ScheduleConfig, int, dict[int, float]]] = [
    (ScheduleConfig(Schedule.constant, warmup_steps=10), 110, {109: 1.0}),
    (ScheduleConfig(Schedule.cosine, 10, min_lr_ratio=0.1), 110, {60: 0.55, 110: 0.1}),
    # The rate would reach its minimum after the last step.
    (wsd(DecayShape.linear, warmup_steps=10), 100, {80: 1, 90: 0.5, 99: 0.05, 100: 0}),
    (wsd(warmup_steps=10), 100, {80: 1, 90: 1 - 0.5**0.5, 99: 1 - 0.95**0.5, 100: 0}),
    (wsd(DecayShape.linear, warmup_steps=10, min_lr_ratio=0.1), 100, {100: 0.1}),
    (wsd(warmup_steps=10, min_lr_ratio=0.1), 100, {100: 0.1}),
    # A run can be lengthened before its decay.
    (wsd(warmup_steps=10), 300, {81: 1, 239: 1}),
]


@pytest.mark.parametrize(("config", "max_steps", "expected"), FACTORS)
def test_rates_rise_linearly_to_the_peak_and_fall_as_the_schedule_says(config, max_steps, expected):
    config = dataclasses.replace(config, decay_fraction=0.2)
    factors = [rate_factor(step, config, max_steps=max_steps) for step in range(max_steps + 1)]
    assert factors[:11] == pytest.approx([*((n + 1) / 10 for n in range(10)), 1.0])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert {step: factors[step] for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    "warmup, decay, steps, message",
    [
        (10, None, 10, "warmup_steps=10 .*; type schedule.warmup_steps=1, or"),
        (6, 0.5, 10, "less the 5 steps of the decay; type schedule.warmup_steps=1, or"),
        (100, 0.95, 1000, r"type schedule\.warmup_steps=50, or"),
    ],
)
def test_a_warm_up_longer_than_the_run_is_refused_and_one_that_fits_named(
    warmup, decay, steps, message
):
    config = ScheduleConfig(warmup_steps=warmup)
    if decay is not None:
        config = wsd(warmup_steps=warmup, decay_fraction=decay)
    with pytest.raises(UserError, match=message):
        check_schedule(config, max_steps=steps)
    config.warmup_steps = fitting_warmup(config, max_steps=steps)
    check_schedule(config, max_steps=steps)
