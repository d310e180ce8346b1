"""The private state of Lightning: each trick works, and is still needed."""

import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from packaging.requirements import Requirement
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from protlm.training import lightning_internals as internals

PROGRAM = Path(__file__).parent / "programs" / "wait_for_lost_rank.py"
VALIDATION_BATCHES = 4


class Recorder(pl.LightningModule):
    """A model of one weight that records the step of each batch, and the validated batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.steps: list[int] = []
        self.validated: list[int] = []

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        self.steps.append(self.trainer.global_step)
        return self.weight * batch.sum()

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.validated.append(batch_index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class On(Callback):
    """Calls a function of the trainer in one hook: `On("on_train_start", function)`."""

    def __init__(self, hook: str, function: Callable[..., Any]) -> None:
        setattr(self, hook, lambda trainer, *rest, **named: function(trainer, *rest))


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Recorder]:
    """Trains a `Recorder`: `fit(On(...), max_steps=4, resume=checkpoint)`."""

    def run(
        *callbacks: Callback, resume: Path | None = None, quiet: bool = True, **settings: Any
    ) -> Recorder:
        fixed = {"max_steps": 2, "max_epochs": -1, "num_sanity_val_steps": 0, "logger": False}
        features = ("checkpointing", "progress_bar", "model_summary")
        trainer = pl.Trainer(
            default_root_dir=tmp_path,
            accelerator="cpu",
            devices=1,
            callbacks=list(callbacks),
            **{f"enable_{name}": False for name in features},
            **fixed | settings,
        )
        model = Recorder()
        # torch.zeros(n) is a sequence of n samples.
        train, valid = (DataLoader(torch.zeros(n)) for n in (100, VALIDATION_BATCHES))  # pyright: ignore[reportArgumentType]
        with internals.quiet_and_interruptible() if quiet else nullcontext():
            trainer.fit(model, train, valid, ckpt_path=resume, weights_only=True)
        return model

    return run


@pytest.fixture(autouse=True)
def signals_restored() -> Iterator[None]:
    """Undoes what Lightning does to the signals of this process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def save_at(step: int, path: Path, hook: str = "on_train_batch_end") -> On:
    """Saves a checkpoint when a hook is first called after this step."""

    def save(trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == step and not path.exists():
            trainer.save_checkpoint(path)

    return On(hook, save)


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    contents = torch.load(path, weights_only=True)
    change(contents)
    torch.save(contents, path)
    return path


def test_the_installed_version_is_the_one_that_is_pinned():
    """A new minor version needs a look at every function of the module, then a new pin."""
    pins = {pin.name: pin.specifier for pin in map(Requirement, requires("protlm") or [])}
    pin = pins["pytorch-lightning"]
    assert version("pytorch-lightning") in pin
    assert [number in pin for number in ("2.5.99", "2.6.99", "2.7.0")] == [False, True, False]


@pytest.mark.parametrize("disable", [True, False])
def test_disable_signal_handlers(disable, fit):
    before, found = signal.getsignal(signal.SIGTERM), []
    tricks = [On("on_fit_start", lambda trainer, _: internals.disable_signal_handlers(trainer))]
    fit(*tricks * disable, On("on_train_start", lambda *_: found.append(signal.getsignal(15))))
    assert (found == [before]) == disable


@pytest.mark.parametrize("rescale", [True, False])
def test_rescale_batch_counters(rescale, fit, tmp_path):
    """Two steps of two micro-batches each, then two steps of three."""
    path = tmp_path / "saved.ckpt"
    fit(save_at(2, path), accumulate_grad_batches=2)
    if rescale:
        changed(path, partial(internals.rescale_batch_counters, before=2, now=3))
    model = fit(resume=path, accumulate_grad_batches=3, max_steps=4)
    # Lightning takes the four earlier micro-batches for one step and a third of the next.
    assert model.steps == ([2, 2, 2, 3, 3, 3] if rescale else [2, 2, 3, 3, 3])


@pytest.mark.parametrize("drop", [True, False])
def test_drop_validation_counters(drop, fit, tmp_path):
    """Checkpoints from the middle and the end of a validation are the same, and can be resumed."""
    loops, paths = [], []
    for hook in ("on_validation_batch_end", "on_validation_end"):
        path = tmp_path / f"{hook}.ckpt"
        fit(save_at(2, path, hook), val_check_interval=2, max_steps=3)
        paths.append(changed(path, internals.drop_validation_counters) if drop else path)
        loops.append(torch.load(path, weights_only=True)["loops"])
    assert (loops[0] == loops[1]) == drop
    if drop:
        model = fit(resume=paths[0], val_check_interval=2, max_steps=4)
        assert model.steps == [2, 3]
        assert model.validated == list(range(VALIDATION_BATCHES))


@pytest.mark.parametrize("allow", [True, False])
def test_set_last_step(allow, fit, tmp_path):
    """A run that has made its last step starts, and makes no further step."""
    path, started = tmp_path / "saved.ckpt", []
    fit(save_at(2, path))

    def on_train_start(trainer: pl.Trainer, _: pl.LightningModule) -> None:
        started.append(trainer.global_step)
        internals.set_last_step(trainer, 2)

    tricks = [On("setup", lambda trainer, *_: internals.set_last_step(trainer, 3))]
    model = fit(*tricks * allow, On("on_train_start", on_train_start), resume=path)
    assert started == [2] * allow
    assert model.steps == []


def test_validate_now(fit):
    is_training = []

    def on_train_start(trainer: pl.Trainer, model: pl.LightningModule) -> None:
        internals.validate_now(trainer)
        is_training.extend([trainer.training, model.training])

    model = fit(On("on_train_start", on_train_start), val_check_interval=100)
    assert model.validated == list(range(VALIDATION_BATCHES))
    assert is_training == [True, True]
    assert model.steps == [0, 1]


@pytest.mark.parametrize("request_it", [True, False])
def test_validate_after_this_batch(request_it, fit):
    """A validation after the last step of a run that ends between two validations."""

    def after_batch(trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and request_it:
            internals.validate_after_this_batch(trainer)

    model = fit(On("on_train_batch_end", after_batch), val_check_interval=50)
    assert model.validated == list(range(VALIDATION_BATCHES)) * request_it
    assert model.steps == [0, 1]


def test_end_validation(fit):
    ended = []

    def after_batch(*given: Any) -> None:
        # The trainer, the model, outputs, a batch, its number and that of its loader.
        if given[4] == 1:
            internals.end_validation()

    at_end = On("on_validation_end", lambda trainer, _: ended.append(trainer.global_step))
    hooks = On("on_validation_batch_end", after_batch), at_end
    model = fit(*hooks, val_check_interval=2, max_steps=3)
    assert model.validated == [0, 1]
    assert ended == [2]
    assert model.steps == [0, 1, 2]


@pytest.mark.parametrize("quiet", [True, False])
def test_quiet_and_interruptible(quiet, fit):
    """Warnings that do not apply are silent, and Ctrl-C before the first step is an interrupt."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt if quiet else SystemExit):
            fit(On("on_train_start", interrupt), quiet=quiet)
    assert (caught == []) == quiet


@pytest.mark.slow
@pytest.mark.parametrize("trick", [True, False])
def test_end_with_exit_code_of_ranks(trick, one_process):
    command = [sys.executable, PROGRAM, "trick" if trick else "none"]
    named: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 100}
    found = subprocess.run(command, env=one_process, check=False, **named)
    assert found.returncode == (128 + signal.SIGTERM if trick else -signal.SIGKILL)
    assert ("rank 2 ended with exit code 143" in found.stderr) == trick
