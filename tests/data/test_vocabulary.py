"""The vocabulary is ESM-2's."""

import numpy as np
import pytest

from protlm.data.vocabulary import RESIDUES, STANDARD, VOCABULARY, capitals
from protlm.system.errors import InputDataError

# As in the vocab.txt of ESM-2.
ESM2 = (
    "<cls> <pad> <eos> <unk> L A G V S E R T I D P K Q N F Y M H W C X B U Z O . - <null_1> <mask>"
)


def test_tokens_are_those_of_esm2_in_their_order():
    assert list(VOCABULARY.tokens) == ESM2.split()
    assert (VOCABULARY.cls, VOCABULARY.pad, VOCABULARY.eos, VOCABULARY.mask) == (0, 1, 2, 32)


def test_the_hash_is_fixed_because_files_contain_it():
    assert VOCABULARY.hash == "0b82cc0a7c7cf9e567b1e5892d793285b9fbae822c964ca48696f7db44598e03"


def test_every_residue_survives_a_round_trip():
    tokens = VOCABULARY.encode(RESIDUES)
    assert (tokens.dtype, len(set(tokens.tolist())), len(RESIDUES)) == (np.uint8, 25, 25)
    assert VOCABULARY.decode(tokens) == RESIDUES
    assert set(STANDARD) < set(RESIDUES)
    assert VOCABULARY.is_residue[tokens].all()
    assert VOCABULARY.is_residue.sum() == 25
    # The check of shards relies on it.
    assert VOCABULARY.residues.tolist() == list(range(4, 29))


def test_every_token_decodes_to_its_name():
    assert VOCABULARY.decode(np.arange(33)) == ESM2.replace(" ", "")
    assert [VOCABULARY.decode(np.array([number])) for number in range(33)] == ESM2.split()
    assert VOCABULARY.encode("").shape == (0,)
    assert VOCABULARY.decode(VOCABULARY.encode("")) == VOCABULARY.decode(np.array([])) == ""


@pytest.mark.parametrize("number", [*range(0, 300), 0x20AC, 0x1F600])
def test_encode_is_total_over_letters(number):
    letter = chr(number)
    if letter in RESIDUES:
        assert VOCABULARY.decode(VOCABULARY.encode(letter)) == letter
    else:
        with pytest.raises(InputDataError, match="residue 2"):
            VOCABULARY.encode(f"M{letter}")


@pytest.mark.parametrize("letter", ["ß", "ſ", "ı", "ﬀ", "ŉ", "µ"])
def test_letters_that_only_unicode_raises_to_residues_are_refused(letter: str):
    assert capitals(f"mk{letter}t") == f"MK{letter}T"
    with pytest.raises(InputDataError, match="residue 3"):
        VOCABULARY.encode(capitals(f"mk{letter}t"))
