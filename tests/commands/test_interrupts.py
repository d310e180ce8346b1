"""Ctrl-C in a long command ends it in a sentence that says how to continue."""

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from protlm.model.transformer import ProteinLM
from protlm.system.terminal import JobProgress

CONTINUES = "the same command continues after the last batch that is finished in o.h5.partial"
AGAIN = "nothing was written; the same command starts again"
COMMANDS = {
    "embed": (["x.fasta", "-o", "o.h5"], CONTINUES),
    "attention": (["x.fasta", "-o", "o.h5"], AGAIN),
    "contacts": (["x.fasta", "-o", "o.h5"], AGAIN),
    "score": (["v.csv", "-o", "o.csv", "--wild-type", "x.fasta"], "complete tables are kept"),
}


def interrupt(*_: object, **__: object) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", [*COMMANDS, "evaluate"])
def test_ctrl_c_says_how_to_continue(
    command: str,
    workplace: Path,
    protlm_in_process: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (workplace / "v.csv").write_text("mutant\nM1A\n")
    before = {path.name for path in workplace.iterdir()}
    monkeypatch.setattr(ProteinLM, "_context", interrupt)
    if command == "evaluate":
        settings = ["data.dir=data", "split=test", "evaluation=[masked]", "output=o.json"]
        arguments, says = ["checkpoint=run", *settings], AGAIN
    else:
        arguments, says = COMMANDS[command]
        arguments = [*arguments, "-m", "run"]
    done = protlm_in_process(command, *arguments, cwd=workplace)
    assert done.returncode == 130, done.stderr
    assert f"protlm: interrupted: {says}" in done.stderr.splitlines()[-1]
    assert {path.name for path in workplace.iterdir()} == before


def test_progress_has_a_rate_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 1_000.0)
    with JobProgress("residues", 3_000, done=1_000) as progress:
        monkeypatch.setattr("time.monotonic", lambda: 1_010.0)
        progress.update(1_500)
        monkeypatch.setattr("time.monotonic", lambda: 1_020.0)
        progress.update(3_000)
    assert capsys.readouterr().err.splitlines() == [
        "residues 1,500/3,000  50/s  0:00:30 left",
        "residues 3,000/3,000  100/s",
    ]
