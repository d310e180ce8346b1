"""Training of sparse autoencoders on the hidden states of a layer, streamed from shards.

As in Gao et al. 2024 (arXiv 2406.04093), the rows of W_d have norm 1, and features that are not
active any more learn to reconstruct what is left of z, in an auxiliary loss.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from protlm.analysis.features.autoencoder import ROWS, SparseAutoencoder, largest
from protlm.checkpoints.format import read_facts, save
from protlm.data.batching.order import EpochOrder
from protlm.data.masking import crop, row_rng
from protlm.data.shards.data_set import SplitReader
from protlm.data.vocabulary import VOCABULARY
from protlm.model.embedding import embeddings
from protlm.model.pretrained import PretrainedModel
from protlm.options.features import Sparsity
from protlm.system.errors import InputDataError, TrainingDivergedError
from protlm.system.parts import new_part, read_part

# Residues whose states are in memory at a time.
BLOCK = 1 << 16
_RATE, _AUXILIARY, _DECAY = 5e-4, 1 / 32, 0.2
# A feature is dead after this number of residues, or a tenth of the training, without activity.
_DEAD = 10_000_000
_INFERENCE_K = (1, 2, 4, 8, 16, 32, 64, 128)


class StateStream(NamedTuple):
    """The states of the residues of a split, in the order of the seed, epoch after epoch.

    Proteins are cropped at random to the length that the model was trained with. Messages call the
    model by its name.
    """

    model: PretrainedModel
    layer: int
    split: SplitReader
    seed: int
    name: str = "the model"

    def block(self, place: int, residues: int) -> tuple[Tensor, int]:
        """Returns shuffled states, [residues, D], of the next proteins, and the next place."""
        longest = self.model.description.max_length - self.model.vocabulary.num_around
        texts = list[str]()
        while sum(map(len, texts)) < residues:
            epoch, position = divmod(place + len(texts), len(self.split))
            order = EpochOrder(len(self.split), seed=self.seed, epoch=epoch)
            sample = int(order[np.array([position])][0])
            tokens = self.split[sample]
            kept = crop(len(tokens), longest, "random", row_rng(self.seed, epoch, sample))
            texts.append(VOCABULARY.decode(tokens[kept]))
        every = [np.arange(len(text)) for text in texts]
        try:
            (states,) = embeddings(self.model, texts, layers=[self.layer], places=every)
        except InputDataError as error:
            raise InputDataError(f"{self.name}: {error}", error.options) from error
        if not torch.from_numpy(states).square().mean().isfinite():
            raise InputDataError(
                f"{self.name}: hidden states of layer {self.layer} are too large for float32; "
                "choose another layer or model",
                {"layer": "LAYER"},
            )
        rows = row_rng(self.seed, 0, place, 1).permutation(len(states))[:residues]
        return torch.from_numpy(states[rows]).to(self.model.device), place + len(texts)


def train(
    model: SparseAutoencoder,
    stream: StateStream,
    state: Path,
    report: Callable[[int], None],
    check: Callable[[], object] = lambda: None,
) -> None:
    """Trains to the end, from where the part `state` is, if there is one.

    Before a state is kept, `check` may refuse.
    """
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    if read_part(state) is not None:
        _continue(model, optimizer, state)
    while (left := model.settings.residues - int(model.progress[0])) > 0:
        block_BD, place = stream.block(int(model.progress[1]), min(BLOCK, left))
        learn(model, optimizer, block_BD)
        model.progress[1] = place
        with new_part(state, check=check) as temporary:
            found = {"autoencoder": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(found, temporary)
        report(int(model.progress[0]))


def _continue(model: SparseAutoencoder, optimizer: torch.optim.Optimizer, state: Path) -> None:
    """Takes over what a state has, if a training can have it."""
    found = read_facts(state, mmap=False)
    model.load_state_dict(found["autoencoder"])
    optimizer.load_state_dict(found["optimizer"])
    moments = (one for some in optimizer.state.values() for one in some.values())
    is_finite = all(bool(one.isfinite().all()) for one in (*model.state_dict().values(), *moments))
    if not is_finite or model.progress[0] > model.settings.residues:
        raise InputDataError(
            f"{state} has numbers that are not finite, or more residues than it is to learn from: "
            f"remove {state.parent} to start over"
        )


def learn(
    model: SparseAutoencoder, optimizer: torch.optim.Optimizer, states_BD: Tensor, rows: int = ROWS
) -> None:
    """Makes a step for each `rows` of a block; the first block sets mean and scale."""
    if not model.progress[0]:
        model.mean.copy_(states_BD.mean(0))
        model.scale.copy_(1 / (states_BD - model.mean).square().mean().sqrt().clamp(min=1e-12))
    for part_BD in states_BD.split(rows):
        left = 1 - float(model.progress[0]) / model.settings.residues
        rate = _RATE * (4096 / model.settings.latents) ** 0.5
        optimizer.param_groups[0]["lr"] = rate * min(1.0, left / _DECAY)
        optimizer.zero_grad()
        f, loss = _backward(model, (part_BD - model.mean) * model.scale)
        with torch.no_grad():
            slope, decoder = model.decoder.grad, model.decoder
            assert slope is not None
            slope -= (slope * decoder).sum(1, keepdim=True) * decoder
            optimizer.step()
            decoder /= torch.linalg.vector_norm(decoder, dim=1, keepdim=True)
            model.idle.add_(len(f)).masked_fill_((f > 0).any(0), 0)
            if not all(bool(one.isfinite().all()) for one in (loss, *model.parameters())):
                step = int(model.progress[0]) // ROWS + 1
                raise TrainingDivergedError(
                    f"seed {model.settings.seed}, step {step:,}: the loss or a weight is not "
                    "finite, and no features are written; choose others",
                    {"seed": "SEED", "latents": "NUMBER", "k": "NUMBER"},
                )
            model.progress[0] += len(f)


def _backward(model: SparseAutoencoder, z_BD: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the gradients of a step, and returns f and the loss."""
    a, settings = model.activations(z_BD), model.settings
    if settings.sparsity is Sparsity.topk:
        f = largest(a, settings.k)
    else:
        number = min(settings.k * len(a), a.numel())
        least = a.detach().flatten().topk(number, sorted=False).values.min()
        model.threshold.lerp_(least, 0.01 if model.progress[0] else 1.0)
        f = a * (a >= least)
    left_BD = z_BD - f @ model.decoder - model.bias
    loss = left_BD.square().mean()
    if len(dead := is_dead(model).nonzero()[:, 0]):
        rest_BD = left_BD.detach()
        again_BD = largest(a[:, dead], z_BD.shape[1] // 2) @ model.decoder[dead]
        loss = loss + _AUXILIARY * (rest_BD - again_BD).square().sum() / rest_BD.square().sum()
    loss.backward()
    return f.detach(), loss.detach()


def is_dead(model: SparseAutoencoder) -> Tensor:
    """Returns which features were not active for a tenth of the training, or 10 M residues."""
    return model.idle >= min(_DEAD, model.settings.residues // 10)


@torch.inference_mode()
def figures_of(model: SparseAutoencoder, states_BD: Tensor) -> dict[str, Any]:
    """Returns the figures of reconstruction of residues that the training did not see.

    `unexplained` is Σ|x - x'|² / Σ|x - m|² with the mean m of the training, at the trained k and by
    k; `active` is the mean number of active features.
    """
    ks = [None, *(k for k in _INFERENCE_K if k <= model.settings.latents)]
    parts, total = states_BD.split(ROWS), (states_BD - model.mean).square().sum()
    own, *by_k = (float(sum((x - model(x, k)).square().sum() for x in parts) / total) for k in ks)
    active = torch.stack([(model.encode(x) > 0).sum(0) for x in parts]).sum(0)
    return {
        "residues": len(states_BD),
        "unexplained": own,
        "unexplained_by_k": dict(zip(ks[1:], by_k, strict=True)),
        "active": float(active.sum()) / len(states_BD),
        "never_active": int((active == 0).sum()),
        "dense": int((active > 0.1 * len(states_BD)).sum()),
        "dead": int(is_dead(model).sum()),
    }
