"""FSDP2: weights, gradients and optimizer states sharded over the ranks, block by block."""

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from pytorch_lightning.core.optimizer import LightningOptimizer
from pytorch_lightning.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from protlm.attention.base import SharesParameters
from protlm.checkpoints.checksums import write_sums
from protlm.checkpoints.format import set_latest
from protlm.checkpoints.sharded import Ranks, read_parts, write_part
from protlm.config import Strategy as StrategyName
from protlm.errors import OutputError, UserError
from protlm.model.transformer import ProteinLM
from protlm.paths import complete_folder, explain_os_error
from protlm.training.checkpoint_io import VerifiedCheckpointIO

ResultT = TypeVar("ResultT")


def shard(network: ProteinLM, mesh: DeviceMesh) -> None:
    """Shards a network over a mesh of one dimension, in place (Zhao et al., arXiv 2304.11277).

    The weights of a block are gathered before its forward and backward pass. Communication and the
    sums of gradients are in float32; autocast decides what is computed in bfloat16, as under DDP.
    """
    for block in network.blocks:
        fully_shard(block, mesh=mesh)
    # Weights are also resharded after a validation, which has no backward pass: they are averaged
    # and saved as shards.
    fully_shard(network, mesh=mesh, reshard_after_forward=True)


def check_sharding(strategy: StrategyName, network: ProteinLM, checkpoint: Path | None) -> None:
    """Rejects models that FSDP cannot train, and checkpoints of the other kind.

    Raises:
        UserError: the message names the settings to use instead.
    """
    is_sharded = strategy is StrategyName.fsdp
    if is_sharded and network.reversible:
        raise UserError(
            "trainer.strategy=fsdp cannot train model.reversible=true, whose blocks have their own "
            "backward pass; type trainer.activation_checkpointing=true instead"
        )
    own = [{name for name, _ in block.named_parameters()} for block in network.blocks]
    if is_sharded and isinstance(network.mechanism(1), SharesParameters) and own[-1] != own[0]:
        raise UserError(
            "trainer.strategy=fsdp cannot shard layers that share parameters; "
            "type attention.sharing=key_value, or trainer.strategy=ddp"
        )
    if checkpoint is not None and checkpoint.is_dir() != is_sharded:
        sharded, name = ("not ", "auto") if is_sharded else ("", "fsdp")
        raise UserError(
            f"{checkpoint} is {sharded}sharded over ranks; type trainer.strategy={name}, "
            "or choose another run_dir="
        )


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, with sharded checkpoints: each rank writes one shard.

    A sharded checkpoint has the same keys and values as an ordinary one. It can be consolidated,
    and can be resumed on any number of ranks.

    Args:
        world_size: number of ranks over which the model is sharded.
        timeout: time-out of collective operations.
    """

    def __init__(self, world_size: int, *, timeout: timedelta) -> None:
        super().__init__(data_parallel_size=world_size, tensor_parallel_size=1, timeout=timeout)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Optimizers restore their states from the checkpoint, as under other strategies."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the sharded weights."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the sharded state of an optimizer, with the usual parameter numbers."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return inner.state_dict()

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Restores the weights."""
        Strategy.load_model_state_dict(self, checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Restores the states of the optimizers."""
        Strategy.load_optimizer_state_dict(self, checkpoint)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Saves a sharded checkpoint atomically; all ranks must call this."""
        io = self.checkpoint_io
        assert isinstance(io, VerifiedCheckpointIO)
        io.failure = None
        try:
            self._save(checkpoint, Path(filepath))
        except OutputError as error:
            io.failure = str(error)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Loads this rank's rows of a sharded checkpoint, whose checksums are already verified."""

        def sharded(rows: Tensor, shape: torch.Size) -> DTensor:
            stride = torch.empty(shape, device="meta").stride()
            mesh = self.device_mesh["data_parallel"]
            local = rows.to(self.root_device)
            return DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
            )

        return read_parts(Path(checkpoint_path), self._ranks, sharded=sharded)

    @property
    def _ranks(self) -> Ranks:
        return Ranks(self.global_rank, self.world_size)

    def _save(self, checkpoint: dict[str, Any], target: Path) -> None:
        is_first = self.is_global_zero
        with ExitStack() as stack:

            def begin() -> Path | None:
                complete = complete_folder(target, overwrite=True)
                return stack.enter_context(complete) if is_first else None

            folder = self.broadcast(self._together(begin, target))
            assert folder is not None

            def end() -> None:
                if is_first:
                    write_sums(folder)
                    stack.close()
                    set_latest(target)

            self._together(lambda: write_part(checkpoint, folder, self._ranks), target)
            self._together(end, target)

    def _together(self, action: Callable[[], ResultT], target: Path) -> ResultT:
        """Runs an action on all ranks, and raises on all of them if it fails on one.

        Raises:
            OutputError: a rank could not write.
        """
        result, failure = None, None
        try:
            result = action()
        except OutputError as error:
            failure = str(error)
        except OSError as error:
            failure = str(explain_os_error(error, target))
        failures: list[str | None] = [None] * self.world_size
        torch.distributed.all_gather_object(failures, failure)
        for one in failures:
            if one is not None:
                raise OutputError(one)
        return cast(ResultT, result)
