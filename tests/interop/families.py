"""The models of other programs that are read, in every layout."""

from dataclasses import replace
from functools import partial
from string import ascii_uppercase

import torch
import torch.nn.functional as F

from protlm.config import Frame
from protlm.data.vocabulary import STANDARD, VOCABULARY
from tests.interop.example import (
    HEADS,
    INNER,
    LAYERS,
    POSITIONS,
    WIDTH,
    Example,
    Tensors,
    ablang,
    esmc_library,
    fair_esm,
    hugging_face,
    in_layers,
    sapiens,
)

SIZES = {
    **{"hidden_size": WIDTH, "num_hidden_layers": LAYERS},
    **{"num_attention_heads": HEADS, "intermediate_size": INNER},
}
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *STANDARD]
# As ProtBert was trained.
PROTBERT = [*BERT, *"XUZOB"]
SAPIENS = ["<s>", "<pad>", "</s>", "<unk>", *STANDARD, "<mask>"]
ABLANG = ["<", *"MRHKDESTNQCGPAVIFYWL", "-", ">", "*"]
AMPLIFY = ["<pad>", "<unk>", "<mask>", "<bos>", "<eos>", "|", *"LAGVSERTIDPKQNFYMHWCB"]

HUGGING_FACE_LAYER = {
    "{q,k,v}.*": "attention.self.{query,key,value}.*",
    "o.*": "attention.output.dense.*",
    "{up,down}.*": "{intermediate,output}.dense.*",
}
FREQUENCY = "esm.encoder.layer.{}.attention.self.rotary_embeddings.inv_freq"
# The names of Hugging Face's ESM in fairseq's.
FAIRSEQ = [
    (r"esm\.embeddings\.word_embeddings", "encoder.sentence_encoder.embed_tokens"),
    (r"esm\.embeddings\.position_embeddings", "encoder.sentence_encoder.embed_positions"),
    (r"esm\.embeddings\.layer_norm", "encoder.sentence_encoder.emb_layer_norm_before"),
    (r"esm\.encoder\.layer\.", "encoder.sentence_encoder.layers."),
    (r"esm\.(encoder|(?=contact_head))\.?", "encoder.sentence_encoder."),
    (r"lm_head\.decoder\.weight", "lm_head.weight"),
    (r"^lm_head", "encoder.lm_head"),
    (r"attention\.LayerNorm", "self_attn_layer_norm"),
    (r"(\d)\.LayerNorm", r"\1.final_layer_norm"),
    (r"attention\.self\.(q|k|v)[a-z]+", r"self_attn.\1_proj"),
    (r"attention\.self\.rotary_embeddings", "self_attn.rot_emb"),
    (r"attention\.output\.dense", "self_attn.out_proj"),
    (r"intermediate\.dense", "fc1"),
    (r"output\.dense", "fc2"),
]

ESM = Example(
    {
        **{"model_type": "esm", "architectures": ["EsmForMaskedLM"], **SIZES},
        **{"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "layer_norm_eps": 1e-5},
        **{"position_embedding_type": "rotary", "max_position_embeddings": 1026},
        **{"emb_layer_norm_before": False, "token_dropout": True},
    },
    {
        "embed.weight": "esm.embeddings.word_embeddings.weight",
        "rotary.frequency": FREQUENCY.format(0),
        "final_norm.*": "esm.encoder.emb_layer_norm_after.*",
        "contacts.*": "esm.contact_head.regression.*",
        "{dense,head_norm}.*": "lm_head.{dense,layer_norm}.*",
        "head.bias": "lm_head.bias",
        **in_layers(
            "esm.encoder.layer.", {**HUGGING_FACE_LAYER, "norm{1,2}.*": "{attention.,}LayerNorm.*"}
        ),
    },
    hugging_face,
    copies={
        "lm_head.decoder.weight": "esm.embeddings.word_embeddings.weight",
        FREQUENCY.format(1): FREQUENCY.format(0),
    },
    traits=frozenset({"token_dropout"}),
)
ESM_1V = replace(
    ESM,
    settings={
        **ESM.settings,
        **{"position_embedding_type": "absolute", "max_position_embeddings": POSITIONS + 2},
    },
    names={
        **{ours: name for ours, name in ESM.names.items() if ours != "rotary.frequency"},
        "positions.weight": "esm.embeddings.position_embeddings.weight",
    },
    copies={"lm_head.decoder.weight": "esm.embeddings.word_embeddings.weight"},
    first=2,
)
ESM_1B = replace(
    ESM_1V,
    settings={**ESM_1V.settings, "emb_layer_norm_before": True},
    names={**ESM_1V.names, "embed_norm.*": "esm.embeddings.layer_norm.*"},
)
FAIR_ESM = replace(
    ESM,
    settings={
        **{"encoder_layers": LAYERS, "encoder_embed_dim": WIDTH},
        **{"encoder_attention_heads": HEADS, "token_dropout": True},
    },
    write=fair_esm,
    spelled=FAIRSEQ,
)
# Released files have settings with and without a prefix.
FAIR_ESM_1V = replace(
    ESM_1V,
    settings={
        "arch": "roberta_large",
        "encoder_token_dropout": True,
        **{key: value for key, value in FAIR_ESM.settings.items() if key != "token_dropout"},
    },
    write=fair_esm,
    spelled=FAIRSEQ,
)
FAIR_ESM_1B = replace(
    ESM_1B,
    settings={
        "arch": "roberta_large",
        **{key.removeprefix("encoder_"): value for key, value in FAIR_ESM.settings.items()},
    },
    write=fair_esm,
    spelled=FAIRSEQ,
)
ESMC = Example(
    {
        **{"model_type": "esmc", "vocab_size": 64, "tie_word_embeddings": False},
        **{**SIZES, "hidden_size": 128, "num_attention_heads": 2},
        **{"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    },
    {
        "embed.weight": "esmc.embed_tokens.weight",
        "final_norm.weight": "esmc.norm.weight",
        "{dense,head_norm,head}.*": "lm_head.{dense,layer_norm,decoder}.*",
        **in_layers(
            "esmc.layers.",
            {
                "norm{1,2}.*": "{input,post_attention}_layernorm.*",
                "{q,k,v,o}.weight": "self_attn.{q,k,v,o}_proj.weight",
                "{q,k}_norm.weight": "self_attn.{q,k}_norm.weight",
                "{gate,up,down}.weight": "mlp.{gate,up,down}_proj.weight",
            },
        ),
    },
    hugging_face,
    alphabet=[*VOCABULARY.tokens, *(f"<{number}>" for number in range(31))],
    traits=frozenset({"scaled"}),
    width=128,
    heads=2,
)
ESMC_LIBRARY = replace(
    ESMC,
    settings={},
    names={
        "embed.weight": "embed.weight",
        "final_norm.weight": "transformer.norm.weight",
        "{dense,head_norm,head}.*": "sequence_head.{0,2,3}.*",
        **in_layers(
            "transformer.blocks.",
            {
                "norm{1,2}.*": "{attn.layernorm_qkv,ffn}.0.*",
                **{f"{x}.weight": "attn.layernorm_qkv.1.weight" for x in "qkv"},
                **{f"{x}.weight": "ffn.1.weight" for x in ("gate", "up")},
                "{q,k}_norm.weight": "attn.{q,k}_ln.weight",
                "{o,down}.weight": "{attn.out_proj,ffn.3}.weight",
            },
        ),
    },
    write=esmc_library,
)
ESMC_FUSED = replace(
    ESMC_LIBRARY,
    settings=ESMC.settings,
    write=hugging_face,
    spelled=[
        (r"layernorm_qkv\.0\.", "layernorm_qkv.layer_norm_"),
        (r"layernorm_qkv\.1\.", "layernorm_qkv."),
        (r"ffn\.0\.", "ffn.layer_norm_"),
        (r"ffn\.1\.", "ffn.fc1_"),
        (r"ffn\.3\.", "ffn.fc2_"),
        (r"^(embed|transformer)", r"esmc.\1"),
        (r"^sequence_head", "lm_head"),
    ],
    further={"transformer.blocks.0.attn.layernorm_qkv._extra_state": (2,)},
)
BERT_MODEL = Example(
    {
        **{"model_type": "bert", **SIZES, "hidden_act": "gelu", "layer_norm_eps": 1e-5},
        **{"vocab_size": len(BERT), "type_vocab_size": 2, "pad_token_id": 0},
        "max_position_embeddings": POSITIONS,
    },
    {
        "embed.weight": "bert.embeddings.word_embeddings.weight",
        "positions.weight": "bert.embeddings.position_embeddings.weight",
        "types.weight": "bert.embeddings.token_type_embeddings.weight",
        "embed_norm.*": "bert.embeddings.LayerNorm.*",
        "{dense,head_norm}.*": "cls.predictions.transform.{dense,LayerNorm}.*",
        "head.bias": "cls.predictions.bias",
        **in_layers(
            "bert.encoder.layer.",
            {**HUGGING_FACE_LAYER, "norm{1,2}.*": "{attention.,}output.LayerNorm.*"},
        ),
    },
    partial(hugging_face, alphabet=BERT),
    alphabet=BERT,
    special=("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"),
    copies={"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"},
    # A pooler, and the head of another task.
    further={"bert.pooler.dense.weight": (WIDTH, WIDTH), "cls.species.bias": (6,)},
)
# A layer of TransformerEngine, where a norm and the product after it are one module.
FUSED = {
    "norm1.*": "self_attention.layernorm_qkv.layer_norm_*",
    **{f"{x}.*": "self_attention.layernorm_qkv.*" for x in "qkv"},
    "o.*": "self_attention.proj.*",
    "norm2.*": "layernorm_mlp.layer_norm_*",
    **{f"{x}.*": "layernorm_mlp.fc1_*" for x in ("gate", "up")},
    "down.*": "layernorm_mlp.fc2_*",
}


def padded(weights: Tensors, rows: int) -> Tensors:
    """Weights with further rows of the embedding and the output layer, of no token."""
    last = {"embed.weight": 0, "head.weight": 0, "head.bias": torch.finfo(torch.float16).min}
    pads = {n: (*(0, 0) * (weights[n].ndim - 1), 0, rows) for n in last if n in weights}
    return weights | {n: F.pad(weights[n], pad, value=last[n]) for n, pad in pads.items()}


def divided(weights: Tensors) -> Tensors:
    """Weights of ESM C divided by the divisor of its residuals, with biases of 0 in all norms."""
    outputs = {n: v for n, v in weights.items() if n.endswith((".o.weight", ".down.weight"))}
    norms = [n.removesuffix("weight") for n in weights if n.endswith("_norm.weight")]
    zeros = {f"{n}bias": torch.zeros(ESMC.width).double() for n in norms}
    return zeros | weights | {n: v / (LAYERS / 36) ** 0.5 for n, v in outputs.items()}


NV_ESM = replace(
    ESM,
    settings={**ESM.settings, "model_type": "nv_esm", "encoder_activation": "gelu"},
    names={
        "embed.weight": "model.embeddings.word_embeddings.weight",
        "final_norm.*": "model.encoder.emb_layer_norm_after.*",
        **{"dense.*": "lm_head.dense.*", "head_norm.*": "lm_head.decoder.layer_norm_*"},
        "head.bias": "lm_head.decoder.bias",
        **in_layers("model.encoder.layers.", FUSED),
    },
    copies={"lm_head.decoder.weight": "model.embeddings.word_embeddings.weight"},
    # Its frequencies are those of the formula, whatever a file has.
    further={"model.rotary_embeddings.inv_freq": (4,), "lm_head.decoder._extra_state": (2,)},
    original=replace(
        ESM,
        names={n: x for n, x in ESM.names.items() if n not in ("rotary.frequency", "contacts.*")},
        copies=ESM_1V.copies,
    ),
    convert=partial(padded, rows=31),
    by_head=True,
)
NV_ESMC = replace(
    ESMC,
    settings={**ESMC.settings, "model_type": "nv_esmc"},
    names={
        **{"embed.weight": "esmc.embed_tokens.weight", "final_norm.*": "esmc.norm.*"},
        "dense.*": "sequence_head.dense.*",
        "head_norm.*": "sequence_head.decoder.layer_norm_*",
        "head.*": "sequence_head.decoder.*",
        **in_layers("esmc.layers.", {f"{x}_norm.*": f"{x}_norm.*" for x in "qk"} | FUSED),
    },
    spelled=[(r"self_attention\.", "")],
    original=ESMC,
    convert=divided,
)
E1 = Example(
    {
        **SIZES,
        **{"model_type": "E1", "gated_mlp": True, "hidden_act": "silu", "rms_norm_eps": 1e-5},
        **{"global_attention_every_n_layers": 2, "max_num_positions_within_seq": 64},
        **{"rope_theta_within_seq": 10_000, "rope_theta_global": 500_000.0, "clip_qkv": 1},
    },
    {
        "embed.weight": "model.embed_tokens.weight",
        **{"types.weight": "model.embed_seq_id.weight", "final_norm.weight": "model.norm.weight"},
        **{"dense.*": "mlm_head.0.*", "head_norm.*": "mlm_head.2.*", "head.*": "mlm_head.3.*"},
        **in_layers(
            "model.layers.",
            {
                "norm1.weight": "norm_attn_norm.input_layernorm.weight",
                **{f"{x}.weight": f"norm_attn_norm.self_attn.{x}_proj.weight" for x in "qkvo"},
                "norm2.weight": "norm_attn_norm.post_attention_layernorm.weight",
                **{"gate.weight": "ffn.mlp.w1.weight", "up.weight": "ffn.mlp.w3.weight"},
                "down.weight": "ffn.mlp.w2.weight",
            },
        ),
    },
    hugging_face,
    alphabet=["<pad>", "<bos>", "<eos>", "<bos_glm>", "<eos_span>", *"?12", *ascii_uppercase],
    special=("<bos>", "<pad>", "<eos>", "X", "?"),
    traits=frozenset({"rms"}),
    frame=Frame(("<cls>", "1"), ("2", "<eos>"), ("1", "2")),
    clip=1.0,
    bases={1: 500_000.0},
)
FAMILIES = {
    "esm2": ESM,
    "esm1v": ESM_1V,
    "esm1b": ESM_1B,
    "fair_esm2": FAIR_ESM,
    "fair_esm1v": FAIR_ESM_1V,
    "fair_esm1b": FAIR_ESM_1B,
    "esmc": ESMC,
    "esmc_library": ESMC_LIBRARY,
    "esmc_fused": ESMC_FUSED,
    "bert": BERT_MODEL,
    "protbert": replace(
        BERT_MODEL,
        settings={**BERT_MODEL.settings, "vocab_size": len(PROTBERT)},
        write=partial(hugging_face, alphabet=PROTBERT),
        alphabet=PROTBERT,
        read_as=dict.fromkeys("UZOB", "X"),
    ),
    "roberta": Example(
        {
            "alphabet": SAPIENS,
            "architecture": {
                **{"family": "RoBERTa (fairseq)", "layers": LAYERS, "heads": HEADS},
                **{"model_width": WIDTH, "feed_forward_width": INNER},
                **{"activation": "gelu (exact, erf)", "layer_norm_epsilon": 1e-5},
            },
        },
        {
            ours: name
            for ours, name in ESM_1B.names.items()
            if not ours.startswith(("final_norm", "contacts"))
        },
        sapiens,
        alphabet=SAPIENS,
        special=("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
        read_as={"X": "<mask>"},
        spelled=[*FAIRSEQ, ("^encoder", "decoder"), ("emb_layer_norm_before", "emb_layer_norm")],
        copies=ESM_1B.copies,
        first=2,
    ),
    "ablang": Example(
        {
            **{**SIZES, "vocab_size": len(ABLANG), "pad_token_id": ABLANG.index("-")},
            **{"max_position_embeddings": POSITIONS + 1, "layer_norm_eps": 1e-5},
            **{"hidden_act": "gelu", "hidden_dropout_prob": 0.1},
        },
        {
            "embed.weight": "AbRep.AbEmbeddings.AAEmbeddings.weight",
            "positions.weight": "AbRep.AbEmbeddings.PositionEmbeddings.weight",
            "embed_norm.*": "AbRep.AbEmbeddings.LayerNorm.*",
            "{dense,head_norm}.*": "AbHead.{dense,layer_norm}.*",
            "head.weight": "AbHead.decoder.weight",
            "head.bias": "AbHead.bias",
            **in_layers(
                "AbRep.EncoderBlocks.Layers.",
                {
                    "{q,k,v,o}.*": "MultiHeadAttention.Attention.{q,k,v,out}_proj.*",
                    "{up,down}.*": "IntermediateLayer.{expand,dense}_dense.*",
                    "norm{1,2}.*": "{MHA,IntermediateLayer.}LayerNorm.*",
                },
            ),
        },
        partial(ablang, alphabet=ABLANG),
        alphabet=ABLANG,
        special=("<", "-", ">", "*", "*"),
        copies={"AbHead.decoder.bias": "AbHead.bias"},
        first=1,
    ),
    "amplify": Example(
        {
            # Its intermediate size is not that of its matrices.
            **{"model_type": "AMPLIFY", **SIZES, "intermediate_size": 72, "max_length": 64},
            **{"hidden_act": "SwiGLU", "norm_eps": 1e-5, "vocab_size": len(AMPLIFY)},
        },
        {
            "embed.weight": "encoder.weight",
            "final_norm.weight": "layer_norm_2.weight",
            "head.*": "decoder.*",
            **in_layers(
                "transformer_encoder.",
                {
                    "norm{1,2}.weight": "{attention,ffn}_norm.weight",
                    "{q,k,v,o,down}.weight": "{q,k,v,wo,ffn.w3}.weight",
                    **{f"{x}.weight": "ffn.w12.weight" for x in ("gate", "up")},
                },
            ),
        },
        partial(hugging_face, alphabet=AMPLIFY),
        alphabet=AMPLIFY,
        special=("<bos>", "<pad>", "<eos>", "<unk>", "<mask>"),
        traits=frozenset({"rms", "interleaved"}),
    ),
    "dplm": replace(
        ESM,
        settings={**ESM.settings, "dplm_type": "dplm_esm", "architectures": ["EsmForDPLM"]},
        further={"esm.embeddings.position_embeddings.weight": (1026, WIDTH)},
    ),
    "nv_esm": NV_ESM,
    "nv_esm_first": replace(
        NV_ESM,
        settings={**NV_ESM.settings, "qkv_weight_interleaved": False},
        spelled=[(r"^model\.", "esm.")],
        by_head=False,
    ),
    "nv_esmc": NV_ESMC,
    "e1": E1,
}
FAMILIES["amplify_te"] = replace(
    FAMILIES["amplify"],
    names={
        "embed.weight": "amplify.encoder.weight",
        **{"final_norm.weight": "decoder.layer_norm_weight", "head.*": "decoder.*"},
        **in_layers("amplify.transformer_encoder.", FUSED),
    },
    original=FAMILIES["amplify"],
    convert=partial(padded, rows=5),
    by_head=True,
)
