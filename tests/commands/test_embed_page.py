"""All commands and examples of docs/embed.md about embeddings run."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest

from protlm.data.records import Tally, read_records

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "embed.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def place(workplace: Path, tiny_fasta: Path) -> Path:
    """A folder with the files that the page names."""
    shutil.copy(tiny_fasta, workplace / "proteins.fasta.gz")
    shutil.copy(workplace / "x.fasta", workplace / "p.fasta")
    (workplace / "runs").mkdir()
    (workplace / "runs" / "mine").symlink_to(workplace / "run")
    first = next(read_records(tiny_fasta, Tally())).identifier
    (workplace / "domains.tsv").write_text(f"accession\tfirst\tlast\n{first}\t2\t9\n")
    return workplace


@pytest.mark.slow
def test_the_commands_of_the_page_run(place: Path, protlm_in_process: Callable) -> None:
    lines = [line.split("#")[0].strip() for line in "".join(blocks("bash")).splitlines()]
    wrapped = [re.sub(r".*--wrap='(.*)'", r"\1", line) for line in lines]
    # Jobs are tested elsewhere.
    commands = [line for line in wrapped if re.match("protlm embed(?!.*--executor)", line)]
    assert len(commands) >= 9
    for command in commands:
        # Several processes are tested elsewhere: they take long to start.
        line = command.replace("$SLURM_ARRAY_TASK_ID/8", "1/1").replace("--processes 2", "")
        typed = line.split()
        done = protlm_in_process(*typed[1:], cwd=place)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        writes = not {"--dry-run", "--shard"} & set(typed)
        assert (place / typed[typed.index("-o") + 1]).exists() == writes


def test_the_examples_of_the_page_run(
    place: Path, protlm_in_process: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    (place / "p.fasta").rename(place / "proteins.fasta")
    done = protlm_in_process("embed", "proteins.fasta", "-o", "embeddings.h5", cwd=place)
    assert done.returncode == 0, done.stderr
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block.replace("proteins.fasta.gz", "proteins.fasta"), "page", "exec"), names)
    with h5py.File("embeddings.h5") as file:
        assert list(file) == ["P1"]
