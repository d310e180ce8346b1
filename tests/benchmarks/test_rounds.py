"""Rounds: turns, ratios within turns, and who is left out and why."""

import time

import pytest
import torch
from torch import Tensor

from benchmarks import rounds
from benchmarks.cases import RETURNS_V, Attend, Case
from benchmarks.contenders import Contender, contenders
from benchmarks.own_process import OwnProcess
from benchmarks.passes import Seconds
from benchmarks.peers import UnavailableError
from benchmarks.rounds import MOST_BYTES, MOST_SECONDS, Forecast, Round, hold_round

CPU = torch.device("cpu")


def case(name: str, length: int = 16) -> Case:
    return Case(name, None, False, length)


def doubled(case: Case, device: torch.device) -> Attend:
    return lambda q_BHLK, k_BHLK, v_BHLC: v_BHLC * 2.0


def absent(case: Case, device: torch.device) -> Attend:
    raise UnavailableError("is not installed")


def broken(case: Case, device: torch.device) -> Attend:
    def attend(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
        raise RuntimeError("no kernel for this dtype\nand more")

    return attend


def slow(case: Case, device: torch.device) -> Attend:
    def attend(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
        time.sleep(0.2)
        return v_BHLC * 2.0

    return attend


ENTRANTS = {
    prepare.__name__: Contender(prepare.__name__, False, prepare)
    for prepare in (doubled, absent, broken, slow)
}


def hold(*cases: Case, needed: tuple[Case, ...] = (), forecast: Forecast | None = None) -> Round:
    return hold_round(cases, ENTRANTS, needed=needed, forecast=forecast or Forecast(), device=CPU)


def test_the_ratio_is_the_median_over_common_turns() -> None:
    ours, peer = case("doubled"), case("broken")
    held = Round((ours, peer))
    held.seconds[ours] = {1: Seconds(1, 1), 2: Seconds(2, 2), 3: Seconds(9, 9), 4: Seconds(7, 7)}
    held.seconds[peer] = {0: Seconds(9, 9), 1: Seconds(2, 4), 2: Seconds(4, 12), 3: Seconds(9, 0)}
    assert held.ratio(peer, ours) == 3.0
    assert held.ratio(peer, ours, "forward") == 2.0
    assert held.ratio(ours, case("absent")) is None
    assert held.median(peer, "backward") == 6.5


def test_everyone_is_measured_or_named() -> None:
    cases = case("doubled"), case("absent"), case("broken")
    held = hold(*cases, cases[0])
    assert held.cases == cases
    assert set(held.seconds) == set(held.bytes) == {cases[0]}
    assert held.left_out == {
        cases[1]: "is not installed",
        cases[2]: "failed: no kernel for this dtype",
    }


def test_each_timed_cheap_pass_follows_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def noted(name: str, seconds: float) -> Contender:
        def attend(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor) -> Tensor:
            calls.append(name)
            time.sleep(seconds)
            return v_BHLC * 2.0

        return Contender(name, False, lambda case, device: attend)

    monkeypatch.setattr(rounds, "_SECONDS_OF_A_CASE", 0.1)
    entrants = {"cheap": noted("cheap", 0.0), "dear": noted("dear", 0.15)}
    cases = [case("cheap"), case("dear")]
    held = hold_round(cases, entrants, needed=(), forecast=Forecast(), device=CPU)
    assert calls.count("cheap") == 1 + 2 * len(held.seconds[cases[0]])
    assert calls.count("dear") == len(held.seconds[cases[1]])


def test_cheap_passes_are_warmed_up_and_repeated_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_SECONDS_OF_A_CASE", 0.2)
    cheap, dear, needed = case("doubled"), case("slow"), case("slow", 32)
    held = hold(cheap, dear, needed, needed=(needed,))
    assert list(held.seconds[cheap]) == list(range(1, 10))
    # A long pass is warm enough to count from the first one on.
    assert list(held.seconds[dear]) == [0, 1, 2]
    assert list(held.seconds[needed]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("exponent", "refused"), [(1.0, False), (2.0, True)])
def test_the_forecast_follows_a_power_law(exponent: float, refused: bool) -> None:
    forecast = Forecast()
    # Lengths come out of order where a short case takes turns among long ones.
    for length in (200, 100):
        forecast.learn(
            case("doubled", length), seconds=(length / 200) ** exponent * MOST_SECONDS / 4, peak=1.0
        )
    assert forecast.reason_against(case("doubled", 390)) is None
    # Three quarters of the most if linear, nine if not.
    reason = forecast.reason_against(case("doubled", 600))
    most = MOST_SECONDS
    message = f"a pass would take about {most * 9 / 4:.0f} s, more than {most:.0f}"
    assert reason == (message if refused else None)
    assert forecast.reason_against(case("broken", 600)) is None


def test_the_forecast_counts_memory() -> None:
    forecast = Forecast()
    for length in (100, 200):
        forecast.learn(case("doubled", length), seconds=1e-6, peak=length * MOST_BYTES / 800)
    assert forecast.reason_against(case("doubled", 790)) is None
    reason = forecast.reason_against(case("doubled", 1600))
    most = MOST_BYTES / 1e9
    assert reason == f"a pass would take about {2 * most:.0f} GB, more than {most:.0f}"


def test_what_a_bar_needs_is_never_too_costly_but_has_a_process_of_its_own() -> None:
    plain, needed = Case(RETURNS_V, None, False, 16), Case(RETURNS_V, None, False, 32)
    forecast = Forecast()
    forecast.learn(plain.at(8), seconds=100.0, peak=1.0)
    calls: list[Case] = []

    def started(contender: Contender, case: Case) -> OwnProcess:
        calls.append(case)
        return OwnProcess(contender, case)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "OwnProcess", started)
        held = hold_round(
            [plain, needed], contenders(), needed=[needed], forecast=forecast, device=CPU
        )
    assert set(held.left_out) == {plain} and set(held.seconds) == {needed}
    assert calls == [needed]
