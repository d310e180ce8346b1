"""Embeddings and output layers over another alphabet, in the order of protlm's vocabulary.

Every token of protlm is read as one of the other alphabet. If several are read as the same one,
they have its embedding, and its probability is divided evenly between them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from protlm.data.vocabulary import RESIDUES, VOCABULARY
from protlm.errors import InputDataError
from protlm.paths import existing_file

# The file of the tokens in the folder of a Hugging Face model.
ALPHABET = "vocab.txt"


def read_alphabet(path: Path) -> list[str]:
    """Reads the tokens of a `vocab.txt`, one a line.

    Raises:
        InputDataError: the file is missing or is not text.
    """
    existing_file(path, "the alphabet of the model")
    try:
        return path.read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        raise InputDataError(f"{path} is not a list of tokens: {error}") from error


def source_tokens(
    path: Path, alphabet: Sequence[str], special: Mapping[str, str], letters: Mapping[str, str]
) -> list[int]:
    """Returns the number in another alphabet of each token of protlm.

    Args:
        path: the model, for messages.
        alphabet: its tokens in order.
        special: its names of `<cls>`, `<pad>`, `<eos>`, `<unk>` and `<mask>`.
        letters: residues that are read as another token of it; others that it lacks are read as
            unknown.

    Raises:
        InputDataError: it lacks a special token or a standard residue, repeats a token, or has
            one that protlm does not have.
    """
    number = {token: place for place, token in enumerate(alphabet)}
    if len(number) != len(alphabet):
        raise InputDataError(f"{path}: the alphabet repeats a token")
    names = {letter: letter for letter in RESIDUES if letter in number} | {**letters, **special}
    for token in (*special.values(), *letters.values(), *"ACDEFGHIKLMNPQRSTVWY"):
        if token not in number:
            raise InputDataError(f"{path}: the alphabet lacks {token!r:.20}")
    unused = set(alphabet) - set(names.values()) - set(RESIDUES)
    if unused:
        raise InputDataError(
            f"{path}: the alphabet has {len(unused)} tokens that protlm lacks, for instance "
            f"{min(unused)!r:.20}"
        )
    return [number[names.get(token, special["<unk>"])] for token in VOCABULARY.tokens]


def gather_rows(weights: dict[str, Tensor], tokens: Sequence[int]) -> None:
    """Puts the embedding and the bias of a tied output layer into the order of the vocabulary.

    Args:
        weights: by protlm's names; changed in place.
        tokens: as returned by `source_tokens`.
    """
    count = Counter(tokens)
    shared_V = torch.tensor([count[token] for token in tokens], dtype=torch.float64)
    weights["embedding.weight"] = weights["embedding.weight"][list(tokens)]
    bias_V = weights["head.bias"][list(tokens)]
    weights["head.bias"] = (bias_V.double() - shared_V.log()).to(bias_V.dtype)
