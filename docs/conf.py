"""Settings of Sphinx, which makes the site from the Markdown pages as they are: `make site`."""

import sys
from pathlib import Path
from shutil import copyfile

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
TABLES = sorted(ROOT.glob("models/*/results.md"))
sys.path.insert(0, str(ROOT))

project = "protlm"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# The source is the whole project, so that links between its pages are links of the site.
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "docs/**.md", "models/*/*.md"]
# Not looked through: environments have a hundred thousand files.
exclude_patterns = [
    p.name for p in ROOT.iterdir() if p.is_dir() and p.name not in {"docs", "models"}
]
myst_heading_anchors = 3
# The tables of a model's results are written without a title.
suppress_warnings = ["myst.header"]
html_theme = "furo"
html_title = "protlm"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
# The fields of a tuple are documented once, by its docstring.
napoleon_use_ivar = True

# The pages in the bar at the side.
CONTENTS = {
    "Data": ["docs/prepare", "docs/shards", "docs/trembl"],
    "Training": ["docs/train", "docs/settings", "docs/cluster", "docs/gpu", "docs/linearize"],
    "Using a model": [
        *("docs/embed", "docs/score", "docs/learn", "docs/generate", "docs/relatives"),
        *("docs/inspect", "docs/features", "docs/benchmark", "docs/evaluate", "docs/interop"),
        *("docs/doctor", "docs/python"),
    ],
    "Background": [
        "docs/how-it-works",
        "docs/mechanisms",
        "docs/extend",
        "docs/results/index",
        "docs/decisions/index",
        "models/*/README",
        "CONTRIBUTING",
    ],
}
# The pages under another one.
UNDER = {"docs/results/index": "docs/results/*", "docs/decisions/index": "docs/decisions/0*"}
UNDER |= {f"models/{p.parent.name}/README": f"models/{p.parent.name}/results" for p in TABLES}


def add_contents(_: Sphinx, name: str, source: list[str]) -> None:
    """Appends the bar at the side to the front page, and to a page those under it."""
    tables = CONTENTS if name == root_doc else {}
    if name in UNDER:
        tables = {"More": [UNDER[name]]}
    for caption, pages in tables.items():
        lines = ["", "```{toctree}", ":hidden:", ":glob:", f":caption: {caption}", ""]
        source[0] += "\n".join([*lines, *(f"/{page}" for page in pages), "```", ""])


def copy_front_page(app: Sphinx, error: Exception | None) -> None:
    """Names the front page as web servers expect it, too."""
    if error is None:
        copyfile(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    """Has the contents added to the pages as they are read."""
    app.connect("source-read", add_contents)
    app.connect("build-finished", copy_front_page)
