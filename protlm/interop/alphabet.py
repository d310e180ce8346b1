"""Embeddings and output layers over another alphabet, in the order of protlm's vocabulary.

Every token of protlm is read as one of the other alphabet. If several are read as the same one,
they have its embedding, and its probability is divided evenly between them.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protlm.data.vocabulary import RESIDUES, VOCABULARY
from protlm.system.errors import InputDataError
from protlm.system.json_file import read_json
from protlm.system.paths import existing_file

# The files of the tokens in the folder of a model.
ALPHABET, TOKENIZER = "vocab.txt", "tokenizer.json"
# Its special tokens, in the order in which a family gives its names of them.
_SPECIAL = ("<cls>", "<pad>", "<eos>", "<unk>", "<mask>")
_FILES = (TOKENIZER, "vocab.json", ALPHABET)


def alphabet_file(folder: Path) -> Path:
    """Returns the file of the tokens of a model."""
    files = [folder / name for name in _FILES]
    return next((path for path in files if path.is_file()), folder / ALPHABET)


def read_alphabet(path: Path) -> list[str]:
    """Reads the tokens of a model in order: of a JSON file their numbers, of a text one a line."""
    if path.name == ALPHABET:
        existing_file(path, "the alphabet of the model")
        try:
            return path.read_text(encoding="utf-8").split()
        except (OSError, ValueError) as error:
            raise InputDataError(f"{path} is not a list of tokens: {error}") from error
    values: Any = read_json(path, "the alphabet of the model")
    try:
        if path.name == TOKENIZER:
            added = {one["content"]: one["id"] for one in values.get("added_tokens") or ()}
            values = values["model"]["vocab"] | added
        tokens = sorted(values, key=values.__getitem__)
        are_numbered = [values[token] for token in tokens] == list(range(len(tokens)))
    except (KeyError, TypeError, AttributeError) as error:
        raise InputDataError(f"{path} is not the alphabet of a model: {error!r:.90}") from error
    if not are_numbered:
        raise InputDataError(f"{path} is not an alphabet: its tokens must be numbered from 0")
    return tokens


def source_tokens(
    path: Path,
    alphabet: Sequence[str],
    special: Sequence[str],
    letters: Mapping[str, str],
    *,
    left_out: Collection[str] = (),
) -> list[int]:
    """Returns the number in another alphabet of each token of protlm.

    Args:
        path: the model, for messages.
        alphabet: its tokens in order.
        special: its names of `<cls>`, `<pad>`, `<eos>`, `<unk>` and `<mask>`.
        letters: residues that are read as another token of it, if it has that; others that it
            lacks are read as unknown.
        left_out: tokens that protlm does not have and sequences do not contain, whose
            probabilities are left out.
    """
    number = {token: place for place, token in enumerate(alphabet)}
    if len(number) != len(alphabet):
        raise InputDataError(f"{path}: the alphabet repeats a token")
    for token in (*special, *"ACDEFGHIKLMNPQRSTVWY"):
        if token not in number:
            raise InputDataError(f"{path}: the alphabet lacks {token!r:.20}")
    names = {letter: letter for letter in RESIDUES if letter in number}
    names |= {letter: token for letter, token in letters.items() if token in number}
    names |= zip(_SPECIAL, special, strict=True)
    unused = set(alphabet) - set(names.values()) - set(RESIDUES) - set(left_out)
    if unused:
        raise InputDataError(
            f"{path}: the alphabet has {len(unused)} tokens that protlm lacks, for instance "
            f"{min(unused)!r:.20}"
        )
    return [number[names.get(token, names["<unk>"])] for token in VOCABULARY.tokens]


def gather_rows(weights: dict[str, Tensor], tokens: Sequence[int]) -> None:
    """Puts the embedding and the output layer into the order of the vocabulary.

    Args:
        weights: by protlm's names; changed in place.
        tokens: as returned by `source_tokens`.
    """
    count = Counter(tokens)
    shared_V = torch.tensor([count[token] for token in tokens], dtype=torch.float64)
    for name in {"embedding.weight", "head.weight"} & weights.keys():
        weights[name] = weights[name][list(tokens)]
    bias_V = weights["head.bias"][list(tokens)]
    weights["head.bias"] = (bias_V.double() - shared_V.log()).to(bias_V.dtype)
