"""README, documents, notebooks and the site are correct: words, links, commands, versions."""

import doctest
import inspect
import json
import re
import shlex
import subprocess
import tomllib
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import protlm.attention
from docs import tables
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.config.settings import settings_of
from protlm.interface import Model
from tests.fixtures.commands import ROOT, run_python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ["benchmarks", "conf", "data_prep", "docs", "notebooks", "protlm", "slurm"]
FOLDERS += ["studies", "tests"]
CELLS = 15

# Options and variables that point an installer at one index, and folders of one machine.
PRIVATE = re.compile(
    r"--(?:extra-)?index[-]url|--find[-]links|_INDEX[_]URL"
    + "".join("|" + re.escape(f"{folder}/") for folder in (ROOT, Path.home()) if folder.name)
)

# Paraphrases that CONTRIBUTING.md replaces, and British spelling.
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

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_the_versions_agree() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == PROJECT["version"] == protlm.__version__


def test_methods_in_documents_exist() -> None:
    calls = [
        found
        for path in DOCUMENTS
        for found in re.findall(r"(?:protlm\.load\([^()]*\)|\bmodel)\.(\w+)\(", path.read_text())
    ]
    assert {"embed", "score", "estimate_errors"} <= set(calls)
    assert [name for name in calls if not hasattr(Model, name)] == []


def test_every_setting_is_explained() -> None:
    settings = list(settings_of(compose(TrainConfig, ())))
    assert {"run_dir", "model.qk_norm", "trainer.max_steps"} <= {one.name for one in settings}
    assert [one.name for one in settings if len(one.help) < 4] == []
    page = (ROOT / "docs" / "settings.md").read_text()
    written = tables.within(page, tables.SETTINGS, tables.settings())
    assert page == written, "docs/settings.md is out of date: type make docs"
    for one in settings:
        assert f"| `{one.name}` | `{one.value}` |" in page


def test_notebooks_are_short_and_clean() -> None:
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks
    for path in notebooks:
        cells = json.loads(path.read_text())["cells"]
        assert len(cells) <= CELLS, path.name
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert not [cell for cell in code if cell["outputs"] or cell["execution_count"]], path.name


def lines_that_match(pattern: re.Pattern[str], kinds: str, *exempt: Path) -> list[str]:
    """The places and lines of the project's own files of some kinds."""
    files = [path for folder in [".ci", *FOLDERS] for path in (ROOT / folder).rglob("*")]
    files += [path for path in ROOT.iterdir() if path.name != ".git"]
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        if path.is_file() and path.suffix in kinds.split(" ") and path not in exempt
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_file_names_a_folder_of_this_machine_or_an_index() -> None:
    kinds = " .cfg .ipynb .lock .md .py .toml .txt .yaml .yml .sbatch .sh"
    assert lines_that_match(PRIVATE, kinds) == []


@pytest.mark.parametrize("phrases", [PHRASES, BRITISH], ids=["paraphrases", "spelling"])
def test_prose_is_plain(phrases: re.Pattern[str]) -> None:
    # But for the table of what not to write, and this list.
    exempt = (ROOT / "CONTRIBUTING.md", Path(__file__))
    assert lines_that_match(phrases, ".md .py .sh .yaml .ipynb", *exempt) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_in_documents_exist(document: Path) -> None:
    text = document.read_text()
    links = re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", text)
    missing = [link for link in links if not (document.parent / link).exists()]
    # A path in backquotes that starts with one of the folders exists, unless it contains a NAME in
    # capitals, or the document asks the reader to write it: the path, a colon, and then the code.
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", text)
    written = {Path(name).stem for name in re.findall(r"^`([\w./-]+)`:\n\n```", text, re.MULTILINE)}
    named = [name for name in named if not re.search("[A-Z]{4}", name)]
    named = [name for name in named if Path(name).stem not in written]
    assert missing + [name for name in named if not (ROOT / name).exists()] == []


def commands_in(document: Path, program: str) -> list[list[str]]:
    """The command lines of a program in a document's code blocks, as words."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    typed = [line.strip().removeprefix("$ ").split(" #")[0].split() for line in lines]
    return [words for words in typed if words[:1] == [program]]


def test_the_readme_names_real_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    (phony,) = re.findall(r"^\.PHONY: (.*)", makefile, re.MULTILINE)
    assert set(phony.split()) == targets
    typed = [words for document in DOCUMENTS for words in commands_in(document, "make")]
    assert {"demo", "test"} <= {word for words in typed for word in words[1:]} <= targets


def test_the_readme_names_real_commands(protlm_in_process: Command, tmp_path: Path) -> None:
    @cache
    def help_of(*command: str) -> str:
        return protlm_in_process(*command, "--help", cwd=tmp_path).stdout

    def subcommands(*command: str) -> set[str]:
        return set(re.findall(r"^  ([a-z]+)  ", help_of(*command).partition("Commands:")[2], re.M))

    typed = [words[1:] for document in DOCUMENTS for words in commands_in(document, "protlm")]
    demo = re.findall(r"^\t\.venv/bin/protlm (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(typed) >= 5 and len(demo) == 5
    for words in [*typed, *map(str.split, demo)]:
        assert words[0] in subcommands(), f"protlm {' '.join(words)}"
        if words[0] in {"train", "evaluate"}:
            # Their settings are Hydra's; the tests of the configs compose them.
            continue
        command = words[:2] if words[0] in {"data", "checkpoint", "features"} else words[:1]
        if len(command) == 2:
            assert command[1] in subcommands(command[0]), f"protlm {' '.join(words)}"
        options = set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", help_of(*command)))
        assert {word.partition("=")[0] for word in words if re.match("--?[a-z]", word)} <= options


@pytest.mark.slow
def test_the_settings_of_training_in_documents_are_settings() -> None:
    """Includes commands of torchrun and sbatch."""
    texts = [document.read_text() for document in DOCUMENTS]
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```", "".join(texts), re.MULTILINE | re.DOTALL))
    lines = [line.split(" #")[0] for line in blocks.replace("\\\n", " ").splitlines()]
    trained = re.compile(
        r".*(?:protlm train|-m protlm\.train|slurm/train\.sbatch)(.*?)(?:; done)?$"
    )
    typed = [shlex.split(found[1]) for line in lines if (found := trained.match(line))]
    assert len(typed) >= 8
    for settings in typed:
        plain = [setting.replace("$seed", "0") for setting in settings]
        # Of another package, and with files that do not exist.
        others = {"data=mixture", "attention=mean_pooling"}
        if not others.intersection(plain) and not any(s.startswith("-") for s in plain):
            compose(TrainConfig, plain)


@pytest.mark.slow
def test_the_code_of_the_python_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "python.md").read_text()
    shown = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    test = doctest.DocTestParser().get_doctest(shown, {}, "python.md", None, None)
    assert len(test.examples) > 15
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.DocTestRunner(optionflags=flags).run(test).failed == 0


def public(cls: type) -> set[str]:
    """The names of a class's own public methods and properties, inherited ones of protlm too."""
    owners = [base for base in cls.__mro__ if base.__module__.startswith("protlm")]
    names = {name for base in owners for name in vars(base) if not name.startswith("_")}
    return {n for n in names if not isinstance(inspect.getattr_static(cls, n), type | str | bool)}


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_complete(tmp_path: Path) -> None:
    words = ("-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", tmp_path)
    run_python(*words, cwd=ROOT)
    assert (tmp_path / "index.html").is_file()
    inventory = (tmp_path / "objects.inv").read_bytes().split(b"\n", 4)[4]
    listed = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    wanted = {f"protlm.interface.Model.{name}" for name in public(Model)} | {"protlm.load"}
    wanted |= {f"protlm.attention.{name}" for name in protlm.attention.__all__} - {
        "protlm.attention.Attention"
    }
    results = "pretrained.TokenBatch transformer.ModelOutput embedding.EmbeddedFile "
    results += "embedding.EmbeddedProtein decoding.Sampling decoding.GeneratedSequence"
    wanted |= {f"protlm.model.{name}" for name in results.split()}
    wanted |= {f"protlm.attention.base.Attention.{name}" for name in ("forward", "attention_map")}
    assert wanted - listed == set()
