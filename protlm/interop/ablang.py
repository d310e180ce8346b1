"""AbLang, a model of antibody chains (doi:10.1093/bioadv/vbac046), in the folder of its library.

`hparams.json` describes it, `vocab.json` gives the alphabet, `amodel.pt` has the weights. Residues
that it lacks are read as its mask. The first row of its table of positions is that of padding.
"""

from typing import final

from protlm.interop.base import POST_NORM, Family
from protlm.interop.layout import Layout

_ATTENTION = "MultiHeadAttention.Attention"


@final
class Ablang(Family):
    """AbLang for heavy or light chains."""

    layout = Layout(
        names={
            "embedding.weight": "AbRep.AbEmbeddings.AAEmbeddings.weight",
            "positions.table": "AbRep.AbEmbeddings.PositionEmbeddings.weight",
            "embedding_norm.*": "AbRep.AbEmbeddings.LayerNorm.*",
            "head_transform.dense.*": "AbHead.dense.*",
            "head_transform.norm.*": "AbHead.layer_norm.*",
            "head.weight": "AbHead.decoder.weight",
            "head.bias": "AbHead.bias",
        },
        layers="AbRep.EncoderBlocks.Layers.",
        layer={
            "attention.query.*": f"{_ATTENTION}.q_proj.*",
            "attention.key.*": f"{_ATTENTION}.k_proj.*",
            "attention.value.*": f"{_ATTENTION}.v_proj.*",
            "attention.output.*": f"{_ATTENTION}.out_proj.*",
            "attention_norm.*": "MHALayerNorm.*",
            "feedforward.up.*": "IntermediateLayer.expand_dense.*",
            "feedforward.down.*": "IntermediateLayer.dense_dense.*",
            "feedforward_norm.*": "IntermediateLayer.LayerNorm.*",
        },
        copies={"AbHead.decoder.bias": "AbHead.bias"},
    )
    fixed = POST_NORM
    allowed = {"hidden_act": ("gelu",)}
    special = ("<", "-", ">", "*", "*")
    first_position = 1
