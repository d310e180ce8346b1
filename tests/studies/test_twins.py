"""The study of twins: which runs it makes, and what it takes over from one to another."""

import json
from pathlib import Path

import pytest

from studies import twin_evaluations, twins

GIVEN = ["TRAIN", "TEST", "--groups", "TABLE", "--sample", "SAMPLE"]


def test_each_objective_has_both_twins_of_each_seed() -> None:
    given = twins.arguments([*GIVEN, "--seeds", "3", "4", "--objectives", "causal"])
    mechanisms = ("performer_relu", "softmax")
    assert list(twins.arms(given)) == [
        twins.Arm("causal", m, s) for s in (3, 4) for m in mechanisms
    ]
    masked = twins.arguments([*GIVEN, "--seeds", "3", "4", "--objectives", "masked"])
    assert list(twins.arms(masked))[-1] == twins.Arm("masked", "performer_softmax", 3)


def test_a_given_rate_needs_no_short_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[dict[str, str]] = []

    def run(command: list[str], *, check: bool) -> None:
        assert check
        settings.append(dict(word.split("=", 1) for word in command if "=" in word))

    monkeypatch.setattr(twins.subprocess, "run", run)
    given = twins.arguments(
        [*GIVEN, "--rate", "4e-3", "--length", "4096", "--steps", "1000", "--out", str(tmp_path)]
    )
    rate = twins.best_rate("softmax", given)
    assert rate == 4e-3 and not settings
    assert {arm.attention for arm in twins.arms(given)} == {"performer_relu", "softmax", "hybrid"}
    for steps in (given.steps, 5760):
        twins.train(twins.Arm("masked", "performer_relu", 0), given, steps, rate)
    equal, longer = settings
    assert {name for name in equal if equal[name] != longer[name]} == {"trainer.max_steps"}
    assert equal["optimizer.learning_rate"] == "0.004"
    assert equal["schedule.warmup_steps"] == "100" and equal["data.mode"] == "concatenated"


def test_the_time_of_a_step_is_given_for_all_runs_or_none(capsys: pytest.CaptureFixture) -> None:
    times = ["masked:performer_relu=0.4", "masked:softmax=0.7"]
    given = [*GIVEN, "--objectives", "masked", "--step-seconds", *times]
    with pytest.raises(SystemExit):
        twins.arguments(given)
    assert "has no masked:performer_softmax" in capsys.readouterr().err
    parsed = twins.arguments([*given, "masked:performer_softmax=0.5"])
    assert twins.step_seconds(twins.Arm("masked", "softmax", 0), parsed) == 0.7


def test_the_time_of_a_step_is_that_of_the_runs_own_steps(tmp_path: Path) -> None:
    given = twins.arguments([*GIVEN, "--steps", "50", "--out", str(tmp_path)])
    longer = twins.Arm("masked", "performer_relu", 0, "time")
    longer.folder(tmp_path).mkdir()
    log = "step,seconds,valid_loss\n40,20,\n80,20,\n80,,2.9\n"
    (longer.folder(tmp_path) / "metrics.csv").write_text(log)
    assert twins.step_seconds(longer, given) == 0.5


def test_a_branch_starts_at_the_end_of_the_stable_phase(tmp_path: Path) -> None:
    given = twins.arguments([*GIVEN, "--steps", "50", "--out", str(tmp_path)])
    source = twins.Arm("masked", "performer_relu", 0)
    checkpoints = source.folder(tmp_path) / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "latest").write_text("step-00000050.ckpt\n")
    (checkpoints / "step-00000030.ckpt").write_bytes(b"stable")
    evaluated = source.folder(tmp_path) / twin_evaluations.EVALUATED
    evaluated.mkdir()
    (evaluated / "test.json").write_text("{}")
    longer = twins.Arm("masked", "performer_relu", 0, "time")
    twins.branch(longer, given)
    copied = longer.folder(tmp_path) / "checkpoints"
    assert (copied / "latest").read_text() == "step-00000030.ckpt\n"
    assert (copied / "step-00000030.ckpt").read_bytes() == b"stable"
    # The evaluations are those of the shorter run.
    assert not (longer.folder(tmp_path) / twin_evaluations.EVALUATED).exists()


def test_splits_are_evaluated_with_their_groups_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test").mkdir()
    splits = ("valid", "test_ood_family", "test_iid")
    manifest = {"splits": dict.fromkeys(splits)}
    (tmp_path / "test" / "manifest.json").write_text(json.dumps(manifest))
    given = twins.arguments(
        ["TRAIN", str(tmp_path / "test"), "--groups", "TABLE", "--sample", "SAMPLE"]
    )
    calls: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> None:
        assert check
        calls.append(command)
        output = next(word for word in command if word.startswith("output="))
        Path(output.removeprefix("output=")).write_text("{}")

    monkeypatch.setattr(twin_evaluations.subprocess, "run", run)
    folder = tmp_path / "run"
    folder.mkdir()
    for _ in range(2):
        twin_evaluations.evaluate(folder, "causal", given)
    chosen = [
        (word, next(w for w in call if w.startswith("evaluation.causal.column=")).split("=")[1])
        for call in calls
        for word in call
        if word.startswith("split=")
    ]
    assert chosen == [
        ("split=[test_iid]", "cluster30"),
        ("split=[test_ood_family]", "pfam_family"),
        ("split=[test_iid,test_remote_homolog,test_ood_cluster]", "cluster30"),
        ("split=[test_ood_family]", "pfam_family"),
    ]
    assert all("evaluation.causal.concatenated=false" in call for call in calls)
    calls.clear()
    given.length = 4096
    (tmp_path / "longer").mkdir()
    twin_evaluations.evaluate(tmp_path / "longer", "causal", given)
    joined = {"evaluation.causal.concatenated=true", "evaluation.causal.max_length=4096"}
    assert len(calls) == 4 and all(joined <= set(call) for call in calls)
    tables = {column.table for column in twin_evaluations.columns(given)}
    assert {Path(table).name for table in tables} == {
        "test.test_iid.tsv",
        "test_families.test_ood_family.tsv",
        "sample.test_iid.tsv",
        "sample.test_remote_homolog.tsv",
        "sample.test_ood_cluster.tsv",
        "sample_families.test_ood_family.tsv",
    }
