"""The tokens of a model of another program in order, from the files of its tokenizer."""

from pathlib import Path
from typing import Any

from protlm.system.errors import InputDataError
from protlm.system.json_file import read_json
from protlm.system.paths import existing_file

# The files of the tokens in the folder of a model.
ALPHABET, TOKENIZER = "vocab.txt", "tokenizer.json"
PIECES, ADDED = "spiece.model", "added_tokens.json"
ALPHABETS = (TOKENIZER, "vocab.json", ALPHABET, PIECES)


def alphabet_of(folder: Path) -> tuple[Path, list[str]]:
    """Returns the first of the files of the tokens of a model, and these in order.

    Another file may have fewer tokens, but not in other places.
    """
    files = [path for path in (folder / name for name in ALPHABETS) if path.is_file()]
    first, *others = files or [folder / ALPHABET]
    tokens = read_alphabet(first)
    number = {token: place for place, token in enumerate(tokens)}
    for path in others:
        for place, token in enumerate(read_alphabet(path)):
            if number.get(token, place) != place:
                raise InputDataError(
                    f"{first} and {path} give {token!r:.20} different numbers; remove the one that "
                    "does not belong to the weights"
                )
    return first, tokens


def read_alphabet(path: Path) -> list[str]:
    """Reads the tokens of a model in order: of a JSON file their numbers, of a text one a line."""
    if path.name == ALPHABET:
        existing_file(path, "the alphabet of the model")
        try:
            return path.read_text(encoding="utf-8").split()
        except (OSError, ValueError) as error:
            raise InputDataError(f"{path} is not a list of tokens: {error}") from error
    try:
        if path.name == PIECES:
            return _pieces(path)
        values: Any = read_json(path, "the alphabet of the model")
        if path.name == TOKENIZER:
            added = {one["content"]: one["id"] for one in values.get("added_tokens") or ()}
            values = values["model"]["vocab"]
            # Pieces with their scores, in order.
            unigrams = isinstance(values, list)
            values = {one[0]: n for n, one in enumerate(values)} if unigrams else values
            values |= added
        tokens = sorted(values, key=values.__getitem__)
        are_numbered = [values[token] for token in tokens] == list(range(len(tokens)))
    except (LookupError, TypeError, AttributeError, ValueError, AssertionError) as error:
        raise InputDataError(f"{path} is not the alphabet of a model: {error!r:.90}") from error
    if not are_numbered:
        raise InputDataError(f"{path} is not an alphabet: its tokens must be numbered from 0")
    return tokens


def _pieces(path: Path) -> list[str]:
    """Reads a SentencePiece model, and puts the tokens added to it into their places.

    It is a protocol buffer that begins with its pieces; each is a field 1 that begins with its
    text, another field 1. Those of residues have lengths of one byte.
    """
    data, place, tokens = path.read_bytes(), 0, list[str]()
    beside = path.with_name(ADDED)
    while data[place : place + 1] == b"\n":
        size, text = data[place + 1], place + 4
        tokens.append(data[text : text + data[text - 1]].decode())
        place += 2 + size
    added = read_json(beside, "the added tokens") if beside.is_file() else {}
    for token, number in sorted(added.items(), key=lambda one: one[1]):
        # Programs number those between in different orders.
        tokens += [f"<unknown {place}>" for place in range(len(tokens), min(number, 1 << 16))]
        tokens.append(token)
        assert tokens[number] == token, f"{token!r:.20} is not {number}"
    return tokens
