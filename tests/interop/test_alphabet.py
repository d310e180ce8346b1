"""Other alphabets: their tokens are read as protlm's, and probabilities keep their meaning."""

from collections import Counter
from pathlib import Path

import torch

from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.interop.layout import gather_rows, source_tokens
from tests.interop.families import BERT, FAMILIES

SPECIAL = FAMILIES["bert"].special
# As ProtBert was trained.
RARE = [*BERT, *"XUZOB"]


def test_the_probability_of_unknown_is_divided() -> None:
    tokens = source_tokens(Path("x"), BERT, SPECIAL, dict.fromkeys("UZOB", "X"))
    count = Counter(tokens)
    assert count.pop(BERT.index("[UNK]")) == len("XBUZO") + len(["<unk>", ".", "-", "<null_1>"])
    assert set(count.values()) == {1}
    assert [BERT[tokens[VOCABULARY[a]]] for a in STANDARD] == list(STANDARD)


def test_rare_residues_are_read_as_x_and_the_others_keep_the_ratios_of_their_probabilities() -> (
    None
):
    tokens = source_tokens(Path("x"), RARE, SPECIAL, dict.fromkeys("UZOB", "X"))
    assert {RARE[tokens[VOCABULARY[a]]] for a in "XUZOB"} == {"X"}
    generator = torch.Generator().manual_seed(0)
    theirs = {
        "embedding.weight": torch.randn(30, 8, generator=generator, dtype=torch.float64),
        "head.bias": torch.randn(30, generator=generator, dtype=torch.float64),
    }
    weights = dict(theirs)
    gather_rows(weights, tokens)
    hidden_D = torch.randn(8, generator=generator, dtype=torch.float64)
    found_V = (weights["embedding.weight"] @ hidden_D + weights["head.bias"]).log_softmax(-1)
    kept_V = (theirs["embedding.weight"] @ hidden_D + theirs["head.bias"])[:-4]
    ours = [VOCABULARY[residue] for residue in STANDARD]
    expected_A = kept_V.log_softmax(-1)[[RARE.index(residue) for residue in STANDARD]]
    torch.testing.assert_close(found_V[ours], expected_A, rtol=0, atol=1e-12)
