"""How the processes of a run come to be, and what each makes of another's silence."""

import faulthandler
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins.environments import (
    ClusterEnvironment,  # pyright: ignore[reportPrivateImportUsage]
    SLURMEnvironment,  # pyright: ignore[reportPrivateImportUsage]
    TorchElasticEnvironment,  # pyright: ignore[reportPrivateImportUsage]
)

from protlm.config import TrainerConfig
from protlm.data.dataset import Batch
from protlm.errors import LostRankError, UserError

# The ranks write where they stand well before those that wait give up.
_STACKS_AT = 0.5
_APART_SECONDS = 0.25


def check_launch(config: TrainerConfig) -> None:
    """Refuses settings that do not fit the processes that torchrun or srun has started.

    Raises:
        UserError: says which settings do.
    """
    if TorchElasticEnvironment.detect():
        _check_processes("torchrun", "WORLD_SIZE", "GROUP_WORLD_SIZE", config)
    elif SLURMEnvironment.detect():
        if "SLURM_STEP_ID" not in os.environ and config.devices * config.num_nodes > 1:
            raise UserError(
                f"trainer.devices={config.devices} trainer.num_nodes={config.num_nodes} in a SLURM "
                "job needs one process for each device; type: srun protlm train ..., as in "
                "slurm/train.sbatch"
            )
        if int(os.environ["SLURM_NTASKS"]) > 1 and "SLURM_NTASKS_PER_NODE" not in os.environ:
            raise UserError(
                "the tasks of the SLURM job are not counted by node, so that no rank knows its "
                f"device; type: sbatch --ntasks-per-node={config.devices}"
            )
        _check_processes("srun", "SLURM_NTASKS", "SLURM_NNODES", config)


def _check_processes(launcher: str, processes: str, nodes: str, config: TrainerConfig) -> None:
    num_processes = int(os.environ.get(processes, "1"))
    num_nodes = int(os.environ.get(nodes, "1"))
    if (config.devices * config.num_nodes, config.num_nodes) != (num_processes, num_nodes):
        raise UserError(
            f"{launcher} started {num_processes} processes on {num_nodes} nodes, and "
            f"trainer.devices={config.devices} trainer.num_nodes={config.num_nodes} is not that: "
            f"type trainer.devices={num_processes // num_nodes} trainer.num_nodes={num_nodes}"
        )


def is_first_rank() -> bool:
    """Whether this process is rank 0, as its launcher says before the ranks have met."""
    numbers = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in numbers)


def cluster_environment() -> list[ClusterEnvironment]:
    """The plugin that keeps Lightning's signal handlers and requeueing out of a SLURM job.

    They would save from within the handler, and requeue by themselves; `StopOnSignal` and
    `slurm/train.sbatch` do that. Outside of SLURM, and under torchrun, Lightning finds out itself.
    """
    if SLURMEnvironment.detect() and not TorchElasticEnvironment.detect():
        return [SLURMEnvironment(auto_requeue=False)]
    return []


def leave_other_ranks() -> None:
    """Leaves the process group, when a run has ended in order.

    Its threads would else be met by the end of the interpreter, which may abort the process.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class ReportStall(Callback):
    """Writes the stacks of all threads where a rank makes no step for half of the time-out.

    All ranks do, so the log shows which one is stuck and where, and in what the others wait for
    it. Crashes in native code, as when NCCL gives up, are reported likewise.

    Args:
        timeout_minutes: after which a rank that waits for another ends.
    """

    def __init__(self, *, timeout_minutes: float) -> None:
        self._seconds = timeout_minutes * 60 * _STACKS_AT

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock, if there is anyone to wait for."""
        if trainer.world_size > 1:
            faulthandler.enable()
            self._restart(trainer)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Starts the clock again."""
        self._restart(trainer)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Starts the clock again."""
        self._restart(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock."""
        self._stop(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Stops the clock."""
        self._stop(trainer)

    def _restart(self, trainer: pl.Trainer) -> None:
        if trainer.world_size > 1:
            # One rank of a machine after the other: stacks written at once run into each other.
            wait = self._seconds + min(_APART_SECONDS * trainer.local_rank, self._seconds / 2)
            faulthandler.dump_traceback_later(wait)

    def _stop(self, trainer: pl.Trainer) -> None:
        if trainer.world_size > 1:
            faulthandler.cancel_dump_traceback_later()


@contextmanager
def lost_ranks_explained(config: TrainerConfig) -> Iterator[None]:
    """Turns what torch says of a rank that is gone or silent into a sentence.

    Raises:
        LostRankError: another rank has ended, or has not answered within the time-out.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_of_the_network(error):
            raise
        reason = str(error).strip().split("\n", 1)[0]
        raise LostRankError(
            f"rank {os.environ.get('RANK') or _rank()} has lost another rank, which ended or was "
            f"silent for trainer.timeout_minutes={config.timeout_minutes:g} ({reason}); its own "
            "message is further up or on its node, and the same command continues from the last "
            "checkpoint"
        ) from error


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _is_of_the_network(error: RuntimeError) -> bool:
    # Gloo's failures have no class of their own.
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)
