"""A model of protlm as one of Hugging Face transformers.

`protlm checkpoint export --format hf` writes it, with the definitions of protlm that it uses, to
one file. It is not imported by protlm.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput, MaskedLMOutput

from protlm.attention import Attention
from protlm.checkpoints.description import ModelDescription
from protlm.config import Objective
from protlm.data.vocabulary import vocabulary_of
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
    _keep_in_fp32_modules_strict = ["rotary", "global_rotary"]

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
        self._constants = {
            module: {name: module.get_buffer(name).clone() for name in unsaved}
            for module in self.network.modules()
            if (unsaved := module._non_persistent_buffers_set)
        }
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Restores what is not saved: transformers replaces it by memory without values."""
        with torch.no_grad():
            for name, value in self._constants.get(module, {}).items():
                module.get_buffer(name).copy_(value)

    def get_input_embeddings(self) -> nn.Module:
        return self.network.embedding

    def _run(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        output_hidden_states: bool | None,
        output_attentions: bool | None,
    ) -> tuple[ModelOutput, dict[str, Any]]:
        """Returns an output, and the fields of another, with hidden states and maps where asked."""
        mask_BL = input_ids != self.config.pad_token_id
        if attention_mask is not None:
            mask_BL = attention_mask.bool()
        # Positions are counted from the first column.
        if mask_BL.shape != input_ids.shape or (mask_BL[:, 1:] & ~mask_BL[:, :-1]).any():
            raise ValueError(
                "attention_mask must have the shape of input_ids, and padding only on the right: "
                "set tokenizer.padding_side = 'right'"
            )
        network, causal = self.network, self.causal
        num_layers = network.num_layers
        out = network(input_ids, mask_BL, causal=causal, layers=range(num_layers + 1))
        fields: dict[str, Any] = {"last_hidden_state": out.hidden[num_layers]}
        if _first(output_hidden_states, self.config.output_hidden_states):
            fields["hidden_states"] = tuple(out.hidden[n] for n in range(num_layers + 1))
        if _first(output_attentions, self.config.output_attentions):
            fields["attentions"] = tuple(
                network.mechanism(number).attention_map(
                    x.q_BHLK, x.k_BHLK, hidden_BLD=x.hidden_BLD, mask_BL=mask_BL, causal=causal
                )
                for number, x in network.attention_inputs(input_ids, mask_BL, causal=causal)
            )
        return out, fields

    def _in_form(self, out: Any, return_dict: bool | None) -> Any:
        return out if _first(return_dict, self.config.return_dict) else out.to_tuple()


class ProtlmModel(ProtlmPreTrainedModel):
    """The hidden states of a model. Its output layer is kept, so that it is saved again."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Returns the last hidden state, and hidden states and maps where asked.

        Without `attention_mask`, everything but padding is attended to.
        """
        _, fields = self._run(input_ids, attention_mask, output_hidden_states, output_attentions)
        return self._in_form(BaseModelOutput(**fields), return_dict)


class _ProtlmPredicting(ProtlmPreTrainedModel):
    """A model with logits, whose loss compares those of a position with a label after it."""

    _output: type[Any]
    _distance: int

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Returns logits, BLV, and the loss where there are labels other than -100."""
        out, fields = self._run(input_ids, attention_mask, output_hidden_states, output_attentions)
        del fields["last_hidden_state"]
        logits_BLV = out.logits_BLV
        loss = None if labels is None else self._loss(logits_BLV, labels)
        return self._in_form(self._output(loss=loss, logits=logits_BLV, **fields), return_dict)

    def _loss(self, logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
        last = labels_BL.shape[1] - self._distance
        predicted, targets = logits_BLV[:, :last], labels_BL[:, self._distance :]
        return F.cross_entropy(predicted.flatten(0, 1).float(), targets.flatten())


class ProtlmForMaskedLM(_ProtlmPredicting):
    """A model that predicts masked residues."""

    _output, _distance = MaskedLMOutput, 0


class ProtlmForCausalLM(_ProtlmPredicting):
    """A model that predicts the next residue; `generate` of transformers is not supported."""

    _output, _distance = CausalLMOutput, 1


class ProtlmTokenizer(PreTrainedTokenizerFast):
    """The tokenizer of `tokenizer.json`, by a name from which programs infer no other model."""


def _first(given: bool | None, default: bool | None) -> bool:
    return bool(default if given is None else given)
