"""Gibbs sampling from a masked model: repeatedly masks and resamples a few residues.

Wang and Cho 2019 (arXiv 1902.04094). If the model's conditionals are those of one distribution and
residues are masked one at a time, that distribution is the limit; in general neither holds.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from protlm.config.data import TOKENS_PER_BATCH
from protlm.data.dataset import collate
from protlm.data.vocabulary import STANDARD_TOKENS
from protlm.model.decoding import draw, float64_copy, probabilities
from protlm.model.embedding import batches
from protlm.model.transformer import ProteinLM
from protlm.options.generate import Sampling, Sweeps
from protlm.system.terminal import JobProgress


@torch.inference_mode()
def resample(
    network: ProteinLM,
    starts: Sequence[str],
    sampling: Sampling,
    *,
    sweeps: Sweeps,
    seed: int,
    batch_size: int,
) -> Iterator[tuple[int, str]]:
    """Yields the index of each start with a sequence of its length, sampled from it; not in order.

    A sequence depends on its start, its index and the seed, not on the others in its batch. Only
    the 20 standard amino acids are drawn. Sequences of similar length share a batch.
    """
    # As in `generate`: in float64, the batch does not change the draws.
    network = float64_copy(network)
    words = network.vocabulary
    lengths = [len(start) for start in starts]
    divided = [*batches(lengths, TOKENS_PER_BATCH, batch_size, around=words.num_around)]
    with JobProgress("sweeps", len(divided) * sweeps.number) as progress:
        for indices in divided:
            chains = [_Chain(words.encode(starts[n]), seed, n, sweeps) for n in indices]
            tokens_BL, mask_BL = collate([chain.start for chain in chains], vocabulary=words)
            tokens_BL = tokens_BL.to(network.embedding.weight.device)
            mask_BL = mask_BL.to(tokens_BL.device)
            for _ in range(sweeps.number):
                _sweep(network, chains, tokens_BL, mask_BL, sampling)
                progress.advance(1)
            for index, tokens_L in zip(indices, tokens_BL.cpu().numpy(), strict=True):
                yield index, words.decode(tokens_L[words.start :][: lengths[index]])


class _Chain:
    """The start of a sequence, its random numbers, and the number of groups of its residues."""

    def __init__(self, start: np.ndarray, seed: int, index: int, sweeps: Sweeps) -> None:
        self.start = start
        self.rng = np.random.default_rng([seed, index])
        # The inverse of a fraction such as 0.1 must not be rounded up.
        self._num_groups = min(math.ceil(1 / sweeps.mask_fraction - 1e-9), len(start))

    def groups(self) -> list[np.ndarray]:
        """Returns all residues, divided at random."""
        return np.array_split(self.rng.permutation(len(self.start)), self._num_groups)


def _sweep(
    network: ProteinLM, chains: list[_Chain], tokens_BL: Tensor, mask_BL: Tensor, sampling: Sampling
) -> None:
    groups = [chain.groups() for chain in chains]
    for turn in range(max(map(len, groups))):
        masked = [(row, own[turn]) for row, own in enumerate(groups) if turn < len(own)]
        rows = torch.tensor(np.concatenate([np.full(len(own), row) for row, own in masked]))
        columns = torch.tensor(
            np.concatenate([own for _, own in masked]) + network.vocabulary.start
        )
        tokens_BL[rows, columns] = network.vocabulary.mask
        logits_TV = network(tokens_BL, mask_BL, causal=False).logits_BLV[rows, columns].cpu()
        is_other_V = torch.ones(logits_TV.shape[-1], dtype=torch.bool)
        is_other_V[STANDARD_TOKENS] = False
        probable_TV = probabilities(logits_TV.masked_fill(is_other_V, -torch.inf), sampling)
        uniform = np.concatenate([chains[row].rng.random(len(own)) for row, own in masked])
        drawn_T1 = draw(probable_TV, torch.from_numpy(uniform)[:, None])
        tokens_BL[rows, columns] = drawn_T1.squeeze(1).to(tokens_BL.device)
