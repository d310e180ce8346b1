"""pyproject.toml, requirements.lock and environment.yml agree on what protlm stands on."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

# What conda-forge calls by another name.
CONDA_NAMES = {"torch": "pytorch", "isal": "python-isal", "build": "python-build"}

# No target of the Makefile needs it; the notebooks are executed without it.
NOT_LOCKED = {"jupyterlab"}

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
    assert conda == {CONDA_NAMES.get(name, name): bounds for name, bounds in declared().items()}


def test_the_lock_holds_what_is_declared() -> None:
    wanted = {name: bounds for name, bounds in declared().items() if name not in NOT_LOCKED}
    lock = locked()
    assert wanted.keys() <= lock.keys()
    outside = [name for name, bounds in wanted.items() if pinned(lock[name]) not in bounds]
    assert outside == []


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


def test_the_lock_names_one_torch_for_every_machine() -> None:
    # A local version such as 2.13.0+cpu would be found on one kind of machine only.
    assert str(locked()["torch"]) == "torch==2.13.0"
    assert [name for name in locked() if pinned(locked()[name]).local] == []


def test_what_is_known_to_be_bad_stays_out() -> None:
    # 2.6.2 and 2.6.3 of Lightning were malware (GHSA-w37p-236h-pfx3).
    bounds = declared()["pytorch-lightning"]
    assert not any(version in bounds for version in ("2.6.2", "2.6.3"))
    # torchvision beside a CPU build of torch breaks torchmetrics, and so Lightning; two Lightnings
    # are two class hierarchies; pyfastx reads a truncated gzip file without an error.
    unwanted = {"torchvision", "lightning", "pyfastx", "torchdata", "performer-pytorch"}
    assert unwanted & (locked().keys() | declared().keys()) == set()
