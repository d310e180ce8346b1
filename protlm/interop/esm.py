"""ESM-2 (doi:10.1126/science.ade2574), ESM-1b (doi:10.1073/pnas.2016239118) and ESM-1v.

From a folder of `EsmForMaskedLM`, or from the `.pt` file of fair-esm, whose contact head is in
another file beside it, or from a folder of NVIDIA BioNeMo. The vocabulary is protlm's.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

from torch import Tensor

from protlm.checkpoints.checks import check_numbers
from protlm.config import Activation, HeadKind, ModelConfig, Positions
from protlm.data.alphabet import ALPHABETS, alphabet_of
from protlm.data.vocabulary import VOCABULARY
from protlm.interop.base import ROTARY, ContactHead, Family, ForeignModel
from protlm.interop.layout import (
    BERT_LAYER,
    FAIRSEQ_COPIES,
    FAIRSEQ_LAYER,
    FAIRSEQ_NAMES,
    FIRST_NORMS,
    FREQUENCY,
    Layout,
)
from protlm.interop.source import Source
from protlm.system.errors import InputDataError

_EMBEDDING = "esm.embeddings.word_embeddings.weight"
HUGGING_FACE_ESM = Layout(
    names={
        "embedding.weight": _EMBEDDING,
        "positions.table": "esm.embeddings.position_embeddings.weight",
        FREQUENCY: FREQUENCY,
        "embedding_norm.*": "esm.embeddings.layer_norm.*",
        "final_norm.*": "esm.encoder.emb_layer_norm_after.*",
        "head_transform.{dense,norm}.*": "lm_head.{dense,layer_norm}.*",
        "head.bias": "lm_head.bias",
    },
    layers="esm.encoder.layer.",
    layer={**BERT_LAYER, "{attention,feedforward}_norm.*": "{attention.,}LayerNorm.*"},
    spellings=FIRST_NORMS,
    # Transformers 4 saved a table of positions that ESM-2 never used.
    unused=r"esm\.(embeddings\.position_(ids|embeddings\.weight)|pooler\..*|contact_head\..*)"
    rf"|{FREQUENCY}",
    copies={"lm_head.decoder.weight": _EMBEDDING},
)
_FAIR_ESM = Layout(
    names={
        **FAIRSEQ_NAMES,
        FREQUENCY: FREQUENCY,
        "embedding_norm.*": "emb_layer_norm_before.*",
        "final_norm.*": "emb_layer_norm_after.*",
    },
    layers="layers.",
    layer=FAIRSEQ_LAYER,
    sizes={"num_layers": "layers", "num_heads": "attention_heads", "model_dim": "embed_dim"},
    epsilon=("layer_norm_eps", 1e-5),
    spellings=((r"^(encoder\.)?(sentence_encoder\.)?", ""),),
    unused=r"contact_head\..*",
    copies=FAIRSEQ_COPIES,
)
# BioNeMo's names in those of Hugging Face; TransformerEngine fuses norms with the next product.
_BIONEMO = (
    (r"^model\.", "esm."),
    (r"\.encoder\.layers\.", ".encoder.layer."),
    (r"\.self_attention\.layernorm_qkv\.layer_norm_", ".attention.LayerNorm."),
    (r"\.self_attention\.layernorm_qkv\.(query|key|value)_", r".attention.self.\1."),
    (r"\.self_attention\.layernorm_qkv\.", ".attention.self.qkv."),
    (r"\.self_attention\.proj\.", ".attention.output.dense."),
    (r"\.layernorm_mlp\.layer_norm_", ".LayerNorm."),
    (r"\.layernorm_mlp\.fc1_", ".intermediate.dense."),
    (r"\.layernorm_mlp\.fc2_", ".output.dense."),
    (r"^lm_head\.decoder\.layer_norm_", "lm_head.layer_norm."),
    (r"^lm_head\.decoder\.bias$", "lm_head.bias"),
)
_STACKS = {
    f".qkv.{part}": [f".{name}.{part}" for name in ("query", "key", "value")]
    for part in ("weight", "bias")
}
_CONTACTS = re.compile(r"(.*\.)?contact_head\.regression\.(weight|bias)")
_COPIES = re.compile(r"(.*\.)?(rotary_embeddings|rot_emb)\.inv_freq")
# The number of tokens of SaProt.
_SAPROT = 446


class Esm(Family):
    """ESM-2, ESM-1b and ESM-1v."""

    fixed = {
        "activation": Activation.gelu,
        "attention_bias": True,
        "head": HeadKind.dense_norm,
        "tied_head": True,
    }
    allowed = {
        **ROTARY,
        **dict.fromkeys(("is_folding_model", "is_decoder", "add_cross_attention"), (False,)),
        **dict.fromkeys(("esmfold_config", "vocab_list"), (None,)),
        "vocab_size": (len(VOCABULARY),),
        "pad_token_id": (VOCABULARY.pad,),
        "mask_token_id": (VOCABULARY.mask,),
        "cls_token_id": (VOCABULARY.cls, None),
        "eos_token_id": (VOCABULARY.eos, None),
        "position_embedding_type": ("absolute", "rotary"),
    }
    output_layer, encoder, anchor = "lm_head.", "esm.", "embeddings.word_embeddings.weight"
    first_position = VOCABULARY.pad + 1

    def translate(self, source: Source) -> ForeignModel:
        """Reads the contact head, too, and changes what fair-esm changes as it reads a file."""
        if source.settings.get("vocab_size") == _SAPROT:
            raise InputDataError(
                f"{source.path} is a SaProt: its {_SAPROT} tokens are pairs of a residue and a "
                "structural letter, which protlm does not support; give an ESM-2 model"
            )
        if "dplm_type" in source.settings:
            # DPLM never trained what it has of ESM-2's contact head.
            kept = {n: v for n, v in source.tensors.items() if not _CONTACTS.fullmatch(n)}
            print(f"{source.path}: left out the contact head, untrained in DPLM", file=sys.stderr)
            source = replace(source, tensors=kept)
        found = super().translate(_with_one_frequency(source))
        weights, config = found.weights, found.description.model
        if _is_fair_esm(source) and config.positions is Positions.learned:
            weights["embedding.weight"] = weights["embedding.weight"].clone()
            weights["embedding.weight"][VOCABULARY.mask] = 0
        return replace(found, contacts=_contact_head(source, config))

    def layout_of(self, source: Source) -> Layout:
        """Returns that of Hugging Face or of fair-esm, without what a model does not have."""
        has_frequency = FREQUENCY in source.tensors
        if _is_fair_esm(source):
            layout = _FAIR_ESM
            has_table = any(name.endswith("embed_positions.weight") for name in source.tensors)
            has_norm = any("emb_layer_norm_before." in name for name in source.tensors)
            if has_table is has_frequency:
                raise InputDataError(
                    f"{source.path} must have either the frequencies of ESM-2's rotary positions "
                    "or the table of positions of ESM-1b"
                )
        else:
            layout = HUGGING_FACE_ESM
            key = "position_embedding_type"
            has_table = source.choice(key, self.allowed[key]) == "absolute"
            has_norm = source.choice("emb_layer_norm_before", (False, True, None))
        absent = {
            "positions.table": not has_table,
            FREQUENCY: has_table or not has_frequency,
            "embedding_norm.*": not has_norm,
        }
        names = {ours: name for ours, name in layout.names.items() if not absent.get(ours)}
        return replace(layout, names=names)

    def config(self, source: Source, layout: Layout, weights: Mapping[str, Tensor]) -> ModelConfig:
        is_learned = "positions.table" in weights
        # Only fair-esm leaves it out of the settings of a model that has it, ESM-2.
        default = _is_fair_esm(source) and not is_learned
        has_dropout = source.choice("token_dropout", (default, not default, None))
        return replace(
            super().config(source, layout, weights),
            positions=Positions.learned if is_learned else Positions.rotary,
            embedding_norm="embedding_norm.weight" in weights,
            token_dropout=bool(has_dropout),
            stored_frequencies=FREQUENCY in weights,
        )

    def alphabet(self, source: Source) -> Sequence[str]:
        """Checks that the alphabet is protlm's, if there is one."""
        names = () if _is_fair_esm(source) else ALPHABETS
        if not any((source.folder / name).is_file() for name in names):
            return VOCABULARY.tokens
        path, tokens = alphabet_of(source.folder)
        if tuple(tokens) != VOCABULARY.tokens:
            raise InputDataError(
                f"{path} does not have the 33 tokens of ESM-2 in their order, in which protlm "
                "reads the embedding; give a model with the alphabet of ESM-2"
            )
        return VOCABULARY.tokens


@final
class NvEsm(Esm):
    """ESM-2 of BioNeMo, whose rotary frequencies are those of the formula, not rounded ones."""

    allowed = {**Esm.allowed, "position_embedding_type": ("rotary",)}
    encoder = "model."
    spare_rows = True

    def translate(self, source: Source) -> ForeignModel:
        source.choice("encoder_activation", ("gelu",))
        unused = ("_extra_state", "inv_freq")
        kept = {n: v for n, v in source.tensors.items() if not n.endswith(unused)}
        return super().translate(replace(source, tensors=kept))

    def layout_of(self, source: Source) -> Layout:
        by_head = _STACKS if source.choice("qkv_weight_interleaved", (True, False)) else ()
        return replace(
            super().layout_of(source), spellings=_BIONEMO, stacks=_STACKS, by_head=by_head
        )


def _is_fair_esm(source: Source) -> bool:
    return "model_type" not in source.settings


def _with_one_frequency(source: Source) -> Source:
    """Returns a model with its rotary frequencies once, of which each layer may have a copy."""
    copies = {name: v for name, v in source.tensors.items() if _COPIES.fullmatch(name)}
    check_numbers(source.path, copies)
    found = list(copies.values())
    if any(not value.equal(found[0]) for value in found):
        raise InputDataError(f"{source.path} has other rotary frequencies in each layer")
    tensors = {name: value for name, value in source.tensors.items() if name not in copies}
    if found:
        tensors[FREQUENCY] = found[0].double()
    return replace(source, tensors=tensors)


def _contact_head(source: Source, config: ModelConfig) -> ContactHead | None:
    pairs = [(_CONTACTS.fullmatch(name), value) for name, value in source.tensors.items()]
    parts = {found[2]: value for found, value in pairs if found}
    if not parts:
        return None
    num_heads = config.num_layers * config.num_heads
    if {part: x.numel() for part, x in parts.items()} != {"weight": num_heads, "bias": 1}:
        raise InputDataError(
            f"{source.path} has a contact head for other than the {num_heads} heads that its "
            "settings say; get both again from one place"
        )
    check_numbers(source.path, {f"contact_head.{part}": value for part, value in parts.items()})
    return ContactHead(parts["weight"].flatten().tolist(), parts["bias"].item())
