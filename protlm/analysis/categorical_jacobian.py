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

_NUM = len(STANDARD_TOKENS)
# Bytes of the rows of the Jacobian that are held in memory, in two blocks.
_MAX_BYTES = 1 << 29


def jacobian_contacts(
    model: PretrainedModel,
    sequence: str,
    *,
    tokens_per_batch: int = EMBED_TOKENS,
    max_bytes: int = _MAX_BYTES,
    bfloat16: bool = False,
) -> np.ndarray:
    """Returns the dependence of each pair of positions of a protein, float64 LL, symmetric.

    Takes 20 L passes over the protein, in bfloat16 products if asked, as long as two blocks of
    rows, 1,600 L bytes a position, fit into `max_bytes`; for a longer protein the blocks are
    recomputed for every pair of them. A causal model predicts a residue from those before it, so
    that only the half of the Jacobian with i < j is nonzero.
    """
    rows = _Rows(model, sequence, tokens_per_batch, bfloat16=bfloat16)
    length = len(sequence)
    size = max(max_bytes // (8 * _NUM**2 * length), 1)
    blocks = [range(start, min(start + size, length)) for start in range(0, length, size)]
    kept = rows.centered(blocks[0]) if len(blocks) == 1 else None
    total = np.zeros((_NUM, length, _NUM))
    for block in blocks:
        total += (kept if kept is not None else rows.centered(block)).sum(axis=0, dtype=np.float64)
    mean = (total / length).astype(np.float32)
    norms_LL = np.zeros((length, length))
    for number, block in enumerate(blocks):
        first = kept if kept is not None else rows.centered(block)
        first -= mean
        for other in blocks[number:]:
            second = first
            if other != block:
                second = rows.centered(other)
                second -= mean
            # A range as an index would copy; a slice does not.
            rows_of, columns_of = (slice(some.start, some.stop) for some in (block, other))
            norms = _norms(first[:, :, columns_of], second[:, :, rows_of])
            norms_LL[rows_of, columns_of] = norms
            norms_LL[columns_of, rows_of] = norms.T
    np.fill_diagonal(norms_LL, 0)
    corrected_LL = apc(norms_LL)
    np.fill_diagonal(corrected_LL, 0)
    return (corrected_LL + corrected_LL.T) / 2


def _norms(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the norms over amino acids of (J[i, a, j, b] + J[j, b, i, a]) / 2, [i, j]."""
    norms = np.empty((one.shape[0], one.shape[2]))
    # One row at a time, because a sum of whole blocks would be as large as they are.
    for row, (of_i, transposed) in enumerate(zip(one, other.transpose(2, 3, 0, 1), strict=True)):
        both = (of_i + transposed) / 2
        norms[row] = np.sqrt(np.einsum("ajb,ajb->j", both, both, dtype=np.float64))
    return norms


class _Rows:
    """The Jacobian of a protein, computed in blocks of rows."""

    def __init__(
        self, model: PretrainedModel, sequence: str, tokens_per_batch: int, *, bfloat16: bool
    ) -> None:
        self._bfloat16 = bfloat16
        batch = model.tokenize([sequence])
        self._model, self._tokens_1L = model, batch.tokens_BL
        self._per_pass = max(tokens_per_batch // batch.tokens_BL.shape[1], 1)
        words = model.vocabulary
        # A causal model predicts the next residue at each position.
        self._residues = words.before if model.causal else words.inner
        self._plain = self._logits(self._tokens_1L)

    def centered(self, positions: range) -> np.ndarray:
        """Returns J[i, a, j, b] for these i, with mean 0 over a, j and b, float32."""
        changed = self._tokens_1L.repeat(len(positions) * _NUM, 1)
        letters = torch.tensor(STANDARD_TOKENS, device=changed.device).repeat(len(positions))
        places = torch.tensor(list(positions), device=changed.device).repeat_interleave(_NUM)
        places += self._model.vocabulary.start
        changed[torch.arange(len(changed)), places] = letters
        rows = np.empty((len(changed), *self._plain.shape[1:]), dtype=np.float32)
        for start in range(0, len(changed), self._per_pass):
            part = slice(start, start + self._per_pass)
            np.subtract(self._logits(changed[part]), self._plain, out=rows[part])
        rows = rows.reshape(len(positions), _NUM, *rows.shape[1:])
        for axis in (1, 2, 3):
            rows -= rows.mean(axis=axis, keepdims=True)
        return rows

    @torch.inference_mode()
    def _logits(self, tokens_BL: torch.Tensor) -> np.ndarray:
        """Returns the logits of the 20 amino acids at each residue, float32 [B, residues, 20]."""
        mask_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
        with torch.autocast(tokens_BL.device.type, torch.bfloat16, enabled=self._bfloat16):
            out = self._model.network(tokens_BL, mask_BL, causal=self._model.causal)
        return out.logits_BLV[:, self._residues, STANDARD_TOKENS].float().cpu().numpy()
