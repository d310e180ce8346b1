"""The guards of the suite are themselves tested: one that never bites guards nothing."""

from typing import Any

import pytest
import torch


@pytest.mark.parametrize(
    ("name", "source", "complaint"),
    [
        ("protlm.x", "q_BHL = torch.zeros(2, 3)", "q_BHL has the shape (2, 3)"),
        ("protlm.x", "mask_B11L = torch.zeros(2, 1, 3, 4)", "mask_B11L has the shape (2, 1, 3, 4)"),
        ("protlm.x", "q_BL, k_BL = torch.zeros(2, 3), torch.zeros(2, 4)", "L is 4 in k_BL and 3"),
        ("protlm.x", "map_LL = torch.zeros(2, 3)", "L is 3 in map_LL and 2"),
        ("protlm.x", "q_BHL, layer_3, L = torch.zeros(2, 3, 4), torch.zeros(7), 0.5", ""),
        ("other.x", "q_BHL = torch.zeros(2, 3)", ""),
    ],
)
def test_a_wrong_suffix_is_seen(
    checked_shapes: list[str], name: str, source: str, complaint: str
) -> None:
    """In the functions of protlm only."""
    namespace: dict[str, Any] = {"__name__": name, "torch": torch}
    exec(f"def f():\n    {source}", namespace)
    namespace["f"]()
    assert len(checked_shapes) == bool(complaint)
    assert all(complaint in one and one.startswith("protlm.x.f: ") for one in checked_shapes)
    checked_shapes.clear()
