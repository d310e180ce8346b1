"""Vocabularies: the 33 tokens of ESM-2 in their order, then those of a model, and its frame."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from string import ascii_lowercase, ascii_uppercase
from typing import final

import numpy as np

from protlm.config import Frame
from protlm.system.errors import InputDataError, UserError

_ESM = Frame()


@final
@dataclass(frozen=True)
class Vocabulary:
    """Tokens and their numbers, and the frame of a protein: what precedes and follows its residues.

    `residues` are the 25 letters of amino acids and classes of amino acids. Only upper-case letters
    are accepted; the readers of sequence files convert lower case.
    """

    tokens: tuple[str, ...]
    frame: Frame = _ESM

    def __post_init__(self) -> None:
        around = {*self.frame.prefix, *self.frame.suffix}
        if len({*self.tokens}) < len(self.tokens):
            raise UserError("the tokens of a model must be distinct")
        if unknown := sorted(around - set(self.tokens) | (around & {*RESIDUES, "<pad>", "<mask>"})):
            raise UserError(f"{unknown[0]!r:.20} is not a token that can be around residues")

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
        if not self.frame.has_mask:
            raise UserError(
                "this model has no <mask>, so that it cannot predict a masked residue; give a "
                "model that was trained on masked residues"
            )
        return self._number["<mask>"]

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """The tokens before the first residue."""
        return tuple(self._number[token] for token in self.frame.prefix)

    @cached_property
    def suffix(self) -> tuple[int, ...]:
        """The tokens after the last residue."""
        return tuple(self._number[token] for token in self.frame.suffix)

    @property
    def start(self) -> int:
        """The position of the first residue."""
        return len(self.prefix)

    @property
    def num_around(self) -> int:
        """The number of tokens that are not residues."""
        return len(self.prefix) + len(self.suffix)

    @property
    def inner(self) -> slice:
        """The positions of the residues, in a row without padding."""
        return slice(self.start, -len(self.suffix) or None)

    @property
    def before(self) -> slice:
        """The positions before those of the residues, at which a causal model predicts these."""
        if not self.start:
            raise UserError(
                "this causal model has no token before the first residue, which it cannot predict; "
                "give a model that has one"
            )
        return slice(self.start - 1, -len(self.suffix) - 1)

    def framed(self, residues: np.ndarray) -> np.ndarray:
        """Returns the tokens of a protein, int64."""
        return np.concatenate(
            [self.prefix, residues, self.suffix], dtype=np.int64, casting="unsafe"
        )

    @cached_property
    def residues(self) -> np.ndarray:
        """Numbers of the 25 residue letters, uint8, ascending."""
        return np.array(
            [self._number[a] for a in sorted(RESIDUES, key=self._number.__getitem__)],
            dtype=np.uint8,
        )

    @cached_property
    def is_residue(self) -> np.ndarray:
        return np.isin(np.arange(len(self)), self.residues)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of tokens and frame, stored in every manifest, checkpoint and output."""
        both = json.dumps([self.tokens, *vars(self.frame).values()])
        text = "\n".join(self.tokens) if self.frame == _ESM else both
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def _encoder(self) -> bytes:
        """Maps ASCII codes to token numbers; letters other than residues map to padding."""
        return bytes(self._number[a] if a in RESIDUES else self.pad for a in map(chr, range(256)))

    @cached_property
    def _decoder(self) -> bytes:
        return bytes.maketrans(
            bytes(self._number[letter] for letter in RESIDUES), RESIDUES.encode()
        )

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
STANDARD_TOKENS = [VOCABULARY[letter] for letter in STANDARD]


def vocabulary_of(frame: Frame | None) -> Vocabulary:
    """Returns the vocabulary of a model with a frame; None is that of ESM-2."""
    if frame is None:
        return VOCABULARY
    return Vocabulary((*VOCABULARY.tokens, *frame.own_tokens), frame)
