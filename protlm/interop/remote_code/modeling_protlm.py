"""A model of protlm as one of Hugging Face transformers.

`protlm checkpoint export --format hf` writes it, with the definitions of protlm that it uses, to
one file. It is not imported by protlm.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers import modeling_outputs as outputs
from transformers.utils.generic import can_return_tuple

from protlm.attention import Attention
from protlm.checkpoints.description import ModelDescription
from protlm.config import Objective
from protlm.data.vocabulary import vocabulary_of
from protlm.model.pooling import residue_means
from protlm.model.selfattention import ValueEmbedding
from protlm.model.transformer import ModelOutput, build_network
from protlm.system.errors import UserError

# The mechanisms of the model, by name.
MECHANISMS: dict[str, type[Attention]] = {}


def mechanism(name: str) -> type[Attention]:
    """Returns the class of a mechanism."""
    if name not in MECHANISMS:
        raise UserError(f"attention={name}: this model was exported with {list(MECHANISMS)}")
    return MECHANISMS[name]


def names() -> list[str]:
    """Returns the names of the mechanisms."""
    return list(MECHANISMS)


def chosen_attention(*case: Any) -> None:
    """Returns None, for attention by PyTorch: this file contains no fused kernels."""


class ProtlmConfig(PreTrainedConfig):
    """The settings of a model; `protlm` is its description as in protlm's own `config.json`."""

    model_type = "protlm"

    def __init__(self, protlm: dict[str, Any] | None = None, **others: Any) -> None:
        self.protlm = protlm
        super().__init__(**others)


class ProtlmPreTrainedModel(PreTrainedModel):
    """A network, with its output layer, in the form that transformers loads and saves."""

    config_class = ProtlmConfig
    config: ProtlmConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _keep_in_fp32_modules_strict = ["rotary", "global_rotary"]
    # Its output, and whether it has a linear layer for the labels of another task.
    _kind: type[Any] = outputs.BaseModelOutput
    _classifies = False

    def __init__(self, config: ProtlmConfig) -> None:
        super().__init__(config)
        described = ModelDescription.parse(Path("config.json"), config.protlm)
        self.causal = described.objective is Objective.causal
        # Transformers builds models on the device `meta`, where tables and angles have no numbers.
        with torch.device("cpu"):
            self.network = build_network(
                described.model,
                described.attention_config,
                seed=described.seed,
                vocabulary=vocabulary_of(described.frame),
            )
        if self._classifies:
            self.classifier = nn.Linear(described.model.model_dim, config.num_labels or 2)
        self._constants = {
            module: {name: module.get_buffer(name).clone() for name in unsaved}
            for module in self.network.modules()
            if (unsaved := module._non_persistent_buffers_set)
        }
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Restores what is not saved: transformers replaces it by memory without values."""
        if module is getattr(self, "classifier", None):
            super()._init_weights(module)
        with torch.no_grad():
            for name, value in self._constants.get(module, {}).items():
                module.get_buffer(name).copy_(value)

    def get_input_embeddings(self) -> nn.Module:
        return self.network.embedding

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> Any:
        """Returns the output of the class, with hidden states and maps where asked.

        Without `attention_mask`, everything but padding is attended to. Embeddings in the place of
        tokens are those of residues. Labels of -100 do not count.
        """
        tokens_BL = self._tokens(input_ids, inputs_embeds)
        mask_BL = tokens_BL != self.config.pad_token_id
        if attention_mask is not None:
            mask_BL = attention_mask.bool()
        # Positions are counted from the first column.
        if mask_BL.shape != tokens_BL.shape or (mask_BL[:, 1:] & ~mask_BL[:, :-1]).any():
            raise ValueError(
                "attention_mask must have the shape of input_ids, and padding only on the right: "
                "set tokenizer.padding_side = 'right'"
            )
        network, causal, last = self.network, self.causal, self.network.num_layers
        network.activation_checkpointing = self.gradient_checkpointing
        fields: dict[str, Any] = {}
        with self._instead(inputs_embeds):
            out = network(tokens_BL, mask_BL, causal=causal, layers=range(last + 1))
            if _first(output_hidden_states, self.config.output_hidden_states):
                fields["hidden_states"] = tuple(out.hidden[n] for n in range(last + 1))
            if _first(output_attentions, self.config.output_attentions):
                fields["attentions"] = tuple(
                    network.mechanism(number).attention_map(x.q_BHLK, x.k_BHLK, **x.rest)
                    for number, x in network.attention_inputs(tokens_BL, mask_BL, causal=causal)
                )
        return self._kind(**self._results(out, mask_BL, labels), **fields)

    def _instead(self, inputs_embeds: Tensor | None) -> AbstractContextManager[object]:
        """Returns a context in which these are the embeddings of the tokens."""
        if inputs_embeds is None:
            return nullcontext()
        return self.network.embedding.register_forward_hook(lambda *_: inputs_embeds)

    def _tokens(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Returns the tokens, or some in the place of embeddings, which are not padding or mask."""
        if inputs_embeds is None and input_ids is not None:
            return input_ids
        if inputs_embeds is None or input_ids is not None:
            raise ValueError("give either input_ids or inputs_embeds")
        if any(isinstance(one, ValueEmbedding) for one in self.network.modules()):
            raise ValueError("this model also embeds tokens in its layers: give input_ids")
        return torch.zeros(inputs_embeds.shape[:2], dtype=torch.long, device=inputs_embeds.device)

    def _results(self, out: ModelOutput, mask_BL: Tensor, labels: Tensor | None) -> dict[str, Any]:
        """Returns the fields that only this class has."""
        return {"last_hidden_state": out.hidden[self.network.num_layers]}


class ProtlmModel(ProtlmPreTrainedModel):
    """The hidden states of a model. Its output layer is kept, so that it is saved again."""


class _ProtlmPredicting(ProtlmPreTrainedModel):
    """A model with logits, whose loss compares those of a position with a label after it."""

    _distance: int

    def _results(self, out: ModelOutput, mask_BL: Tensor, labels: Tensor | None) -> dict[str, Any]:
        loss, end = None, mask_BL.shape[1] - self._distance
        if labels is not None:
            predicted, targets = out.logits_BLV[:, :end], labels[:, self._distance :]
            loss = F.cross_entropy(predicted.flatten(0, 1).float(), targets.flatten())
        return {"loss": loss, "logits": out.logits_BLV}


class ProtlmForMaskedLM(_ProtlmPredicting):
    """A model that predicts masked residues."""

    _kind, _distance = outputs.MaskedLMOutput, 0


class ProtlmForCausalLM(_ProtlmPredicting):
    """A model that predicts the next residue; `generate` of transformers is not supported."""

    _kind, _distance = outputs.CausalLMOutput, 1


class ProtlmForSequenceClassification(ProtlmPreTrainedModel):
    """A linear layer on the mean over the residues."""

    _kind, _classifies = outputs.SequenceClassifierOutput, True

    def _results(self, out: ModelOutput, mask_BL: Tensor, labels: Tensor | None) -> dict[str, Any]:
        words, hidden_BLD = self.network.vocabulary, out.hidden[self.network.num_layers]
        means_BD = residue_means(hidden_BLD, mask_BL.sum(1) - words.num_around, words.start)
        logits, loss = self.classifier(means_BD), None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return {"loss": loss, "logits": logits}


class ProtlmForTokenClassification(ProtlmPreTrainedModel):
    """A linear layer on every position."""

    _kind, _classifies = outputs.TokenClassifierOutput, True

    def _results(self, out: ModelOutput, mask_BL: Tensor, labels: Tensor | None) -> dict[str, Any]:
        logits, loss = self.classifier(out.hidden[self.network.num_layers]), None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, config=self.config)
        return {"loss": loss, "logits": logits}


class ProtlmTokenizer(PreTrainedTokenizerFast):
    """The tokenizer of `tokenizer.json`, by a name from which programs infer no other model."""


def _first(given: bool | None, default: bool | None) -> bool:
    return bool(default if given is None else given)
