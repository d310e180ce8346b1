"""The sweep of recipes: runs are alike but for their option, and no failure is lost."""

import dataclasses
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from protlm.analysis.sequence_sums import SequenceSums, write_sums
from protlm.composition import compose
from protlm.config import TrainConfig
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


def write_result(arm: recipe.Arm, nats: float) -> None:
    """Writes what training and evaluation leave: five proteins of equal nats per residue."""
    arm.folder.mkdir(parents=True)
    (arm.folder / "metrics.csv").write_text("train_loss,residues_per_second\n2,100\n2,300\n2,200\n")
    model = {"perplexity": float(np.exp(nats)), "accuracy": 0.1}
    arm.report.write_text(json.dumps({"results": {"valid": {"masked": {"model": model}}}}))
    targets = np.array([10.0, 20.0, 30.0, 10.0, 20.0])
    others = len(SequenceSums.__dataclass_fields__) - 2
    sums = SequenceSums(targets, nats * targets, *[targets] * others)
    path = arm.folder / "evaluated.tsv"
    write_sums(path, "valid", list("ABCDE"), list("ABCDE"), sums)


def test_differences_are_from_the_base_of_the_same_mechanism(tmp_path: Path) -> None:
    both = {"performer_relu", "softmax"}
    arms = [arm for arm in recipe.arms(tmp_path) if arm.option in {"base", "Muon"}]
    arms = [arm for arm in arms if arm.attention in both]
    nats = {("performer_relu", "base"): 2.7, ("performer_relu", "Muon"): 2.6}
    nats |= {("softmax", "base"): 2.5, ("softmax", "Muon"): 2.75}
    for arm in arms:
        write_result(arm, nats[arm.attention, arm.option])
    rows = recipe.table(arms).splitlines()[2:]
    base = f"| performer_relu | small | base | {np.exp(2.7):.2f} | 10.00% |  | 200 |"
    assert rows[0] == base
    assert any("performer_relu | small | Muon" in row and " -0.1000 (" in row for row in rows)
    assert any("softmax | small | Muon" in row and " +0.2500 (" in row for row in rows)


def test_a_failed_run_is_a_row_and_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(recipe.subprocess, "run", run)
    with pytest.raises(SystemExit, match=r"runs failed, the first: see .*base\.log"):
        recipe.main(["DATA", "VALID", "--out", str(tmp_path / "out")])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == len(list(recipe.arms(tmp_path)))
    assert all("failed" in row for row in rows)
