"""The study of twins: which runs it makes, and what a twin copies from its sibling."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from protlm.analysis.sequence_sums import SequenceSums, write_sums
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


SECONDS = {"performer_relu": 36, "softmax": 72, "hybrid": 40, "performer_softmax": 50}
NATS = {"performer_relu": 2.7, "softmax": 2.6, "hybrid": 2.55, "performer_softmax": 2.7}
BEST_RATES = {"performer_relu": "0.0015", "softmax": "0.006"}


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """The settings of the trainings of a study, by run; its commands write tiny results."""
    (tmp_path / "test").mkdir()
    manifest = {"splits": dict.fromkeys(("valid", "test_iid", "test_ood_family"))}
    (tmp_path / "test" / "manifest.json").write_text(json.dumps(manifest))
    runs: dict[str, dict[str, str]] = {}

    def run(command: list[str], *, check: bool) -> None:
        assert check
        settings = dict(word.split("=", 1) for word in command if "=" in word)
        if command[2] == "protlm.train":
            runs[Path(settings["run_dir"]).name] = settings
            write_log(settings)
        else:
            write_sums_of_splits(settings)

    monkeypatch.setattr(subprocess, "run", run)
    return runs


def write_log(settings: dict[str, str]) -> None:
    """Writes what `protlm train` does: its checkpoints, and a log of two rows."""
    folder, mechanism = Path(settings["run_dir"]), settings["attention"]
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints" / "latest").touch()
    steps, is_best = settings["trainer.max_steps"], BEST_RATES.get(mechanism)
    loss = 2.5 if settings["optimizer.learning_rate"] == is_best else 2.9
    seconds = SECONDS[mechanism] * int(steps)
    log = f"step,seconds,valid_loss\n{steps},{seconds},\n{steps},,{loss}\n"
    (folder / "metrics.csv").write_text(log)


def write_sums_of_splits(settings: dict[str, str]) -> None:
    """Writes what `protlm evaluate` does: the sums of six proteins of each split."""
    mechanism = Path(settings["checkpoint"]).name.split("-")[1]
    objective = settings["evaluation"].strip("[]")
    names, targets = list("ABCDEF"), np.full(6, 10.0)
    others = [targets] * (len(SequenceSums.__dataclass_fields__) - 2)
    sums = SequenceSums(targets, NATS[mechanism] * targets, *others)
    groups = ["Pkinase"] * 5 + ["RRM_1"] if "families" in settings["output"] else names
    for split in settings["split"].strip("[]").split(","):
        path = Path(settings[f"evaluation.{objective}.per_sequence"])
        write_sums(path, split, names, groups, sums)
    Path(settings["output"]).write_text("{}")


def study(tmp_path: Path, *options: str) -> None:
    """Runs the study of 100 steps and one seed on the data set of `trained`."""
    given = ["TRAIN", str(tmp_path / "test"), "--groups", "TABLE", "--sample", "SAMPLE"]
    few = ["--seeds", "0", "--steps", "100", "--out", str(tmp_path / "out")]
    twins.main([*given, *few, *options])


@pytest.mark.parametrize(("length", "third"), [(512, "performer_softmax"), (4096, "hybrid")])
def test_twins_differ_in_mechanism_rate_and_the_time_that_they_have(
    length: int,
    third: str,
    tmp_path: Path,
    trained: dict[str, dict[str, str]],
    capsys: pytest.CaptureFixture,
) -> None:
    study(tmp_path, "--length", str(length))
    rates = {name: one["optimizer.learning_rate"] for name, one in trained.items()}
    assert rates["masked-performer_relu-0-tokens"] == BEST_RATES["performer_relu"]
    assert rates["causal-performer_relu-0-time"] == BEST_RATES["performer_relu"]
    assert rates["causal-softmax-0-tokens"] == BEST_RATES["softmax"]
    assert rates[f"masked-{third}-0-tokens"] == BEST_RATES["softmax"]
    # A step of softmax takes twice the time of one of the Performer.
    assert trained["masked-performer_relu-0-time"]["trainer.max_steps"] == "200"
    figures, title, relu, *rest = capsys.readouterr().out.split("\n\n")
    assert "| masked | performer_relu | equal tokens | 0 | 1.00 |" in figures
    assert "| masked | performer_relu | equal time | 0 | 2.00 |" in figures
    assert title.startswith("`softmax` less `performer_relu`, with 95 % intervals")
    cells = [f"{one} | equal {budget}" for one in twins.OBJECTIVES for budget in ("tokens", "time")]
    for row, start in zip(relu.splitlines()[2::2], cells, strict=True):
        assert row.startswith(f"| {start} | 1 | nats | -0.1000 (-0.1000 to -0.1000) |")
    assert bool(rest) == (third == "hybrid")
    if rest:
        assert rest[0].startswith("`softmax` less `hybrid`")
        assert rest[1].splitlines()[2].startswith("| masked | equal tokens | 1 | nats | +0.0500 (")


def test_a_slower_performer_is_not_trained_longer(
    tmp_path: Path, trained: dict[str, dict[str, str]], capsys: pytest.CaptureFixture
) -> None:
    times = ["masked:performer_relu=1", "masked:softmax=0.7", "masked:performer_softmax=1.5"]
    study(tmp_path, "--objectives", "masked", "--rate", "3e-3", "--step-seconds", *times)
    assert [name for name in trained if name.endswith("-time")] == []
    out = capsys.readouterr().out
    assert "masked, seed 0: a step of softmax takes 0.7 s, of performer_relu 1 s; it is not" in out
    assert "| masked | equal tokens | 1 | nats | -0.1000 (" in out and "equal time" not in out


@pytest.mark.parametrize(
    "given",
    [
        *(f"masked:performer_relu={value}" for value in ("-1", "0", "nan", "inf", "", "fast")),
        "masked:typo=3",
        "masked:performer_relu",
    ],
)
def test_times_are_finite_and_of_known_runs(given: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        twins.arguments([*GIVEN, "--step-seconds", given])
    message = capsys.readouterr().err
    assert f"{given!r} is not a finite time above 0 of one of: causal:hybrid, " in message


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
