"""The LightningDataModule: shards to batches, and the place in the data to continue from."""

import signal
from typing import Any

import pytorch_lightning as pl
from torch.utils.data import DataLoader

from protlm.config import DataConfig, Objective, ObjectiveConfig
from protlm.data.batching import BatchRule, BatchStream, Progress
from protlm.data.dataset import Batch, SequenceDataset
from protlm.data.masking import MaskingRule
from protlm.data.shards import SplitReader
from protlm.errors import UserError

# Lightning must never see the end of an epoch: ours are counted by `Progress`, and a run is as
# long as its optimiser steps. Lightning's own epochs end early or repeat data after a restart.
_ENDLESS = 1_000_000_000


def _identity(batch: Any) -> Any:
    # The data set gives whole batches; there is nothing to collate.
    return batch


def _ignore_interrupts(worker: int) -> None:
    # Ctrl-C reaches the whole process group; the run itself ends at the next step's end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class SequenceData(pl.LightningDataModule):
    """Training and validation batches in an order that is a pure function of the seed.

    Its state is the place {epoch, samples}, the samples of the epoch that were trained on, and the
    fingerprint of the data it is a place in.
    """

    def __init__(
        self,
        train: SplitReader,
        valid: SplitReader,
        *,
        config: DataConfig,
        objective: ObjectiveConfig,
        seed: int,
    ) -> None:
        super().__init__()
        self.train, self.valid = train, valid
        self.config, self.objective, self.seed = config, objective, seed
        self.progress = Progress()

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, for the checkpoint."""
        return {
            "epoch": self.progress.epoch,
            "samples": self.progress.samples,
            "fingerprint": self.train.fingerprint,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up the place in the data from a checkpoint.

        Raises:
            UserError: the run was trained on other data, where the place means nothing.
        """
        if state_dict["fingerprint"] != self.train.fingerprint:
            raise UserError(
                f"data.dir={self.config.dir}: the run was trained on other data than this "
                f"{self.config.train_split} split; give those, or choose another run_dir="
            )
        self.progress = Progress(state_dict["epoch"], state_dict["samples"])

    def train_dataloader(self) -> DataLoader[Batch]:
        """Batches without end, from the present place on."""
        return self._loader(self.train, shuffle=True, start=self.progress, num_batches=_ENDLESS)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Every sample of the validation split once, corrupted the same way every time."""
        return self._loader(self.valid, shuffle=False, start=Progress(), num_batches=None)

    def _loader(
        self, sequences: SplitReader, *, shuffle: bool, start: Progress, num_batches: int | None
    ) -> DataLoader[Batch]:
        rule = BatchRule(
            tokens_per_batch=self.config.tokens_per_batch,
            max_length=self.config.max_length,
            seed=self.seed,
            shuffle=shuffle,
        )
        stream = BatchStream(
            sequences.lengths,
            rule,
            start=start,
            num_batches=num_batches,
            rank=self.trainer.global_rank if self.trainer else 0,
            world_size=self.trainer.world_size if self.trainer else 1,
        )
        return DataLoader(
            self._dataset(sequences, random_crop=shuffle),
            sampler=stream,
            batch_size=None,
            collate_fn=_identity,
            num_workers=self.config.num_workers,
            multiprocessing_context="forkserver" if self.config.num_workers else None,
            persistent_workers=self.config.num_workers > 0,
            worker_init_fn=_ignore_interrupts,
        )

    def _dataset(self, sequences: SplitReader, *, random_crop: bool) -> SequenceDataset:
        masking = MaskingRule(
            fraction=self.objective.fraction,
            mask_share=self.objective.mask_share,
            random_share=self.objective.random_share,
        )
        return SequenceDataset(
            sequences,
            objective=Objective(self.objective.name).value,
            masking=masking,
            max_length=self.config.max_length,
            crop=self.config.crop.value if random_crop else "prefix",
            seed=self.seed,
        )
