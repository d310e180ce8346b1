"""AbLang, a model of antibody chains (doi:10.1093/bioadv/vbac046), in the folder of its library.

`hparams.json` describes it, `vocab.json` gives the alphabet, `amodel.pt` has the weights. Residues
that it lacks are read as its mask. The first row of its table of positions is that of padding.
"""

from typing import final

from protlm.interop.base import POST_NORM, Family
from protlm.interop.layout import Layout


@final
class Ablang(Family):
    """AbLang for heavy or light chains."""

    layout = Layout(
        names={
            "embedding.weight": "AbRep.AbEmbeddings.AAEmbeddings.weight",
            "positions.table": "AbRep.AbEmbeddings.PositionEmbeddings.weight",
            "embedding_norm.*": "AbRep.AbEmbeddings.LayerNorm.*",
            "head_transform.{dense,norm}.*": "AbHead.{dense,layer_norm}.*",
            "head.weight": "AbHead.decoder.weight",
            "head.bias": "AbHead.bias",
        },
        layers="AbRep.EncoderBlocks.Layers.",
        layer={
            "attention.{query,key,value,output}.*": (
                "MultiHeadAttention.Attention.{q,k,v,out}_proj.*"
            ),
            "{attention,feedforward}_norm.*": "{MHA,IntermediateLayer.}LayerNorm.*",
            "feedforward.{up,down}.*": "IntermediateLayer.{expand,dense}_dense.*",
        },
        copies={"AbHead.decoder.bias": "AbHead.bias"},
    )
    fixed = POST_NORM
    allowed = {"hidden_act": ("gelu",)}
    special = ("<", "-", ">", "*", "*")
    first_position = 1
