"""Gibbs sampling: the distribution of known conditionals, and what is masked when."""

from typing import ClassVar, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.model.decoding import STANDARD_TOKENS, Sampling
from protlm.model.gibbs import Sweeps, resample
from protlm.model.transformer import ModelOutput, ProteinLM
from protlm.system.errors import UserError
from tests.small_models import small_model

# The joint distribution of two residues that are A or C, and always differ but for a tenth.
JOINT = torch.tensor([[0.05, 0.6], [0.3, 0.05]], dtype=torch.float64)
LETTERS = [VOCABULARY["A"], VOCABULARY["C"]]


class TwoResidues(nn.Module):
    """Predicts a masked residue by the conditionals of `JOINT`, if the other one is visible."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1, 1)

    def forward(self, tokens_BL: Tensor, mask_BL: Tensor, *, causal: bool) -> ModelOutput:
        assert not causal
        assert mask_BL.all()
        logits_BLV = torch.full((*tokens_BL.shape, len(VOCABULARY)), -30.0, dtype=torch.float64)
        # A token that is not a residue is the likeliest of all.
        logits_BLV[..., VOCABULARY.eos] = 9.0
        for row, (_, one, other, _) in enumerate(tokens_BL.tolist()):
            assert (one == VOCABULARY.mask) + (other == VOCABULARY.mask) == 1
            if one == VOCABULARY.mask:
                logits_BLV[row, 1, LETTERS] = JOINT[:, LETTERS.index(other)].log()
            else:
                logits_BLV[row, 2, LETTERS] = JOINT[LETTERS.index(one)].log()
        return ModelOutput(logits_BLV, {})


class Recording(nn.Module):
    """Predicts W everywhere, and records the rows that it sees; copies record in one list."""

    seen: ClassVar[list[Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1, 1)
        self.seen.clear()

    def forward(self, tokens_BL: Tensor, mask_BL: Tensor, *, causal: bool) -> ModelOutput:
        self.seen.append(tokens_BL.clone())
        logits_BLV = torch.zeros(*tokens_BL.shape, len(VOCABULARY), dtype=torch.float64)
        logits_BLV[..., VOCABULARY["W"]] = 50.0
        return ModelOutput(logits_BLV, {})


def sampled(
    network: nn.Module,
    starts: list[str],
    sweeps: Sweeps,
    sampling: Sampling = Sampling(),  # noqa: B008
    *,
    seed: int = 0,
    batch_size: int = 64,
) -> list[str]:
    given = (cast("ProteinLM", network), starts, sampling)
    found = dict(resample(*given, sweeps=sweeps, seed=seed, batch_size=batch_size))
    assert sorted(found) == list(range(len(starts)))
    return [found[index] for index in range(len(starts))]


def test_known_conditionals_give_their_joint_distribution() -> None:
    number = 2000
    found = sampled(TwoResidues(), ["AA"] * number, Sweeps(8, 0.5), batch_size=500)
    pairs = [f"{one}{other}" for one in "AC" for other in "AC"]
    assert set(found) <= set(pairs)
    expected = JOINT.flatten().numpy() / JOINT.sum().item()
    rates = np.array([found.count(pair) / number for pair in pairs])
    # Five standard errors. Residues drawn together would be independent: 0.27 for AA.
    assert np.all(np.abs(rates - expected) < 5 * np.sqrt(expected * (1 - expected) / number))


@pytest.mark.parametrize(
    "fraction, passes", [(0.1, 10), (0.15, 7), (0.5, 2), (1.0, 1), (1e-9, 20), (0.3, 4)]
)
def test_a_sweep_masks_every_residue_once(fraction: float, passes: int) -> None:
    network = Recording()
    assert sampled(network, [STANDARD, "M"], Sweeps(3, fraction)) == ["W" * 20, "W"]
    assert len(network.seen) == 3 * passes
    # The shorter sequence comes first.
    for sweep in range(3):
        turns = torch.stack(network.seen[sweep * passes : (sweep + 1) * passes])
        is_masked = turns == VOCABULARY.mask
        assert is_masked[:, 1, 1:21].sum(0).tolist() == [1] * 20
        assert is_masked[:, 0].sum(0).tolist() == [0, 1, *[0] * 20]
        assert int(is_masked[:, 1].sum(1).max()) == -(-20 // passes)
    assert network.seen[0][:, 0].tolist() == [VOCABULARY.cls] * 2
    assert network.seen[-1][0, 2:].tolist() == [VOCABULARY.eos, *[VOCABULARY.pad] * 19]


def test_the_draws_depend_on_the_seed_and_not_on_the_batch() -> None:
    network = small_model("performer_relu").network.float()
    starts = ["MKTAYIAKQR", "GSHM", "MXBZUO", "MKTAYIAKQR"]
    found = sampled(network, starts, Sweeps(2, 0.3))
    assert found == sampled(network, starts, Sweeps(2, 0.3), batch_size=1)
    assert found[:2] == sampled(network, starts[:2], Sweeps(2, 0.3))
    assert found != sampled(network, starts, Sweeps(2, 0.3), seed=1)
    assert found[0] != found[3]
    assert [len(one) for one in found] == [10, 4, 6, 10]
    assert set("".join(found)) <= set(STANDARD)
    # The network itself stays in float32.
    assert network.embedding.weight.dtype is torch.float32


def test_temperature_0_takes_the_most_probable_residue() -> None:
    network = small_model("softmax").network
    (found,) = sampled(network, ["MKTAY"], Sweeps(1, 1.0), sampling=Sampling(temperature=0))
    tokens_BL = torch.full((1, 7), VOCABULARY.mask)
    tokens_BL[0, 0], tokens_BL[0, -1] = VOCABULARY.cls, VOCABULARY.eos
    with torch.no_grad():
        logits_BLV = network(tokens_BL, tokens_BL != VOCABULARY.pad, causal=False).logits_BLV
    best = logits_BLV[0, 1:-1, STANDARD_TOKENS].argmax(-1)
    assert found == "".join(STANDARD[index] for index in best)


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_impossible_sweeps_are_refused(fraction: float) -> None:
    with pytest.raises(UserError, match=f"--mask-fraction {fraction} must be above 0"):
        Sweeps(1, fraction)
