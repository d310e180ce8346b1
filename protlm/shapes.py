"""The legend of shape suffixes: the name `q_BHLK` lists the axes of a tensor.

Digits in a suffix are literal sizes (`mask_B11L`). Scalars, flat buffers and parameters that
torch names carry no suffix. A test rejects suffix letters that are not in the legend.
"""

LEGEND: dict[str, str] = {
    "B": "batch",
    "L": "positions (residues and special tokens)",
    "M": "key positions, or chunk positions, where they differ from L",
    "H": "attention heads",
    "K": "query and key width of a head",
    "C": "value width of a head",
    "D": "model width",
    "E": "width of all heads together",
    "F": "feed-forward width",
    "R": "random features",
    "V": "vocabulary",
    "N": "layers",
    "S": "segments: blocks, chunks or windows of positions",
    "O": "offsets between two positions",
    "P": "landmarks, projected, compressed or global positions",
    "T": "rounds of hashing",
}
