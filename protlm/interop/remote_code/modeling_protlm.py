"""A model of protlm as one of Hugging Face transformers.

`protlm checkpoint export --format hf` writes it, with the definitions of protlm that it uses, to
one file. It is not imported by protlm.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers import modeling_outputs as outputs

from protlm.attention import Attention
from protlm.checkpoints.description import ModelDescription
from protlm.config import Objective
from protlm.data.vocabulary import vocabulary_of
from protlm.model.layers import only, padded_at_the_end
from protlm.model.pooling import residue_means
from protlm.model.selfattention import ValueEmbedding
from protlm.model.transformer import ModelOutput, build_network
from protlm.system.errors import UserError

# The oldest transformers in which the tests use exported models.
_OLDEST = (4, 48)
_SPREAD = 0.02

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


class ProtlmConfig(PretrainedConfig):
    """The settings of a model.

    `protlm` is its description as in protlm's own `config.json`, and `frequencies` are the rotary
    frequencies of a model that has its own: as weights, they would be rounded in low precision.
    """

    model_type = "protlm"

    def __init__(
        self,
        protlm: dict[str, Any] | None = None,
        frequencies: list[float] | None = None,
        **others: Any,
    ) -> None:
        version = transformers.__version__
        if tuple(int(number) for number in version.split(".")[:2]) < _OLDEST:
            raise ImportError(
                f"transformers {version} is too old for this model: type pip install "
                "'transformers>=4.48'"
            )
        self.protlm, self.frequencies = protlm, frequencies
        super().__init__(**others)


class ProtlmPreTrainedModel(PreTrainedModel):
    """A network, with its output layer, in the form that transformers loads and saves.

    Maps of `output_attentions` have a graph for softmax, window, longformer, and the heads of
    hybrid that have windows; the maps of other mechanisms have no gradient.
    """

    config_class = ProtlmConfig
    config: ProtlmConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    # Its output, and whether it has a linear layer for the labels of another task.
    _kind: type[Any] = outputs.BaseModelOutput
    _classifies = False

    def __init__(self, config: ProtlmConfig) -> None:
        super().__init__(config)
        described = ModelDescription.parse(Path("config.json"), config.protlm)
        self.causal = described.objective is Objective.causal
        try:
            # Transformers builds models on the device `meta`, where tables have no numbers.
            with torch.device("cpu"):
                self.network = build_network(
                    described.model,
                    described.attention_config,
                    seed=described.seed,
                    vocabulary=vocabulary_of(described.frame),
                )
        except UserError:
            # transformers 4 would leave the type of the refused model.
            if torch.get_default_dtype() == torch.float16:
                torch.set_default_dtype(torch.float32)
            raise
        if config.frequencies is not None:
            assert self.network.rotary is not None
            frequency = torch.tensor(config.frequencies, dtype=torch.float64, device="cpu")
            self.network.rotary.register_buffer("frequency", frequency, persistent=False)
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
        if isinstance(module, nn.Linear) and module is getattr(self, "classifier", None):
            nn.init.normal_(module.weight, std=_SPREAD)
            nn.init.zeros_(module.bias)
        with torch.no_grad():
            for name, value in self._constants.get(module, {}).items():
                module.get_buffer(name).copy_(value)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.network.embedding

    def set_input_embeddings(self, value: Any) -> None:
        self.resize_token_embeddings(value.num_embeddings)
        self.network.add_module("embedding", value)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Returns the embeddings; another number of tokens is refused."""
        number = len(self.network.vocabulary)
        if pad_to_multiple_of or new_num_tokens not in (None, number):
            raise ValueError(
                f"this model has {number} tokens, of which its tokenizer and its output layer "
                "consist: their number cannot be changed"
            )
        return self.network.embedding

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Any:
        """Returns the output of the class, with hidden states and maps where asked.

        Without `attention_mask`, everything but padding is attended to. Embeddings in the place of
        tokens are those of residues. Labels of -100 do not count. Positions are 0 to L - 1, and
        types of tokens 0; other ones are refused.
        """
        tokens_BL = self._tokens(input_ids, inputs_embeds)
        mask_BL = tokens_BL != self.config.pad_token_id
        if attention_mask is not None:
            mask_BL = attention_mask.bool()
        # Positions are counted from the first column. A graph cannot raise: other rows are NaN.
        rows_B = padded_at_the_end(mask_BL)
        if mask_BL.shape != tokens_BL.shape or not (torch.compiler.is_compiling() or rows_B.all()):
            raise ValueError(
                "attention_mask must have the shape of input_ids, and padding only on the right: "
                "set tokenizer.padding_side = 'right'"
            )
        _refuse_ids(mask_BL, position_ids, token_type_ids)
        network, causal, last = self.network, self.causal, self.network.num_layers
        network.activation_checkpointing = self.gradient_checkpointing
        fields: dict[str, Any] = {}
        has_states = _first(output_hidden_states, self.config.output_hidden_states)
        layers = range(0 if has_states else last, last + 1)
        with self._instead(inputs_embeds):
            out = network(tokens_BL, mask_BL, causal=causal, layers=layers)
            if has_states:
                fields["hidden_states"] = tuple(out.hidden[n] for n in layers)
            if _first(output_attentions, self.config.output_attentions):
                fields["attentions"] = tuple(
                    network.mechanism(number).attention_map(x.q_BHLK, x.k_BHLK, x.context)
                    for number, x in network.attention_inputs(tokens_BL, mask_BL, causal=causal)
                )
        fields |= self._results(out, mask_BL, labels)
        if torch.compiler.is_compiling():
            fields = tree_map_only(Tensor, lambda x: only(rows_B, x), fields)
        result = self._kind(**fields)
        return result if _first(return_dict, self.config.return_dict) else result.to_tuple()

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


class _NoGenerationMixin:
    """Refuses to generate.

    transformers puts its `GenerationMixin`, and a new class that cannot be pickled, in the place of
    a class with these methods, unless a base class has this name.
    """

    @classmethod
    def can_generate(cls) -> bool:
        """Returns true, so that pipelines and PEFT call `generate` and show its sentence."""
        return True

    def generate(self, *given: Any, **named: Any) -> Any:
        """Refuses to generate."""
        raise NotImplementedError(
            "transformers does not generate from this model: type protlm generate -m FOLDER -o "
            "NEW.fasta, with the folder of the model"
        )

    # PEFT looks for it before it trains.
    prepare_inputs_for_generation = generate


class ProtlmForCausalLM(_NoGenerationMixin, _ProtlmPredicting):
    """A model that predicts the next residue; `generate` of transformers is refused."""

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


def _refuse_ids(
    mask_BL: Tensor, position_ids: Tensor | None, token_type_ids: Tensor | None
) -> None:
    """Refuses positions and types of tokens that the model does not have, except at padding.

    A compiler would have to read them.
    """
    if torch.compiler.is_compiling():
        return
    position_L = torch.arange(mask_BL.shape[1], device=mask_BL.device)
    for name, given, allowed_L, says in (
        ("position_ids", position_ids, position_L, "0 to L - 1 in each row"),
        ("token_type_ids", token_type_ids, torch.zeros_like(position_L), "0"),
    ):
        if given is None:
            continue
        if given.shape[-1:] != allowed_L.shape or ((given != allowed_L) & mask_BL).any():
            raise ValueError(f"{name} must be {says}: leave them out")


def _first(given: bool | None, default: bool | None) -> bool:
    return bool(default if given is None else given)
