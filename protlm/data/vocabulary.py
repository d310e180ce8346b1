"""The vocabulary: the 33 tokens of ESM-2 in their order, as one immutable object."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from string import ascii_lowercase, ascii_uppercase
from typing import final

import numpy as np

from protlm.system.errors import InputDataError


@final
@dataclass(frozen=True)
class Vocabulary:
    """Tokens and their numbers.

    `residues` are the 25 letters of amino acids and classes of amino acids. Only upper-case letters
    are accepted; the readers of sequence files convert lower case.
    """

    tokens: tuple[str, ...]

    @cached_property
    def _number(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, token: str) -> int:
        return self._number[token]

    @property
    def cls(self) -> int:
        return self._number["<cls>"]

    @property
    def pad(self) -> int:
        return self._number["<pad>"]

    @property
    def eos(self) -> int:
        return self._number["<eos>"]

    @property
    def mask(self) -> int:
        return self._number["<mask>"]

    @cached_property
    def residues(self) -> np.ndarray:
        """Numbers of the 25 residue letters, uint8, ascending."""
        return np.array(
            [self._number[a] for a in sorted(RESIDUES, key=self._number.__getitem__)],
            dtype=np.uint8,
        )

    @cached_property
    def is_residue(self) -> np.ndarray:
        claims = np.zeros(len(self), dtype=bool)
        claims[self.residues] = True
        return claims

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the tokens in order, stored in every manifest, checkpoint and output."""
        return hashlib.sha256("\n".join(self.tokens).encode()).hexdigest()

    @cached_property
    def _encoder(self) -> bytes:
        """Maps ASCII codes to token numbers; letters other than residues map to padding."""
        return bytes(self._number[a] if a in RESIDUES else self.pad for a in map(chr, range(256)))

    @cached_property
    def _decoder(self) -> bytes:
        codes = bytearray(256)
        for letter in RESIDUES:
            codes[self._number[letter]] = ord(letter)
        return bytes(codes)

    def encode(self, sequence: str | bytes, where: str = "") -> np.ndarray:
        """Encodes a sequence without special tokens, as a read-only uint8 array.

        >>> VOCABULARY.encode("MKV").tolist()
        [20, 15, 7]
        """
        letters = sequence.encode("ascii", "replace") if isinstance(sequence, str) else sequence
        tokens = letters.translate(self._encoder)
        bad = tokens.find(self.pad)
        if bad >= 0:
            letter = sequence[bad] if isinstance(sequence, str) else chr(sequence[bad])
            raise InputDataError(
                f"{where}{letter!r} at residue {bad + 1} is not one of {_LETTERS}: "
                + _ADVICE.get(letter, "write X for an unknown residue")
            )
        return np.frombuffer(tokens, dtype=np.uint8)

    def decode(self, tokens: np.ndarray) -> str:
        """Decodes tokens to text; special tokens are written in angle brackets.

        >>> VOCABULARY.decode(VOCABULARY.encode("MKV"))
        'MKV'
        """
        numbers = np.asarray(tokens, dtype=np.intp)
        if self.is_residue[numbers].all():
            return numbers.astype(np.uint8).tobytes().translate(self._decoder).decode("ascii")
        return "".join(self.tokens[number] for number in numbers)


RESIDUES = "LAGVSERTIDPKQNFYMHWCXBUZO"
STANDARD = "ACDEFGHIKLMNPQRSTVWY"

_LETTERS = "".join(sorted(RESIDUES))
_ADVICE = {"*": "cut the sequence there", **dict.fromkeys("-.~ \t\n", "remove gaps and blanks")}
_CAPITALS = str.maketrans(ascii_lowercase, ascii_uppercase)


def capitals(letters: str) -> str:
    """Returns the letters with a to z in upper case, and all others as they are.

    `str.upper` would turn other letters into residues: ß into SS, the long s into S, a ligature
    into FF.

    >>> capitals("mkß")
    'MKß'
    """
    return letters.translate(_CAPITALS)


VOCABULARY = Vocabulary(
    ("<cls>", "<pad>", "<eos>", "<unk>", *RESIDUES, ".", "-", "<null_1>", "<mask>")
)
