"""The table of mechanisms in the documents agrees with the code."""

from pathlib import Path

import pytest

from protlm.attention import docs_table
from protlm.system.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "mechanisms.md"


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """The lines of the table, which is in the page."""
    page = PAGE.read_text(encoding="utf-8")
    table = page.partition(docs_table.BEGIN)[2].partition(docs_table.END)[0]
    return [line for line in table.splitlines() if line.startswith("|")]


def cells(name: str, lines: list[str]) -> list[str]:
    """The cells of a mechanism's row."""
    (row,) = [line for line in lines if line.startswith(f"| `{name}` |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_page_agrees_with_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert docs_table.with_table(page) == page, "type: make docs"


def test_the_measured_cells_are_correct(lines: list[str]) -> None:
    _, idea, modes, cost, longest, state, parameters, *_ = cells("performer_softmax", lines)
    # The sums of [v | 1] by feature, and a reference for each.
    assert (modes, cost, state, parameters) == ("both", "L R K", f"{66 * 256:,}", "0")
    assert idea and not idea.endswith(".")
    assert (longest, cells("linformer", lines)[4]) == ("any", "`model.max_length`")
    assert (cells("softmax", lines)[5], cells("bigbird", lines)[5]) == ("grows with L", "none")


def test_a_page_without_the_markers_is_refused_and_left_unchanged() -> None:
    with pytest.raises(UserError, match="no place for the table"):
        docs_table.with_table(f"# Page\n{docs_table.END}\n")
