"""Learning rates are pure functions of the step."""

import pytest

from protlm.config import DecayShape, Schedule, ScheduleConfig
from protlm.system.errors import UserError
from protlm.training.optimization import check_schedule, fitting_warmup, rate_factor


def rates(config: ScheduleConfig, *, max_steps: int) -> list[float]:
    return [rate_factor(step, config, max_steps=max_steps) for step in range(max_steps)]


@pytest.mark.parametrize("name", Schedule)
def test_warm_up_rises_linearly_to_the_peak(name: Schedule) -> None:
    config = ScheduleConfig(name=name, warmup_steps=10)
    assert rates(config, max_steps=110)[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])


def test_constant_stays_at_the_peak() -> None:
    assert rates(ScheduleConfig(), max_steps=9) == [1.0] * 9


def test_cosine_falls_to_its_minimum() -> None:
    config = ScheduleConfig(name=Schedule.cosine, warmup_steps=10, min_lr_ratio=0.1)
    factors = [rate_factor(step, config, max_steps=110) for step in range(10, 111)]
    assert factors == sorted(factors, reverse=True)
    assert factors[50] == pytest.approx(0.55)
    assert factors[100] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "shape, halfway", [(DecayShape.linear, 0.5), (DecayShape.sqrt, 1 - 0.5**0.5)]
)
def test_wsd_is_stable_and_then_decays(shape: DecayShape, halfway: float) -> None:
    config = ScheduleConfig(
        Schedule.wsd, 10, min_lr_ratio=0.0, decay_fraction=0.2, decay_shape=shape
    )
    factors = rates(config, max_steps=100)
    assert factors[10:81] == [1.0] * 71
    assert factors[90] == pytest.approx(halfway)
    assert factors[80:] == sorted(factors[80:], reverse=True)
    # The rate would reach its minimum after the last step.
    assert 0 < factors[99] < 0.06
    assert rate_factor(100, config, max_steps=100) == 0
    ends = ScheduleConfig(Schedule.wsd, min_lr_ratio=0.1, decay_shape=shape)
    assert rate_factor(100, ends, max_steps=100) == pytest.approx(0.1)


def test_a_wsd_run_can_be_lengthened_before_its_decay() -> None:
    config = ScheduleConfig(Schedule.wsd, warmup_steps=5, decay_fraction=0.2)
    short, long = rates(config, max_steps=100), rates(config, max_steps=300)
    assert short[:81] == long[:81]
    assert short[81] < long[81]


@pytest.mark.parametrize(
    "config, message",
    [
        (ScheduleConfig(warmup_steps=10), "warmup_steps=10"),
        (ScheduleConfig(Schedule.wsd, warmup_steps=6, decay_fraction=0.5), "less the 5 steps"),
    ],
)
def test_a_warm_up_longer_than_the_run_is_refused(config: ScheduleConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_schedule(config, max_steps=10)


def test_the_warm_up_that_a_refusal_names_fits() -> None:
    config = ScheduleConfig(Schedule.wsd, warmup_steps=100, decay_fraction=0.95)
    with pytest.raises(UserError, match=r"type schedule\.warmup_steps=50$"):
        check_schedule(config, max_steps=1000)
    config.warmup_steps = fitting_warmup(config, max_steps=1000)
    check_schedule(config, max_steps=1000)


def test_fractions_are_at_most_1() -> None:
    with pytest.raises(UserError, match=r"schedule\.decay_fraction=1\.5 must be"):
        ScheduleConfig(decay_fraction=1.5)
