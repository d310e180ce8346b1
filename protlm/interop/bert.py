"""BERT over residues, such as AntiBERTy and ProtBert, in the format of Hugging Face.

BERT: arXiv 1810.04805. `tokenizer.json` or `vocab.txt` gives the alphabet. The embedding of the
first token type is part of that of the positions. The pooler and heads of other tasks are left out.
"""

from typing import final

from protlm.interop.base import POST_NORM, Family
from protlm.interop.layout import BERT_LAYER, FIRST_NORMS, Layout

_EMBEDDING = "bert.embeddings.word_embeddings.weight"


@final
class Bert(Family):
    """BERT."""

    layout = Layout(
        names={
            "embedding.weight": _EMBEDDING,
            "positions.table": "bert.embeddings.position_embeddings.weight",
            "types": "bert.embeddings.token_type_embeddings.weight",
            "embedding_norm.*": "bert.embeddings.LayerNorm.*",
            "head_transform.{dense,norm}.*": "cls.predictions.transform.{dense,LayerNorm}.*",
            "head.bias": "cls.predictions.bias",
        },
        layers="bert.encoder.layer.",
        layer={**BERT_LAYER, "{attention,feedforward}_norm.*": "{attention.,}output.LayerNorm.*"},
        spellings=FIRST_NORMS,
        unused=r"bert\.(embeddings\.position_ids|pooler\..*)"
        r"|cls\.(seq_relationship|species|chain|graft)\..*",
        copies={
            "cls.predictions.decoder.weight": _EMBEDDING,
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
    )
    fixed = {**POST_NORM, "tied_head": True}
    allowed = {
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "hidden_act": ("gelu",),
        "position_embedding_type": ("absolute",),
    }
    output_layer, encoder, anchor = "cls.predictions.", "bert.", "embeddings.word_embeddings.weight"
    special = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")
    # ProtBert was trained so.
    read_as = dict.fromkeys("UZOB", "X")
