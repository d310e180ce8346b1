"""Weights as bytes: what the page shows is what the codes say, within the stated error."""

import base64

import numpy as np
import pytest

from protlm.report.heads import Codes, binned


def weights(kind: str) -> np.ndarray:
    generator = np.random.default_rng(0)
    values = generator.random((31, 31)) ** 8 * 0.3
    return values - 0.01 * generator.random((31, 31)) if kind == "signed" else values


@pytest.mark.parametrize("kind", ["unsigned", "signed"])
def test_a_decoded_weight_is_within_half_a_step(kind: str) -> None:
    map_LL = weights(kind)
    codes = Codes.of(map_LL)
    assert codes.is_signed == (kind == "signed")
    levels = 127 if codes.is_signed else 255
    # x = sqrt(w / scale) is within d = step / 2 of its code, so x² is within 2 x d + d².
    step = 1 / levels
    bound = codes.scale * (np.sqrt(np.abs(map_LL) / codes.scale) * step + step**2 / 4)
    assert (np.abs(codes.decode() - map_LL) <= bound * (1 + 1e-9)).all()
    assert codes.decode().flat[np.abs(map_LL).argmax()] == map_LL.flat[np.abs(map_LL).argmax()]


def test_rounding_below_zero_is_not_a_negative_weight() -> None:
    assert not Codes.of(np.array([1.0, -1e-8])).is_signed
    assert Codes.of(np.array([1.0, -1e-8])).decode().tolist() == [1.0, 0.0]


def test_a_map_of_zeros_has_codes_of_zero() -> None:
    codes = Codes.of(np.zeros((3, 3)))
    assert codes.scale == 0.0
    assert codes.decode().tolist() == np.zeros((3, 3)).tolist()


def test_plain_values_have_the_codes_row_by_row() -> None:
    plain = Codes.of(np.array([[0.0, 1.0], [0.25, 4.0]])).to_plain()
    assert plain["scale"] == 4.0
    assert list(base64.b64decode(plain["codes"])) == [0, 128, 64, 255]


@pytest.mark.parametrize("number", [0, 1, 2, 3, 100])
def test_the_length_of_base64(number: int) -> None:
    codes = Codes.of(np.zeros(number))
    assert codes.num_bytes == len(codes.to_plain()["codes"])


@pytest.mark.parametrize("size", [1, 2, 7, 31, 40])
def test_bins_have_the_largest_magnitude(size: int) -> None:
    map_LL = weights("signed")
    reduced = binned(map_LL, size)
    for i in range(len(reduced)):
        for j in range(len(reduced)):
            square = map_LL[i * size : (i + 1) * size, j * size : (j + 1) * size]
            assert abs(reduced[i, j]) == np.abs(square).max()
            assert reduced[i, j] in square
