"""The head of two convolutions over residues: the CNN of biotrainer 1.4.0 in its default size."""

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from protlm.downstream.tasks import Targets

_CHANNELS, _WINDOW = 32, 7
# Adam's rate, proteins per step, most epochs, and those without a loss lower by 0.1 % that end it.
_RATE, _BATCH, _EPOCHS, _PATIENCE, _LOWER = 1e-3, 32, 200, 10, 0.999


def convolutions(width: int, outputs: int) -> nn.Sequential:
    """Returns the head: 32 channels over 7 residues, ReLU, and numbers or logits over 7."""
    first = nn.Conv1d(width, _CHANNELS, _WINDOW, padding="same")
    return nn.Sequential(first, nn.ReLU(), nn.Conv1d(_CHANNELS, outputs, _WINDOW, padding="same"))


def convolved(head: nn.Sequential, proteins: Sequence[np.ndarray]) -> Tensor:
    """Returns the outputs for all residues of proteins, [residues, outputs], of features [L, D]."""
    # Zeros after each protein, so that no window has residues of two.
    rows, ends = (np.pad(x, ((0, _WINDOW // 2), (0, 0))) for x in proteins), [*map(len, proteins)]
    x_LD = torch.from_numpy(np.concatenate([*rows])).float()
    is_inside = torch.cat([torch.arange(n + _WINDOW // 2) < n for n in ends])
    hidden_CL = head[1](head[0](x_LD.T)) * is_inside
    return head[2](hidden_CL).T[is_inside]


def fit_convolutions(
    proteins: Sequence[np.ndarray],
    targets: Targets,
    to_fit: np.ndarray,
    held_out: np.ndarray,
    *,
    seed: int,
) -> tuple[nn.Sequential, float]:
    """Trains until the mean loss on proteins held out does not fall, and returns its least value.

    Proteins are features of all their residues, [L, D]. On a CPU, this is deterministic.
    """
    places = targets.places
    assert places is not None
    values = torch.tensor(targets.values).split([*map(len, places)])
    is_labeled = [
        np.isin(np.arange(len(x)), known) for x, known in zip(proteins, places, strict=True)
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = convolutions(proteins[0].shape[1], len(targets.classes) or 1)

    def loss(some: np.ndarray) -> Tensor:
        outputs = convolved(head, [proteins[x] for x in some])
        outputs = outputs[np.concatenate([is_labeled[x] for x in some])]
        own = torch.cat([values[x] for x in some])
        if targets.classes:
            return F.cross_entropy(outputs, own)
        return F.mse_loss(outputs[:, 0], own.float())

    def batches(some: np.ndarray) -> list[np.ndarray]:
        return np.split(some, range(_BATCH, len(some), _BATCH))

    optimizer = torch.optim.Adam(head.parameters(), _RATE)
    order, best, least, left = np.random.default_rng(seed), {}, np.inf, _PATIENCE
    for _ in range(_EPOCHS):
        for some in batches(order.permutation(to_fit)):
            optimizer.zero_grad()
            loss(some).backward()
            optimizer.step()
        with torch.no_grad():
            now = sum(float(loss(x)) * len(x) for x in batches(held_out)) / len(held_out)
        left -= 1
        if not best or now < _LOWER * least:
            best, least, left = deepcopy(head.state_dict()), now, _PATIENCE
        if not left:
            break
    head.load_state_dict(best)
    return head, least
