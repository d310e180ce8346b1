"""The predictions in the documents are those of the code, and count what they say."""

from pathlib import Path

import pytest
import torch

from benchmarks import roofline
from benchmarks.mechanism_costs import CostCounter, traced
from protlm.attention import names

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def test_bytes_and_operations_of_a_product() -> None:
    x, y = torch.empty(3, 4, 5, device="meta"), torch.empty(5, device="meta")
    counter = CostCounter()
    with counter:
        out = torch.bmm(x, y.expand(3, 6, 5).mT)
        out.flatten().relu_()
    # What is expanded is read once, and views cost nothing.
    assert counter.num_bytes == 4 * (60 + 5 + 72) + 4 * (72 + 72)
    assert counter.operations == {torch.float32: 2 * 3 * 4 * 5 * 6}


def test_exact_attention_has_the_operations_of_its_formula() -> None:
    found = traced("softmax", 1024, causal=False)
    assert found is not None
    # Two products of the length forward, five backward; the mask is a coordinate, padded to 72.
    assert found.operations == {torch.bfloat16: 2 * 7 * 1024 * 72}
    causal = traced("softmax", 1024, causal=True)
    assert causal is not None and 2 * causal.operations.total() == found.operations.total()


def test_linear_attention_has_the_operations_of_its_formula() -> None:
    found = traced("performer_softmax", 1024, causal=False, num_features=128)
    assert found is not None
    # Six products with the rows, six of features and values of a further column of ones.
    assert found.operations[torch.float32] == 2 * 6 * 128 * 64
    bfloat16 = found.operations[torch.bfloat16]
    assert bfloat16 == pytest.approx(2 * 6 * 128 * 65, rel=0.02)


@pytest.mark.parametrize("name", ["performer_relu", "softmax"])
def test_the_page_has_the_predictions_of_a_mechanism(name: str) -> None:
    rows = list(roofline.mechanism_rows([name]))
    assert len(rows) == 2
    assert all(f"| {' | '.join(row)} |" in PAGE.read_text() for row in rows)


def test_the_page_has_the_predictions_of_causal_attention() -> None:
    assert roofline.table(roofline.CAUSAL_TITLES, roofline.causal_predictions()) in PAGE.read_text()


def test_causal_attention_is_predicted_as_fast_as_exact_attention_at_the_length_told() -> None:
    """Exact attention is on the line through its two measurements, and causal takes half."""
    for name, _, time, length, exact in roofline.causal_predictions():
        ratio = roofline.CARDS["H200"].bfloat16 / roofline.CARDS[name].bfloat16

        def half(positions: float, ratio: float = ratio) -> float:
            return ratio * (2.6 + 14.4 * (positions - 1024) / 7168) / 2

        assert exact == f"{half(1024):.1f} / {half(8192):.1f}"
        told, found = float(length.replace(",", "")), float(time)
        # The time is rounded to 0.01 ns, the length to 10 positions.
        assert found - half(told) <= 0.005 + half(5) - half(0)
        assert told == 0 or half(told) - found <= 0.005 + half(5) - half(0)


@pytest.mark.slow
def test_the_page_has_all_predictions() -> None:
    page = PAGE.read_text()
    assert roofline.table(roofline.TITLES, roofline.predictions()) in page
    rows = list(roofline.mechanism_rows(names()))
    assert roofline.table(roofline.TITLES_OF_MECHANISMS, rows) in page, (
        "type: python -m benchmarks.roofline, and copy its tables into docs/gpu.md"
    )
