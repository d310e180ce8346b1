"""Settings of evaluations that are refused: of the wrong type, impossible, or missing."""

from typing import Any

import pytest

from protlm.evaluation import create
from protlm.system.errors import UserError

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"name": "contacts", "max_residues": None},
        "evaluation.mine.max_residues=null must be a whole number",
    ),
    ({"name": "heads", "ablate": "yes"}, "evaluation.mine.ablate=yes must be true or false"),
    (
        {"name": "accuracy", "objective": "masked", "mask_fraction": "15%"},
        "evaluation.mine.mask_fraction=15% must be a number",
    ),
    ({"name": "favor_vs_softmax", "features": 256}, "evaluation.mine.features=256 must be a list"),
    ({"name": "similarity", "seed": -1}, "evaluation.mine.seed=-1 must be at least 0"),
    ({"name": "retrieval"}, "retrieval.labels=TABLE"),
    ({"name": "retrieval", "labels": "x", "max_gallery": 0}, "max_gallery=0 leaves an empty"),
    ({"name": "sequence_labels", "labels": "x"}, "sequence_labels.sequences has no value"),
    ({"name": "heads", "max_proteins": 0}, "max_proteins=0 excludes every protein"),
    ({"name": "jacobian", "max_residues": 0}, "max_residues=0 excludes every protein"),
    (
        {"name": "contacts", "structures": "x", "fit_structures": "x", "max_residues": 0},
        "max_residues=0 excludes every protein",
    ),
    ({"name": "favor_vs_softmax", "draws": 1}, "draws=1 has no variance"),
    ({"name": "favor_vs_softmax", "features": [0]}, "must be numbers of 1 or more"),
    *(
        ({"name": name, "threshold": threshold}, f"threshold={threshold} must be above 0")
        for name in ("annotations", "similarity")
        for threshold in (0.0, 1.5)
    ),
    ({"name": "accuracy", "objective": "span"}, "objective=span is not one of: causal, masked"),
    (
        {"name": "accuracy", "objective": "masked", "max_length": 2},
        "max_length=2 must be at least 3",
    ),
    (
        {"name": "accuracy", "objective": "masked", "concatenated": True},
        "concatenated=true needs the length of rows; type max_length=TOKENS too",
    ),
]


@pytest.mark.parametrize("settings, words", REFUSED)
def test_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        create("mine", settings)
    assert words in str(refused.value)
