"""Untrusted configs, names and identifiers are refused in a sentence or escaped."""

import io
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import h5py
import numpy as np
import pytest

from protlm.commands.data import export
from protlm.commands.embed import embed
from protlm.commands.embedding.options import EmbedOptions
from protlm.data.records.proteins import Proteins
from protlm.system.errors import InputDataError
from tests.marks import slow_but

ESCAPES = ["\x1b[2J", "\x1b]0;title\x07", "\x9b2J", "\u202e", "\r", "\x7f"]

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)

CONFIGS = {
    "empty": "",
    "blank": "\n\n",
    "a comment": "# nothing\n",
    "a list": "- 1\n- 2\n",
    "a word": "hello\n",
    "of another program": "name: mine\nversion: 3\n",
    "a damaged one": "model: [1, 2\n",
    "of aliases": BOMB,
    "a large one": "#" * (2 << 20),
    "of other bytes": "\udcff\udcfe",
    "a deep one": "[" * 5_000,
}


@pytest.mark.parametrize("name", slow_but(CONFIGS, "empty", "a list", "of aliases"))
def test_a_config_of_another_program(
    name: str, tiny_run: Path, train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    run = shutil.copytree(tiny_run, tmp_path / "run")
    (run / "config.yaml").write_bytes(CONFIGS[name].encode(errors="surrogateescape"))
    with pytest.raises(
        InputDataError, match=r"config\.yaml cannot be read as the config"
    ) as caught:
        train_tiny(run, "trainer.max_steps=6")
    assert "\n" not in str(caught.value)


def test_names_that_are_impossible_for_a_file(
    protlm_in_process: Callable, tiny_run: Path, tiny_data: Path, tiny_fasta: Path, tmp_path: Path
) -> None:
    long = "x" * 300
    (tmp_path / "link").symlink_to("nowhere")
    for code, arguments in (
        (4, ["embed", tiny_fasta, "-m", tiny_run, "-o", f"{long}.h5"]),
        (3, ["embed", long, "-m", tiny_run, "-o", "out.h5"]),
        (3, ["embed", tiny_fasta, "-m", long, "-o", "out.h5"]),
        (4, ["embed", tiny_fasta, "-m", tiny_run, "-o", "link"]),
        (4, ["prepare", tiny_fasta, "--out", long]),
        (4, ["prepare", tiny_fasta, "--out", "x" * 252]),
        (4, ["prepare", tiny_fasta, "--out", "link"]),
        (3, ["prepare", long, "--out", "data"]),
        (4, ["checkpoint", "export", tiny_run, "-o", "link"]),
        (3, ["checkpoint", "info", long]),
        (3, ["data", "info", long]),
        (4, ["train", f"run_dir={long}", f"data.dir={tiny_data}", "model=tiny"]),
        (4, ["train", "run_dir=link", f"data.dir={tiny_data}", "model=tiny"]),
    ):
        done = protlm_in_process(*arguments, cwd=tmp_path)
        assert done.returncode == code, (arguments, done.stderr)
        assert done.stderr.startswith("protlm: "), (arguments, done.stderr)
        assert len(done.stderr.splitlines()) == 1, (arguments, done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_escapes_do_not_reach_the_terminal(tmp_path: Path) -> None:
    fasta = tmp_path / "x.fasta"
    fasta.write_bytes(
        "".join(f">P{i}{e}x\nMK?\n" for i, e in enumerate(ESCAPES)).encode() + b">Q\nMK\n"
    )
    with redirect_stderr(io.StringIO()) as printed:
        Proteins(fasta).report("read")
    assert "\\x1b[2J" in printed.getvalue()
    assert [c for c in printed.getvalue() if not c.isprintable() and c != "\n"] == []


def test_escapes_do_not_reach_the_terminal_in_an_error(
    protlm_in_process: Callable, tiny_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "x.fasta").write_text(">P\x1b[2J\nMKT\n>P\x1b[2J\nMKT\n")
    done = protlm_in_process("embed", "x.fasta", "-m", tiny_run, "-o", "out.h5", cwd=tmp_path)
    assert done.returncode == 3
    assert "P\\x1b[2J is repeated" in done.stderr
    assert "\x1b" not in done.stderr


def test_escapes_do_not_reach_the_table_of_rejected_records(
    prepare_bytes: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    fasta = "".join(f">P{i}{escape}x\nMK?\n" for i, escape in enumerate(ESCAPES)) + ">Q\nMKT\n"
    prepare_bytes(fasta.encode())
    table = (tmp_path / "data" / "rejected.tsv").read_text()
    assert len(table.splitlines()) == 1 + len(ESCAPES)
    assert [c for c in table if not c.isprintable() and c not in "\t\n"] == []


def test_an_identifier_cannot_add_a_record(
    make_data_set: Callable[..., Path], tmp_path: Path
) -> None:
    directory = make_data_set([("P1\n>FAKE", "MKT"), ("P2\x1b[2J", "MKV")])
    export(directory, tmp_path / "x.fasta", ())
    lines = (tmp_path / "x.fasta").read_text().splitlines()
    headers = [line for line in lines if line.startswith(">P") or "FAKE" in line]
    assert sorted(headers) == [">P1\\n>FAKE", ">P2\\x1b[2J"]


def test_identifiers_of_any_length_and_letters(tiny_run: Path, tmp_path: Path) -> None:
    names = ["x" * 300, "y" * 40_000, "a\0b", "\x1b[2J", "é" * 200]
    fasta = tmp_path / "x.fasta"
    fasta.write_text("".join(f">{name}\nMKT\n" for name in names))
    embed(fasta, tiny_run, tmp_path / "out.h5", EmbedOptions())
    with h5py.File(tmp_path / "out.h5") as file:
        came = [file[name].attrs["original_id"] for name in file]
    assert came == [name.replace("\0", "\\x00") for name in names]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_flipped_token_names_its_shard(
    workers: int,
    make_data_set: Callable[..., Path],
    train_tiny: Callable[..., Path],
    tmp_path: Path,
) -> None:
    directory = make_data_set([(f"P{i:03}", "MKTAYIAK" * 4) for i in range(60)])
    shards = sorted((directory / "train").glob("*.h5"))
    for shard in shards:
        with h5py.File(shard) as file:
            place = file["tokens"].id.get_offset()
            size = len(np.asarray(file["tokens"]))
        content = bytearray(shard.read_bytes())
        content[place : place + size : 32] = bytes([200]) * len(range(0, size, 32))
        shard.write_bytes(content)
    settings = [f"data.dir={directory}", "data.verify=sizes", f"data.num_workers={workers}"]
    with pytest.raises(InputDataError, match=r"^the shard .*train/shard-.*protlm data verify") as e:
        train_tiny(tmp_path / "run", *settings)
    assert "\n" not in str(e.value)
