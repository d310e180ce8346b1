"""Token dropout of ESM: masked tokens have no embedding, and the others are scaled up for it.

Rives et al. (doi:10.1073/pnas.2016239118) describe the masking; the scale is that of ESM-1b and
ESM-2, which also have it at inference.
"""

from torch import Tensor

from protlm.data.vocabulary import VOCABULARY

# The mean fraction of `<mask>` tokens in the training of ESM: 80 % of 15 %.
_IN_TRAINING = 0.15 * 0.8


def drop_masked_tokens(x_BLD: Tensor, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Sets the embeddings of `<mask>` to 0 and multiplies a row by 0.88 / (1 - its fraction of it).

    Args:
        x_BLD: embeddings of the tokens.
        tokens_BL: token numbers, int64.
        mask_BL: true where there is a token, false at padding, which is not counted.
    """
    is_dropped_BL = (tokens_BL == VOCABULARY.mask) & mask_BL
    num_tokens_B = mask_BL.sum(1).double()
    # A row of nothing but `<mask>` has no embedding to scale.
    num_left_B = (num_tokens_B - is_dropped_BL.sum(1)).clamp(min=1)
    scale_B = ((1 - _IN_TRAINING) * num_tokens_B / num_left_B).to(x_BLD.dtype)
    return x_BLD.masked_fill(is_dropped_BL[..., None], 0) * scale_B[:, None, None]
