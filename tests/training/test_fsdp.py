"""FSDP2 trains like DDP, and its sharded checkpoints have the contents of ordinary ones."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from protlm.checkpoints.format import AVERAGE, latest, load_training
from protlm.checkpoints.metrics import read_metrics
from protlm.checkpoints.sharded import Ranks, consolidated, read_parts
from protlm.commands.checkpoint import consolidate, verify
from protlm.errors import ExitCode, InputDataError, OutputError, UserError
from protlm.loading import load_model
from protlm.training.module import LanguageModeling

SETTINGS = (
    "trainer.precision=32-true",
    "attention=performer_softmax",
    "attention.num_features=32",
    "attention.redraw_every=2",
    "model.qk_norm=true",
    "model.dropout=0.2",
    "optimizer=muon",
    "trainer.activation_checkpointing=true",
    "trainer.tokens_per_step=2048",
    "trainer.ema_decay=0.9",
    "trainer.gradient_clip=0.1",
    "trainer.log_every=1",
    "trainer.valid_every=2",
)
# A step has two slices, each with its dropout: one rank computes them one after the other.
IN_TWO_PARTS = "data.tokens_per_batch=1024"
FSDP = "trainer.strategy=fsdp"


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Destroys the process group that a run of one rank has created."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def sharded(
    protlm_command: Callable, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of two ranks, four steps long."""
    folder = tmp_path_factory.mktemp("sharded")
    done = protlm_command(
        "train",
        "model=tiny",
        f"data.dir={tiny_data}",
        "run_dir=run",
        "data.max_length=128",
        "schedule.warmup_steps=1",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "trainer.max_steps=4",
        "data.tokens_per_batch=2048",
        FSDP,
        *SETTINGS,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def whole(train_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in one process, six steps long."""
    folder = tmp_path_factory.mktemp("whole")
    settings = (*SETTINGS, IN_TWO_PARTS, "trainer.max_steps=6", "trainer.checkpoint_every=2")
    return train_tiny(folder / "run", *settings)


def tensors(node: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from tensors(value, f"{name}.{key}")
    elif isinstance(node, torch.Tensor):
        yield name, node


def assert_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    for part in ("state_dict", "optimizer_states", AVERAGE):
        mine, its = dict(tensors(one[part])), dict(tensors(other[part]))
        assert mine.keys() == its.keys()
        for name, value in mine.items():
            assert torch.allclose(value, its[name], rtol=1e-4, atol=1e-5), (part, name)


@pytest.mark.slow
def test_two_shards_learn_what_one_process_learns(sharded: Path, whole: Path) -> None:
    checkpoint = latest(sharded)
    assert checkpoint is not None and checkpoint.is_dir()
    parts = [torch.load(path) for path in sorted(checkpoint.glob("part-*.pt"))]
    assert len(parts) == 2
    sizes = [sum(tensor.numel() for tensor in part.values()) for part in parts]
    assert 0.4 < sizes[0] / sum(sizes) < 0.6
    other = load_training(whole / "checkpoints" / "step-00000004.ckpt")
    assert_close(consolidated(checkpoint), other)
    logs = [read_metrics(run / "metrics.csv") for run in (sharded, whole)]
    for one, two in zip(*logs, strict=False):
        for column in one.keys() & {"train_loss", "valid_loss", "gradient_norm", "samples"}:
            assert one[column] == pytest.approx(two[column], rel=1e-4), column


@pytest.mark.slow
def test_any_number_of_ranks_reads_its_rows(sharded: Path) -> None:
    folder = latest(sharded)
    assert folder is not None
    expected = dict(tensors(consolidated(folder)))
    for number in (1, 3, 5):
        rows = [dict(tensors(read_parts(folder, Ranks(rank, number)))) for rank in range(number)]
        for name, value in expected.items():
            pieces = [part[name] for part in rows]
            is_sharded = sum(piece.numel() for piece in pieces) == value.numel()
            found = torch.cat(pieces) if is_sharded and value.ndim else pieces[0]
            assert torch.equal(found, value), name


@pytest.mark.slow
def test_one_rank_continues_the_run_of_two(
    sharded: Path, whole: Path, train_tiny: Callable[..., Path], one_rank: None
) -> None:
    with pytest.raises(UserError, match=r"is sharded.*trainer\.strategy=fsdp"):
        train_tiny(sharded, *SETTINGS, IN_TWO_PARTS, "trainer.max_steps=6")
    train_tiny(sharded, *SETTINGS, IN_TWO_PARTS, FSDP, "trainer.max_steps=6")
    checkpoint = latest(sharded)
    assert checkpoint is not None and checkpoint.name == "step-00000006.ckpt"
    other = load_training(whole / "checkpoints" / "step-00000006.ckpt")
    assert_close(consolidated(checkpoint), other)


@pytest.mark.slow
def test_a_consolidated_checkpoint_is_an_ordinary_one(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verify(sharded)
    with pytest.raises(UserError, match=r"must end in \.ckpt"):
        consolidate(sharded, tmp_path / "one")
    consolidate(sharded, tmp_path / "one.ckpt")
    assert str(tmp_path / "one.ckpt") in capsys.readouterr().out
    contents = load_training(tmp_path / "one.ckpt")
    loaded = load_model(tmp_path / "one.ckpt").network.state_dict()
    for name, value in contents[AVERAGE].items():
        assert torch.equal(loaded[name], value), name
    with pytest.raises(OutputError, match="exists already"):
        consolidate(sharded, tmp_path / "one.ckpt")
    with pytest.raises(InputDataError, match=r"is sharded.*protlm checkpoint consolidate"):
        load_model(latest(sharded) or tmp_path)


@pytest.mark.slow
def test_a_damaged_shard_is_rejected(sharded: Path, tmp_path: Path) -> None:
    folder = latest(sharded)
    assert folder is not None
    copy = tmp_path / folder.name
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    part = bytearray((copy / "part-00000.pt").read_bytes())
    part[len(part) // 2] ^= 1
    (copy / "part-00000.pt").write_bytes(part)
    with pytest.raises(InputDataError, match=r"part-00000\.pt"):
        consolidate(copy, tmp_path / "one.ckpt")
    assert not (tmp_path / "one.ckpt").exists()


def test_models_that_cannot_be_sharded_are_rejected(
    train_tiny: Callable[..., Path], tiny_run: Path, tmp_path: Path
) -> None:
    for settings, message in (
        (["model.reversible=true"], r"cannot train model\.reversible=true"),
        (["attention=linformer"], r"attention\.sharing=key_value"),
    ):
        with pytest.raises(UserError, match=message):
            train_tiny(tmp_path / f"run-{len(message)}", FSDP, *settings)
    with pytest.raises(UserError, match=r"not sharded.*trainer\.strategy=auto"):
        train_tiny(tiny_run, FSDP, "trainer.max_steps=5")


# Without bfloat16 products a processor emulates them, more slowly and with the same result.
@pytest.mark.filterwarnings("ignore:trainer.precision=bf16-mixed")
def test_in_bfloat16_it_learns_what_one_process_learns(
    train_tiny: Callable[..., Path], tmp_path: Path, one_rank: None
) -> None:
    settings = ("trainer.precision=bf16-mixed", "trainer.log_every=1")
    plain = train_tiny(tmp_path / "plain", *settings)
    sharded = train_tiny(tmp_path / "sharded", *settings, FSDP)
    for one, other in zip(
        *(read_metrics(r / "metrics.csv") for r in (plain, sharded)), strict=True
    ):
        for column in one.keys() & {"train_loss", "valid_loss"}:
            assert one[column] == pytest.approx(other[column], rel=2e-3), column


def test_a_step_that_is_not_finite_is_skipped(
    train_tiny: Callable[..., Path],
    tmp_path: Path,
    one_rank: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train_step, calls = LanguageModeling.training_step, []

    def poisoned(self: LanguageModeling, *args: object) -> dict[str, torch.Tensor]:
        calls.append(1)
        out = train_step(self, *args)
        if len(calls) == 2:
            out["loss"] = out["loss"] * torch.nan
        return out

    monkeypatch.setattr(LanguageModeling, "training_step", poisoned)
    settings = (FSDP, "trainer.checkpoint_every=1", "trainer.keep_checkpoints=4")
    with pytest.warns(UserWarning, match="step 2 was skipped"):
        run = train_tiny(tmp_path / "run", *settings)
    first, second, third = (
        consolidated(run / "checkpoints" / f"step-{step:08d}.ckpt") for step in (1, 2, 3)
    )
    for part in ("state_dict", "optimizer_states"):
        before, after = dict(tensors(first[part])), dict(tensors(second[part]))
        assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not torch.equal(
        second["state_dict"]["network.head.weight"], third["state_dict"]["network.head.weight"]
    )


def test_a_full_disk_is_reported_on_all_ranks(
    train_tiny: Callable[..., Path],
    tmp_path: Path,
    one_rank: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("protlm.training.sharding.write_part", full)
    with pytest.raises(OutputError, match="no space left") as caught:
        train_tiny(tmp_path / "run", FSDP, "trainer.on_save_error=stop")
    assert caught.value.exit_code == ExitCode.OUTPUT
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == []
