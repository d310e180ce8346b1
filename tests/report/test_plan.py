"""The size of a page is bounded before the work, and too large ones are refused."""

import pytest

from protlm.report.plan import MAX_BYTES, MAX_RESIDUES, plan_page
from protlm.system.errors import UserError

PAPER_36 = 36 * 8


def test_all_maps_of_a_small_model_are_full() -> None:
    plan = plan_page(300, [24], is_selection=False)
    assert plan.full_maps == 24


@pytest.mark.parametrize(("length", "full"), [(100, 288), (300, 16), (1_000, 5), (2_000, 1)])
def test_a_deep_model_has_full_maps_of_some_heads(length: int, full: int) -> None:
    plan = plan_page(length, [PAPER_36], is_selection=False)
    assert plan.full_maps == full
    assert length / plan.bin_size <= 96
    assert plan.num_bytes <= MAX_BYTES


def test_selected_heads_are_full_or_refused() -> None:
    assert plan_page(1_000, [10], is_selection=True).full_maps == 10
    with pytest.raises(UserError, match="at most 18 heads in all, or omit --layers and --heads"):
        plan_page(1_000, [36], is_selection=True)
    with pytest.raises(UserError, match="at most 8 heads of each model, or give one"):
        plan_page(1_000, [18, 18], is_selection=True)
    assert plan_page(1_000, [18], is_selection=True).full_maps == 18
    assert plan_page(1_000, [8, 8], is_selection=True).full_maps == 8


def test_more_heads_than_fit_into_a_page() -> None:
    with pytest.raises(UserError, match=r"the page would have .* MB.*select fewer heads with"):
        plan_page(2_000, [48 * 40], is_selection=False)


def test_titin_is_refused_with_what_to_do() -> None:
    assert plan_page(MAX_RESIDUES, [24], is_selection=False).full_maps >= 1
    with pytest.raises(UserError, match=r"35,213 residues.*at most 2,048.*protlm attention"):
        plan_page(35_213, [24], is_selection=False)
