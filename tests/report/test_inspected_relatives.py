"""The relatives of a page: weights beside those of whole maps, and names that are text."""

import base64
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from protlm.commands.inspect import inspect
from protlm.options.look import InspectOptions
from protlm.options.relatives import FamilyOptions, RelativesOptions
from protlm.report.relatives import relatives_to_plain
from tests.fixtures.browser import Browser
from tests.report.test_browser import HOSTILE
from tests.test_in_contexts import FASTA, QUERY, ROWS, seeing


@pytest.mark.parametrize(
    ("kind", "heads"), [("full softmax", 0), ("ordered performer_relu", 0), ("full reformer", 3)]
)
def test_the_strongest_residues_of_each_row_are_those_of_its_map(kind: str, heads: int) -> None:
    model = seeing(*kind.split(), relatives_heads=heads)
    relatives = model.relatives([(f"R{n}", row) for n, row in enumerate(ROWS)])
    model, (draw, *_) = relatives.first("R0", QUERY), relatives.draws("R0", QUERY)
    found = relatives_to_plain(model, draw, QUERY, [2], [2, 1])
    # Heads of relatives are one, their mean.
    numbers = [(2, None)] if heads else [(2, 2), (2, 1)]
    assert [(one["layer"], one["head"]) for one in found["heads"]] == numbers
    assert [one["name"] for one in found["relatives"]] == draw.names
    (_, _), (_, x) = model.attention_inputs(model.tokenize([QUERY]))
    rows = slice(1, len(QUERY) + 1)
    map_HLM = (x.relatives or x).map_rows(rows)[0].detach().numpy()
    map_HLM = map_HLM.mean(0, keepdims=True) if heads else map_HLM
    cuts = [*pairwise(np.cumsum([0, *(len(one.residues) + 2 for one in draw.relatives)]))]
    for one, map_LM in zip(found["heads"], map_HLM[::-1], strict=True):
        mass_LR = np.stack([map_LM[:, a:b].sum(1) for a, b in cuts], 1)
        order = np.argsort(-mass_LR.mean(0))
        assert one["relatives"] == order.tolist()
        np.testing.assert_allclose(one["mean"], mass_LR.mean(0)[order], rtol=1e-6)
        mass = np.concatenate([mass_LR[:, order], mass_LR.sum(1, keepdims=True)], 1)
        inner_LN = np.concatenate([map_LM[:, a + 1 : b - 1] for a, b in cuts], 1)
        residues = np.frombuffer(base64.b64decode(one["residues"]), "<u4").reshape(-1, 5)
        strongest = np.take_along_axis(inner_LN, residues.astype(int), 1)
        np.testing.assert_allclose(strongest, -np.sort(-inner_LN)[:, :5], rtol=1e-6)
        for name, known in (("mass", mass), ("weights", strongest)):
            codes = np.frombuffer(base64.b64decode(one[name]["codes"]), np.uint8)
            shown = one[name]["scale"] * (codes.reshape(known.shape) / 255.0) ** 2
            np.testing.assert_allclose(shown, known, atol=known.max() / 200)


@pytest.mark.slow
def test_the_page_names_them_as_text(tiny_run: Path, browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "f.a3m").write_text(FASTA.replace(">R1\n", f">{HOSTILE}\n"))
    (tmp_path / "f.fasta").write_text(f">R0\n{QUERY}\n")
    options = RelativesOptions(tmp_path / "f.a3m", FamilyOptions(), force_relatives=True)
    page = tmp_path / "page.html"
    inspect(tmp_path / "f.fasta", [tiny_run], page, InspectOptions(relatives=options))
    browser.open(page, width=390)
    browser.evaluate("App.point(9, 2)")
    browser.drawn()
    rows = "[...document.querySelectorAll('#relatives{} tbody tr')].map((x) => x.textContent)"
    relatives, residues = (browser.evaluate(rows.format(x)) for x in ("", "-residues"))
    assert len(relatives) == 4 and any(row.startswith(HOSTILE[:20]) for row in relatives)
    # The strongest residue, and that of the protein in its column.
    codes = browser.evaluate(
        "App.models[0].relatives.heads.find((x) => x.layer === App.state.head.layer && "
        "x.head === App.state.head.head).residues"
    )
    number = np.frombuffer(base64.b64decode(codes), "<u4")[9 * 5]
    found = browser.evaluate(
        "App.models[0].relatives.relatives.flatMap((one) => [...one.residues].map((x, at) => "
        "one.name + x + (at + 1) + Content.protein.sequence[one.columns[at]]))"
    )
    assert residues[0].startswith(found[number])
    checks = "[window.broken ?? 0, document.documentElement.scrollWidth <= innerWidth]"
    assert browser.evaluate(checks) == [0, True]
    assert (browser.requests(), browser.faults()) == ([], [])
