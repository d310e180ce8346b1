"""The wheel is complete, and all lists of what protlm stands on agree."""

import json
import math
import os
import re
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.fixtures.commands import ROOT, SHORT_TRAINING, Command, run_python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

# What conda-forge calls by another name.
CONDA_NAMES = {"torch": "pytorch", "isal": "python-isal", "build": "python-build"}

# No target of the Makefile needs them; the notebooks are executed without the first. conda-forge
# does not have the second.
NOT_LOCKED = {"jupyterlab", "biotrainer"}

# What a build of torch for CUDA brings, and pins, by itself.
OF_TORCH = re.compile(r"(nvidia|cuda)-.*|triton")


def declared() -> dict[str, SpecifierSet]:
    """The requirements of pyproject.toml, of every extra too, with their bounds."""
    lines = [*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)]
    found = [Requirement(line) for line in lines]
    return {canonicalize_name(requirement.name): requirement.specifier for requirement in found}


def locked() -> dict[str, Requirement]:
    """The requirements of the lock by name."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    found = [Requirement(line) for line in lines if not line.startswith("#")]
    names = [canonicalize_name(requirement.name) for requirement in found]
    assert names == sorted(set(names)), "the lock is sorted and names nothing twice"
    return dict(zip(names, found, strict=True))


def pinned(requirement: Requirement) -> Version:
    """The one version that a line of the lock allows."""
    (specifier,) = requirement.specifier
    assert specifier.operator == "==", f"{requirement} is not an exact version"
    return Version(specifier.version)


def test_conda_and_pip_ask_for_the_same() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    entries = [line.partition(" ") for line in environment["dependencies"]]
    conda = {name: SpecifierSet(bounds) for name, _, bounds in entries}
    assert len(conda) == len(entries)
    assert conda.pop("python") == SpecifierSet(PROJECT["requires-python"])
    assert conda.pop("pip") == SpecifierSet()
    pip = {name: bounds for name, bounds in declared().items() if name != "biotrainer"}
    assert conda == {CONDA_NAMES.get(name, name): bounds for name, bounds in pip.items()}


def test_the_lock_holds_what_is_declared() -> None:
    wanted = {name: bounds for name, bounds in declared().items() if name not in NOT_LOCKED}
    lock = locked()
    assert wanted.keys() <= lock.keys()
    assert [name for name, bounds in wanted.items() if pinned(lock[name]) not in bounds] == []
    # A local version such as 2.13.0+cpu would be found on one kind of machine only.
    assert str(lock["torch"]) == "torch==2.13.0"
    assert [name for name in lock if pinned(lock[name]).local] == []


def test_the_lock_is_closed() -> None:
    lock = locked()
    for name in lock:
        try:
            needs = [Requirement(line) for line in requires(name) or []]
        except PackageNotFoundError:
            # For another operating system, or conda has it from elsewhere, as Node.js.
            continue
        missing = {
            canonicalize_name(need.name)
            for need in needs
            if need.marker is None or need.marker.evaluate({"extra": ""})
        } - lock.keys()
        assert {need for need in missing if not OF_TORCH.fullmatch(need)} == set(), name


def test_what_is_known_to_be_bad_stays_out() -> None:
    # 2.6.2 and 2.6.3 of Lightning were malware (GHSA-w37p-236h-pfx3).
    bounds = declared()["pytorch-lightning"]
    assert not any(version in bounds for version in ("2.6.2", "2.6.3"))
    # torchvision beside a CPU build of torch breaks torchmetrics, and so Lightning; two Lightnings
    # are two class hierarchies; pyfastx reads a truncated gzip file without an error.
    unwanted = {"torchvision", "lightning", "pyfastx", "torchdata", "performer-pytorch"}
    assert unwanted & (locked().keys() | declared().keys()) == set()


def run(*arguments: str | Path, folder: Path, path: Path | None = None) -> str:
    """Runs this Python with the arguments and returns its output."""
    return run_python(*arguments, cwd=folder, PYTHONPATH=str(path or "")).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree without the network."""
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_contains_configs_and_sample(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        # The real package is in the place of the link.
        packaged = archive.read("protlm/data_prep/__init__.py")
    assert packaged == (ROOT / "data_prep" / "__init__.py").read_bytes()
    tree = [path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*.yaml")]
    sample = (ROOT / "data_prep" / "sample").rglob("*")
    tree += [path.relative_to(ROOT).as_posix() for path in sample if path.is_file()]
    tree += [path.relative_to(ROOT).as_posix() for path in (ROOT / "data_prep").glob("*.py")]
    shipped = {f"protlm/{name}" for name in tree}
    assets = (ROOT / "protlm" / "report" / "assets").iterdir()
    shipped |= {path.relative_to(ROOT).as_posix() for path in assets}
    shipped |= {"protlm/docs/train.md", "protlm/notebooks/heads.ipynb", "protlm/slurm/train.sbatch"}
    assert {"protlm/conf/train.yaml", "protlm/data_prep/sample/uniprot_sample.fasta.gz"} <= shipped
    assert shipped <= names
    # A top-level conf or data_prep could clash with those of other packages.
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"protlm"}


def install(what: Path, site: Path, folder: Path) -> None:
    """Installs a wheel or a folder of sources, without the network."""
    words = ("-m", "pip", "install", "--no-deps", "--no-build-isolation", "--quiet")
    run(*words, "--target", site, what, folder=folder)


@pytest.mark.slow
def test_a_mechanism_and_an_evaluation_are_installed_as_the_page_says(
    wheel: Path, tmp_path: Path, tiny_data: Path, tiny_fasta: Path, protlm_command: Command
) -> None:
    """The example of docs/extend.md: built, installed, trained, evaluated, loaded; then missing."""
    source, site, own = (tmp_path / name for name in ("source", "site", "own"))
    (source / "my_mechanisms").mkdir(parents=True)
    (source / "my_mechanisms" / "__init__.py").touch()
    page = (ROOT / "docs" / "extend.md").read_text()
    shown = re.findall(r"^`(\w+\.(?:py|yaml))`:\n\n```\w+\n(.*?)^```", page, re.M | re.S)
    assert len(shown) == 4
    for name, content in shown:
        (source / "my_mechanisms" / name).write_text(content)
    (declared,) = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    (source / "pyproject.toml").write_text(declared)
    install(wheel, site, tmp_path)
    install(source, own, tmp_path)

    def protlm(*words: object) -> str:
        path = f"{site}{os.pathsep}{own}"
        return run("-m", "protlm", *map(str, words), folder=tmp_path, path=Path(path))

    chosen = ("model=tiny", "attention=mean_pooling", "attention.scale=0.5", *SHORT_TRAINING)
    protlm("train", *chosen, f"data.dir={tiny_data}", "run_dir=run")
    assert "scale: 0.5" in (tmp_path / "run" / "config.yaml").read_text()
    protlm("train", "run_dir=run", "trainer.max_steps=3")
    evaluated = protlm(
        *("evaluate", "checkpoint=run", f"data.dir={tiny_data}", "output=out.json"),
        *("evaluation=[masked,confidence]", "evaluation.confidence.max_sequences=3"),
    )
    assert all(x in evaluated for x in ("entropy", "perplexity"))
    values = json.loads((tmp_path / "out.json").read_text())["results"]["test"]["confidence"]
    assert 0 < values["entropy"] < math.log(33)
    loaded = "import protlm; print(protlm.__file__, protlm.load('run').embed(['MKV']).shape)"
    printed = run("-c", loaded, folder=tmp_path, path=Path(f"{site}{os.pathsep}{own}"))
    assert printed == f"{site / 'protlm' / '__init__.py'} (1, 64)\n"
    # The package is now only in the working folder: nothing there is imported.
    words = ("embed", tiny_fasta, "-m", tmp_path / "run", "-o", "out.h5")
    refused = protlm_command(*words, cwd=own, code=3)
    assert "attention=mean_pooling does not exist; there are: " in refused.stderr
    assert "found when its package is installed (docs/extend.md)" in refused.stderr
