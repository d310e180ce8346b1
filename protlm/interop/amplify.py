"""AMPLIFY in the format of Hugging Face (doi:10.1101/2024.09.23.614603).

Its rotary positions pair neighboring coordinates. `tokenizer.json` or `vocab.txt` gives the
alphabet. The names of BioNeMo, for TransformerEngine, are other spellings.
"""

from typing import final

from protlm.config import Activation, Norm, Positions
from protlm.interop.base import Family
from protlm.interop.layout import SIZES, Layout


@final
class Amplify(Family):
    """AMPLIFY."""

    layout = Layout(
        names={
            "embedding.weight": "encoder.weight",
            "final_norm.weight": "layer_norm_2.weight",
            "head.*": "decoder.*",
        },
        layers="transformer_encoder.",
        layer={
            "{attention,feedforward}_norm.weight": "{attention,ffn}_norm.weight",
            "attention.{query,key,value,output}.weight": "{q,k,v,wo}.weight",
            "feedforward.{gate,up,down}.weight": "ffn.{w1,w2,w3}.weight",
        },
        # Its `intermediate_size` is not that of its matrices.
        sizes={**SIZES, "max_length": "max_length"},
        epsilon=("norm_eps", 1e-5),
        spellings=(
            (r"^amplify\.", ""),
            (r"^decoder\.layer_norm_", "layer_norm_2."),
            (r"\.self_attention\.layernorm_qkv\.layer_norm_", ".attention_norm."),
            (r"\.self_attention\.layernorm_qkv\.", ".qkv."),
            (r"\.self_attention\.proj\.", ".wo."),
            (r"\.layernorm_mlp\.layer_norm_", ".ffn_norm."),
            (r"\.layernorm_mlp\.fc1_", ".ffn.w12."),
            (r"\.layernorm_mlp\.fc2_", ".ffn.w3."),
        ),
        unused=r"freqs_cis|.*\.(_extra_state|inv_freq)",
        stacks={
            ".qkv.weight": (".q.weight", ".k.weight", ".v.weight"),
            "ffn.w12.weight": ("ffn.w1.weight", "ffn.w2.weight"),
        },
        by_head=(".qkv.weight",),
    )
    fixed = {"positions": Positions.rotary, "norm": Norm.rms, "activation": Activation.swiglu}
    allowed = {
        "rms_norm": (True,),
        "layer_norm_after_embedding": (False,),
        "layer_norm_before_last_layer": (True,),
        "ffn_bias": (False,),
        "att_bias": (False,),
        "hidden_act": ("SwiGLU", "swiglu"),
    }
    special = ("<bos>", "<pad>", "<eos>", "<unk>", "<mask>")
    # The chain break, and the letter for leucine or isoleucine, which protlm reads as X.
    left_out = (r"\|", "J")
    spare_rows = True
    rotary_pairs = True
