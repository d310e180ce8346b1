"""Prose stays plain: phrases that CONTRIBUTING.md replaces do not come back."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [
    "benchmarks",
    "conf",
    "data_prep",
    "docs",
    "notebooks",
    "protlm",
    "slurm",
    "studies",
    "tests",
]
PHRASES = re.compile(
    r"\b(?:whoever|nobody|for ever|none of ours|half a dozen|without a word|stands? (?:in|for) the"
    r"|go(?:es)? on|takes? up|gives? back|comes? to be|lets? go|so many|is told"
    r"|is no (?:setting|flag|name|number|protein)|mends?|mended|heeds?|vouche?[sd]?)\b",
    re.IGNORECASE,
)
BRITISH = re.compile(
    r"\b\w*(?:colour|behaviour|neighbour|favour|centre|licence|defence)\w*\b"
    r"|\b\w*(?:normal|token|initial|recogn|optim|general|real|minim|maxim)is(?:e|ed|es|ing|ation)\b"
    r"|\b(?:grey|learnt|labelled|cancelled|modelled)\b",
    re.IGNORECASE,
)
# The table of what not to write, and this list.
EXEMPT = {ROOT / "CONTRIBUTING.md", Path(__file__)}


def prose() -> list[Path]:
    """All files that a person reads."""
    kinds = {".md", ".py", ".sh", ".yaml", ".ipynb"}
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    found += [ROOT / name for name in ("README.md", "CHANGELOG.md", "Makefile")]
    return [path for path in found if path.suffix in kinds and path not in EXEMPT]


@pytest.mark.parametrize("phrases", [PHRASES, BRITISH], ids=["paraphrases", "spelling"])
def test_prose_is_plain(phrases: re.Pattern[str]) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()!r} in {line.strip()}"
        for path in prose()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in phrases.finditer(line)
    ]
    assert found == []
