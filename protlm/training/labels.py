"""Learning of labels: a network, or its LoRA adapters, with a linear head, and its batches.

Hu et al. 2021 (arXiv:2106.09685) for LoRA. The head begins as a linear probe, as Kumar et al. 2022
(arXiv:2202.10054) recommend: a random head distorts the features in the first steps. The order of
batches is a pure function of seed and epoch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, final

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from protlm.config import ScheduleConfig
from protlm.data.dataset import collate
from protlm.data.vocabulary import VOCABULARY, Vocabulary
from protlm.model.embedding import batches
from protlm.model.objective import TargetSums
from protlm.model.pooling import residue_means
from protlm.model.transformer import ProteinLM
from protlm.options.labels import FinetuneSettings, Task
from protlm.training.datamodule import ENDLESS
from protlm.training.module import Training

# The key of a checkpoint under which the training loss of its epoch is saved.
_SUMS = "epoch_sums"


@dataclass(frozen=True)
class LabeledTokens:
    """Proteins and their labels.

    Attributes:
        values: floats, class numbers or rows of booleans: one for each protein, or for each labeled
            residue in order.
        places: the labeled residues of each protein; None if whole proteins have labels.
    """

    tokens: Sequence[np.ndarray]
    values: np.ndarray
    places: Sequence[np.ndarray] | None = None
    vocabulary: Vocabulary = VOCABULARY

    @cached_property
    def ends(self) -> np.ndarray:
        """The number of labels before each protein, and that of all, int64 [proteins + 1]."""
        counts = [1] * len(self.tokens) if self.places is None else list(map(len, self.places))
        return np.cumsum([0, *counts])

    @property
    def groups(self) -> np.ndarray:
        """The protein of each label."""
        return np.repeat(np.arange(len(self.tokens)), np.diff(self.ends))


@dataclass
class TokenRows:
    """The part of a batch that one process computes.

    Attributes:
        is_label_BL: true at residues with a label; None if whole proteins have labels.
        values: the labels, in the order of the rows and of the residues in them.
        rows: their rows in `LabeledTokens.values`, int64.
        is_used: false if this process has none of the batch's proteins, and computes one of others.
        place: the epoch, the batch and the process, which seed dropout.
    """

    tokens_BL: Tensor
    mask_BL: Tensor
    is_label_BL: Tensor | None
    values: Tensor
    rows: np.ndarray
    is_used: bool
    place: tuple[int, int, int]


class Batches(Dataset[TokenRows]):
    """Batches of labeled proteins: batch n of a run has the place n mod len(batches) in its epoch.

    Without a seed, each epoch has the order of the examples. `share` has the number of this process
    and of all processes, which divide each batch.
    """

    def __init__(
        self,
        data: LabeledTokens,
        batch_size: int,
        *,
        seed: int | None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.data, self._batch_size, self._seed, self._share = data, batch_size, seed, share

    def __len__(self) -> int:
        return math.ceil(len(self.data.tokens) / self._batch_size)

    def __getitem__(self, number: int) -> TokenRows:
        epoch, number = divmod(number, len(self))
        order = np.arange(len(self.data.tokens))
        if self._seed is not None:
            order = np.random.default_rng([self._seed, epoch]).permutation(order)
        batch = order[number * self._batch_size :][: self._batch_size]
        rank, parts = self._share
        mine = batch[rank::parts]
        # Every process has to compute something, also of a last batch that is smaller.
        used = mine if mine.size else batch[:1]
        return self._rows(used, is_used=mine.size > 0, place=(epoch, number, rank))

    def _rows(
        self, proteins: np.ndarray, *, is_used: bool, place: tuple[int, int, int]
    ) -> TokenRows:
        places, ends = self.data.places, self.data.ends.tolist()
        words = self.data.vocabulary
        tokens_BL, mask_BL = collate([self.data.tokens[one] for one in proteins], vocabulary=words)
        is_label_BL = None
        if places is not None:
            is_label_BL = torch.zeros_like(mask_BL)
            for row, one in enumerate(proteins):
                is_label_BL[row, torch.from_numpy(places[one] + words.start)] = True
        rows = np.concatenate([np.arange(ends[one], ends[one + 1]) for one in proteins])
        return TokenRows(
            tokens_BL,
            mask_BL,
            is_label_BL,
            torch.from_numpy(self.data.values[rows]),
            rows,
            is_used,
            place,
        )


class LabeledData(pl.LightningDataModule):
    """The batches of a run that learns labels, from its next step on, and of its validations."""

    def __init__(
        self, train: LabeledTokens, valid: LabeledTokens, *, batch_size: int, seed: int
    ) -> None:
        super().__init__()
        self.train, self.valid, self._batch_size, self._seed = train, valid, batch_size, seed

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.train.tokens) / self._batch_size)

    @property
    def batches_per_validation(self) -> int:
        return math.ceil(len(self.valid.tokens) / self._batch_size)

    def train_dataloader(self) -> DataLoader[TokenRows]:
        """Returns an endless loader of batches that starts at the next step."""
        assert self.trainer is not None
        return DataLoader(
            self._batches(self.train, self._seed),
            batch_size=None,
            sampler=range(self.trainer.global_step, ENDLESS),
        )

    def val_dataloader(self) -> DataLoader[TokenRows]:
        return DataLoader(self._batches(self.valid, None), batch_size=None)

    def _batches(self, data: LabeledTokens, seed: int | None) -> Batches:
        assert self.trainer is not None
        return Batches(
            data,
            self._batch_size,
            seed=seed,
            share=(self.trainer.global_rank, self.trainer.world_size),
        )


@dataclass(frozen=True)
class Metric:
    """A metric of outputs, values and the protein of each, all NumPy arrays [labels, ...]."""

    name: str
    of: Callable[[np.ndarray, np.ndarray, np.ndarray], float]


@final
class LabelLearning(Training):
    """A linear head on the last hidden states of a network: their mean, or those of residues.

    Parameters that do not require gradients are not trained.
    """

    keeps_start = True
    uses_all_parameters = False

    def __init__(
        self,
        network: ProteinLM,
        head: nn.Linear,
        *,
        task: Task,
        metric: Metric,
        data: LabeledData,
        causal: bool,
        settings: FinetuneSettings,
    ) -> None:
        steps = data.steps_per_epoch
        super().__init__(
            network,
            schedule=ScheduleConfig(warmup_steps=max(steps // 10, 1)),
            max_steps=settings.epochs * steps,
            seed=settings.seed,
        )
        self.head, self.metric = head, metric
        self._loss, self._causal, self._settings = _LOSSES[task], causal, settings
        self._valid = data.valid
        # The total training loss of the epoch, and its labels.
        self._epoch_sums = torch.zeros(2, dtype=torch.float64)
        self._valid_outputs = torch.zeros(0)

    def forward(self, batch: TokenRows) -> Tensor:
        """Returns the outputs of the head, [labels, outputs].

        The activations of a batch of several passes are computed again for the gradient, one pass
        at a time.
        """
        given = (batch.tokens_BL, batch.mask_BL, batch.is_label_BL)
        if batch.tokens_BL.numel() <= self._settings.tokens_per_batch:
            return self._outputs(*given)
        lengths = batch.mask_BL.sum(1).tolist()
        outputs, passes = [], list(batches(lengths, self._settings.tokens_per_batch, around=0))
        for rows in passes:
            cut = [None if x is None else x[rows, : lengths[rows[-1]]] for x in given]
            outputs.append(checkpoint(self._outputs, *cut, use_reentrant=False))
        counts = (
            [1] * len(lengths) if batch.is_label_BL is None else batch.is_label_BL.sum(1).tolist()
        )
        labels = torch.arange(sum(counts)).split(counts)
        order = torch.cat([labels[row] for rows in passes for row in rows])
        return torch.cat(outputs)[order.argsort()]

    def _outputs(self, tokens_BL: Tensor, mask_BL: Tensor, is_label_BL: Tensor | None) -> Tensor:
        last = self.network.num_layers
        out = self.network(tokens_BL, mask_BL, causal=self._causal, layers=[last])
        hidden_BLD = out.hidden[last]
        if is_label_BL is not None:
            return self.head(hidden_BLD[is_label_BL])
        words = self.network.vocabulary
        return self.head(residue_means(hidden_BLD, mask_BL.sum(1) - words.num_around, words.start))

    def _losses(self, batch: TokenRows) -> tuple[Tensor, TargetSums]:
        total = self._loss(self(batch), batch.values) * batch.is_used
        count = torch.tensor(len(batch.values) * batch.is_used, device=self.device)
        _, number, _ = batch.place
        before = self._epoch_sums.to(self.device) if number else 0.0
        self._epoch_sums = before + torch.stack([total.detach().double(), count.double()])
        return total, TargetSums(total, torch.zeros_like(count), count)

    def train_loss(self) -> float:
        """Returns the mean loss of the labels of this epoch, of all processes; NaN before it."""
        total, count = self.all_ranks(self._epoch_sums.to(self.device)).tolist()
        return total / count if count else math.nan

    def _place(self, batch: TokenRows) -> tuple[int, ...]:
        return batch.place

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [p for p in self.parameters() if p.requires_grad], lr=self._settings.learning_rate
        )

    def on_validation_epoch_start(self) -> None:
        self._valid_outputs = torch.zeros(
            len(self._valid.values), self.head.out_features, device=self.device
        )

    def validation_step(self, batch: TokenRows, batch_index: int) -> None:
        if batch.is_used:
            self._valid_outputs[torch.from_numpy(batch.rows).to(self.device)] = self(batch)

    def valid_scores(self) -> tuple[float, float]:
        """Returns the mean loss of the validation labels and the metric, of all processes."""
        outputs = self.all_ranks(self._valid_outputs).cpu()
        values = self._valid.values
        loss = self._loss(outputs.double(), torch.from_numpy(values)) / len(values)
        return float(loss), self.metric.of(outputs.numpy(), values, self._valid.groups)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[_SUMS] = self.all_ranks(self._epoch_sums.to(self.device)).tolist()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.is_global_zero:
            self._epoch_sums = self._epoch_sums.new_tensor(checkpoint[_SUMS])


# Sums over the labels.
def _mean_squares(outputs: Tensor, values: Tensor) -> Tensor:
    return F.mse_loss(outputs[:, 0], values.to(outputs.dtype), reduction="sum")


def _binary(outputs: Tensor, values: Tensor) -> Tensor:
    sums = F.binary_cross_entropy_with_logits(outputs, values.to(outputs.dtype), reduction="sum")
    return sums / outputs.shape[1]


_LOSSES = {
    Task.number: _mean_squares,
    Task.one_class: partial(F.cross_entropy, reduction="sum"),
    Task.several_classes: _binary,
    Task.residue_classes: partial(F.cross_entropy, reduction="sum"),
    Task.residue_numbers: _mean_squares,
}
