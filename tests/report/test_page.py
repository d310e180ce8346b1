"""The page as a file: its policy, its data, and nothing that a browser could request."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from protlm.report.page import SCRIPTS, assemble, json_for_html

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
        found = hashlib.sha256(text.encode()).digest()
        return f"'sha256-{base64.b64encode(found).decode()}'"

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


def test_a_number_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_for_html({"weight": float("nan")})


def test_every_label_in_the_page_has_an_element(elements: Elements) -> None:
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = {attributes.get("aria-labelledby") for _, attributes in elements.found} - {None}
    assert named <= set(ids)
