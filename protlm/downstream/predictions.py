"""Log-probabilities of residues: at chosen positions of a masked model, or along a causal one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from protlm.data.batching.plan import SPECIALS
from protlm.data.vocabulary import VOCABULARY
from protlm.model.pretrained import PretrainedModel


@dataclass(frozen=True)
class Query:
    """A position whose residue a masked model predicts.

    Attributes:
        sequence: residues.
        position: from 0.
        masked: whether the residue at the position is replaced by `<mask>`.
    """

    sequence: str
    position: int
    masked: bool = True


@dataclass(frozen=True)
class Predictor:
    """A model, the largest number of tokens in one of its batches, and whether progress is hidden.

    A protein longer than a masked model accepts is cut, for each query, to the window of
    `max_length` tokens whose center is nearest to the position; `<cls>` and `<eos>` are in the
    window only if it includes them (ProteinGym's `optimal` window).
    """

    model: PretrainedModel
    tokens_per_batch: int = 16_384
    quiet: bool = False

    def log_p(self, queries: Iterable[Query]) -> Iterator[tuple[Query, np.ndarray]]:
        """Yields each query, in order, with the log-probabilities of all tokens, float64 V.

        Consecutive queries of the same length share a batch.
        """
        batch: list[tuple[Query, np.ndarray, int]] = []
        for query in queries:
            row = (query, *self._window(query))
            size = len(row[1])
            full = (len(batch) + 1) * size > self.tokens_per_batch
            if batch and (full or len(batch[0][1]) != size):
                yield from self._pass(batch)
                batch = []
            batch.append(row)
        if batch:
            yield from self._pass(batch)

    def unmasked_log_p(
        self, asked: Iterable[tuple[str, Sequence[int]]]
    ) -> Iterator[dict[int, np.ndarray]]:
        """Yields, for positions of each sequence, log-probabilities given all of it, float64 V.

        Consecutive sequences of the same length share a batch; a sequence takes one pass, or one
        for each position if it is longer than the model accepts.
        """
        batch: list[tuple[str, Sequence[int]]] = []
        for sequence, positions in asked:
            size = len(sequence) + SPECIALS
            full = (len(batch) + 1) * size > self.tokens_per_batch
            if batch and (full or len(batch[0][0]) != len(sequence)):
                yield from self._unmasked_pass(batch)
                batch = []
            batch.append((sequence, positions))
        if batch:
            yield from self._unmasked_pass(batch)

    def causal_log_p(self, sequences: Iterable[str]) -> Iterator[np.ndarray]:
        """Yields log p of the residues and of `<eos>`, each given those before it, float64.

        Consecutive sequences share a batch, padded to the longest.
        """
        batch: list[str] = []
        longest = 0
        for sequence in sequences:
            longest = max(longest, len(sequence) + SPECIALS)
            if batch and (len(batch) + 1) * longest > self.tokens_per_batch:
                yield from self._causal_pass(batch)
                batch, longest = [], len(sequence) + SPECIALS
            batch.append(sequence)
        if batch:
            yield from self._causal_pass(batch)

    def _window(self, query: Query) -> tuple[np.ndarray, int]:
        """Returns the tokens of a query's window, and the place of the position in it."""
        residues = VOCABULARY.encode(query.sequence)
        tokens_L = np.concatenate(([VOCABULARY.cls], residues, [VOCABULARY.eos]))
        place, limit = query.position + 1, self.model.max_length
        if query.masked:
            tokens_L[place] = VOCABULARY.mask
        if limit is None or len(tokens_L) <= limit:
            return tokens_L, place
        start = min(max(place - limit // 2, 0), len(tokens_L) - limit)
        return tokens_L[start : start + limit], place - start

    @torch.inference_mode()
    def _pass(
        self, batch: Sequence[tuple[Query, np.ndarray, int]]
    ) -> Iterator[tuple[Query, np.ndarray]]:
        queries, rows, places = zip(*batch, strict=True)
        tokens_BL = torch.from_numpy(np.stack(rows)).long().to(self.model.device)
        mask_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
        logits_BLV = self.model.network(tokens_BL, mask_BL, causal=False).logits_BLV
        logits_BV = logits_BLV[range(len(batch)), places]
        log_p_BV = logits_BV.cpu().double().log_softmax(-1).numpy()
        return zip(queries, log_p_BV, strict=True)

    def _unmasked_pass(
        self, batch: Sequence[tuple[str, Sequence[int]]]
    ) -> Iterator[dict[int, np.ndarray]]:
        limit = self.model.max_residues
        if limit is not None and len(batch[0][0]) > limit:
            for sequence, positions in batch:
                queries = (Query(sequence, position, masked=False) for position in positions)
                yield {query.position: log_p_V for query, log_p_V in self.log_p(queries)}
            return
        with torch.inference_mode():
            tokens = self.model.tokenize([sequence for sequence, _ in batch])
            logits_BLV = self.model(tokens).logits_BLV[:, 1:-1]
            log_p_BLV = logits_BLV.cpu().double().log_softmax(-1).numpy()
        for log_p_LV, (_, positions) in zip(log_p_BLV, batch, strict=True):
            yield {position: log_p_LV[position].copy() for position in positions}

    @torch.inference_mode()
    def _causal_pass(self, sequences: Sequence[str]) -> Iterator[np.ndarray]:
        batch = self.model.tokenize(sequences)
        targets_BL1 = batch.tokens_BL[:, 1:, None].cpu()
        log_p_BLV = self.model(batch).logits_BLV[:, :-1].cpu().double().log_softmax(-1)
        log_p_BL = log_p_BLV.gather(-1, targets_BL1)[..., 0].numpy()
        return (row[: length + 1] for row, length in zip(log_p_BL, batch.lengths, strict=True))
