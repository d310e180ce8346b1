"""The LightningDataModule: batches from shards, and the position to resume from."""

import atexit
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from multiprocessing import active_children, forkserver, resource_tracker
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import pytorch_lightning as pl
from torch.utils.data import DataLoader

from protlm.config import DataConfig
from protlm.data.batching.contexts import Contexts
from protlm.data.batching.mixture import Mixture
from protlm.data.batching.plan import (
    SPECIALS,
    BatchingStrategy,
    BatchStream,
    Progress,
    RankBatches,
    Sequences,
)
from protlm.data.batching.relatives import Families, WholeFamilies
from protlm.data.batching.strategies import LengthBuckets
from protlm.data.dataset import Batch, SequenceDataset
from protlm.data.frequencies import count_residues, frequencies, posterior
from protlm.data.masking import MaskingRule
from protlm.system.errors import UserError
from protlm.system.shares import end_with_parent
from protlm.training.launch import SIGNALS

# Lightning sees a single endless epoch: epochs are counted by `Progress`, and the length of a run
# is given in optimizer steps. Lightning's epochs end early or repeat data after a restart.
ENDLESS = 1_000_000_000
# Number of samples that residue frequencies are counted on; it gives about three digits.
_COUNTED = 16_384


def _start_forkserver() -> None:
    """Starts the process that loader workers are forked from, with the run's signals blocked.

    Ctrl-C and SLURM's signals reach all processes of a run. The run ends after the next step and
    needs its workers until then. They inherit the signal mask.
    """
    _end_workers_at_exit()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    resource_tracker.ensure_running()
    # Starting the tracker unblocks some of them.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@cache
def _end_workers_at_exit() -> None:
    """Kills the workers that are left when the run exits, after torch has asked its workers to end.

    Python ends its children with SIGTERM, which these block, and waits for them without a limit.
    torch does not ask a worker whose loader failed at its first batch. Functions that are
    registered earlier are called later: this one between those of torch and of multiprocessing.
    """

    @atexit.register
    def kill() -> None:
        for worker in active_children():
            if worker.daemon:
                worker.kill()


def _end_with_run(worker: int) -> None:
    """Ends a loader worker when the process that it loads for is killed.

    torch's workers watch the process that they were forked from, which is the fork server, and the
    fork server ends after the last worker: without this they would keep each other alive.
    """
    end_with_parent()
    # Python prints a batch that cannot be sent, as when /dev/shm is full, and the run waits for it.
    setattr(Queue, "_on_queue_feeder_error", staticmethod(lambda *_: os._exit(1)))  # noqa: B010


class SequenceData(pl.LightningDataModule):
    """Training and validation batches in an order that is a pure function of the seed.

    Its state is the position {epoch, samples, tokens} and the fingerprint of the data. Validation
    has one sequence per row, cropped to its start, or documents of relatives as in training, and
    masks a fixed fraction. The share has the number of micro-batches per batch, and of batches per
    optimizer step.
    """

    def __init__(
        self,
        train: Mixture,
        valid: Mixture,
        *,
        rule: BatchingStrategy,
        config: DataConfig,
        masking: MaskingRule | None,
        seed: int,
        share: RankBatches,
    ) -> None:
        super().__init__()
        self.train, self.valid, self.rule = train, valid, rule
        self.config, self.masking, self.seed = config, masking, seed
        self.share = share
        self.progress = Progress()
        # Whether the batch at hand has no padding.
        self.is_whole = False

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Looks for padding while the host has the mask, and need not wait for a GPU."""
        self.is_whole = bool(batch.mask_BL.all())
        return batch

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.progress) | {"fingerprint": self.train.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.check_continues(state_dict)
        self.progress = Progress(
            **{key: value for key, value in state_dict.items() if key != "fingerprint"}
        )

    def check_continues(self, state_dict: Mapping[str, Any]) -> None:
        if state_dict["fingerprint"] != self.train.fingerprint:
            where = f"data.dir={self.config.dir}" if self.config.dir else "data.mixture"
            raise UserError(
                f"{where}: the run was trained on other data, or with other weights of the "
                "mixture; give those, or choose another run_dir="
            )

    def train_dataloader(self) -> DataLoader[Batch]:
        """Returns an endless loader of batches that starts at the current position."""
        steps_done = 0 if self.trainer is None else self.trainer.global_step
        stream = BatchStream(
            self.train.lengths_of,
            self.train.order(seed=self.seed),
            self.rule,
            start=self.progress,
            num_batches=ENDLESS,
            # A checkpoint is written between two optimizer steps, skipped ones included.
            done=steps_done * self.share.batches_per_step,
            share=self._of_rank(self.share),
        )
        return self._loader(self.train, stream, self.masking)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Returns a loader of the validation split, with the same masks every time."""
        # Where a part is validated: the first sequences of a file are not a sample of it.
        is_cut = self.trainer is not None and isinstance(self.trainer.limit_val_batches, int)
        stream = BatchStream(
            self.valid.lengths_of,
            self.valid.order(shuffle=is_cut),
            self.valid_batching,
            share=self._of_rank(RankBatches()),
        )
        return self._loader(self.valid, stream, self.valid_rule)

    @property
    def valid_batching(self) -> BatchingStrategy:
        """The rows of validation."""
        size = self.config.tokens_per_batch
        if isinstance(self.valid, Families | Contexts):
            return replace(self.valid.rule, tokens_per_batch=size)
        return LengthBuckets(size, self.config.max_length)

    def unigram_table(self) -> np.ndarray:
        """Returns the predictions of residue frequencies by input token and target, float64 [V, V].

        The frequencies are those of the first samples in the order of the run, cropped as in
        validation. The result is the same on all ranks.
        """
        order = self.train.order(seed=self.seed)
        samples = order.draw(0, np.arange(min(len(order), self.rule.block_size, _COUNTED))).samples
        most = self.config.max_length - SPECIALS
        counts_V = count_residues(self.train[sample][:most] for sample in samples.tolist())
        return posterior(frequencies(counts_V), self.valid_rule)

    @property
    def valid_rule(self) -> MaskingRule | None:
        """The masking of validation, with one fraction for all rows; None if causal."""
        return self.masking and replace(self.masking, mask_fraction_range=None, narrowing=None)

    def _of_rank(self, share: RankBatches) -> RankBatches:
        if self.trainer is None:
            return share
        return replace(share, rank=self.trainer.global_rank, world_size=self.trainer.world_size)

    def _loader(
        self, sequences: Sequences, stream: BatchStream, masking: MaskingRule | None
    ) -> DataLoader[Batch]:
        dataset = SequenceDataset(
            sequences,
            objective="causal" if masking is None else "masked",
            masking=masking or MaskingRule(),
            seed=self.seed,
            positions=self.rule.positions if isinstance(self.rule, WholeFamilies) else None,
        )
        # More processes than processors gain nothing. The batches do not depend on the number.
        num_workers = min(self.config.num_workers, os.cpu_count() or 1)
        if num_workers:
            _start_forkserver()
        return DataLoader(
            dataset,
            sampler=stream,
            # The data set returns whole batches.
            batch_size=None,
            num_workers=num_workers,
            multiprocessing_context="forkserver" if num_workers else None,
            worker_init_fn=_end_with_run,
            persistent_workers=num_workers > 0,
            # Lightning copies without waiting, which needs page-locked memory.
            pin_memory=self.trainer is not None
            and self.trainer.strategy.root_device.type == "cuda",
        )
