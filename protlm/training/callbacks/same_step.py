"""A check that all ranks of a run resume from the same step."""

import pytorch_lightning as pl
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback

from protlm.system.errors import UserError


class CheckSameStep(Callback):
    """Rejects ranks that resume from different steps; each chooses its checkpoint itself."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compares the steps."""
        steps = [trainer.global_step] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(steps, trainer.global_step)
        other = next((rank for rank, step in enumerate(steps) if step != steps[0]), None)
        if other is not None:
            raise UserError(
                f"rank 0 resumes from step {steps[0]}, rank {other} from step {steps[other]}: "
                f"run_dir={trainer.default_root_dir} is not the same directory for both; type a "
                "run_dir= on a file system that all nodes see"
            )
