"""The forecast of an epoch."""

import numpy as np
import pytest

from protlm.data.batching import plan as module
from protlm.data.batching.buckets import LengthBuckets
from protlm.data.batching.mixture import SampleOrder
from protlm.data.batching.packing import Packing
from protlm.data.batching.plan import Curriculum, forecast

LENGTHS = np.random.default_rng(0).integers(1, 300, 5_000)
ORDER = SampleOrder([len(LENGTHS)], seed=1)
RULE = LengthBuckets(4_000, 128, window=1_000)


def test_cropping_is_counted():
    found = forecast(LENGTHS.take, ORDER, RULE)
    left_out = np.maximum(LENGTHS + 2 - 128, 0)
    assert (found.cropped, found.left_out) == ((left_out > 0).sum(), left_out.sum())
    assert found.is_exact
    assert f"{found.cropped:,} cropped ({found.left_out:,} residues)" in found.describe()
    assert "about" not in found.describe()


def test_for_large_data_sets_only_one_window_is_read(monkeypatch):
    monkeypatch.setattr(module, "_MAX_EXACT", 4_999)
    asked = []

    def lengths_of(samples):
        asked.extend(samples.tolist())
        return LENGTHS.take(samples)

    found = forecast(lengths_of, ORDER, RULE)
    assert len(set(asked)) == RULE.window
    left_out = np.maximum(LENGTHS + 2 - 128, 0)
    assert found.cropped == pytest.approx((left_out > 0).sum(), rel=0.1)
    assert found.left_out == pytest.approx(left_out.sum(), rel=0.1)
    assert found.describe().startswith("about ")


def test_what_fits_is_not_mentioned():
    text = forecast(LENGTHS.take, ORDER, LengthBuckets(4_000, 302)).describe()
    assert "cropped" not in text
    assert text.endswith("of the positions of a batch are padding")


def test_joined_sequences_have_hardly_any_padding():
    found = forecast(LENGTHS.take, ORDER, Packing(4_096, 128, window=1_000))
    assert found.cropped == 0
    # Of a window's 1,000 rows and more, the last one is short.
    assert 0.999 < found.useful_fraction <= 1


@pytest.mark.parametrize("most", [5_000, 4_999])
def test_a_curriculum_crops_more(monkeypatch, most):
    """Half of the epoch has rows of 32 tokens, the rest rows of 128."""
    monkeypatch.setattr(module, "_MAX_EXACT", most)
    rule = LengthBuckets(4_000, 128, window=1_000, curriculum=Curriculum([[0, 32], [2_500, 128]]))
    found = forecast(LENGTHS.take, ORDER, rule)
    drawn = LENGTHS[ORDER.draw(0, np.arange(5_000)).samples]
    # A window has the length that holds at its beginning: the first three are short.
    left_out = np.maximum(drawn + 2 - np.repeat([32, 128], [3_000, 2_000]), 0)
    rel = 1e-9 if found.is_exact else 0.1
    assert found.cropped == pytest.approx(np.count_nonzero(left_out), rel=rel)
    assert found.left_out == pytest.approx(left_out.sum(), rel=rel)
    assert found.is_exact == (most == 5_000)
