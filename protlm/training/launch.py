"""The start of a run: devices, ranks, its lock, and errors about lost ranks and workers."""

import os
import re
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
from pytorch_lightning.plugins.environments import (
    ClusterEnvironment,  # pyright: ignore[reportPrivateImportUsage]
    SLURMEnvironment,  # pyright: ignore[reportPrivateImportUsage]
    TorchElasticEnvironment,  # pyright: ignore[reportPrivateImportUsage]
)
from pytorch_lightning.strategies import DDPStrategy, Strategy

from protlm.attention.ops.products import cpu_multiplies_bfloat16
from protlm.config import TrainerConfig
from protlm.system.errors import InputDataError, OutputError, UserError
from protlm.system.lock import FolderLock
from protlm.system.paths import failures_explained, shipped
from protlm.system.shares import ProcessDiedError

# Those that end a run after its next step: Ctrl-C, and what schedulers send before preemption,
# SIGTERM, SLURM's `--signal=USR1@120`, and submitit's SIGUSR2.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Where workers put batches, and the free space that is too little for some.
_SHARED, _LITTLE = Path("/dev/shm"), 64 << 20  # noqa: S108
# The prefix that torch's loader adds to the message of a worker's exception.
_OF_A_WORKER = re.compile(r"Caught \w+ in DataLoader worker.*\n[\w.]+Error: (.*)", re.DOTALL)
# Sums are float64, which Apple's GPUs do not support.
ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
# Ranks per processor: more than one is useful only to test a launch.
MOST_RANKS = 4


def check_launch(config: TrainerConfig) -> None:
    """Rejects settings that do not match the processes that torchrun or srun has started."""
    if TorchElasticEnvironment.detect():
        _check_processes("torchrun", "WORLD_SIZE", "GROUP_WORLD_SIZE", config)
    elif SLURMEnvironment.detect():
        if "SLURM_STEP_ID" not in os.environ and config.devices * config.num_nodes > 1:
            raise UserError(
                f"trainer.devices={config.devices} trainer.num_nodes={config.num_nodes} in a SLURM "
                "job needs one process for each device; type: srun protlm train ..., as in "
                f"{shipped('slurm/train.sbatch')}"
            )
        if int(os.environ["SLURM_NTASKS"]) > 1 and "SLURM_NTASKS_PER_NODE" not in os.environ:
            raise UserError(
                "the SLURM job does not set its number of tasks per node, which determines the "
                f"device of a rank; type: sbatch --ntasks-per-node={config.devices}"
            )
        _check_processes("srun", "SLURM_NTASKS", "SLURM_NNODES", config)
    elif config.num_nodes > 1 and "NODE_RANK" not in os.environ:
        raise UserError(
            f"trainer.num_nodes={config.num_nodes} needs processes on each machine; type there "
            f"torchrun --nnodes={config.num_nodes} --nproc-per-node={config.devices} ..., as in "
            f"{shipped('docs/cluster.md')}, or sbatch {shipped('slurm/train.sbatch')} ..."
        )


def _check_processes(launcher: str, processes: str, nodes: str, config: TrainerConfig) -> None:
    num_processes = int(os.environ.get(processes, "1"))
    num_nodes = int(os.environ.get(nodes, "1"))
    if (config.devices * config.num_nodes, config.num_nodes) != (num_processes, num_nodes):
        raise UserError(
            f"{launcher} started {num_processes} processes on {num_nodes} nodes, which does not "
            f"match trainer.devices={config.devices} trainer.num_nodes={config.num_nodes}: "
            f"type trainer.devices={num_processes // num_nodes} trainer.num_nodes={num_nodes}"
        )


def is_first_rank() -> bool:
    """Returns whether this process is rank 0, by the variables of its launcher."""
    numbers = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in numbers)


@contextmanager
def locked(run_dir: Path, *, break_lock: bool = False) -> Iterator[FolderLock | None]:
    """Creates the run directory and holds its lock; yields None on ranks other than the first."""
    if not is_first_rank():
        yield None
        return
    with failures_explained(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(run_dir, "being trained", "run_dir=", break_lock=break_lock)
    try:
        yield lock
    finally:
        # On a file system that became read-only the file stays, and the next start takes it over.
        with suppress(OSError):
            lock.release()


def cluster_environment() -> list[ClusterEnvironment]:
    """Returns the plugin that disables Lightning's requeueing in a SLURM job.

    Lightning would save from within a signal handler and requeue the job; `StopOnSignal` and
    `slurm/train.sbatch` do that instead. Outside of SLURM, and under torchrun, Lightning detects
    its environment itself.
    """
    if SLURMEnvironment.detect() and not TorchElasticEnvironment.detect():
        return [SLURMEnvironment(auto_requeue=False)]
    return []


def leave_other_ranks() -> None:
    """Destroys the process group after a run has ended cleanly.

    Its threads might otherwise abort the process when the interpreter exits.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextmanager
def lost_ranks_explained(config: TrainerConfig) -> Iterator[None]:
    """Converts torch's errors about a lost rank into one sentence."""
    try:
        yield
    except RuntimeError as error:
        # Gloo's errors have no separate class.
        if not (isinstance(error, torch.distributed.DistError) or "gloo" in str(error)):
            raise
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        reason = str(error).strip().split("\n", 1)[0]
        raise ProcessDiedError(
            f"rank {os.environ.get('RANK') or rank} has lost another rank, which ended or did "
            f"not respond for trainer.timeout_minutes={config.timeout_minutes:g} ({reason}); its "
            "own message is further up or on its node, and the same command continues from the "
            "last checkpoint"
        ) from error


@contextmanager
def loader_errors_explained(num_workers: int, size_fault: Callable[[], str]) -> Iterator[None]:
    """Reduces the traceback of a loader worker's error to its sentence.

    `size_fault` returns why a shard cannot be read, and is asked when a worker was lost.
    """
    try:
        yield
    except (UserError, RuntimeError, MemoryError, ConnectionError, EOFError) as error:
        if found := _OF_A_WORKER.match(str(error)):
            raise type(error)(found[1].strip()) from error
        is_cut_off = num_workers > 0 and isinstance(error, ConnectionError | EOFError)
        if not is_cut_off and not str(error).startswith("DataLoader worker (pid"):
            raise
        if fault := size_fault():
            raise InputDataError(f"{fault}; restore it, or make the data set again") from error
        free = shutil.disk_usage(_SHARED).free if _SHARED.exists() else _LITTLE
        advice = "type data.num_workers=0 to load without workers"
        if free < _LITTLE:
            raise OutputError(
                f"a loader worker has ended: {_SHARED} has {free >> 20:,} MiB left; {advice}, or "
                "enlarge it (docker run --shm-size=1g)"
            ) from error
        raise ProcessDiedError(
            f"a loader worker was killed, perhaps because the memory was full; {advice}"
        ) from error


def check_trainer(config: TrainerConfig) -> None:
    """Rejects settings that do not fit this machine, or the processes that were started."""
    if config.accelerator not in ACCELERATORS:
        raise UserError(
            f"trainer.accelerator={config.accelerator} is not one of {', '.join(ACCELERATORS)}"
        )
    asked = f"trainer.accelerator={config.accelerator} trainer.devices={config.devices}"
    require_devices(asked, config.devices, is_gpu=resolved_accelerator(config.accelerator) != "cpu")
    check_launch(config)


def require_devices(asked: str, devices: int, *, is_gpu: bool) -> None:
    """Makes sure that a machine has this many GPUs, or processors for this many processes."""
    there = torch.cuda.device_count() if is_gpu else MOST_RANKS * (os.cpu_count() or 1)
    if devices > there:
        what = "GPUs that torch can use" if is_gpu else "as the most processes for its processors"
        advice = "fewer, or use the CPU" if is_gpu else "fewer"
        raise UserError(f"{asked}: this machine has {there} {what}; type {advice}")


def resolved_accelerator(name: str) -> str:
    """Resolves `auto`; Lightning's `auto` would select any type of device."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def strategy(config: TrainerConfig, *, uses_all_parameters: bool) -> Strategy | str:
    """Returns the strategy: a single process, or ranks with a time-out."""
    if config.devices * config.num_nodes == 1:
        return "auto"
    return DDPStrategy(
        timeout=timedelta(minutes=config.timeout_minutes),
        gradient_as_bucket_view=True,
        find_unused_parameters=not uses_all_parameters,
    )


def resolved_precision(name: str, accelerator: str) -> str:
    """Returns the precision to train with; `auto` is bfloat16 if the hardware multiplies it.

    A processor without bfloat16 products emulates them, six times slower than float32. A run that
    resumes on another machine uses the precision of that machine.

    >>> resolved_precision("32-true", "cpu")
    '32-true'
    """
    if name == "bf16-mixed" and accelerator == "cpu" and not cpu_multiplies_bfloat16():
        warnings.warn(
            "trainer.precision=bf16-mixed: this processor has no bfloat16 products and emulates "
            "them, about six times slower than float32; type trainer.precision=auto",
            stacklevel=2,
        )
    if name != "auto":
        return name
    has_bfloat16 = (
        cpu_multiplies_bfloat16()
        if accelerator == "cpu"
        else torch.cuda.is_bf16_supported(including_emulation=False)
    )
    return "bf16-mixed" if has_bfloat16 else "32-true"
