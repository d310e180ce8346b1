"""The page as a file: its policy, its data, and what its heads show, against slow values."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

import protlm
from protlm.analysis.contact_regression import features
from protlm.analysis.precision import SEPARATIONS, precision
from protlm.analysis.structures import contact_map, read_structure
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.model.pretrained import PretrainedModel
from protlm.report import heads as module
from protlm.report.heads import STATISTICS, Codes, binned, inspected_heads
from protlm.report.page import SCRIPTS, assemble, json_for_html
from protlm.report.protein import InspectedProtein, predicted_distributions
from tests.fixtures.runs import Train
from tests.small_models import shortest_structures

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)> \"'&@@DATA@@\u2028]]>"


class Elements(HTMLParser):
    """The elements of a page: tags, attributes, and the text of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.is_open = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.texts.append("")
        self.is_open = True

    def handle_endtag(self, tag: str) -> None:
        self.is_open = False

    def handle_data(self, data: str) -> None:
        if self.is_open:
            self.texts[-1] += data

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        """Returns the attributes and the text of each element of a kind."""
        found = zip(self.found, self.texts, strict=True)
        return [(attributes, text) for (name, attributes), text in found if name == tag]


@pytest.fixture(scope="module")
def elements() -> Elements:
    """The elements of a page whose content is hostile."""
    return Elements(assemble({"header": HOSTILE, HOSTILE: [HOSTILE]}))


def test_hostile_content_is_data(elements: Elements) -> None:
    scripts = elements.all("script")
    assert len(scripts) == len(SCRIPTS) + 1
    [data] = [text for attributes, text in scripts if attributes.get("type") == "application/json"]
    assert not set(data) & set("<>&")
    assert data.isascii()
    assert json.loads(data) == {"header": HOSTILE, HOSTILE: [HOSTILE]}
    assert elements.all("img") == []


def test_the_policy_allows_the_scripts_and_styles_of_the_page_alone(elements: Elements) -> None:
    [policy] = [
        attributes["content"] or ""
        for attributes, _ in elements.all("meta")
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = {name: rest for name, _, rest in (r.partition(" ") for r in policy.split("; "))}
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert set(rules) == {"default-src", "script-src", "style-src", "base-uri", "form-action"}

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    code = [text for attributes, text in elements.all("script") if "type" not in attributes]
    assert rules["script-src"].split() == [digest(text) for text in code]
    assert rules["style-src"].split() == [digest(text) for _, text in elements.all("style")]


def test_nothing_in_the_page_is_fetched(elements: Elements) -> None:
    page = assemble({})
    assert re.search(r"https?:|@import|\burl\(|fetch\(|XMLHttpRequest|import\s*\(", page) is None
    for tag, attributes in elements.found:
        # `<a href="#...">` leads inside the page.
        assert not {"src", "action", "data", "srcset", "poster"} & set(attributes), tag
        assert (attributes.get("href") or "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on") or name == "style"]


def test_scripts_write_text_only() -> None:
    page = assemble({})
    assert re.search(r"(inner|outer|Adjacent)HTML|document\.write|\beval\b", page) is None
    assert re.search(r"new Function|setAttribute\(\"(on|style|src|href)", page) is None


def test_scripts_are_short_and_all_in_the_page() -> None:
    folder = files("protlm.report").joinpath("assets")
    found = {path.name: path.read_text() for path in folder.iterdir() if path.name.endswith(".js")}
    assert set(found) == set(SCRIPTS)
    assert max(len(text.splitlines()) for text in found.values()) < 300
    assert all(text.startswith('"use strict";\n// ') for text in found.values())


def test_every_label_in_the_page_has_an_element(elements: Elements) -> None:
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = {attributes.get("aria-labelledby") for _, attributes in elements.found} - {None}
    assert named <= set(ids)


def weights(kind: str) -> np.ndarray:
    generator = np.random.default_rng(0)
    values = generator.random((31, 31)) ** 8 * 0.3
    return values - 0.01 * generator.random((31, 31)) if kind == "signed" else values


@pytest.mark.parametrize("kind", ["unsigned", "signed"])
def test_a_decoded_weight_is_within_half_a_step(kind: str) -> None:
    map_LL = weights(kind)
    codes = Codes.of(map_LL)
    assert codes.is_signed == (kind == "signed")
    levels = 127 if codes.is_signed else 255
    # x = sqrt(w / scale) is within d = step / 2 of its code, so x² is within 2 x d + d².
    step = 1 / levels
    bound = codes.scale * (np.sqrt(np.abs(map_LL) / codes.scale) * step + step**2 / 4)
    assert (np.abs(codes.decode() - map_LL) <= bound * (1 + 1e-9)).all()
    assert codes.decode().flat[np.abs(map_LL).argmax()] == map_LL.flat[np.abs(map_LL).argmax()]


def test_codes_of_zeros_and_rounding_row_by_row() -> None:
    rounded, zeros = Codes.of(np.array([1.0, -1e-8])), Codes.of(np.zeros((3, 3)))
    assert not rounded.is_signed and rounded.decode().tolist() == [1.0, 0.0]
    assert zeros.scale == 0.0 and not zeros.decode().any()
    codes = Codes.of(np.array([[0.0, 1.0], [0.25, 4.0]]))
    plain = codes.to_plain()
    assert plain["scale"] == 4.0 and codes.num_bytes == len(plain["codes"])
    assert list(base64.b64decode(plain["codes"])) == [0, 128, 64, 255]
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_for_html({"weight": float("nan")})


@pytest.mark.parametrize("size", [1, 2, 7, 31, 40])
def test_bins_have_the_largest_magnitude(size: int) -> None:
    map_LL = weights("signed")
    reduced = binned(map_LL, size)
    for i in range(len(reduced)):
        for j in range(len(reduced)):
            square = map_LL[i * size : (i + 1) * size, j * size : (j + 1) * size]
            assert abs(reduced[i, j]) == np.abs(square).max()
            assert reduced[i, j] in square


SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"
PROTEIN = InspectedProtein("P1", "P1 one", "x.fasta", SEQUENCE)
ALL: dict[str, Any] = {"layers": (1, 2), "heads": (1, 2)}


def test_full_maps_are_those_of_the_model(model: PretrainedModel) -> None:
    found = inspected_heads(model, PROTEIN, **ALL)
    assert [(head.layer, head.head) for head in found] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    maps = model.attention_maps(model.tokenize([SEQUENCE]))
    for head in found:
        map_LL = maps[head.layer][0, head.head - 1, 1:-1, 1:-1].numpy()
        shown_LL = head.full.codes.decode()
        np.testing.assert_allclose(shown_LL, map_LL, atol=head.full.error * (1 + 1e-6))
        assert head.full.error <= map_LL.max() / 255
        rows, columns, weights = zip(*head.pairs, strict=True)
        apart = np.abs(np.subtract.outer(range(33), range(33))) >= 6
        expected = np.sort(map_LL[apart])[::-1][:20]
        np.testing.assert_allclose(weights, expected, rtol=1e-5)
        np.testing.assert_allclose(map_LL[rows, columns], expected, rtol=1e-5)
        received = Codes.of(map_LL.mean(axis=0))
        np.testing.assert_allclose(head.received.decode(), received.decode(), rtol=1e-4)
        # The rows of a map with its special tokens sum to 1.
        assert head.statistics["sink_mass"] == pytest.approx(1 - map_LL.sum(1).mean(), abs=1e-5)


@pytest.mark.parametrize(
    ("maps", "options", "kept"),
    [(4, {}, 4), (3.99, {}, 3), (4, {"num_models": 2}, 2), (0, {}, 1), (0, {"keep_full": True}, 4)],
)
def test_only_the_best_maps_stay_full(
    maps: float, options: Any, kept: int, model: PretrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_OVERVIEW_SIDE", 9)
    monkeypatch.setattr(module, "_FULL_PAIRS", int(maps * 33**2))
    found = inspected_heads(model, PROTEIN, **ALL, **options)
    best = sorted(found, key=lambda head: -head.rank)[:kept]
    assert {id(head) for head in found if head.full} == {*map(id, best)}
    for head in found:
        plain = head.to_plain()
        assert plain["bin"] == (1 if head.full else 4)
        assert len(plain["statistics"]) == len(STATISTICS)
        assert head.reduced.codes.codes.shape == (9, 9)


@pytest.mark.parametrize("length", [1, 2, 6, 7])
def test_short_proteins_have_a_page(length: int, model: PretrainedModel) -> None:
    protein = InspectedProtein("P1", "", "x.fasta", SEQUENCE[:length])
    for head in inspected_heads(model, protein, **ALL):
        assert len(head.to_plain()["pairs"]) == max(length - 6, 0) * 2


def test_precision_and_contrast_of_a_head(model: PretrainedModel) -> None:
    (path,) = shortest_structures("test", 1)
    structure = read_structure(path)
    protein = InspectedProtein("P1", "", path.name, structure.sequence, structure)
    [head] = inspected_heads(model, protein, layers=(1,), heads=(1,))
    maps = model.attention_maps(model.tokenize([structure.sequence]), [1], [1])
    feature_LL = features(maps[1][0, None, :, 1:-1, 1:-1].numpy())[0]
    known_LL = contact_map(structure)
    hits, asked = precision(feature_LL, known_LL, separation=SEPARATIONS["long"], divisor=1)
    assert head.statistics["precision"] == hits / asked == head.rank
    pairs = [feature_LL[i, j] for i in range(len(protein)) for j in range(i + 6, len(protein))]
    z = (np.array(pairs) - np.mean(pairs)) / np.std(pairs)
    expected = np.sort(z)[-len(protein) :].mean()
    assert head.statistics["contrast"] == pytest.approx(expected, rel=1e-3)
    plain = protein.to_plain()["structure"]
    i, j = plain["contacts"][0]
    assert known_LL[i, j] == 1 and j - i >= 3
    assert len(plain["ca"]) == len(plain["cb"]) == len(plain["states"]) == len(protein)


def test_predictions_are_those_with_one_residue_masked(model: PretrainedModel) -> None:
    p_L20 = predicted_distributions(model, SEQUENCE)
    np.testing.assert_allclose(p_L20.sum(axis=1), 1, rtol=1e-12)
    batch = model.tokenize([SEQUENCE])
    batch.tokens_BL[0, 5] = VOCABULARY.mask
    letters = [VOCABULARY[letter] for letter in STANDARD]
    expected = model(batch).logits_BLV[0, 5, letters].double().softmax(-1)
    np.testing.assert_allclose(p_L20[4], expected, rtol=1e-4)


def test_predictions_of_a_causal_model_do_not_depend_on_the_rest(train: Train) -> None:
    model = protlm.load(train("causal", "objective=causal", "trainer.max_steps=2"))
    whole = predicted_distributions(model, SEQUENCE)
    part = predicted_distributions(model, SEQUENCE[:10] + "W" * 10)
    assert whole.shape == (33, 20)
    np.testing.assert_allclose(whole[:11], part[:11], rtol=1e-4)
    assert not np.allclose(whole[11:20], part[11:20], rtol=1e-4)
