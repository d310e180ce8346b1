"""The fused kernels in Triton's interpreter, against float64, and compiled for cards."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.marks import slow_but

PROGRAM = Path(__file__).parent / "programs" / "interpret.py"
PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
# Of outputs, and of gradients: their sums over the values cancel in part, so that the roundings of
# the operands weigh more. The second one is the limit of the check at first use.
BUDGETS = {"float32": (1e-5, 1e-5), "bfloat16": (1e-2, 2e-2)}


def interpret(
    mechanism: str, dtype: str, mode: str, width: int, features: int, *lengths: int
) -> list[dict[str, Any]]:
    """Runs kernels; returns what was found for each length."""
    pytest.importorskip("triton")
    numbers = map(str, (width, features, *lengths))
    command = [sys.executable, PROGRAM, mechanism, dtype, mode, *numbers]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(lengths)
    return found


def check(found: dict[str, Any], dtype: str) -> None:
    """Asserts what `interpret` found for a length."""
    output, *gradients = found["errors"]
    budget, gradient_budget = BUDGETS[dtype]
    assert output <= budget and max(gradients) <= gradient_budget, found
    assert found["is_clear"], found
    assert found.get("is_causal", True), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "dtype", "mode", "width", "features"),
    [
        ("performer_softmax", "float32", "bidirectional", 24, 256),
        ("performer_softmax", "float32", "causal", 16, 256),
        ("performer_softmax", "bfloat16", "bidirectional", 16, 32),
        ("performer_softmax", "bfloat16", "causal", 24, 32),
        ("performer_relu", "float32", "bidirectional", 24, 0),
        ("performer_relu", "float32", "causal", 16, 0),
        ("performer_relu", "bfloat16", "bidirectional", 24, 100),
        ("performer_relu", "bfloat16", "causal", 24, 100),
    ],
)
def test_kernels_are_exact_within_the_dtype(
    mechanism: str, dtype: str, mode: str, width: int, features: int
) -> None:
    for found in interpret(mechanism, dtype, mode, width, features, 1, 64, 65, 257):
        check(found, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "width"), [("bidirectional", 128), ("causal", 64)])
def test_wide_heads(mode: str, width: int) -> None:
    for found in interpret("performer_softmax", "bfloat16", mode, width, 20, 1, 65, 257):
        check(found, "bfloat16")


@pytest.mark.parametrize(
    "mechanism", slow_but(["performer_softmax", "performer_relu"], "performer_softmax")
)
def test_causal_kernels_on_two_chunks(mechanism: str) -> None:
    (found,) = interpret(mechanism, "float32", "causal", 16, 20, 40)
    check(found, "float32")


def test_causal_kernels_cut_keys_as_pytorch_does() -> None:
    (found,) = interpret("performer_softmax", "float32", "cut", 16, 20, 40)
    assert max(found["errors"]) <= 1e-4, found
    assert found["is_clear"] and found["is_causal"], found


@pytest.mark.slow
@pytest.mark.parametrize("card", ["sm_80", "sm_90", "sm_100"])
def test_kernels_fit_every_card_without_spills(card: str) -> None:
    pytest.importorskip("triton")
    from benchmarks.kernel_resources import CARDS, usages

    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    titles = next(row for row in rows if row[-1] == "sm_100 |")
    found = usages(card)
    assert len(found) == 54
    for key, usage in found.items():
        assert usage.spilled == 0, key
        assert usage.shared <= CARDS[card].shared, key
        (row,) = [row for row in rows if row[:3] == [f"| {key[0]}", *key[1:]]]
        of_page = dict(zip(titles, row, strict=True))
        assert str(usage) in str(of_page.get(card, of_page.get(f"{card} |"))), key


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["performer_softmax", "performer_relu"])
def test_sums_over_parts_of_long_sequences(mechanism: str) -> None:
    (found,) = interpret(mechanism, "float32", "bidirectional", 16, 16, 600)
    assert max(found["errors"]) <= BUDGETS["float32"][0], found
