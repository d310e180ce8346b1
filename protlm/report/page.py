"""Assembles the page: one HTML file that requests nothing, and runs no script but its own."""

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from protlm.system.errors import UserError

# The attachments that mail servers accept are 25 MB.
MAX_BYTES = 25_000_000
# In the order in which they run; each defines what the later ones use.
SCRIPTS = (
    "data.js",
    "palettes.js",
    "heatmap.js",
    "grid.js",
    "structure.js",
    "sequence.js",
    "features.js",
    "logo.js",
    "tables.js",
    "relatives.js",
    "export.js",
    "about.js",
    "app.js",
    "controls.js",
)
_STYLE = "page.css"
# Of JSON inside of HTML: `<` could end the element; the others are escaped for older readers.
_ESCAPED = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def assemble(content: dict[str, Any]) -> str:
    """Returns the page, ASCII but for its assets, with `content` as JSON in an inert element.

    The policy in the page lets the browser run and apply only scripts and styles of these hashes,
    and load nothing.
    """
    scripts = [_asset(name) for name in SCRIPTS]
    style = _asset(_STYLE)
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; "
        f"style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": policy,
        "STYLE": f"<style>{style}</style>",
        "DATA": json_for_html(content),
        "SCRIPTS": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    # Split first, so that a mark inside of a part is text.
    texts = _asset("page.html").split("@@")
    return "".join(parts[text] if place % 2 else text for place, text in enumerate(texts))


def check_size(num_bytes: int) -> None:
    """Refuses a page of this size, or one whose maps alone have it."""
    if num_bytes > MAX_BYTES:
        raise UserError(
            f"the page has over {num_bytes / 1e6:.0f} MB, and mail takes {MAX_BYTES / 1e6:.0f} MB; "
            "select fewer heads with --layers and --heads, or omit both for reduced maps, or give "
            "one model"
        )


def json_for_html(content: dict[str, Any]) -> str:
    r"""Returns JSON that no HTML parser can leave: ASCII, without `<`, `>` and `&`.

    >>> json_for_html({"header": "</script>"})
    '{"header":"\\u003c/script\\u003e"}'
    """
    return json.dumps(content, separators=(",", ":"), allow_nan=False).translate(_ESCAPED)


def _asset(name: str) -> str:
    return files("protlm.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
