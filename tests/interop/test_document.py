"""The commands of docs/interop.md, one after the other, with small models of the names there."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import protlm
from protlm.system.paths import sample_dir
from tests.fixtures.commands import SHORT_TRAINING, commands_of
from tests.interop.families import FAIR_ESM

DOCUMENT = Path(__file__).parents[2] / "docs" / "interop.md"


@pytest.mark.slow
@pytest.mark.peers
def test_the_commands_of_the_document(
    protlm_in_process: Callable[..., subprocess.CompletedProcess[str]],
    write_esm: Callable[..., Path],
    esm2_8m: Path,
    tiny_data: Path,
    tiny_run: Path,
    tmp_path: Path,
) -> None:
    write_esm("esm2_t33_650M_UR50D")
    FAIR_ESM.save(tmp_path / "fair").rename(tmp_path / "esm2_t33_650M_UR50D.pt")
    # With a folder of its owner, a name of the Hub is a local path.
    (tmp_path / "facebook").mkdir()
    (tmp_path / "facebook" / "esm2_t33_650M_UR50D").symlink_to(tmp_path / "esm2_t33_650M_UR50D")
    for folder in ("data", "runs", "models"):
        (tmp_path / folder).mkdir()
    for name in ("mine", "family"):
        (tmp_path / "data" / name).symlink_to(tiny_data)
    (tmp_path / "runs" / "mine").symlink_to(tiny_run)
    for name in ("proteins.fasta", "protein.fasta"):
        (tmp_path / name).write_text(">P1\nMKTAYIAKQRQISFVKSHFSRQ\n>P2\nMKXU\n")
    structures = sample_dir() / "structures" / "fit"
    smallest = min(structures.glob("*.gz"), key=lambda path: path.stat().st_size)
    (tmp_path / smallest.name).write_bytes(smallest.read_bytes())
    # The layers of the tiny model, and the format of the shipped structures.
    ours = {"33": "2", "protein.pdb": smallest.name}
    for program, *named in commands_of(DOCUMENT):
        if program == "pip":
            continue
        assert program == "protlm"
        words = [ours.get(word, word) for word in named]
        (tmp_path / "embeddings.h5").unlink(missing_ok=True)
        short = SHORT_TRAINING if words[0] == "train" else []
        done = protlm_in_process(*words, *short, cwd=tmp_path)
        assert done.returncode == 0, f"{words}: {done.stderr}"
    assert (tmp_path / "exported" / "modeling_protlm.py").is_file()
    assert not list((tmp_path / "esm2").glob("*.py"))
    assert protlm.load(tmp_path / "models" / "again").hash == protlm.load(tiny_run).hash
    assert protlm.load(tmp_path / "runs" / "family").description.source is not None
