"""The sweep of recipes: runs are alike but for their option, and no failure is lost."""

import dataclasses
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from protlm.analysis.sequence_sums import SequenceSums, write_sums
from protlm.config import TrainConfig
from protlm.config.composition import compose, to_plain
from protlm.training.run_config import refuse_unused
from studies import recipe

DATA = Path("DATA")


def leaves(config: TrainConfig) -> dict[str, object]:
    """All settings by their dotted names."""

    def walk(name: str, value: object) -> Iterator[tuple[str, object]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(f"{name}.{key}" if name else key, inner)
        else:
            yield name, value

    return dict(walk("", dataclasses.asdict(config)))


def test_a_run_differs_from_the_base_in_its_option_alone(tmp_path: Path) -> None:
    arms = list(recipe.arms(tmp_path))
    assert len({arm.folder for arm in arms}) == len({arm.log for arm in arms}) == len(arms)
    of_relu = {
        arm.option: compose(TrainConfig, arm.overrides(DATA, 1000))
        for arm in arms
        if (arm.attention, arm.size) == ("performer_relu", "small")
    }
    for arm in arms:
        typed = arm.overrides(DATA, 1000)
        refuse_unused(typed, to_plain(compose(TrainConfig, typed)))
    base = of_relu.pop("base")
    assert set(of_relu) == set(recipe.OPTIONS) - {"base"}
    settings = leaves(base)
    for option, config in of_relu.items():
        differ = {name for name, value in leaves(config).items() if value != settings[name]}
        named = {word.split("=")[0] for word in recipe.OPTIONS[option]}
        assert differ - {"run_dir"}, option
        for name in differ - {"run_dir"}:
            assert any(name == one or name.startswith(f"{one}.") for one in named), (option, name)


def test_all_mechanisms_have_the_same_rates_to_choose_from(tmp_path: Path) -> None:
    rates: dict[str, set[float]] = {}
    for arm in recipe.arms(tmp_path):
        if arm.option.startswith(recipe.FULL) and arm.size == "small":
            config = compose(TrainConfig, arm.overrides(DATA, 1000))
            rates.setdefault(arm.attention, set()).add(config.optimizer.learning_rate)
    assert rates["performer_relu"] == rates["softmax"] == rates["hybrid"] == {1.5e-3, 3e-3, 6e-3}


Commands = list[dict[str, str]]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    """The settings of the commands that a study runs, which write tiny results.

    Trainings of the option `Muon` fail; the first evaluation ends between its two files.
    """
    ran: Commands = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        settings = dict(word.split("=", 1) for word in command if "=" in word)
        is_training = command[1:3] == ["-m", "protlm.train"]
        is_first = all("checkpoint" not in one for one in ran)
        ran.append(settings)
        folder = Path(settings["run_dir" if is_training else "checkpoint"])
        code = int(folder.name.endswith("-small-Muon"))
        if is_training:
            folder.mkdir(parents=True, exist_ok=True)
            log = "train_loss,residues_per_second\n2,100\n2,300\n2,200\n"
            (folder / "metrics.csv").write_text(log)
        else:
            write_result(settings, folder.name)
            if is_first:
                Path(settings["output"]).unlink()
            code = int(is_first)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(recipe.subprocess, "run", run)
    return ran


def write_result(settings: dict[str, str], run: str) -> None:
    """Writes what `protlm evaluate` does: five proteins, whose differences to the base vary."""
    bases = {"performer_relu-small-base": 2.7, "softmax-small-base": 2.5}
    nats = bases.get(run, 2.6)
    targets = np.array([10.0, 20.0, 30.0, 10.0, 20.0])
    each = targets * nats + (run not in bases) * np.array([-0.4, -0.2, 0.0, 0.2, 0.4])
    sums = SequenceSums(targets, each, *[targets] * (len(SequenceSums.__dataclass_fields__) - 2))
    path = Path(settings["evaluation.masked.per_sequence"])
    write_sums(path, settings["split"], list("ABCDE"), list("ABCDE"), sums)
    model = {"perplexity": float(np.exp(nats)), "accuracy": 0.1}
    results = {"results": {settings["split"]: {"masked": {"model": model}}}}
    Path(settings["output"]).write_text(json.dumps(results))


def test_the_table_compares_runs_with_the_base_of_their_mechanism(
    tmp_path: Path, commands: Commands, capsys: pytest.CaptureFixture
) -> None:
    given = ["DATA", "VALID", "--jobs", "1", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match=r"3 runs failed, the first: see .*-base\.log"):
        recipe.main(given)
    capsys.readouterr()
    # The interrupted evaluation left sums; it is repeated, and the failed trainings.
    first = len(commands)
    with pytest.raises(SystemExit, match=r"2 runs failed, the first: see .*-Muon\.log"):
        recipe.main(given)
    again = [Path(one.get("run_dir") or one["checkpoint"]).name for one in commands[first:]]
    expected = ["performer_relu-small-base"] * 2
    assert again == [*expected, "performer_relu-small-Muon", "softmax-small-Muon"]
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == len(list(recipe.arms(tmp_path)))
    assert rows[0] == f"| performer_relu | small | base | {np.exp(2.7):.2f} | 10.00% |  | 200 |"
    for mechanism, above in (("performer_relu", -0.1), ("softmax", 0.1)):
        row = next(row for row in rows if f"{mechanism} | small | convolution" in row)
        value = re.escape(f"{above:+.4f}")
        low, high = re.split(rf".*\| {value} \((\S+) to (\S+)\) \| 200 \|", row)[1:3]
        assert float(low) < above - 0.01 and float(high) > above + 0.01
    # Without a base of this size there is nothing to compare with.
    assert rows[-1].endswith("| 10.00% |  | 200 |")


def test_a_failed_training_is_not_evaluated(
    tmp_path: Path, commands: Commands, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        recipe.main(["DATA", "VALID", "--jobs", "1", "--out", str(tmp_path / "out")])
    evaluated = {Path(one["checkpoint"]).name for one in commands if "checkpoint" in one}
    trained = {Path(one["run_dir"]).name for one in commands if "run_dir" in one}
    failed = {"performer_relu-small-Muon", "softmax-small-Muon"}
    assert trained - evaluated == failed and evaluated < trained
    rows = capsys.readouterr().out.splitlines()
    assert "| performer_relu | small | Muon | failed |  |  |  |" in rows


def test_rows_of_the_evaluation_are_as_long_as_those_of_training(tmp_path: Path) -> None:
    arm = next(recipe.arms(tmp_path))
    config = compose(TrainConfig, arm.overrides(DATA, 1000))
    assert f"evaluation.masked.max_length={config.data.max_length}" in arm.evaluation(DATA)
