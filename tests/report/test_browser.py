"""The page in a real browser: hostile names, requests, keys, numbers, exports, themes, print."""

import struct
import time
from pathlib import Path

import numpy as np
import pytest

import protlm
from protlm.commands.inspect import inspect
from protlm.options.look import InspectOptions
from protlm.report.page import SCRIPTS
from tests.fixtures.browser import Browser
from tests.fixtures.runs import Train
from tests.report.test_inspected_features import described
from tests.small_models import shortest_structures

HOSTILE = "</script><script>window.broken=1</script><img/src=x/onerror=window.broken=2>\"'`&lt;"
SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"
TITLE = "document.getElementById('map-title').textContent"
GRID = "[...document.querySelectorAll('#grid button')]"
READING = "document.getElementById('reading').textContent"


@pytest.fixture(scope="module")
def two_models(tiny_run: Path, train_tiny: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a structure by two models."""
    folder = tmp_path_factory.mktemp("pages")
    other = train_tiny(folder / "other", "attention=softmax", "trainer.max_steps=2")
    (structure,) = shortest_structures("test", 1)
    inspect(structure, [tiny_run, other], folder / "two.html", InspectOptions())
    return folder / "two.html"


@pytest.fixture
def page(two_models: Path, browser: Browser) -> Browser:
    """The page of two models, newly opened."""
    browser.open(two_models)
    return browser


@pytest.mark.slow
def test_a_hostile_file_is_shown_as_text(tiny_run: Path, browser: Browser, tmp_path: Path) -> None:
    fasta = tmp_path / f"{HOSTILE[:20].replace('/', '_')}.fasta"
    fasta.write_text(f">{HOSTILE} {HOSTILE * 13_000}\n{SEQUENCE}\n")
    assert fasta.stat().st_size > 1_000_000
    inspect(fasta, [tiny_run], tmp_path / "page.html", InspectOptions())
    browser.open(tmp_path / "page.html")
    assert browser.evaluate("window.broken") is None
    assert browser.evaluate("document.images.length") == 0
    assert browser.evaluate("document.scripts.length") == len(SCRIPTS) + 1
    assert HOSTILE * 3 in browser.evaluate("document.getElementById('description').textContent")
    assert HOSTILE in browser.evaluate("document.getElementById('title').textContent")
    assert HOSTILE[:20].replace("/", "_") in browser.evaluate("document.body.textContent")
    assert (browser.requests(), browser.faults()) == ([], [])


@pytest.mark.slow
def test_the_policy_stops_what_is_not_of_the_page(page: Browser) -> None:
    """A script that is added does not run, and nothing is loaded."""
    page.evaluate(
        """(() => {
          const script = document.createElement("script");
          script.textContent = "window.added = 1";
          document.body.append(script);
          const image = document.createElement("img");
          image.src = "data:image/gif;base64,R0lGODlhAQABAAAAACw=";
          document.body.append(image);
          return fetch("http" + "://example.org").catch(() => null).then(() => 0);
        })()"""
    )
    assert page.evaluate("window.added") is None
    assert len([fault for fault in page.faults() if "Content Security Policy" in fault]) >= 3
    assert page.requests() == []


def test_the_page_opens_without_faults_or_requests(page: Browser) -> None:
    assert (page.requests(), page.faults()) == ([], [])
    assert page.evaluate(f"{GRID}.length") == 4
    assert page.evaluate("document.querySelectorAll('#statistics tbody tr').length") == 8
    assert "of A: tiny" in page.evaluate(TITLE)
    # No element is wider than the window.
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_numbers_are_those_of_the_model(page: Browser, tiny_run: Path) -> None:
    """Every weight is as computed, within the precision that is shown beside it."""
    model = protlm.load(tiny_run)
    sequence = page.evaluate("Content.protein.sequence")
    maps = model.attention_maps(model.tokenize([sequence]))
    for at, (layer, head) in enumerate([(1, 1), (1, 2), (2, 1), (2, 2)]):
        page.evaluate(f"App.open(App.models[0], App.models[0].heads[{at}])")
        assert f"ayer {layer} head {head}" in page.evaluate(TITLE)
        shown = page.evaluate("Array.from(App.getView().matrix.weights)")
        half_steps = "matrix.weights.map((_, place) => Data.halfStep(matrix, place))"
        steps = page.evaluate(f"(({{ matrix }}) => Array.from({half_steps}))(App.getView())")
        expected = maps[layer][0, head - 1, 1:-1, 1:-1].numpy().ravel()
        # Weights are float32 in the page.
        assert (np.abs(np.array(shown) - expected) <= np.array(steps) + 1e-6 * expected.max()).all()
        assert np.abs(np.array(shown) - expected).max() == pytest.approx(
            page.evaluate("App.state.head.error"), rel=1e-2
        )


def test_the_cross_is_moved_by_keys(page: Browser) -> None:
    sequence = page.evaluate("Content.protein.sequence")
    page.evaluate("App.point(4, 7); document.getElementById('map').focus()")
    for key, shift in (("Down", False), ("Right", False), ("Right", False), ("Right", True)):
        page.press(f"Arrow{key}", shift=shift)
    assert f"Row {sequence[5]}6, column {sequence[19]}20: weight" in page.evaluate(READING)
    page.press("ArrowUp", shift=True)
    assert f"Row {sequence[0]}1, column" in page.evaluate(READING)
    page.press(" ")
    assert "(fixed)" in page.evaluate(READING)
    assert "Å" in page.evaluate(READING)
    for key, size in (("+", round(len(sequence) / 2)), ("0", len(sequence))):
        page.press(key)
        assert page.evaluate("App.getView().size") == size
    assert "Map of Layer" in page.evaluate("document.getElementById('map').ariaLabel")


def test_the_pointer_finds_the_pair_that_is_drawn_there(page: Browser) -> None:
    length = page.evaluate("Data.length")
    # 48 and 58 pixels of margin, 590 of map, in a drawing that is 760 wide.
    place: dict[str, float] = page.evaluate(
        """(() => {
          const map = document.getElementById("map");
          map.scrollIntoView();
          const box = map.getBoundingClientRect();
          return {x: box.x, y: box.y, scale: box.width / 760};
        })()"""
    )
    row, column = 20, 33
    x = place["x"] + place["scale"] * (58 + (column + 0.5) * 590 / length)
    y = place["y"] + place["scale"] * (48 + (row + 0.5) * 590 / length)
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.drawn()
    assert page.evaluate("App.state.cursor") == {"row": row, "column": column}


def choose(page: Browser, control: str, value: str) -> None:
    """Chooses a value, which is an expression, in a control."""
    page.evaluate(
        f"""(() => {{
          const control = document.getElementById("{control}");
          control.value = {value};
          control.dispatchEvent(new Event("change"));
        }})()"""
    )


def test_heads_are_sorted_opened_and_compared(page: Browser) -> None:
    choose(page, "order", "Content.statistics.findIndex((one) => one.name === 'entropy')")
    shown = page.evaluate("[...document.querySelectorAll('#grid span')].map((x) => x.textContent)")
    values = [float(text.split()[1]) for text in shown]
    assert values == sorted(values)
    page.evaluate(f"{GRID}[3].focus()")
    page.press("ArrowLeft")
    assert page.evaluate(f"{GRID}.indexOf(document.activeElement)") == 2
    page.evaluate(f"{GRID}[0].click()")
    page.evaluate(f"{GRID}[1].dispatchEvent(new MouseEvent('click', {{shiftKey: true}}))")
    first, second = (text.split()[0].replace("-", " head ") for text in shown[:2])
    assert page.evaluate(TITLE) == f"Layer {first} of A: tiny, less layer {second} of A: tiny"
    difference = page.evaluate(
        """(() => {
          const shown = App.getView().matrix.weights;
          const [a, b] = [App.state.head, App.state.compared.head].map(Data.matrixOf);
          const expected = (i) => a.weights[i] - b.weights[i];
          return Math.max(...shown.map((w, i) => Math.abs(w - expected(i))));
        })()"""
    )
    assert difference == pytest.approx(0, abs=1e-7)


def test_a_head_of_one_model_is_compared_with_one_of_the_other(page: Browser) -> None:
    choose(page, "compare", "'1.2'")
    assert page.evaluate(TITLE).endswith("less layer 2 head 1 of B: other")
    page.evaluate("App.open(App.models[1], App.models[1].heads[2])")
    assert page.evaluate(TITLE) == "Layer 2 head 1 of B: other"
    assert page.evaluate("document.getElementById('model').value") == "1"


def download(page: Browser, button: str) -> bytes:
    """Clicks a button, and returns the file that the browser saves."""
    for path in page.downloads.iterdir():
        path.unlink()
    page.evaluate(f"document.getElementById('{button}').click()")
    end = time.monotonic() + 20
    while time.monotonic() < end:
        done = [path for path in page.downloads.iterdir() if path.suffix in {".png", ".tsv"}]
        if done and done[0].stat().st_size:
            return done[0].read_bytes()
        time.sleep(0.05)
    raise AssertionError(f"{button} saved nothing")


def test_tables_and_pictures_are_saved(page: Browser) -> None:
    length = page.evaluate("Data.length")
    rows = [line.split("\t") for line in download(page, "save-map-tsv").decode().splitlines()]
    weights = np.array([row[1:] for row in rows[1:]], dtype=float)
    shown = page.evaluate("Array.from(App.getView().matrix.weights)")
    np.testing.assert_allclose(weights.ravel(), shown, rtol=1e-5)
    sequence = page.evaluate("Content.protein.sequence")
    assert rows[0][1:] == [f"{letter}{i}" for i, letter in enumerate(sequence, 1)]
    statistics = download(page, "save-statistics-tsv").decode().splitlines()
    assert statistics[0].startswith("model\tlayer\thead\tprecision\tcontrast\tentropy")
    assert len(statistics) == 9
    predictions = download(page, "save-logo-tsv").decode().splitlines()
    assert len(predictions) == length + 1
    for button in ("save-map-png", "save-structure-png", "save-logo-png"):
        picture = download(page, button)
        assert picture.startswith(b"\x89PNG")
        assert struct.unpack(">I", picture[16:20])[0] >= 840


def test_letters_of_the_logo_stand_at_their_positions(page: Browser) -> None:
    """There is no ink right of the last position, nor above the highest stack."""
    inked: dict[str, int] = page.evaluate(
        """(() => {
          const canvas = document.getElementById("logo");
          const at = (n) => 2 * (56 + (n % 50) * 24);
          const height = canvas.height - 2 * 112;
          const count = (x) => {
            const { data } = canvas.getContext("2d").getImageData(x, height, 40, 150);
            let found = 0;
            for (let i = 0; i < data.length; i += 4) {
              const rgb = [...data.slice(i, i + 3)];
              if (Math.max(...rgb) - Math.min(...rgb) > 60) found++;
            }
            return found;
          };
          return {last: count(at(Data.length - 1) + 4), beyond: count(at(Data.length) + 4)};
        })()"""
    )
    assert page.evaluate("Data.length % 50 > 0")
    assert inked["last"] > 100
    assert inked["beyond"] == 0
    frame = page.evaluate(
        """(() => {
          App.point(0, 51);
          return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => {
            const frame = document.getElementById("logo-frame").getBoundingClientRect();
            const clientX = frame.x + frame.width / 2;
            const clientY = frame.y + frame.height / 2;
            done(Logo.positionAt({ clientX, clientY }));
          })));
        })()"""
    )
    assert frame == 51
    assert page.evaluate("document.getElementById('logo-reading').textContent")[1:3] == "52"


def colors(page: Browser) -> tuple[str, int]:
    """The color of the page, and the red of the corner of the map, which has the theme's."""
    map_pixel = "document.getElementById('map').getContext('2d').getImageData(2, 2, 1, 1).data[0]"
    page_color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return page_color, page.evaluate(map_pixel)


def test_themes_and_print(two_models: Path, browser: Browser) -> None:
    light, dark = ("rgb(255, 255, 255)", 246), ("rgb(20, 23, 27)", 29)
    browser.open(two_models)
    assert colors(browser) == light
    browser.open(two_models, dark=True)
    assert colors(browser) == dark
    for event, expected in (("beforeprint", light), ("afterprint", dark)):
        browser.evaluate(f"window.dispatchEvent(new Event('{event}'))")
        browser.drawn()
        assert colors(browser) == expected


def test_the_trace_turns_and_shows_the_pair(page: Browser) -> None:
    picture = "document.getElementById('structure').toDataURL()"
    before = page.evaluate(picture)
    page.evaluate("document.getElementById('structure').focus()")
    page.press("ArrowRight")
    assert page.evaluate(picture) != before
    # A viewer who asked for less motion gets a trace at rest.
    assert page.evaluate("document.getElementById('spin').checked") is False
    near = "contacts.every(([i, j]) => Structure.distance(i, j) < 8)"
    assert page.evaluate(f"Content.protein.structure.{near}")


def test_text_is_legible(two_models: Path, browser: Browser) -> None:
    """The contrast of text and panel is at least 4.5 to 1 (WCAG 2.2), in both themes."""

    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for dark in (False, True):
        browser.open(two_models, dark=dark)
        panel = luminance(browser.evaluate("Palettes.themed('panel')"))
        for name in ("text", "quiet", "accent"):
            ink = luminance(browser.evaluate(f"Palettes.themed('{name}')"))
            high, low = max(ink, panel), min(ink, panel)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, dark)


def test_controls_have_names(page: Browser) -> None:
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    kinds = {"button", "checkbox", "combobox", "image", "PopUpButton"}
    controls = [x for x in nodes if not x.get("ignored") and x["role"]["value"] in kinds]
    assert len(controls) > 15
    assert [one for one in controls if not one.get("name", {}).get("value")] == []


@pytest.mark.slow
def test_a_sparse_feature_is_opened(tiny_run: Path, browser: Browser, tmp_path: Path) -> None:
    """Its name is text, and it colors the sequence and marks the structure until it is closed."""
    described(tmp_path, protlm.load(tiny_run), {3: HOSTILE})
    options = InspectOptions(features=tmp_path / "sae", description=tmp_path / "names")
    (structure,) = shortest_structures("test", 1)
    inspect(structure, [tiny_run], tmp_path / "page.html", options)
    browser.open(tmp_path / "page.html", width=390)
    buttons = "[...document.querySelectorAll('#features button')]"
    browser.evaluate(f"{buttons}[0].focus()")
    browser.press("ArrowDown")
    assert browser.evaluate(f"{buttons}.indexOf(document.activeElement)") == 1
    browser.evaluate(f"{buttons}[0].click()")
    browser.drawn()
    reading = browser.evaluate("document.getElementById('feature-reading').textContent")
    assert f"Feature 3: {HOSTILE}, F1 0.50 (95 % interval 0.40 to 0.60; by chance 0.10)" in reading
    assert browser.evaluate("document.querySelectorAll('#feature-proteins li').length") == 2
    values = browser.evaluate("Array.from(Features.activity(App.state.feature))")
    letters = "[...document.querySelectorAll('.sequence-letters > span')]"
    bright = f"{letters}.map((x) => x.style.backgroundColor === 'rgb(253, 231, 37)')"
    assert browser.evaluate(bright).index(True) == int(np.argmax(values))
    label = "document.getElementById('structure').ariaLabel"
    assert f"with {np.count_nonzero(values)} active residues" in browser.evaluate(label)
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    browser.evaluate(f"{buttons}[0].click()")
    browser.drawn()
    assert "pairs" in browser.evaluate(label) and not browser.evaluate("window.broken")
    assert browser.evaluate(f"{buttons}[0].getAttribute('aria-pressed')") == "false"
    assert (browser.requests(), browser.faults()) == ([], [])
