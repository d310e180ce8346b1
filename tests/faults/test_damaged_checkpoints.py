"""Checkpoints that are damaged or of others: named, never used, and no code of theirs runs.

The SHA-256 of those of others are correct: who writes a checkpoint also writes its checksum.
"""

import json
import os
import pickle
import random
import resource
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import protlm
from protlm import evaluation
from protlm.build import load_initial_weights
from protlm.checkpoints import format as checkpoints
from protlm.checkpoints.checks import check_sum, damaged_files, sum_path, write_sum, write_sums
from protlm.checkpoints.format import LATEST, all_checkpoints, latest
from protlm.checkpoints.validations import METRICS, read_metrics
from protlm.commands.checkpoint import info, verify
from protlm.commands.evaluate import evaluate
from protlm.commands.train import train
from protlm.config import EvaluateConfig, TrainConfig
from protlm.config.composition import compose
from protlm.interop import hugging_face
from protlm.model.transformer import build_network
from protlm.system.errors import InputDataError, UserError
from tests.marks import slow_but

SETTINGS = ("trainer.checkpoint_every=1", "trainer.log_every=1", "trainer.valid_every=2")


@pytest.fixture(scope="module")
def whole(train_tiny, tmp_path_factory) -> Path:
    """A run of four steps that keeps three checkpoints."""
    return train_tiny(tmp_path_factory.mktemp("runs") / "whole", *SETTINGS)


@pytest.fixture
def run(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def flip_a_bit(path: Path, rng: random.Random) -> None:
    contents = bytearray(path.read_bytes())
    contents[rng.randrange(len(contents))] ^= 1 << rng.randrange(8)
    path.write_bytes(contents)


def spoil(damage: Callable[[Path], object]) -> Callable[[Path], object]:
    """Damages the newest checkpoint."""
    return lambda run: damage(all_checkpoints(run)[-1])


def point(content: bytes) -> Callable[[Path], object]:
    return lambda run: (run / "checkpoints" / LATEST).write_bytes(content)


# What is damaged, and whether the newest checkpoint itself is.
DAMAGE = {
    "a flipped bit": (spoil(lambda path: flip_a_bit(path, random.Random(0))), True),
    "cut short": (spoil(lambda path: path.write_bytes(path.read_bytes()[:-1])), True),
    "empty": (spoil(lambda path: path.write_bytes(b"")), True),
    "gone": (spoil(lambda path: path.unlink()), True),
    "no sum": (spoil(lambda path: sum_path(path).unlink()), True),
    "an empty sum": (spoil(lambda path: sum_path(path).write_bytes(b"")), True),
    "no pointer": (lambda run: (run / "checkpoints" / LATEST).unlink(), False),
    "an empty pointer": (point(b""), False),
    "a pointer of other bytes": (point(b"\xff\xfe"), False),
    "a pointer elsewhere": (point(b"../../etc/passwd"), False),
    "a dangling pointer": (point(b"step-99999999.ckpt\n"), False),
}


@pytest.mark.parametrize(("damage", "is_newest"), DAMAGE.values(), ids=DAMAGE)
def test_no_other_model_is_used_silently(damage, is_newest, run):
    """The message names the checkpoint to use instead."""
    _, third, fourth = all_checkpoints(run)
    good = third if is_newest else fourth
    damage(run)
    with pytest.raises(InputDataError, match=f"the newest undamaged checkpoint is {good}"):
        protlm.load(run)
    assert protlm.load(good).hash


@pytest.mark.slow
def test_training_resumes_from_the_last_intact_checkpoint(run, whole, train_tiny, state_of, log_of):
    """Steps 3 and 4 are repeated, are logged once, and replace the damaged checkpoints."""
    second, third, fourth = all_checkpoints(run)
    flip_a_bit(fourth, random.Random(0))
    sum_path(third).unlink()
    with pytest.warns(UserWarning) as warned:
        train_tiny(run, *SETTINGS)
    told = [str(warning.message) for warning in warned]
    assert len(told) == 2
    assert fourth.name in told[0] and third.name in told[1]
    assert all(f"resuming from {second}" in text for text in told)
    assert log_of(run) == log_of(whole)
    for path in all_checkpoints(whole):
        assert state_of(run / "checkpoints" / path.name) == state_of(path)
    verify(run)


def test_damaged_checkpoints_do_not_count_as_kept(run, train_tiny, killed_after):
    """After step 3 the checkpoint of step 2 is still there, beside the damaged one of step 4."""
    second, third, fourth = all_checkpoints(run)
    for path in (third, fourth):
        path.write_bytes(b"")
    damaged = fourth.stat().st_mtime_ns
    with pytest.warns(UserWarning), killed_after(3):
        train_tiny(run, *SETTINGS, "trainer.keep_checkpoints=2")
    assert all_checkpoints(run) == [second, third, fourth]
    assert latest(run) == third
    assert fourth.stat().st_mtime_ns == damaged
    protlm.load(run)


def test_without_an_intact_checkpoint_no_file_is_written_or_removed(run, train_tiny, contents):
    for path in all_checkpoints(run):
        flip_a_bit(path, random.Random(1))
    before = contents(run / "checkpoints"), (run / "metrics.csv").read_bytes()
    with pytest.raises(
        InputDataError, match=r"all checkpoints of .* are damaged.*step-00000002"
    ) as none:
        train_tiny(run, *SETTINGS)
    assert none.value.exit_code == 3
    assert (contents(run / "checkpoints"), (run / "metrics.csv").read_bytes()) == before


def test_verify_prints_the_state_of_every_checkpoint(run, capsys):
    second, third, fourth = all_checkpoints(run)
    verify(run)
    assert capsys.readouterr().out.count("good") == 3
    flip_a_bit(third, random.Random(2))
    with pytest.raises(InputDataError, match=r"step-00000003\.ckpt is damaged"):
        verify(run)
    assert capsys.readouterr().out.splitlines() == [
        f"{second}: good",
        f"{third}: damaged",
        f"{fourth}: good, the latest",
    ]
    (run / "checkpoints" / LATEST).unlink()
    with pytest.raises(InputDataError, match="latest is missing"):
        verify(run)


def test_info_names_the_best(run, capsys):
    info(run)
    told = capsys.readouterr().out.splitlines()
    (line,) = (one for one in told if one.startswith("best by valid_loss"))
    losses = {x["valid_loss"]: x["step"] for x in read_metrics(run / METRICS) if "valid_loss" in x}
    assert line.endswith(f"step-{losses[min(losses)]:08.0f}.ckpt") and len(losses) == 2


ENTRIES = ["/dev/zero", "../x", "..", "part/x", "pipe", "zero", "x" * 300]


@pytest.mark.parametrize("name", [*ENTRIES, "huge.json", "model.safetensors", "SHA256SUMS"])
def test_checksums_of_other_than_files_of_the_folder_are_refused(name, tmp_path):
    """None of them is read: a device has no end, and a pipe waits for its writer."""
    folder = tmp_path / "model"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  {name}\n")
    if name in ENTRIES and name != "x" * 300:
        with pytest.raises(InputDataError, match=r"SHA256SUMS lists"):
            damaged_files(folder)
        return
    if name not in ENTRIES:
        (folder / name).touch()
        os.truncate(folder / name, 1 << 42)
    assert damaged_files(folder)


def test_a_table_of_any_length_may_lie_beside_weights(tmp_path):
    (tmp_path / "predictions.tsv").touch()
    os.truncate(tmp_path / "predictions.tsv", 1 << 27)
    write_sums(tmp_path)
    assert damaged_files(tmp_path) == []


def test_a_checksum_that_is_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "x.ckpt.sha256")
    (tmp_path / "x.ckpt").write_text("x")
    with pytest.raises(InputDataError, match=r"no readable x\.ckpt\.sha256"):
        check_sum(tmp_path / "x.ckpt")


# What a config must not be able to name, and what it would do.
NAMES = (
    "os.system",
    "logging.os.system",
    "builtins.eval",
    "torch.hub.load",
    "pathlib.Path.unlink",
    "protlm.attention.softmax.os",
    "../../canary",
    "canary",
)


@pytest.fixture
def canary(tmp_path, monkeypatch) -> Path:
    """A file that exists only if foreign code has run, such as the module `canary`."""
    path = tmp_path / "canary"
    (tmp_path / "canary.py").write_text(f"open({str(path)!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return path


@pytest.fixture
def newest(tiny_run, tmp_path) -> Path:
    """The newest checkpoint of a copy of a run."""
    return checkpoints.latest(shutil.copytree(tiny_run, tmp_path / "run"))


def describe(exported: Path, key: str, value: object) -> None:
    """Changes a value of the description of a model, `model.norm` for instance."""
    config = exported / "config.json"
    description = json.loads(config.read_text())
    group, _, name = key.partition(".")
    (description[group] if name else description)[name or key] = value
    config.write_text(json.dumps(description))
    write_sums(exported)


def assert_refused(path: Path) -> str:
    """Loads a model that must be refused; returns the sentence."""
    with pytest.raises(InputDataError) as caught:
        protlm.load(path)
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Malicious:
    """An object whose unpickling creates the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.canary}",)


PICKLES: dict[str, Callable[[Malicious, Path], object]] = {
    "a bare pickle": lambda bad, path: path.write_bytes(pickle.dumps(bad)),
    "a bare pickle of an old protocol": lambda bad, path: path.write_bytes(pickle.dumps(bad, 0)),
    "torch's archive": lambda bad, path: torch.save({"state_dict": bad}, path),
    "torch's old format": lambda bad, path: torch.save(
        {"protlm": bad}, path, _use_new_zipfile_serialization=False
    ),
    "beside what is good": lambda bad, path: torch.save(
        torch.load(path, weights_only=True) | {"callbacks": {"Monitor": bad}}, path
    ),
}


@pytest.mark.parametrize("spoil", PICKLES.values(), ids=PICKLES)
def test_a_pickle_is_never_executed(spoil, newest, canary, train_tiny):
    run = newest.parents[1]
    spoil(Malicious(canary), newest)
    write_sum(newest, contents=newest)
    for use in (
        lambda: protlm.load(run),
        lambda: protlm.load(newest),
        lambda: verify(run),
        lambda: info(run),
        lambda: train_tiny(run, "trainer.max_steps=6"),
    ):
        with pytest.raises(UserError, match=newest.name):
            use()
    assert not canary.exists()
    # With the protection off, the canary is created.
    with suppress(RuntimeError):
        torch.load(newest, weights_only=False)
    assert canary.exists()


@pytest.mark.parametrize("name", slow_but(NAMES, "os.system", "protlm.attention.softmax.os"))
def test_a_name_in_a_config_executes_no_other_code(name, tiny_data, tmp_path, canary, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for overrides in (
        [f"attention.name={name}"],
        [f"+attention._target_={name}", f"+attention.command=touch {canary}"],
        [f"attention={name}"],
        [f"model._target_={name}"],
        [f"+trainer._target_={name}"],
        [f"optimizer.name={name}"],
        [f"trainer.strategy={name}"],
    ):
        settings = ["model=tiny", f"data.dir={tiny_data}", f"run_dir={tmp_path / 'run'}"]
        with pytest.raises(UserError):
            train(compose(TrainConfig, [*settings, *overrides]))
    with pytest.raises(UserError):
        evaluation.create("mine", {"name": name})
    with pytest.raises(UserError):
        evaluate(compose(EvaluateConfig, ["checkpoint=x", f"evaluation.masked.name={name}"]))
    assert {path.name for path in tmp_path.iterdir()} <= {"canary.py", "__pycache__"}


def test_a_config_of_a_run_is_data(newest, train_tiny, canary):
    """YAML tags create no objects; interpolations read no variables and run no commands."""
    written = newest.parents[1] / "config.yaml"
    before = written.read_text()
    for line in (
        f"seed: !!python/object/apply:os.system ['touch {canary}']",
        "seed: ${oc.env:HOME}",
    ):
        written.write_text(before.replace("seed: 0", line))
        with pytest.raises(UserError):
            train_tiny(newest.parents[1], "trainer.max_steps=6")
    assert not canary.exists()


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
def test_a_config_of_another_program(name, newest, train_tiny):
    run = newest.parents[1]
    (run / "config.yaml").write_bytes(CONFIGS[name].encode(errors="surrogateescape"))
    told = r"config\.yaml cannot be read as the config"
    with pytest.raises(InputDataError, match=told) as caught:
        train_tiny(run, "trainer.max_steps=6")
    assert "\n" not in str(caught.value)


SHAPES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a list": lambda contents: [contents],
    "a number": lambda contents: 3,
    "no weights": lambda contents: contents | {"state_dict": None},
    "weights in a list": lambda contents: contents | {"state_dict": [torch.ones(2)]},
    "weights that are strings": lambda contents: contents | {"state_dict": {"network.a": "b"}},
    "weights without names": lambda contents: contents | {"state_dict": {3: torch.ones(2)}},
    "no weights of a network": lambda contents: contents | {"state_dict": {"a": torch.ones(2)}},
    "an average that is a list": lambda contents: contents | {"average": [1]},
    "sparse weights": lambda contents: (
        contents | {"state_dict": {"network.head.bias": torch.ones(33).to_sparse()}}
    ),
    "no description": lambda contents: contents | {"protlm": None},
    "an empty description": lambda contents: contents | {"protlm": {"format": 1}},
}


@pytest.mark.parametrize("change", SHAPES.values(), ids=SHAPES)
def test_another_shape(change, newest):
    torch.save(change(checkpoints.load_training(newest)), newest)
    write_sum(newest, contents=newest)
    assert_refused(newest)


@pytest.mark.parametrize("key", ["loops", "optimizer_states", "state_dict"])
def test_a_run_does_not_continue_without_a_part(key, newest, train_tiny):
    contents = checkpoints.load_training(newest)
    del contents[key]
    checkpoints.save_training(contents, newest)
    with pytest.raises(InputDataError, match=f"its '{key}' is missing"):
        train_tiny(newest.parents[1], "trainer.max_steps=6")


HUGE = 10**12
NOT_NUMBERS = [torch.nan, torch.inf, torch.int64, torch.bool, torch.complex64, torch.int8]
DESCRIPTIONS: list[tuple[str, object]] = [
    ("model", None),
    ("model", [1]),
    ("attention", None),
    ("attention", {}),
    ("attention.name", ["softmax"]),
    ("attention.name", "os.system"),
    ("attention.name", "../../canary"),
    ("attention._target_", "os.system"),
    ("model._target_", "os.system"),
    ("attention.num_features", "many"),
    ("attention.num_features", HUGE),
    ("objective", "both"),
    ("objective", []),
    ("seed", "0"),
    ("seed", -1),
    ("seed", 2**70),
    ("max_length", "128"),
    ("vocabulary", 3),
    ("model.num_heads", "4"),
    ("model.num_heads", HUGE),
    ("model.num_layers", True),
    ("model.num_layers", HUGE),
    ("model.model_dim", [64]),
    ("model.model_dim", 0),
    ("model.model_dim", HUGE),
    ("model.feedforward_dim", HUGE),
    ("model.max_length", HUGE),
    ("model.dropout", float("nan")),
    ("model.positions", "random"),
    ("model.color", "red"),
    ("model.norm", "${oc.env:TOKEN}"),
]


@pytest.mark.parametrize(("key", "value"), DESCRIPTIONS)
def test_another_description(key, value, exported, monkeypatch):
    monkeypatch.setenv("TOKEN", "layer")
    if key == "model.max_length":
        describe(exported, "model.positions", "sinusoidal")
    describe(exported, key, value)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sentence = assert_refused(exported)
    assert "${oc.env:TOKEN}" in sentence or value != "${oc.env:TOKEN}"
    # In KiB: the tiny model itself takes some hundred.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


@pytest.mark.parametrize("value", slow_but(NOT_NUMBERS, torch.nan, torch.int64))
def test_weights_that_are_not_numbers(value, newest, tmp_path):
    """In every form of a model, and as the beginning of a run."""
    contents, found = checkpoints.load_training(newest), checkpoints.read(newest)
    bias = found.weights["head.bias"]
    bias = bias.to(value) if isinstance(value, torch.dtype) else bias.fill_(value)
    contents["state_dict"]["network.head.bias"] = found.weights["head.bias"] = bias
    checkpoints.save_training(contents, newest)
    checkpoints.export(found, tmp_path / "exported")
    hugging_face.export(found, tmp_path / "for_transformers", None)
    described = found.description
    network = build_network(described.model, described.attention_config, seed=0)
    for path in (newest, tmp_path / "exported", tmp_path / "for_transformers"):
        message = assert_refused(path)
        assert f"as {value}" in message or "NaN or infinite" in message
        assert "head.bias'" in message
        with pytest.raises(InputDataError, match=r"head\.bias'"):
            load_initial_weights(network, described.model, described.attention_config, path)


def test_a_checkpoint_that_is_a_folder(newest):
    newest.unlink()
    newest.mkdir()
    assert "is not a model" in assert_refused(newest)
    with pytest.raises(InputDataError, match="is missing or not a file"):
        checkpoints.load_training(newest)
