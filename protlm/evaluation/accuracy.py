"""Accuracy and perplexity on residues, beside baselines: 3-mers, residue frequencies, uniform.

Masked: arXiv 1810.04805, on the masked positions only. Causal: each residue from those before it.
Perplexity is exp(total nats / count); sums are divided once (arXiv 2009.14794, C.2).
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from protlm.analysis.bootstrap import MODEL
from protlm.analysis.intervals import HEADING, bounds
from protlm.analysis.sequence_sums import (
    BASELINES,
    SequenceSums,
    by_group,
    groups_of,
    intervals,
    ratio,
    write_sums,
)
from protlm.data.batching.mixture import SampleOrder
from protlm.data.batching.plan import SPECIALS, BatchingStrategy, BatchStream
from protlm.data.batching.strategies import Concatenation, LengthBuckets
from protlm.data.dataset import Batch, SequenceDataset
from protlm.data.frequencies import Trigram, count_residues, frequencies, sample
from protlm.data.masking import IGNORE, MaskingRule
from protlm.data.shards.data_set import SplitReader
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.evaluation.base import Evaluation, EvaluationData, ResultTable, of_split, table_path
from protlm.model.objective import residues_only
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import OptionError, UserError
from protlm.system.terminal import JobProgress

# Sequences that are joined and cut into rows together: rows, and so masks, do not depend on the
# batch size.
_JOINED = 16_384
_TRAIN_STREAM = 1 << 63


class Accuracy(Evaluation):
    """Masked or causal accuracy and perplexity of a model on a split.

    The masked positions of a sequence depend only on `seed` and its index in the split; those of
    joined sequences on `seed`, `max_length` and the split. Of several groups of a sequence, the
    most frequent in the split counts; a sequence without a group forms one by itself. In contexts
    of relatives, log-probabilities are averaged over these.
    """

    sees_relatives = draws_contexts = True

    def __init__(
        self,
        *,
        objective: str,
        mask_fraction: float = 0.15,
        seed: int = 0,
        groups: str | None = None,
        column: str = "pfam_family",
        per_sequence: str | None = None,
        max_length: int | None = None,
        concatenated: bool = False,
    ) -> None:
        if concatenated and max_length is None:
            raise OptionError(
                lambda at: (
                    f"{at}concatenated=true needs the length of rows; type "
                    f"{at}max_length=TOKENS too"
                )
            )
        if max_length is not None and max_length <= SPECIALS:
            raise OptionError(f"max_length={max_length} must be at least {SPECIALS + 1}")
        if objective not in ("masked", "causal"):
            raise OptionError(f"objective={objective} is not one of: causal, masked")
        self.objective = objective
        self.masking = MaskingRule(mask_fraction=mask_fraction, mask_prob=1.0, random_prob=0.0)
        self.seed = seed
        self.groups = None if groups is None else Path(groups)
        self.column = column
        self.per_sequence = table_path("per_sequence", per_sequence)
        self.max_length = max_length
        self.concatenated = concatenated

    def outputs_of(self, split: str) -> list[Path]:
        return [of_split(path, split) for path in filter(None, [self.per_sequence])]

    def run(self, model: PretrainedModel, data: EvaluationData | None) -> dict[str, Any]:
        """Returns accuracy and perplexity of the model and the baselines, and the counts.

        `interval` holds the bounds of 95 % bootstrap intervals of the model's figures; with groups
        there are also `by_group`, `macro`, the mean over groups of five sequences or more, and
        `without_group`, the number of sequences that are not in the table.
        `cropped` counts the cropped sequences and the residues that they lost; `max_length` is the
        longest row in tokens, null for whole proteins.
        """
        assert data is not None
        limits = [limit for limit in (self.max_length, model.max_length) if limit is not None]
        limit = min(limits, default=None)
        if self.concatenated and limit != self.max_length:
            raise UserError(
                f"max_length={self.max_length} is more than the model reads; "
                f"type max_length={limit}"
            )
        if self.concatenated and data.contexts is not None:
            raise UserError("concatenated=true joins queries; leave it out, or relatives=")
        names = [data.split.identifier(number) for number in range(len(data.split))]
        group_of, without_group = groups_of(names, self.groups, self.column)
        sums = self._sums(model, data, limit)
        count = float(sums.targets.sum())
        if not count:
            raise UserError("the split has no residue to predict; choose another split")
        result = {
            **{who: sums.figures(who) for who in ("model", *BASELINES)},
            "uniform": ratio(count * math.log(len(STANDARD)), count / len(STANDARD), count),
            "interval": intervals(sums, group_of, seed=self.seed),
            "targets": int(count),
            "sequences": len(names),
            "cropped": _cropped(data.split, None if self.concatenated else limit),
            "max_length": limit,
            "concatenated": self.concatenated,
            "trained_as": model.description.objective.value,
            **({} if data.contexts is None else {"relatives": data.contexts.settings}),
        }
        if self.groups is not None:
            result |= {**by_group(sums, group_of), "without_group": without_group}
        for output in self.outputs_of(data.name):
            write_sums(output, names, group_of, sums)
        return result

    def table(self, results: Mapping[str, dict[str, Any]]) -> ResultTable:
        rows, notes = [], []
        for split, values in results.items():
            cropped = values["cropped"]
            notes.append(
                f"{split}: {cropped['sequences']:,} of {values['sequences']:,} sequences cropped, "
                f"by {cropped['residues']:,} residues"
            )
            if without := values.get("without_group"):
                notes.append(
                    f"{split}: {without:,} of {values['sequences']:,} sequences have no "
                    f"{self.column}, each a group by itself"
                )
            interval = {MODEL: bounds(*values["interval"]["perplexity"], style=".2f")}
            kinds = {who: values[who] for who in ("model", *BASELINES, "uniform")}
            if "macro" in values:
                kinds |= {
                    f"{who}, mean over {values['macro']['groups']} groups": values["macro"][who]
                    for who in ("model", *BASELINES)
                }
            for who, figures in kinds.items():
                shown = who + ", with relatives" * (who == MODEL and "relatives" in values)
                cells = (f"{figures['accuracy']:.2%}", f"{figures['perplexity']:.2f}")
                targets = f"{values['targets']:,}"
                rows.append((split, self.objective, shown, *cells, interval.get(who, ""), targets))
        columns = ("split", "objective", "predictor", "accuracy", "perplexity", HEADING, "targets")
        return ResultTable(columns, rows, caption="\n".join(notes))

    def _sums(
        self, model: PretrainedModel, data: EvaluationData, limit: int | None
    ) -> SequenceSums:
        max_residues = None if limit is None or self.concatenated else limit - SPECIALS
        unigram_V = torch.from_numpy(frequencies(count_residues(sample(data.train, max_residues))))
        trigram = Trigram(sample(data.train, max_residues), causal=self.objective == "causal")
        sums = SequenceSums.zeros(len(data.split))
        order_S = self._order(data).draw(0, np.arange(len(data.split))).samples
        position_S = np.argsort(order_S)
        for batch in self._watched(data, limit):
            targets_BL = residues_only(batch.targets_BL)
            chosen_BL = targets_BL != IGNORE
            targets = targets_BL[chosen_BL]
            near = torch.from_numpy(trigram.probabilities(batch.tokens_BL.numpy()))[chosen_BL]
            found = [torch.ones(len(targets)), *self._score(model, batch, targets_BL, data)]
            for probabilities in (unigram_V.expand_as(near), near):
                found.append(-probabilities.gather(1, targets[:, None])[:, 0].log())
                found.append((probabilities.argmax(dim=1) == targets).double())
            # <eos> joins a sequence and the next one.
            later_BL = (batch.tokens_BL == VOCABULARY.eos).cumsum(dim=1)
            place_BL = position_S[batch.samples_B.numpy()][:, None] + later_BL.numpy()
            rows = order_S[place_BL[chosen_BL.numpy()]]
            for total, values in zip(vars(sums).values(), found, strict=True):
                np.add.at(total, rows, values.double().numpy())
        return sums

    def _watched(self, data: EvaluationData, limit: int | None) -> Iterator[Batch]:
        with JobProgress(f"{data.name}: sequences evaluated", len(data.split)) as progress:
            for batch in self._batches(data, limit):
                yield batch
                ends = batch.tokens_BL == VOCABULARY.eos
                progress.advance(int(ends.sum()) if self.concatenated else len(batch.samples_B))

    def _batches(self, data: EvaluationData, limit: int | None) -> DataLoader[Batch]:
        # Not the targets that training with this seed had in its first epoch.
        is_train = data.split.fingerprint == data.train.fingerprint
        seed = self.seed + _TRAIN_STREAM * is_train
        dataset = SequenceDataset(
            data.split, objective=self.objective, masking=self.masking, seed=seed
        )
        stream = BatchStream(data.split.lengths_of, self._order(data), self._rule(data, limit))
        return DataLoader(dataset, sampler=stream, batch_size=None, collate_fn=lambda batch: batch)

    def _order(self, data: EvaluationData) -> SampleOrder:
        """The order of the sequences: random where they are joined, because relatives are close."""
        return SampleOrder([len(data.split)], seed=self.seed, shuffle=self.concatenated)

    def _rule(self, data: EvaluationData, limit: int | None) -> BatchingStrategy:
        if self.concatenated:
            assert limit is not None
            return Concatenation(data.tokens_per_batch, limit, block=_JOINED)
        longest = len(data.split.length_counts()) - 1 + SPECIALS
        return LengthBuckets(data.tokens_per_batch, min(longest, limit or longest))

    @torch.inference_mode()
    def _score(
        self, model: PretrainedModel, batch: Batch, targets_BL: torch.Tensor, data: EvaluationData
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the nats of each target, and whether the most probable token is the target."""
        device, contexts = model.device, data.contexts
        groups = [([model], [*range(len(targets_BL))])]
        if contexts is not None:
            names, texts = zip(*map(data.query, batch.samples_B.tolist()), strict=True)
            groups = contexts.groups(names, texts, data.tokens_per_batch)
        found: list[torch.Tensor] = []
        for models, rows in groups:
            # Only the positions with a target go through the softmax: 15 % of them when masked.
            chosen = targets_BL[rows].to(device) != IGNORE
            given = batch.tokens_BL[rows].to(device), batch.mask_BL[rows].to(device)
            each = [
                one.network(*given, causal=self.objective == "causal").logits_BLV[chosen].float()
                for one in models
            ]
            found.append(torch.stack([logits.log_softmax(-1) for logits in each]).mean(0))
        log_p, targets = torch.cat(found), targets_BL[targets_BL != IGNORE].to(device)
        nats = F.nll_loss(log_p, targets, reduction="none")
        return nats.cpu().double(), (log_p.argmax(-1) == targets).cpu()


def _cropped(split: SplitReader, limit: int | None) -> dict[str, int]:
    """Counts the sequences that rows of `limit` tokens crop, and the residues that they lose."""
    counts = split.length_counts()
    kept = len(counts) if limit is None else limit - SPECIALS
    excess = np.maximum(np.arange(len(counts)) - kept, 0)
    return {"sequences": int(counts[excess > 0].sum()), "residues": int((counts * excess).sum())}
