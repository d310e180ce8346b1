"""The LightningDataModule: shards to batches, and the place in the data to continue from."""

import os
import signal
from dataclasses import asdict, replace
from multiprocessing import forkserver, resource_tracker
from typing import Any

import pytorch_lightning as pl
from torch.utils.data import DataLoader

from protlm.config import DataConfig, Objective, ObjectiveConfig
from protlm.data.batching import BatchRule, BatchStream, Progress, Sequences, Share
from protlm.data.buckets import LengthBuckets
from protlm.data.dataset import Batch, SequenceDataset
from protlm.data.masking import MaskingRule
from protlm.data.mixture import Mixture, SampleOrder
from protlm.data.shards import SplitReader
from protlm.errors import UserError
from protlm.training.preemption import SIGNALS

# Lightning must never see the end of an epoch: ours are counted by `Progress`, and a run is as
# long as its optimiser steps. Lightning's own epochs end early or repeat data after a restart.
_ENDLESS = 1_000_000_000


def _identity(batch: Any) -> Any:
    # The data set gives whole batches; there is nothing to collate.
    return batch


def _start_forkserver() -> None:
    """Starts the process that loader workers are forked from, deaf to the signals of the run.

    Ctrl-C and SLURM's signals reach all processes of a run. The run itself ends at the next step's
    end and needs its workers until then: they inherit that the signals are held back.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    resource_tracker.ensure_running()
    # Starting the tracker lets some of them through again.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


class SequenceData(pl.LightningDataModule):
    """Training and validation batches in an order that is a pure function of the seed.

    Its state is the place {epoch, samples, tokens}, what of the epoch was trained on, and the
    fingerprint of the data it is a place in. Validation has one sequence to a row, cropped to its
    start, whatever training does.

    `share` says in how many parts a rank computes what it has of a training batch.
    """

    def __init__(
        self,
        train: Mixture,
        valid: SplitReader,
        *,
        rule: BatchRule,
        config: DataConfig,
        objective: ObjectiveConfig,
        seed: int,
        share: Share,
    ) -> None:
        super().__init__()
        self.train, self.valid, self.rule = train, valid, rule
        self.config, self.objective, self.seed = config, objective, seed
        self.share = share
        self.progress = Progress()

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, for the checkpoint."""
        return asdict(self.progress) | {"fingerprint": self.train.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up the place in the data from a checkpoint.

        Raises:
            UserError: the run was trained on other data, where the place means nothing.
        """
        place = dict(state_dict)
        if place.pop("fingerprint") != self.train.fingerprint:
            where = f"data.dir={self.config.dir}" if self.config.dir else "data.mixture"
            raise UserError(
                f"{where}: the run was trained on other data than these, or other weights of "
                "them; give those, or choose another run_dir="
            )
        self.progress = Progress(**place)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Batches without end, from the present place on."""
        stream = BatchStream(
            self.train.lengths_of,
            self.train.order(seed=self.seed),
            self.rule,
            start=self.progress,
            num_batches=_ENDLESS,
            share=self._of_rank(self.share),
        )
        return self._loader(self.train, stream)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Every sample of the validation split once, corrupted the same way every time."""
        stream = BatchStream(
            self.valid.lengths_of,
            SampleOrder([len(self.valid)], seed=self.seed, shuffle=False),
            LengthBuckets(self.config.tokens_per_batch, self.config.max_length),
            share=self._of_rank(Share()),
        )
        return self._loader(self.valid, stream)

    def _of_rank(self, share: Share) -> Share:
        trainer = self.trainer
        if trainer is None:
            return share
        return replace(share, rank=trainer.global_rank, world_size=trainer.world_size)

    def _loader(self, sequences: Sequences, stream: BatchStream) -> DataLoader[Batch]:
        dataset = SequenceDataset(
            sequences,
            objective=Objective(self.objective.name).value,
            masking=MaskingRule(
                fraction=self.objective.fraction,
                mask_share=self.objective.mask_share,
                random_share=self.objective.random_share,
            ),
            seed=self.seed,
        )
        # More processes than processors only take them from each other; the batches are the same.
        num_workers = min(self.config.num_workers, os.cpu_count() or 1)
        if num_workers:
            _start_forkserver()
        return DataLoader(
            dataset,
            sampler=stream,
            batch_size=None,
            collate_fn=_identity,
            num_workers=num_workers,
            multiprocessing_context="forkserver" if num_workers else None,
            persistent_workers=num_workers > 0,
        )
