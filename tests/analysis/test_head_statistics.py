"""Statistics of heads against their definitions, row by row in float64."""

import math

import numpy as np
import pytest
import torch

from protlm.analysis.head_statistics import (
    MAX_OFFSET,
    head_statistics,
    residue_rows,
    sink_mass,
)
from tests.rounding import error_bound
from tests.small_models import small_model

PER_ROW = ("entropy", "effective_keys", "mean_distance", "bandwidth", "column_entropy")


def direct(a: np.ndarray) -> dict[str, float]:
    """The statistics of one head, each written from its definition."""
    n = len(a)
    p = a / a.sum(axis=1, keepdims=True)
    entropies = [-sum(x * math.log(x) for x in row if x > 0) for row in p]
    bandwidths = []
    for i, row in enumerate(p):
        within = (sum(row[max(0, i - w) : i + w + 1]) for w in range(n))
        bandwidths.append(next(w for w, mass in enumerate(within) if mass >= 0.8))
    columns = p.mean(axis=0)

    def offset(d: int) -> float:
        return float(np.mean([a[i, i + d] for i in range(n) if 0 <= i + d < n]))

    return {
        "entropy": float(np.mean(entropies)),
        "effective_keys": float(np.mean(np.exp(entropies))),
        "mean_distance": sum(p[i, j] * abs(i - j) for i in range(n) for j in range(n)) / n,
        "bandwidth": float(np.median(bandwidths)),
        "column_entropy": -float((columns * np.log(columns)).sum()),
        "symmetry": float(np.linalg.norm(a - a.T) / np.linalg.norm(a + a.T)),
        "neighbor_mass": offset(1) + offset(-1),
        "strand_mass": offset(2) + offset(-2),
        "helix_mass": offset(3) + offset(-3) + offset(4) + offset(-4),
    }


@pytest.mark.parametrize("sizes", [(40,), (1, 0, 30, 9), (13, 13, 14)])
def test_statistics_of_random_maps_match_their_definitions(sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    map_HLL = torch.randn(3, 42, 42, generator=generator, dtype=torch.float64).mul(3).softmax(-1)
    map_HLL = map_HLL[:, 1:-1, 1:-1]
    found = head_statistics(map_HLL.split([*sizes], dim=1))
    for head, map_LL in enumerate(map_HLL.numpy()):
        for name, expected in direct(map_LL).items():
            # Sums of up to L² positive terms.
            bound = error_bound(torch.float64, abs(expected) + 1, 40**2)
            assert abs(found[name][head].item() - expected) <= bound, name
        for d in range(-MAX_OFFSET, MAX_OFFSET + 1):
            expected = np.diagonal(map_LL, d).mean()
            assert found["offset_profile"][head, MAX_OFFSET + d].item() == pytest.approx(expected)


def test_a_uniform_head_has_the_known_entropy_and_distance() -> None:
    length = 50
    found = head_statistics([torch.full((1, length, length), 1 / length)])
    assert found["entropy"].item() == pytest.approx(math.log(length), rel=1e-6)
    assert found["effective_keys"].item() == pytest.approx(length, rel=1e-5)
    assert found["mean_distance"].item() == pytest.approx((length**2 - 1) / (3 * length), rel=1e-6)
    assert found["symmetry"].item() == 0


def test_a_band_and_a_stripe_are_told_apart() -> None:
    length = 30
    helix = torch.zeros(length, length)
    for d in (-4, -3, 3, 4):
        helix += 0.25 * torch.diag(torch.ones(length - abs(d)), d)
    stripe = torch.zeros(length, length)
    stripe[:, 7] = 1
    found = head_statistics([torch.stack([helix, stripe])])
    assert found["helix_mass"].tolist()[0] == 1
    assert found["helix_mass"][1] < 0.2
    assert found["column_entropy"][1] == 0 < found["column_entropy"][0]
    # Half of the mass of an inner row is at distance 3.
    assert found["bandwidth"][0] == 4
    assert found["symmetry"][0] == 0 < found["symmetry"][1]


def test_a_causal_map_without_a_diagonal_is_not_symmetric() -> None:
    map_LL = torch.ones(6, 6).tril(-1)
    found = head_statistics([map_LL[None]])
    assert found["symmetry"].item() == 1
    # The first row is empty and does not count.
    assert found["effective_keys"].item() == pytest.approx((1 + 2 + 3 + 4 + 5) / 5)


def test_negative_weights_have_no_entropy() -> None:
    map_HLL = torch.full((2, 4, 4), 0.25)
    map_HLL[1, 2] = torch.tensor([-0.5, 0.5, 0.5, 0.5])
    found = head_statistics([map_HLL])
    for name in PER_ROW:
        assert found[name].isnan().tolist() == [False, True], name
    assert found["symmetry"].isfinite().all()


def test_offsets_beyond_a_short_protein_are_missing() -> None:
    profile = head_statistics([torch.full((1, 3, 3), 1 / 3)])["offset_profile"][0]
    assert profile.isfinite().sum() == 5
    assert profile[MAX_OFFSET - 2 : MAX_OFFSET + 3].tolist() == pytest.approx([1 / 3] * 5)


def test_symmetry_is_left_out_of_long_proteins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protlm.analysis.head_statistics.MAX_SYMMETRY_RESIDUES", 5)
    found = head_statistics([torch.full((2, 6, 6), 1 / 6)])
    assert found["symmetry"].isnan().all()
    assert found["entropy"].isfinite().all()


def test_incomplete_maps_are_refused() -> None:
    with pytest.raises(AssertionError, match="square"):
        head_statistics([torch.full((1, 3, 4), 0.25)])


# The rows of Linformer's maps do not sum to 1.
@pytest.mark.parametrize("mechanism", ["performer_relu", "linformer"])
def test_statistics_of_a_model_are_those_of_its_maps(
    mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(mechanism)
    monkeypatch.setattr("protlm.analysis.head_statistics._BLOCK_ENTRIES", 5 * 32 * 2)
    sequence = "MKTAYIAKQRQISFVKSHFSRQLEERLGLI"
    maps = model.attention_maps(model.tokenize([sequence]))
    found = {}
    for layer, rows in residue_rows(model, sequence):
        blocks = [*rows]
        assert len(blocks) > 1
        sinks = {"sink_mass": torch.cat([*map(sink_mass, blocks)], dim=1).mean(dim=1)}
        found[layer] = head_statistics(block[:, :, 1:-1] for block in blocks) | sinks
    assert list(found) == list(maps)
    for layer, map_BHLL in maps.items():
        whole = head_statistics([map_BHLL[0, :, 1:-1, 1:-1]])
        sinks_HL = map_BHLL[0, :, 1:-1, [0, -1]].double().sum(dim=-1)
        whole["sink_mass"] = sinks_HL.mean(dim=-1)
        for name, value in whole.items():
            # Blocks of other sizes round differently, in the maps.
            bound = error_bound(torch.float32, 1.0, 64)
            torch.testing.assert_close(
                found[layer][name], value, rtol=bound, atol=bound, equal_nan=True
            )
