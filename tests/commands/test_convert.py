"""protlm checkpoint convert, and the commands of docs/linearize.md."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import protlm
from protlm.attention.hedgehog import Hedgehog
from protlm.commands import checkpoint
from protlm.system.errors import InputDataError
from tests.fixtures.commands import SHORT_TRAINING, commands_of

Command = Callable[..., subprocess.CompletedProcess[str]]

DOCUMENT = Path(__file__).parents[2] / "docs" / "linearize.md"
SHORT = ("model=tiny", *SHORT_TRAINING)


@pytest.mark.slow
def test_the_commands_of_the_document(
    protlm_in_process: Command,
    train_tiny: Callable[..., Path],
    tiny_data: Path,
    tmp_path: Path,
) -> None:
    train_tiny(tmp_path / "runs" / "softmax", "attention=softmax", "trainer.max_steps=2")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").symlink_to(tiny_data)
    commands = commands_of(DOCUMENT)
    assert [words[1] for words in commands] == [
        "checkpoint", "train", "train", "evaluate", "checkpoint", "train",
        "data", "generate", "prepare", "train",
    ]  # fmt: skip
    printed = {}
    for program, *words in commands:
        assert program == "protlm"
        few = ["20" if word == "5000" else word for word in words]
        done = protlm_in_process(*few, *(SHORT if words[0] == "train" else ()), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        printed[words[-1]] = done
    swap = printed["runs/swapped"]
    assert swap.stdout == "runs/swapped\n"
    maps = (f"blocks.*.attention.mechanism.{name}_map" for name in ("query", "key"))
    assert swap.stderr == f"initialized: {', '.join(maps)}\nleft out: none\n"
    model = protlm.load(tmp_path / "runs" / "linear")
    assert isinstance(model.network.mechanism(1), Hedgehog)
    favor = protlm.load(tmp_path / "runs" / "favor").description.attention_options
    assert (favor["num_features"], favor["redraw_every"]) == (512, None)
    info = protlm_in_process("checkpoint", "info", "runs/favor", cwd=tmp_path).stdout
    assert re.search(r"source.converted_from +softmax", info)
    original = protlm.load(tmp_path / "runs" / "softmax").hash
    assert re.search(rf"source.converted_hash +{original}", info)


def test_a_conversion_that_fails_leaves_nothing(
    protlm_in_process: Command, tiny_run: Path, tmp_path: Path
) -> None:
    before = ["convert", tiny_run, "-o", "new", "--attention"]
    for arguments, code, message in (
        (["reformer"], 2, "the keys of reformer are its queries"),
        (["performer_relu"], 2, "already has attention=performer_relu"),
        (["softmx"], 2, "did you mean softmax?"),
        (["softmax", "--set", "nothing=1"], 2, "--set nothing is not a setting"),
        (["performer_softmax", "--set", "num_features"], 2, "type --set num_features=VALUE"),
        (["performer_softmax", "--set", "=3"], 2, "--set =3 is not OPTION=VALUE"),
        (["performer_softmax", "--set", "num_features=0"], 2, "type --set num_features=256"),
        (["softmax", "--seed", "-1"], 2, "--seed -1 must be at least 0"),
    ):
        done = protlm_in_process("checkpoint", *before, *arguments, cwd=tmp_path)
        assert (done.returncode, message in done.stderr) == (code, True), done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert list(tmp_path.iterdir()) == []
    # A path is left as it is.
    odd = tmp_path / "my.attention.v2"
    odd.symlink_to(tiny_run)
    done = protlm_in_process("checkpoint", "convert", odd, *before[2:], "reformer", cwd=tmp_path)
    assert (done.returncode, "my.attention.v2/" in done.stderr) == (2, True), done.stderr
    missing = ["convert", "missing", "-o", "new", "--attention", "softmax"]
    assert protlm_in_process("checkpoint", *missing, cwd=tmp_path).returncode == 3
    exists = ["convert", tiny_run, "-o", tiny_run, "--attention", "softmax"]
    assert protlm_in_process("checkpoint", *exists, cwd=tmp_path).returncode == 4


def test_a_damaged_model_is_no_error_of_usage(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = checkpoint.read_model(tiny_run)
    del damaged.weights["blocks.1.attention.value.weight"]
    monkeypatch.setattr(checkpoint, "read_model", lambda _: damaged)
    with pytest.raises(InputDataError, match="does not match its description"):
        checkpoint.convert_model(
            tiny_run, tmp_path / "new", attention="hedgehog", settings=(), seed=None
        )
    assert list(tmp_path.iterdir()) == []
