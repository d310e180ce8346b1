"""Groups of parameters for decay and Muon, the fused optimizer, the loss as a total."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from protlm.attention import names
from protlm.build import build_module
from protlm.checkpoints.validations import read_metrics
from protlm.config import Optimizer, OptimizerConfig, TrainConfig
from protlm.config.composition import compose
from protlm.data.masking import IGNORE
from protlm.model import objective
from protlm.model.objective import target_sums
from protlm.model.transformer import ProteinLM, build_network
from protlm.system.errors import UserError
from protlm.training.lora import add_adapters
from protlm.training.module import LanguageModeling
from protlm.training.optimization import (
    ParameterKinds,
    adamw,
    build_optimizer,
    with_half_life,
)

# What activations are not multiplied with as with a matrix.
NEVER_DECAYED = (
    "gain",
    "embedding.weight",
    "positions.table",
    "norm.weight",
    "norm.bias",
    ".bias",
    ".scale",
    # Gates, tables of positions and kernels of mechanisms.
    "mechanism.weight",
    "mechanism.kernel",
    "mechanism.gain",
    "mechanism.shift",
    "mechanism.scales",
    "mechanism.conv_weight",
    ".u",
    ".v",
)
IN_EVERY_BLOCK = {"query", "key", "value", "output", "up", "down", "gate"}


def network(*settings: str) -> ProteinLM:
    config = compose(TrainConfig, ["model=tiny", "run_dir=unused", "data.dir=unused", *settings])
    return build_network(config.model, config.attention, seed=0)


@pytest.mark.parametrize("name", names())
def test_matrices_decay_and_nothing_else(name: str) -> None:
    made = network(f"attention={name}", "model.positions=learned", "model.qk_norm=true")
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
def test_groups_have_the_decay_of_their_kind(name: Optimizer) -> None:
    made = network()
    optimizer = build_optimizer(
        made, OptimizerConfig(learning_rate=1e-3, name=name, weight_decay=0.1)
    )
    kinds = ParameterKinds.of(made)
    decayed = {
        id(p) for g in optimizer.param_groups if g["weight_decay"] == 0.1 for p in g["params"]
    }
    others = {id(p) for g in optimizer.param_groups if g["weight_decay"] == 0 for p in g["params"]}
    assert decayed == {id(p) for p in (*kinds.hidden.values(), *kinds.matrices.values())}
    assert others == {id(p) for p in kinds.rest.values()}


@pytest.mark.parametrize("name", Optimizer)
def test_adapters_decay_as_matrices_do(name: Optimizer) -> None:
    adapted = network()
    add_adapters(adapted, rank=2, targets=["query"], seed=0)
    config = OptimizerConfig(learning_rate=1e-3, name=name, weight_decay=0.1)
    (group,) = build_optimizer(adapted, config).param_groups
    assert group["weight_decay"] == 0.1
    assert sorted(p.shape for p in group["params"]) == sorted([(2, 64), (64, 2)] * 2)


def test_parameters_without_hidden_matrices_have_adamw_alone() -> None:
    made = network("attention=linformer", "data.max_length=64", "model.max_length=64")
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
def test_beta2_forgets_half_after_its_half_life(
    name: Optimizer, settings: list[str], tokens: int
) -> None:
    given = [f"optimizer={name}", "optimizer.beta2_half_life=1e6", *settings]
    config = compose(TrainConfig, ["model=tiny", "run_dir=unused", "data.dir=unused", *given])
    module = build_module(build_network(config.model, config.attention, seed=0), config)
    groups = build_optimizer(module.network, module._optimizer).param_groups
    betas = [group["betas"] for group in groups if "betas" in group]
    assert betas
    for beta1, beta2 in betas:
        assert beta1 == config.optimizer.beta1
        assert beta2 ** (1e6 / tokens) == pytest.approx(0.5)


def test_without_a_half_life_beta2_is_unchanged() -> None:
    config = OptimizerConfig(learning_rate=1e-3, beta2=0.9)
    assert with_half_life(config, tokens_per_step=10) is config
    with pytest.raises(UserError, match=r"beta2_half_life=-1.* above 0"):
        OptimizerConfig(learning_rate=1e-3, beta2_half_life=-1)


@pytest.mark.parametrize("tokens", [10.0, 1e30])
def test_a_half_life_is_between_one_step_and_what_doubles_can_express(tokens: float) -> None:
    config = OptimizerConfig(learning_rate=1e-3, beta2_half_life=tokens)
    with pytest.raises(UserError, match=r"^optimizer\.beta2_half_life=.* at least a step, 4096,"):
        with_half_life(config, tokens_per_step=4096)
    for steps in (1, 1e12):
        fits = OptimizerConfig(learning_rate=1e-3, beta2_half_life=4096 * steps)
        assert 0.4 < with_half_life(fits, tokens_per_step=4096).beta2 < 1


def test_the_fused_optimizer_is_adamw() -> None:
    fused, plain = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
    plain.load_state_dict(copy.deepcopy(fused.state_dict()))
    config = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)
    ours = adamw({"weight": fused.weight}, {"bias": fused.bias}, config)
    assert ours.defaults["fused"] is True
    theirs = torch.optim.AdamW(
        [{"params": [plain.weight]}, {"params": [plain.bias], "weight_decay": 0.0}],
        lr=1e-2,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=0.1,
        foreach=False,
    )
    for _ in range(5):
        x = torch.randn(4, 8, dtype=torch.float64)
        for layer, optimizer in ((fused, ours), (plain, theirs)):
            optimizer.zero_grad()
            layer(x).square().sum().backward()
            optimizer.step()
    assert torch.allclose(fused.weight, plain.weight, rtol=1e-9, atol=0)
    assert torch.allclose(fused.bias, plain.bias, rtol=1e-9, atol=0)


def test_gradients_are_clipped_but_logged_unclipped(
    train_tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped, norms = LanguageModeling.lr_scheduler_step, []

    def look(self: LanguageModeling, *given: object) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        stepped(self, *given)

    monkeypatch.setattr(LanguageModeling, "lr_scheduler_step", look)
    run = train_tiny(tmp_path / "run", "trainer.gradient_clip=0.01", "trainer.log_every=1")
    assert norms == pytest.approx([0.01] * 4, rel=1e-3)
    rows = [row for row in read_metrics(run / "metrics.csv") if "gradient_norm" in row]
    assert len(rows) == 4 and min(row["gradient_norm"] for row in rows) > 0.02


def test_loss_is_a_total_over_targets() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_BLV = torch.randn(2, 5, 33, generator=generator, dtype=torch.float64)
    targets_BL = torch.full((2, 5), IGNORE)
    targets_BL[0, 1], targets_BL[1, 4] = 7, 9
    sums = target_sums(logits_BLV, targets_BL)
    by_hand = sum(
        math.log(sum(math.exp(x) for x in logits_BLV[b, i].tolist())) - logits_BLV[b, i, t].item()
        for b, i, t in ((0, 1, 7), (1, 4, 9))
    )
    assert sums.count == 2
    assert sums.nats.item() == pytest.approx(by_hand, rel=1e-6)
    nothing = target_sums(logits_BLV, torch.full((2, 5), IGNORE))
    assert (nothing.nats, nothing.count) == (0, 0)


def test_the_loss_of_a_gpu_is_that_of_a_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_BLV = torch.randn(2, 5, 33, generator=generator, dtype=torch.float64)
    # Padding has no influence, NaN included.
    logits_BLV[1, 3:] = math.nan
    logits_BLV.requires_grad_()
    targets_BL = torch.full((2, 5), IGNORE)
    targets_BL[0, 1], targets_BL[0, 2], targets_BL[1, 0] = 7, int(logits_BLV[0, 2].argmax()), 9
    found = []
    for function in (objective._sums_everywhere, objective._sums_at_targets):
        sums = function(logits_BLV, targets_BL)
        (gradient,) = torch.autograd.grad(sums.nats, logits_BLV)
        found.append([sums.stacked(), gradient])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    nothing = objective._sums_everywhere(logits_BLV, torch.full((2, 5), IGNORE))
    assert (nothing.nats, nothing.count) == (0, 0)
