"""RoBERTa over residues with fairseq's names, such as Sapiens (doi:10.1080/19420862.2021.2020203).

RoBERTa: arXiv 1907.11692. A `.safetensors` file, and beside it a `.json` file with `alphabet`,
`special_tokens` and `architecture`.
"""

from typing import final

from protlm.interop.base import POST_NORM, Family, ForeignModel
from protlm.interop.layout import FAIRSEQ_COPIES, FAIRSEQ_LAYER, FAIRSEQ_NAMES, Layout
from protlm.interop.source import Source
from protlm.system.errors import InputDataError


@final
class Roberta(Family):
    """RoBERTa with fairseq's names."""

    layout = Layout(
        names={**FAIRSEQ_NAMES, "embedding_norm.*": "emb_layer_norm.*"},
        layers="layers.",
        layer=FAIRSEQ_LAYER,
        sizes={
            "num_layers": "layers",
            "num_heads": "heads",
            "model_dim": "model_width",
            "feedforward_dim": "feed_forward_width",
        },
        epsilon=("layer_norm_epsilon", 1e-5),
        spellings=((r"^(decoder|encoder)\.(sentence_encoder\.)?", ""),),
        copies=FAIRSEQ_COPIES,
    )
    fixed = {**POST_NORM, "tied_head": True}
    allowed = {"activation": ("gelu", "gelu (exact, erf)")}
    special = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    # Sapiens does so: a residue to be predicted.
    read_as = {"X": "<mask>"}
    # Positions are counted from the number of `<pad>` + 1.
    first_position = 2

    def translate(self, source: Source) -> ForeignModel:
        if source.path.is_dir():
            raise InputDataError(
                f"{source.path} is a RoBERTa folder of Hugging Face; protlm reads RoBERTa only in "
                "fairseq's layout, as that of Sapiens: give NAME.safetensors with NAME.json beside "
                "it"
            )
        return super().translate(source)

    def alphabet(self, source: Source) -> list[str]:
        given = source.settings.get("alphabet")
        tokens = [one for one in given if isinstance(one, str)] if isinstance(given, list) else []
        if tokens != given or tokens[1:2] != ["<pad>"] or "X" in tokens:
            raise InputDataError(
                f"{source.path}: the alphabet must be a list of tokens as that of Sapiens, whose "
                "second token is <pad>, and which has no X"
            )
        return tokens
