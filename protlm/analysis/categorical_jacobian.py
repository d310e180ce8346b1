"""The categorical Jacobian of a model, which predicts contacts without attention maps.

Zhang et al. 2024 (doi:10.1073/pnas.2406285121): J[i, a, j, b] is the change of the logit of amino
acid b at position j when position i is replaced by a, with nothing masked. J is centered over each
of its four axes and symmetrized; its norm over a and b, corrected by the average product, measures
the dependence of two positions.
"""

import numpy as np
import torch

from protlm.analysis.contact_regression import apc
from protlm.config.data import EMBED_TOKENS
from protlm.data.vocabulary import STANDARD_TOKENS
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import UserError
from protlm.system.memory import free_memory, readable_size

_NUM = len(STANDARD_TOKENS)
# In float32, and the tokens of all changed sequences.
_BYTES_PER_PAIR = 4 * _NUM**2 + 8 * _NUM


def jacobian_contacts(
    model: PretrainedModel, sequence: str, *, bfloat16: bool = False
) -> np.ndarray:
    """Returns the dependence of each pair of positions of a protein, float64 LL, symmetric.

    Takes 20 L passes over the protein, in bfloat16 products if asked, and 1,600 L² bytes of memory.
    A causal model predicts a residue from those before it, so that only the half of the Jacobian
    with i < j is nonzero.
    """
    needed, free = _BYTES_PER_PAIR * len(sequence) ** 2, free_memory(torch.device("cpu"))
    if needed > free:
        raise UserError(
            f"the Jacobian of {len(sequence):,} residues needs {readable_size(needed)} of memory, "
            f"and {readable_size(free)} are free; type a smaller evaluation.jacobian.max_residues"
        )
    rows = _jacobian(model, sequence, bfloat16=bfloat16)
    for axis in range(4):
        rows -= rows.mean(axis=axis, keepdims=True)
    norms_LL = np.empty((len(sequence), len(sequence)))
    # One row at a time, because a sum of the whole would be as large as it is.
    for row, (of_i, transposed) in enumerate(zip(rows, rows.transpose(2, 3, 0, 1), strict=True)):
        both = (of_i + transposed) / 2
        norms_LL[row] = np.sqrt(np.einsum("ajb,ajb->j", both, both, dtype=np.float64))
    np.fill_diagonal(norms_LL, 0)
    corrected_LL = apc(norms_LL)
    np.fill_diagonal(corrected_LL, 0)
    return (corrected_LL + corrected_LL.T) / 2


@torch.inference_mode()
def _jacobian(model: PretrainedModel, sequence: str, *, bfloat16: bool) -> np.ndarray:
    """Returns J[i, a, j, b], float32."""
    words, tokens_1L = model.vocabulary, model.tokenize([sequence]).tokens_BL
    # A causal model predicts the next residue at each position.
    residues = words.before if model.causal else words.inner

    def logits(tokens_BL: torch.Tensor) -> np.ndarray:
        """Of the 20 amino acids at each residue, float32 [B, residues, 20]."""
        mask_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
        with torch.autocast(tokens_BL.device.type, torch.bfloat16, enabled=bfloat16):
            out = model.network(tokens_BL, mask_BL, causal=model.causal)
        return out.logits_BLV[:, residues, STANDARD_TOKENS].float().cpu().numpy()

    length, plain = len(sequence), logits(tokens_1L)
    changed = tokens_1L.repeat(length * _NUM, 1)
    letters = torch.tensor(STANDARD_TOKENS, device=changed.device).repeat(length)
    places = torch.arange(length, device=changed.device).repeat_interleave(_NUM) + words.start
    changed[torch.arange(len(changed)), places] = letters
    rows = np.empty((len(changed), *plain.shape[1:]), dtype=np.float32)
    per_pass = max(EMBED_TOKENS // changed.shape[1], 1)
    for start in range(0, len(changed), per_pass):
        part = slice(start, start + per_pass)
        np.subtract(logits(changed[part]), plain, out=rows[part])
    return rows.reshape(length, _NUM, *rows.shape[1:])
