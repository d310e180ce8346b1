"""The site of the documentation: it is built without a warning, and has every public name."""

import inspect
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import protlm.attention
from protlm.interface import Model

ROOT = Path(__file__).resolve().parent.parent


def public(cls: type) -> set[str]:
    """The names of a class's own public methods and properties, inherited ones of protlm too."""
    owners = [base for base in cls.__mro__ if base.__module__.startswith("protlm")]
    names = {name for base in owners for name in vars(base) if not name.startswith("_")}
    return {n for n in names if not isinstance(inspect.getattr_static(cls, n), type | str | bool)}


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_complete(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", "."]
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").is_file()
    inventory = (tmp_path / "objects.inv").read_bytes().split(b"\n", 4)[4]
    listed = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    wanted = {f"protlm.interface.Model.{name}" for name in public(Model)} | {"protlm.load"}
    wanted |= {f"protlm.attention.{name}" for name in protlm.attention.__all__} - {
        "protlm.attention.Attention"
    }
    wanted |= {f"protlm.attention.base.Attention.{name}" for name in ("forward", "attention_map")}
    assert wanted - listed == set()
