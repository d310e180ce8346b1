"""`make demo`: what is printed around its commands."""

import json
from pathlib import Path

import pytest

from protlm.data_prep.demo import SHIPPED, SPLITS, STEPS, TRAINED, demo


def test_a_finished_demo_explains_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in STEPS:
        (tmp_path / step.output).parent.mkdir(exist_ok=True)
        (tmp_path / step.output).touch()
    figures = {"model": {"perplexity": 17.4}, "empirical": {"perplexity": 18.2}}
    results = json.dumps({"results": {split: {"masked": figures} for split in SPLITS}})
    for name in (TRAINED, SHIPPED):
        (tmp_path / name).write_text(results)
    demo(tmp_path)
    printed = capsys.readouterr().out
    training, contacts = printed.index("$ protlm train"), printed.index("$ protlm contacts")
    assert printed.index("80/10/10") < training < printed.index("crosses are") < contacts
    assert printed.index("\n== Compare both models") < printed.index(
        "perplexity of masked residues"
    )
    assert printed.splitlines()[-1].startswith("Next: ")
    assert "Documentation" in printed.splitlines()[-1]
