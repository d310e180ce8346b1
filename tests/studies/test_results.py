"""The results of a model card: parts that are there are used only if they are what is asked for."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protlm.data.shards.manifest import MANIFEST
from protlm.loading import load_model
from protlm.system.errors import UserError
from studies import results
from studies.results import Part


@pytest.fixture
def part(
    tiny_run: Path, make_data_set: Callable[..., Path], tmp_path: Path
) -> tuple[Part, argparse.Namespace, Path]:
    """An evaluation that is done, the arguments of the study, and its data set."""
    data = make_data_set([("A", "MKTAYIAKQRWCF"), ("B", "MKVWLL")], "data")
    settings = ("evaluation=[causal]", f"data.dir={data}", "split=train")
    given = argparse.Namespace(model=tiny_run, out=tmp_path, model_hash=load_model(tiny_run).hash)
    done = Part("part", "Title", settings)
    results.run(done, given)
    return done, given, data


def test_a_part_that_is_there_is_not_repeated(
    part: tuple[Part, argparse.Namespace, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    done, given, _ = part
    monkeypatch.setattr(results, "evaluate", lambda config: pytest.fail("repeated"))
    report, tables = results.run(done, given)
    assert set(report["results"]) == {"train"} and "Title" in tables


def test_results_of_another_model_are_refused(
    part: tuple[Part, argparse.Namespace, Path],
) -> None:
    done, given, _ = part
    given.model_hash = "0" * 64
    with pytest.raises(UserError, match="another model"):
        results.run(done, given)


def test_results_with_other_settings_are_refused(
    part: tuple[Part, argparse.Namespace, Path],
) -> None:
    done, given, _ = part
    other = Part(done.name, done.title, (*done.settings, "evaluation.causal.max_length=9"))
    with pytest.raises(UserError, match="with other settings"):
        results.run(other, given)


def test_results_of_data_prepared_anew_are_refused(
    part: tuple[Part, argparse.Namespace, Path], write_manifest: Callable[[Path, str], None]
) -> None:
    done, given, data = part
    fields: dict[str, Any] = json.loads((data / MANIFEST).read_text())
    write_manifest(data, json.dumps(fields, indent=7))
    with pytest.raises(UserError, match="of another data set"):
        results.run(done, given)
