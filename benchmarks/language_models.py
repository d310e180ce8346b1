"""The models whose training is compared: protlm's, Hugging Face's ESM and PerformerLM, of one size.

Each is a module that returns the mean cross-entropy of a batch's targets. None has dropout,
because with dropout the exact attention of Hugging Face falls back to L×L weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.attention_contenders import installed
from protlm.build import describe
from protlm.checkpoints.format import Checkpoint
from protlm.config import Activation, ModelConfig, Positions, TrainConfig
from protlm.config.composition import compose
from protlm.data.dataset import Batch
from protlm.data.masking import IGNORE
from protlm.data.vocabulary import VOCABULARY
from protlm.model.objective import target_sums
from protlm.model.transformer import build_network

ESM = "ESM (Hugging Face)"
PERFORMER_LM_256 = "PerformerLM (performer-pytorch) m=256"
PERFORMER_LM_64 = "PerformerLM (performer-pytorch) m=64"
OURS = ("performer_relu", "performer_softmax", "softmax")


@dataclass(frozen=True)
class Sizes:
    """The sizes that all models share; the measured models have heads of 64."""

    num_layers: int = 6
    model_dim: int = 512
    num_heads: int = 8
    feedforward_dim: int = 1024
    max_length: int = 16_384


def random_checkpoint(*typed: str) -> Checkpoint:
    """Returns a model with random weights, by settings as they are typed."""
    config = compose(TrainConfig, typed)
    network = build_network(config.model, config.attention, seed=0)
    return Checkpoint(Path("random"), describe(config), dict(network.state_dict()))


def mean_loss(network: nn.Module, batch: Batch, *, is_whole: bool = False) -> Tensor:
    """Returns the mean cross-entropy of the targets by a network of protlm."""
    rows = batch.tokens_BL, batch.mask_BL
    out = network(*rows, causal=False, bounds=batch.bounds, is_whole=is_whole)
    sums = target_sums(out.logits_BLV, batch.targets_BL)
    return sums.nats / sums.count


def training_step(
    loss: Callable[[], Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    device: torch.device,
    is_mixed: bool,
    clip: float | None = None,
) -> None:
    """Makes a step: forward, backward, clipping and the optimizer, in bf16 autocast if mixed."""
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_mixed):
        found = loss()
    found.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


@final
class Ours(nn.Module):
    """protlm's model with rotary positions, LayerNorm and GELU, like the other models."""

    def __init__(self, attention: str, sizes: Sizes) -> None:
        super().__init__()
        config = ModelConfig(
            num_layers=sizes.num_layers,
            num_heads=sizes.num_heads,
            model_dim=sizes.model_dim,
            feedforward_dim=sizes.feedforward_dim,
            max_length=sizes.max_length,
            positions=Positions.rotary,
            activation=Activation.gelu,
        )
        self.network = build_network(config, {"name": attention}, seed=0)

    def forward(self, batch: Batch) -> Tensor:
        """Returns the mean loss of the targets."""
        return mean_loss(self.network, batch)


@final
class Esm(nn.Module):
    """`EsmForMaskedLM` of Hugging Face with rotary positions and SDPA."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        package = installed("transformers", "bench-training")
        config = package.EsmConfig(
            vocab_size=len(VOCABULARY),
            pad_token_id=VOCABULARY.pad,
            mask_token_id=VOCABULARY.mask,
            hidden_size=sizes.model_dim,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            intermediate_size=sizes.feedforward_dim,
            max_position_embeddings=sizes.max_length,
            position_embedding_type="rotary",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="sdpa",
        )
        self.model = package.EsmForMaskedLM(config)
        # The head that predicts contacts has no part in training.
        self.model.esm.contact_head = nn.Identity()

    def forward(self, batch: Batch, *, is_whole: bool = False) -> Tensor:
        """Returns the mean loss of the targets; without padding, a graph needs no mask."""
        return self.model(
            input_ids=batch.tokens_BL,
            attention_mask=None if is_whole else batch.mask_BL.long(),
            labels=batch.targets_BL,
        ).loss


@final
class PerformerPytorch(nn.Module):
    """`PerformerLM` of performer-pytorch with ReLU features.

    Args:
        sizes: the sizes.
        num_features: the number of random features.
    """

    def __init__(self, sizes: Sizes, num_features: int) -> None:
        super().__init__()
        package = installed("performer_pytorch", "bench-training")
        self.model = package.PerformerLM(
            num_tokens=len(VOCABULARY),
            max_seq_len=sizes.max_length,
            dim=sizes.model_dim,
            depth=sizes.num_layers,
            heads=sizes.num_heads,
            dim_head=sizes.model_dim // sizes.num_heads,
            ff_mult=sizes.feedforward_dim // sizes.model_dim,
            nb_features=num_features,
            generalized_attention=True,
        )

    def forward(self, batch: Batch) -> Tensor:
        """Returns the mean loss of the targets."""
        # Without padding it needs no mask, and is faster.
        mask_BL = None if bool(batch.mask_BL.all()) else batch.mask_BL
        logits_BLV = self.model(batch.tokens_BL, mask=mask_BL)
        return F.cross_entropy(
            logits_BLV.flatten(0, 1), batch.targets_BL.flatten(), ignore_index=IGNORE
        )


def models(sizes: Sizes) -> dict[str, Callable[[], nn.Module]]:
    """Returns the functions that build the models, by name.

    A function raises `UnavailableError` if its peer is not installed.
    """
    ours: dict[str, Callable[[], nn.Module]] = {
        attention: partial(Ours, attention, sizes) for attention in OURS
    }
    return ours | {
        ESM: partial(Esm, sizes),
        PERFORMER_LM_256: partial(PerformerPytorch, sizes, 256),
        PERFORMER_LM_64: partial(PerformerPytorch, sizes, 64),
    }
