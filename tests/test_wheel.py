"""The wheel alone is enough: configs and sample are inside, and it runs from an empty folder."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str | Path, folder: Path, path: Path | None = None) -> str:
    """Runs this Python with the arguments, and returns what it printed."""
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


def test_the_wheel_holds_what_the_program_reads(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tree = [path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*.yaml")]
    sample = (ROOT / "data_prep" / "sample").rglob("*")
    shipped = {f"protlm/{name}" for name in tree}
    shipped |= {path.relative_to(ROOT).as_posix() for path in sample if path.is_file()}
    assert {"protlm/conf/train.yaml", "data_prep/sample/uniprot_sample.fasta.gz"} <= shipped
    assert shipped <= names
    # A top-level conf would stand in the way of everybody else's.
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"protlm", "data_prep"}


def test_the_wheel_runs_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    run("-m", "pip", "install", "--no-deps", "--quiet", "--target", site, wheel, folder=empty)
    assert "Usage: protlm" in run("-m", "protlm", "--help", folder=empty, path=site)
    names = "from protlm.attention import __file__, names; print(__file__, *names())"
    place, *mechanisms = run("-c", names, folder=empty, path=site).split()
    assert Path(place).is_relative_to(site)
    assert {"softmax", "performer_relu", "performer_softmax"} <= set(mechanisms)
    sample = "from protlm.paths import sample_dir; print(*sample_dir().glob('*.fasta.gz'))"
    assert str(site) in run("-c", sample, folder=empty, path=site)
    assert list(empty.iterdir()) == []
