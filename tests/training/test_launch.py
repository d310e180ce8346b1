"""The start of a run: processes of torchrun and srun, devices, precision, and lost workers."""

import shutil
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.accelerators import MPSAccelerator
from pytorch_lightning.plugins.environments import SLURMEnvironment

from protlm.config import TrainerConfig
from protlm.system.errors import InputDataError, OutputError, UserError
from protlm.system.shares import ProcessDiedError
from protlm.training.launch import (
    check_launch,
    check_trainer,
    cluster_environment,
    is_first_rank,
    leave_other_ranks,
    loader_errors_explained,
    resolved_precision,
    strategy,
)

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2", "RANK": "3"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "protlm",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "0",
}
SRUN = {**SLURM, "SLURM_STEP_ID": "0"}


def config(devices: int, num_nodes: int) -> TrainerConfig:
    return TrainerConfig(max_steps=1, devices=devices, num_nodes=num_nodes)


def put(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("launcher", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_settings_must_match_the_processes(launcher, monkeypatch):
    """Otherwise each process would be a separate run in the same directory."""
    check_launch(config(1, 1))
    assert strategy(config(1, 1), uses_all_parameters=True) == "auto"
    put(launcher, monkeypatch)
    check_launch(config(4, 2))
    for devices, num_nodes in ((1, 1), (8, 1), (2, 4)):
        with pytest.raises(UserError, match=r"started 8 processes on 2 nodes") as raised:
            check_launch(config(devices, num_nodes))
        assert str(raised.value).endswith("type trainer.devices=4 trainer.num_nodes=2")


@pytest.mark.parametrize(
    "variables, absent, message",
    [
        (SLURM, "RANK", "type: srun protlm train"),
        (SRUN, "SLURM_NTASKS_PER_NODE", "--ntasks-per-node=4"),
    ],
)
def test_a_job_that_was_started_in_another_way_is_told_how(variables, absent, message, monkeypatch):
    put(variables, monkeypatch)
    monkeypatch.delenv(absent, raising=False)
    with pytest.raises(UserError, match=message):
        check_launch(config(4, 2))
    put({"SLURM_NTASKS": "1", "SLURM_NNODES": "1"}, monkeypatch)
    check_launch(config(1, 1))


def test_lightning_does_not_requeue(monkeypatch):
    assert cluster_environment() == []
    put(SRUN, monkeypatch)
    (environment,) = cluster_environment()
    assert isinstance(environment, SLURMEnvironment) and not environment.auto_requeue
    put(TORCHRUN, monkeypatch)
    assert cluster_environment() == []


@pytest.mark.parametrize(
    ("variables", "is_first"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "4", "LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "1"}, False),
        ({"NODE_RANK": "1"}, False),
        ({"SLURM_PROCID": "0"}, True),
        ({"SLURM_PROCID": "7", "SLURM_LOCALID": "0"}, False),
    ],
)
def test_one_process_is_the_first(variables, is_first, monkeypatch):
    put(variables, monkeypatch)
    assert is_first_rank() is is_first


def test_a_run_that_ended_cleanly_leaves_the_process_group():
    leave_other_ranks()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    leave_other_ranks()
    assert not dist.is_initialized()


@pytest.mark.filterwarnings("ignore:GPU available but not used")
def test_apple_gpus_are_not_used(train, monkeypatch):
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    run = train("run", "trainer.accelerator=auto", "trainer.max_steps=2")
    assert (run / "checkpoints" / "step-00000002.ckpt").exists()
    with pytest.raises(UserError, match=r"trainer\.accelerator=mps is not one of auto, cpu"):
        train("other", "trainer.accelerator=mps")


@pytest.mark.parametrize("accelerator", ["auto", "gpu"])
def test_more_devices_than_gpus_are_refused(accelerator, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_trainer(TrainerConfig(max_steps=1, accelerator=accelerator))
    with pytest.raises(UserError, match=r"trainer\.devices=2: this machine has 1 GPUs"):
        check_trainer(TrainerConfig(max_steps=1, accelerator=accelerator, devices=2))


@pytest.mark.parametrize(
    ("raised", "fault", "told"),
    [
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), "", ProcessDiedError),
        (ConnectionResetError(104, "Connection reset by peer"), "", ProcessDiedError),
        (EOFError(), "the shard x has 3 bytes", InputDataError),
        (MemoryError("Caught MemoryError in DataLoader worker 0.\nError: x"), "", MemoryError),
        (RuntimeError("another"), "the shard x has 3 bytes", RuntimeError),
    ],
)
def test_a_lost_loader_worker_is_explained(raised, fault, told, monkeypatch):
    """A killed one, one that read a truncated shard, and one without space for its batch."""
    for free in (1 << 40, 0):
        usage = shutil.disk_usage("/")._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        full = OutputError if told is ProcessDiedError and not free else told
        with pytest.raises(full) as caught, loader_errors_explained(1, lambda: fault):
            raise raised
        assert type(caught.value) is full
    if told is ProcessDiedError:
        assert "type data.num_workers=0" in str(caught.value)
    with pytest.raises(type(raised)), loader_errors_explained(0, lambda: ""):
        raise EOFError if isinstance(raised, EOFError) else type(raised)("of something else")


PROBES = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


@pytest.mark.parametrize("has", [(True, False), (False, True), (False, False), ()])
def test_precision_follows_the_hardware_if_it_is_auto(has, monkeypatch):
    """A processor that multiplies bfloat16 by either unit, by none, and a torch without probes."""
    for probe in PROBES:
        monkeypatch.delattr(torch.cpu, probe, raising=False)
    for probe, value in zip(PROBES, has, strict=False):
        monkeypatch.setattr(torch.cpu, probe, lambda value=value: value, raising=False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: any(has))
    for accelerator in ("cpu", "cuda"):
        expected = "bf16-mixed" if any(has) else "32-true"
        assert resolved_precision("auto", accelerator) == expected
        assert resolved_precision("32-true", accelerator) == "32-true"
    assert resolved_precision("bf16-mixed", "cuda") == "bf16-mixed"
    with nullcontext() if any(has) else pytest.warns(UserWarning, match="six times slower"):
        assert resolved_precision("bf16-mixed", "cpu") == "bf16-mixed"
