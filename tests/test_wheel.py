"""The wheel is complete: it contains configs and sample, and runs from an empty folder."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str | Path, folder: Path, path: Path | None = None) -> str:
    """Runs this Python with the arguments and returns its output."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree without the network."""
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_contains_configs_and_sample(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tree = [path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*.yaml")]
    sample = (ROOT / "data_prep" / "sample").rglob("*")
    tree += [path.relative_to(ROOT).as_posix() for path in sample if path.is_file()]
    tree += [path.relative_to(ROOT).as_posix() for path in (ROOT / "data_prep").glob("*.py")]
    shipped = {f"protlm/{name}" for name in tree}
    assets = (ROOT / "protlm" / "report" / "assets").iterdir()
    shipped |= {path.relative_to(ROOT).as_posix() for path in assets}
    assert {"protlm/conf/train.yaml", "protlm/data_prep/sample/uniprot_sample.fasta.gz"} <= shipped
    assert shipped <= names
    # A top-level conf or data_prep could clash with those of other packages.
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"protlm"}


def test_the_wheel_has_the_real_package_in_place_of_the_link(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packaged = archive.read("protlm/data_prep/__init__.py")
    assert packaged == (ROOT / "data_prep" / "__init__.py").read_bytes()


@pytest.mark.slow
def test_the_source_distribution_keeps_both_folders(tmp_path: Path) -> None:
    """The tests run from it, and a wheel can be built of it."""
    run("-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, ROOT, folder=tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"data_prep/prepare.py", "data_prep/sample/uniprot_sample.fasta.gz"} <= names
    assert "protlm/data_prep/__init__.py" in names


def test_the_wheel_runs_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    run("-m", "pip", "install", "--no-deps", "--quiet", "--target", site, wheel, folder=empty)
    assert "Usage: protlm" in run("-m", "protlm", "--help", folder=empty, path=site)
    names = "from protlm.attention import __file__, names; print(__file__, *names())"
    place, *mechanisms = run("-c", names, folder=empty, path=site).split()
    assert Path(place).is_relative_to(site)
    assert {"softmax", "performer_relu", "performer_softmax"} <= set(mechanisms)
    sample = "from protlm.system.paths import sample_dir; print(*sample_dir().glob('*.fasta.gz'))"
    assert str(site) in run("-c", sample, folder=empty, path=site)
    module = "from protlm.data_prep import prepare; print(prepare.__file__)"
    assert str(site) in run("-c", module, folder=empty, path=site)
    assert list(empty.iterdir()) == []
