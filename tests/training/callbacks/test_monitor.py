"""The metrics of a run: utilization, waiting time, memory; and their loggers, which never fail."""

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import TextIO

import pytest
import torch
from pytorch_lightning.loggers.logger import DummyLogger

from benchmarks.pretended_cuda import PretendedCuda
from protlm.checkpoints.validations import METRICS, read_metrics
from protlm.config import LoggerConfig, WandbMode
from protlm.data.dataset import Batch, SequenceDataset
from protlm.training.callbacks import monitor
from protlm.training.callbacks.monitor import DataWait
from protlm.training.flops import ModelFlops, peak_tflops
from protlm.training.loggers import COLUMNS, CsvFile, make_loggers
from protlm.training.module import LanguageModeling
from tests.fixtures.runs import rows_of
from tests.small_models import network_of

CPU = torch.device("cpu")
# In a process of its own, because Triton decides when it is imported whether it interprets.
COUNT_FUSED = """
import torch
from torch.utils.flop_counter import FlopCounterMode
from protlm.attention import create
from protlm.training.flops import _more_counters, fused_counters

torch.set_num_threads(1)
q, k, v = torch.ones(3, 2, 2, 40, 16)
mask, hidden = torch.ones(2, 40, dtype=torch.bool), torch.ones(2, 40, 32)
for backend in ("triton", "torch"):
    options = {"num_features": 24, "backend": backend}
    sizes = {"num_heads": 2, "head_dim": 16, "model_dim": 32, "max_length": 40}
    attention = create("performer_relu", options, **sizes)
    counters = _more_counters(q.device) | fused_counters()
    counter = FlopCounterMode(display=False, custom_mapping=counters)
    with torch.no_grad(), counter:
        attention(q, k, v, hidden_BLD=hidden, mask_BL=mask, causal=False)
    print(counter.get_total_flops())
"""


def test_flops_are_those_of_the_formula_and_linear_for_linear_attention():
    network, length, depth, width = network_of("attention=softmax"), 48, 2, 64
    matrices = sum(p.numel() for p in network.parameters() if p.ndim == 2)
    matrices -= network.embedding.weight.numel()
    # Two for each weight and token, and q·k and the sum over values for each pair of positions.
    forward = 2 * matrices * length + depth * 2 * 2 * length**2 * width
    assert ModelFlops(network, causal=False).training(length, CPU) == 3 * forward
    flops = ModelFlops(network_of("attention=performer_softmax"), causal=False)
    assert flops.training(128, CPU) == 2 * flops.training(64, CPU)


def test_fused_kernels_have_the_flops_of_torch():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", COUNT_FUSED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    fused, torch_ = done.stdout.split()
    assert int(fused) == int(torch_) > 0


def test_a_run_logs_its_pace_its_memory_and_with_a_known_peak_its_utilization(
    train, tiny_run, capfd
):
    settings = ("data.mode=concatenated", "trainer.accumulate_grad_batches=2")
    run = train("run", *settings, "trainer.log_every=1", "trainer.peak_tflops=0.25")
    of_a_row = ModelFlops(network_of(), causal=False).training(128, CPU)
    rows = rows_of(run, "train_loss")
    assert len(rows) == 4
    for row in rows:
        expected = row["samples_per_second"] * of_a_row / 0.25e12
        assert row["model_flops_utilization"] == pytest.approx(expected, rel=1e-6)
        assert row["residues_per_second_per_device"] == row["residues_per_second"]
        assert 0 <= row["data_wait_fraction"] < 1
        assert 0.1 < row["memory_gib"] < 64
        assert row["gradient_norm"] > 0
    line = capfd.readouterr().err.splitlines()[-2]
    for said in ("loss ", "lr ", "gradient ", "residues/s", "a device", "MFU ", "waiting", "GiB"):
        assert said in line
    assert peak_tflops(CPU) is None
    assert not rows_of(tiny_run, "model_flops_utilization")


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 311.9),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA RTX A4000", None),
    ],
)
def test_the_peak_is_known_by_name(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(torch.device("cuda")) == peak


def test_the_logged_rate_is_that_of_the_step(train):
    settings = ("schedule.warmup_steps=4", "optimizer.learning_rate=0.4", "trainer.log_every=1")
    run = train("run", *settings, "trainer.max_steps=5")
    rates = [row["learning_rate"] for row in rows_of(run, "learning_rate")]
    # A linear warm-up reaches the peak with its last step.
    assert rates[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_only_the_fetch_of_a_batch_counts_as_waiting(monkeypatch):
    times = iter([1.0, 3.5, 10.0, 11.0])
    monkeypatch.setattr(monitor.time, "perf_counter", lambda: next(times))
    wait = DataWait()
    for action in ("fetch.train_dataloader_next", "run_training_batch") * 2:
        with wait.profile(action):
            pass
    assert wait.seconds == 3.5


def test_rates_exclude_the_time_of_validation(train, monkeypatch):
    # A batch is waited for 3 seconds, trained on for one, validated for 100.
    now = [0.0]
    monkeypatch.setattr(monitor, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def taking(seconds: float, work: Callable) -> Callable:
        def takes(*given: object) -> object:
            now[0] += seconds
            return work(*given)

        return takes

    for of, name, seconds in (
        (SequenceDataset, "__getitem__", 3.0),
        (LanguageModeling, "training_step", 1.0),
        (LanguageModeling, "validation_step", 100.0),
    ):
        monkeypatch.setattr(of, name, taking(seconds, getattr(of, name)))
    settings = ("trainer.valid_every=1", "trainer.valid_batches=1", "data.num_workers=0")
    run = train("run", *settings, "trainer.max_steps=3")
    # The log after step 4 covers two steps; one of them was made before the stop.
    train(run, *settings, "trainer.max_steps=6")
    rows = {row["step"]: row for row in rows_of(run, "samples")}
    for step in (4, 6):
        samples = rows[step]["samples"] - rows[step - 2]["samples"]
        assert samples / rows[step]["samples_per_second"] == pytest.approx(2 * 4), step
        assert rows[step]["data_wait_fraction"] == pytest.approx(0.75), step


def test_counting_a_batch_does_not_wait_for_a_gpu():
    tokens_BL = torch.zeros(2, 9, dtype=torch.int64, device="meta")
    batch = Batch(tokens_BL, tokens_BL, tokens_BL == 0, tokens_BL[:, 0], (0, 0, 0))
    counter = monitor.Monitor(every=1, max_steps=1, data_wait=DataWait())
    with PretendedCuda():
        assert counter._sizes(batch).shape == (6,)


def test_every_step_is_in_one_row_of_the_log(train):
    settings = ("trainer.max_steps=6", "trainer.valid_every=2")
    runs = [train(every, *settings, f"trainer.log_every={every}") for every in "13"]
    one, three = ([row["train_loss"] for row in rows_of(run, "train_loss")] for run in runs)
    assert (len(one), len(three)) == (6, 2)
    for number, value in enumerate(three):
        part = one[3 * number : 3 * number + 3]
        assert min(part) <= value <= max(part)
        assert value == pytest.approx(sum(part) / 3, rel=5e-3)


def row(step: int) -> str:
    """A row of the log that has only its step."""
    return f"{step}{',' * len(COLUMNS)}\n"


HEADER = f"step,{','.join(COLUMNS)}\n"


@pytest.mark.parametrize(
    ("text", "from_step", "kept"),
    [
        # No gaps and no repeats.
        (HEADER + row(1) + row(2) + row(3), 2, [1, 2]),
        # Truncated where the disk was full, and continued on the same line by an older version.
        (HEADER + row(1) + "2,0,8,2.5" + row(3), 5, [1]),
        # Truncated, and after a flipped bit.
        (HEADER + row(1) + "4,0\n" + row(5).replace("\n", "x\n"), 5, [1]),
        ("step,train_loss,of_an_older_version\n1,0.1,7\n", 1, [1]),
    ],
)
def test_a_resumed_log_has_every_whole_row_once(text, from_step, kept, tmp_path):
    path = tmp_path / METRICS
    path.write_text(text)
    assert [one["step"] for one in read_metrics(path) if one["step"] <= from_step] == kept
    CsvFile(tmp_path, from_step=from_step).log_metrics({"train_loss": 0.5}, 9)
    rows = read_metrics(path)
    assert [one["step"] for one in rows] == [*kept, 9]
    assert rows[-1] == {"step": 9, "train_loss": 0.5}
    assert rows[0].get("train_loss", 0.1) == 0.1


def test_a_full_disk_leaves_no_truncated_row(tmp_path, monkeypatch):
    log = CsvFile(tmp_path, from_step=0)
    log.log_metrics({"train_loss": 0.1}, 1)

    class Full:
        def __init__(self, file: TextIO, columns: object) -> None:
            self.file = file

        def writerow(self, row: object) -> None:
            self.file.write("2,0,8,2.5")
            self.file.flush()
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="No space left"):
        patch.setattr("csv.DictWriter", Full)
        log.log_metrics({"train_loss": 0.2}, 2)
    log.log_metrics({"train_loss": 0.3}, 3)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.csv")] == [1, 3]


def test_tensorboard_is_written(train):
    run = train("run", "logger=tensorboard")
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))


def test_a_resumed_run_hides_the_repeated_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = LoggerConfig(tensorboard=True)
    for from_step, steps in ((0, (1, 2, 3)), (1, (2, 3))):
        _, tensorboard = make_loggers(config, tmp_path, from_step=from_step)
        for step in steps:
            tensorboard.log_metrics({"train_loss": from_step + step / 10}, step)
        tensorboard.finalize("success")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, round(event.value, 3)) for event in events.Scalars("train_loss")]
    assert found == [(1, 0.1), (2, 1.2), (3, 1.3)]


def test_a_resumed_run_keeps_its_wandb_id(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(
        "pytorch_lightning.loggers.WandbLogger", lambda **named: told.append(named) or DummyLogger()
    )
    for folder in ("run", "run", "another"):
        (tmp_path / folder).mkdir(exist_ok=True)
        loggers = make_loggers(LoggerConfig(wandb=WandbMode.online), tmp_path / folder, from_step=0)
        loggers[1].log_metrics({"train_loss": 0.1}, 1)
    first, second, other = (named["id"] for named in told)
    assert first == second != other
    assert all(named["resume"] == "allow" for named in told)


@pytest.mark.slow
def test_wandb_runs_offline(protlm_command, tiny_settings, tmp_path):
    environment = {"HOME": str(tmp_path), "WANDB_SILENT": "true"}
    settings = [*tiny_settings, "run_dir=run", "trainer.max_steps=2", "trainer.log_every=1"]
    done = protlm_command("train", *settings, "logger=wandb", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "wandb failed" not in done.stderr
    logged = list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))
    assert len(logged) == 1 and logged[0].stat().st_size > 0
    assert read_metrics(tmp_path / "run" / "metrics.csv")
