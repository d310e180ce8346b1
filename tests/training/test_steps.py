"""A step: its size and gradient on any number of ranks; optimizers, learning rates and the loss."""

import dataclasses
import json
import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from protlm.attention import names
from protlm.build import build_data, build_training
from protlm.checkpoints.validations import read_metrics
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
from protlm.model.objective import target_sums
from protlm.system.errors import UserError
from protlm.training.lora import add_adapters
from protlm.training.module import LanguageModeling
from protlm.training.optimization import (
    Muon,
    MuonWithAdamW,
    ParameterKinds,
    adamw,
    build_optimizer,
    with_half_life,
)
from protlm.training.run_plan import RunPlan
from protlm.training.schedule import check_schedule, fitting_warmup, rate_factor
from tests.fixtures.commands import run_python
from tests.fixtures.runs import Train, rows_of, weights_of
from tests.small_models import network_of

PROGRAM = Path(__file__).parent / "programs" / "gradients_of_ranks.py"
STEP = (
    "trainer.tokens_per_step=2048",
    "trainer.log_every=1",
    "trainer.valid_every=3",
    "trainer.max_steps=6",
    "attention=performer_softmax",
    "attention.num_features=32",
    "attention.redraw_every=2",
    "model.qk_norm=true",
)


@pytest.fixture(scope="module")
def at_once(train_tiny: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "at_once"
    return train_tiny(run, *STEP, "data.tokens_per_batch=2048")


def test_slices_of_a_batch_draw_their_own_dropout(train, look_at):
    drawn = []
    look_at(
        *(LanguageModeling, "training_step"),
        lambda _, batch, *rest: drawn.append((batch.micro_batch, torch.initial_seed())),
        after=True,
    )
    train("run", *STEP, "data.tokens_per_batch=700", "trainer.max_steps=2")
    assert [number for number, _ in drawn] == [0, 1, 2, 3] * 2
    assert len({seed for _, seed in drawn}) == len(drawn)


@pytest.mark.slow
def test_any_micro_batches_make_the_same_steps_also_in_a_resumed_run(at_once, train, tmp_path):
    run = tmp_path / "run"
    # 700 does not divide a step: there are more micro-batches, and filler rows.
    train(run, *STEP, "data.tokens_per_batch=700", "trainer.max_steps=2")
    # Six micro-batches: Lightning's count of batches is not a multiple of both.
    train(run, *STEP, "data.tokens_per_batch=410", "trainer.max_steps=4")
    train(run, *STEP, "data.tokens_per_batch=2048")
    for column in ("step", "samples", "train_loss", "gradient_norm"):
        values = ([row[column] for row in rows_of(one, "train_loss")] for one in (run, at_once))
        assert next(values) == pytest.approx(next(values), rel=1e-5), column
    # Runs of two and of four steps also validate at their ends.
    expected, found = (
        {row["step"]: row["valid_loss"] for row in rows_of(one, "valid_loss")}
        for one in (at_once, run)
    )
    assert [found[step] for step in (3, 6)] == pytest.approx([expected[3], expected[6]], rel=1e-5)
    torch.testing.assert_close(weights_of(run), weights_of(at_once), rtol=0, atol=2e-6)


def test_accumulated_gradients_are_those_of_all_targets_at_once(train, tiny_data):
    given = [f"data.dir={tiny_data}", "data.max_length=128", "data.tokens_per_batch=1024"]
    config, network = compose(TrainConfig, given), network_of()
    loader = build_data(RunPlan(config)).train_dataloader()
    nats, count = torch.zeros(()), 0
    for _, batch in zip(range(3), loader, strict=False):
        logits = network(batch.tokens_BL, batch.mask_BL, causal=False).logits_BLV
        chosen = batch.targets_BL >= 0
        nats = nats + torch.nn.functional.cross_entropy(
            logits[chosen], batch.targets_BL[chosen], reduction="sum"
        )
        count += int(chosen.sum())
    (nats / count).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in network.parameters()])
    settings = ("trainer.accumulate_grad_batches=3", "trainer.log_every=1", "trainer.max_steps=2")
    first = read_metrics(train("run", *settings) / "metrics.csv")[0]
    assert first["gradient_norm"] == pytest.approx(expected.item(), rel=1e-4)
    assert first["train_loss"] == pytest.approx(nats.item() / count, rel=1e-5)


@pytest.mark.parametrize("mode", ["sequences", "concatenated"])
@pytest.mark.parametrize("tokens", [128, 190, 300, 410, 700])
def test_a_micro_batch_of_the_longest_rows_holds_at_most_its_tokens(mode, tokens, tiny_data):
    settings = [f"data.dir={tiny_data}", "data.max_length=128", f"data.mode={mode}"]
    settings += ["trainer.tokens_per_step=1024", f"data.tokens_per_batch={tokens}"]
    config = compose(TrainConfig, settings)
    batches = build_data(RunPlan(config)).train_dataloader()
    shapes = [batch.mask_BL.shape for batch in islice(batches, 60)]
    sizes = [rows * length for rows, length in shapes if length == 128]
    assert sizes and max(sizes) <= tokens


FIRST_STEP = ("data.max_length=256", "schedule.warmup_steps=0", "trainer.max_steps=1")
TAUGHT = (
    "objective=distillation attention=hedgehog objective.teacher={teacher} "
    "model.init_from={swapped}"
)
# Numbers of ranks and of micro-batches, for each thing that is learned.
DIVIDED = {
    "masks": ("attention=softmax objective.mask_fraction=0.03", [(1, 1), (1, 4), (2, 2)]),
    "packed": (
        "data.batching=packed data.tokens_per_row=512 attention=hybrid model.convolution=5 "
        "model.token_dropout=true",
        [(1, 1), (1, 4), (2, 1), (3, 1)],
    ),
    "relatives": (
        "data.batching=relatives data.dir={clusters} data.tokens_per_row=512 attention=hybrid "
        "attention.relatives_window=4 model.relatives_sum=apart model.relatives_every=2 "
        "model.relatives=ordered model.relatives_positions=aligned",
        [(1, 1), (1, 4), (2, 1), (3, 1)],
    ),
    "attention": (f"{TAUGHT} optimizer.learning_rate=1e-2", [(1, 1), (2, 1)]),
    "logits": (f"{TAUGHT} objective.stage=logits optimizer.learning_rate=5e-3", [(1, 1), (2, 1)]),
}


@pytest.mark.slow
def test_ranks_and_micro_batches_have_the_same_gradient(
    tiny_settings, one_process, teacher, swapped, tiny_clusters, tmp_path
):
    """Few targets are masked, and very different numbers of targets per row."""
    runs = [
        (f"{name}-{ranks}-{parts}", ranks, parts, [*tiny_settings, *FIRST_STEP, *settings.split()])
        for name, (text, divided) in DIVIDED.items()
        for settings in [text.format(teacher=teacher, swapped=swapped, clusters=tiny_clusters)]
        for ranks, parts in divided
    ]
    run_python(PROGRAM, json.dumps(runs), cwd=tmp_path, env=one_process)
    for name, (_, divided) in DIVIDED.items():
        whole, *others = (torch.load(tmp_path / f"{name}-{r}-{p}.pt") for r, p in divided)
        assert whole.norm() > 0
        for gradient in others:
            assert (gradient - whole).norm() <= 1e-7 * whole.norm(), name


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
    module = build_training(RunPlan(config))
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


@pytest.mark.parametrize("on_gpu", [False, True])
def test_loss_is_a_total_over_targets(on_gpu, monkeypatch):
    """Also as a GPU computes it, at all positions; others have no influence, NaN included."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", on_gpu)
    generator = torch.Generator().manual_seed(0)
    logits_BLV = torch.randn(2, 5, 33, generator=generator, dtype=torch.float64)
    logits_BLV[1, 3:] = math.nan
    targets_BL = torch.full((2, 5), IGNORE)
    nothing = target_sums(logits_BLV, targets_BL)
    assert (nothing.nats, nothing.count) == (0, 0)
    best = int(logits_BLV[0, 2].argmax())
    places = ((0, 1, 7), (0, 2, best), (1, 0, 9))
    for b, i, token in places:
        targets_BL[b, i] = token
    sums = target_sums(logits_BLV.requires_grad_(), targets_BL)
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


def test_muon_and_adamw_make_one_step_and_adamw_is_torchs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3, bias=False)).double()
    (weight, bias), last = model[0].parameters(), model[1].weight
    muon = Muon([weight], lr=1e-2, momentum=0.95, weight_decay=0.1)
    optimizer = MuonWithAdamW([muon, adamw({"last": last}, {"bias": bias}, CONFIG)])
    others = [nn.Parameter(p.detach().clone()) for p in (last, bias)]
    groups = [{"params": others[:1]}, {"params": others[1:], "weight_decay": 0.0}]
    named = {"betas": (CONFIG.beta1, CONFIG.beta2), "eps": CONFIG.eps, "weight_decay": 0.1}
    theirs = torch.optim.AdamW(groups, lr=1e-2, foreach=False, **named)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        losses.append(model(torch.ones(2, 6, dtype=torch.float64)).square().sum())
        losses[-1].backward()
        return losses[-1]

    for number in range(1, 6):
        assert optimizer.step(closure) is losses[-1]
        assert len(losses) == number
        for one, other in zip((last, bias), others, strict=True):
            other.grad = one.grad
        theirs.step()
    torch.testing.assert_close([last, bias], others, rtol=1e-9, atol=0)
    assert "momentum_buffer" in optimizer.state[weight] and "exp_avg" in optimizer.state[bias]
    # A schedule sets the rates of both.
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step(closure)
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
