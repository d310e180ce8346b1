"""Sparse autoencoders: a few of many features reconstruct the hidden state of a residue.

With the mean m and the scale s of the first training residues, z = s (x - m) of a state x, and

    a = relu(W_e (z - b) + b_e),  z' = W_dᵀ f + b,  x' = m + z' / s.

f keeps the k largest of a for each residue (TopK, Gao et al. 2024, arXiv 2406.04093), or k B of B
residues and, after training, those above a threshold (BatchTopK, Bussmann et al. 2024, arXiv
2412.06410).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
import torch.nn.functional as F
from scipy.sparse import csr_array, vstack
from torch import Tensor, nn

from protlm.checkpoints.checks import Artifact
from protlm.model.pretrained import PretrainedModel
from protlm.options.features import FeatureOptions, Sparsity
from protlm.system.errors import InputDataError, UserError
from protlm.system.json_file import Count, Sha256, from_json, to_json

FEATURES = Artifact("features.safetensors", "features.json", "sparse features", "features train")
# Residues that are learned from, or encoded, at a time.
ROWS = 2048


@final
@dataclass(frozen=True, kw_only=True)
class SparseSettings(FeatureOptions):
    """What features are of, and how they are trained: `k` of the `latents` are active.

    `model` is its identity, perhaps `with_random_weights` of a seed; `vocabulary` is a hash.
    """

    model: Sha256
    vocabulary: Sha256
    layer: Count

    def check(self, model: PretrainedModel, layer: int | None = None) -> None:
        """Refuses another model, vocabulary or layer than those of the training."""
        layer = self.layer if layer is None else layer
        given = {"model": model.identity, "vocabulary": model.vocabulary.hash, "layer": layer}
        for what, one in given.items():
            if one != (own := vars(self)[what]):
                raise UserError(
                    f"the features were trained on the {what} {own!s:.12}, and this is "
                    f"{one!s:.12}; give that {what}, or train others: protlm features train"
                )


class SparseAutoencoder(nn.Module):
    """The weights, `encoder` and `decoder` [latents, D], and how they act on raw states.

    `idle` counts the residues since a feature was active, `progress` residues and proteins seen.
    """

    def __init__(self, width: int, settings: SparseSettings) -> None:
        super().__init__()
        self.settings = settings
        generator = torch.Generator().manual_seed(settings.seed)
        rows = F.normalize(torch.randn(settings.latents, width, generator=generator), dim=1)
        # Tied at the start (Gao et al.), so that few features die.
        self.encoder, self.decoder = nn.Parameter(rows), nn.Parameter(rows.clone())
        self.encoder_bias, self.bias = (nn.Parameter(torch.zeros(n)) for n in rows.shape)
        self.mean, self.scale = nn.Buffer(torch.zeros(width)), nn.Buffer(torch.ones(()))
        self.threshold = nn.Buffer(torch.zeros(()))
        counts = (torch.zeros(n, dtype=torch.int64) for n in (settings.latents, 2))
        self.idle, self.progress = map(nn.Buffer, counts)

    def activations(self, z_BD: Tensor) -> Tensor:
        """Returns a, [B, latents]."""
        return F.relu(F.linear(z_BD - self.bias, self.encoder, self.encoder_bias))

    def encode(self, x_BD: Tensor, k: int | None = None) -> Tensor:
        """Returns f of raw states, [B, latents]; with another `k` its largest of each residue."""
        a = self.activations((x_BD - self.mean) * self.scale)
        if k is None and self.settings.sparsity is Sparsity.batch_topk:
            return a * (a > self.threshold)
        return largest(a, k or self.settings.k)

    def forward(self, x_BD: Tensor, k: int | None = None) -> Tensor:
        """Returns x', the reconstruction of raw states."""
        return self.mean + (self.encode(x_BD, k) @ self.decoder + self.bias) / self.scale

    @torch.inference_mode()
    def features_of(self, states_LD: Tensor) -> csr_array:
        """Returns f of residues, float32 [L, latents], in which zeros are not stored."""
        parts = states_LD.float().to(self.mean.device).split(ROWS)
        return csr_array(vstack([csr_array(self.encode(part).cpu().numpy()) for part in parts]))

    def write(self, folder: Path) -> None:
        """Writes the two files, and the checksums of all files of the folder."""
        # In files, counts are numbers as all others are; here integers, which every device has.
        counts = {name: getattr(self, name).cpu().double() for name in ("idle", "progress")}
        FEATURES.write(folder, {**self.state_dict(), **counts}, to_json(self.settings))


def largest(a: Tensor, k: int) -> Tensor:
    """Keeps the k largest of each row, and sets the others to 0."""
    found = a.topk(min(k, a.shape[1]), dim=1)
    return torch.zeros_like(a).scatter(1, found.indices, found.values)


def read_features(folder: Path) -> SparseAutoencoder:
    """Reads what `protlm features train` has written."""
    content, weights = FEATURES.read(folder)
    try:
        model = SparseAutoencoder(len(weights["bias"]), from_json(SparseSettings, content))
        model.load_state_dict(weights)
    except (KeyError, RuntimeError, ValueError) as error:
        raise InputDataError(f"{folder} is not usable: {str(error)[:200]}") from error
    return model.eval()
