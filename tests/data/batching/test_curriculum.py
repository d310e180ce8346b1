"""Length curricula, and rejection of invalid ones."""

import pytest

from protlm.data.batching.plan import Curriculum
from protlm.system.errors import UserError


def test_a_length_applies_from_its_number_of_samples_on():
    curriculum = Curriculum([[0, 256], [1_000, 512], [3_000, 1_024]])
    seen = [0, 999, 1_000, 2_999, 3_000, 10**12]
    assert [curriculum.max_length(n) for n in seen] == [256, 256, 512, 512, 1_024, 1_024]
    assert curriculum.describe() == (
        "rows of 256 tokens, 512 after 1,000 samples, 1024 after 3,000 samples"
    )


def test_without_stages_there_is_no_curriculum():
    assert Curriculum().max_length(0) is None
    assert Curriculum([]).describe() == ""
    Curriculum().check(3)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ([[5, 64]], "beginning with 0"),
        ([[0, 64], [10, 64]], "ascend"),
        ([[0, 64], [10, 32]], "ascend"),
        ([[0, 2]], "at least 3"),
        ([[0, 64], [20, 128], [20, 256]], "ascend"),
        ([[0, 64, 1]], "pairs"),
        ([[0]], "pairs"),
        ([[]], "pairs"),
    ],
)
def test_invalid_stages_are_rejected(wrong, words):
    with pytest.raises(UserError, match=words):
        Curriculum(wrong)


def test_a_length_above_that_of_the_rows_is_rejected():
    Curriculum([[0, 64], [10, 128]]).check(128)
    with pytest.raises(UserError, match=r"data\.max_length=128"):
        Curriculum([[0, 64], [10, 128]]).check(127)
