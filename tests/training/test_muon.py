"""Muon and AdamW as one optimizer, whose state is restored exactly."""

import copy

import pytest
import torch
from torch import nn

from protlm.config import OptimizerConfig
from protlm.training.optimization import Muon, MuonWithAdamW, adamw

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


@pytest.mark.parametrize("shape", [(32, 16), (16, 32), (24, 24)])
def test_an_update_is_nearly_orthogonal_and_as_large_as_one_of_adamw(
    shape: tuple[int, int],
) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(shape))
    weight.grad = 1e-3 * torch.randn(shape)
    Muon([weight], lr=1.0, momentum=0.95, weight_decay=0).step()
    size = 0.2 * max(shape) ** 0.5
    singular = torch.linalg.svdvals(weight.detach()) / size
    # A nearly singular matrix has a singular value that five iterations do not raise to 1.
    assert singular[:-2].min() > 0.5 and singular.max() < 1.3
    assert weight.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2)


def test_it_is_torchs_muon() -> None:
    # torch's Muon computes in bfloat16, also on a CPU.
    torch.manual_seed(0)
    start = torch.randn(48, 24)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    one = Muon([ours], lr=1e-2, momentum=0.9, weight_decay=0.1)
    other = torch.optim.Muon(
        [theirs], lr=1e-2, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(4):
        ours.grad = theirs.grad = torch.randn(48, 24)
        one.step()
        other.step()
    assert (ours - theirs).norm() < 0.03 * (ours - start).norm()


def test_matrices_that_are_orthogonalized_together_do_not_affect_each_other() -> None:
    torch.manual_seed(0)
    shapes, scales = [(8, 4), (4, 8), (8, 4), (8, 4)], [1.0, 1.0, 1e-3, 1e3]
    together = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for weight, scale in zip(together, scales, strict=True):
        weight.grad = scale * torch.randn_like(weight)
    alone = copy.deepcopy(together)
    for one, other in zip(alone, together, strict=True):
        one.grad = other.grad
        Muon([one], lr=0.1, momentum=0.9, weight_decay=0.1).step()
    Muon(together, lr=0.1, momentum=0.9, weight_decay=0.1).step()
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other)


def test_parameters_that_are_not_matrices_are_updated_by_adamw() -> None:
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


def test_a_resumed_run_makes_the_same_steps() -> None:
    model, optimizer = model_and_optimizer()
    for seed in range(3):
        step(model, optimizer, seed)
    resumed, continued = model_and_optimizer()
    resumed.load_state_dict(copy.deepcopy(model.state_dict()))
    continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(resumed, continued, seed)
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_schedule_sets_the_rates_of_both() -> None:
    model, optimizer = model_and_optimizer()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = [p.detach().clone() for p in model.parameters()]
    step(model, optimizer, 0)
    schedule.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_the_closure_is_run_once_and_its_loss_returned() -> None:
    model, optimizer = model_and_optimizer()
    losses = []

    def closure() -> torch.Tensor:
        losses.append(model(torch.ones(2, 6)).sum())
        losses[-1].backward()
        return losses[-1]

    assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1
