"""Standard streams that are closed, full, or without a reader; and input that ends early."""

import gzip
import subprocess
import sys

import pytest

from protlm.system.paths import sample_dir
from tests.fixtures.commands import Command, ended

pytestmark = pytest.mark.slow

# Writes to a pipe without a reader, other than standard output.
WRITE = """
import os
from protlm.system.errors import exit_with_message
reader, writer = os.pipe()
os.close(reader)
exit_with_message(lambda: os.write(writer, b"to a worker that has ended"))
"""
TINY = sample_dir() / "uniprot_tiny.fasta.gz"

# Redirections: a reader ends at once or after two lines, a disk is full, or a stream is closed, as
# cron and service managers do.
LOSSES = {
    "no reader": "2> >(exec true)",
    "a reader of two lines": "2> >(head -2 >/dev/null)",
    "no reader of both": "> >(exec true) 2>&1",
    "a full disk": "2>/dev/full",
    "no output": ">&-",
    "no errors": "2>&-",
    "neither": ">&- 2>&-",
    "nothing": "<&- >&- 2>&-",
}
# Commands, and what they make.
COMMANDS = {
    "embed": (f"embed {TINY} -m {{run}} -o out.h5", "out.h5"),
    "prepare": (f"prepare {TINY} --out data", "data/manifest.json"),
    "train": ("train {settings} run_dir=run trainer.max_steps=3", "run/checkpoints/latest"),
    "evaluate": ("evaluate checkpoint={run} data.dir={data} output=out.json", "out.json"),
}
LOG_LOSSES = ["no reader", "a reader of two lines", "a full disk", "no errors", "neither"]
CASES = [("embed", loss) for loss in [*LOG_LOSSES[1:3], "neither", "no reader of both"]]
CASES += [("prepare", loss) for loss in ("no reader", "no errors")]
CASES += [("train", loss) for loss in ("no reader of both", "nothing")]
CASES += [("evaluate", "no output")]


@pytest.fixture
def shell(one_process, tmp_path) -> Command:
    """Runs a command of bash, which must end with `code`; `protlm` is the command line."""
    define = f'set -o pipefail; protlm() {{ {sys.executable} -m protlm "$@"; }}'

    def run(command: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            ["bash", "-c", f"{define}; {command}"],
            cwd=tmp_path,
            env=one_process,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return ended(done, code)

    return run


@pytest.mark.parametrize(("command", "loss"), CASES)
def test_a_command_completes(command, loss, shell, tiny_run, tiny_data, tiny_settings, tmp_path):
    typed, made = COMMANDS[command]
    typed = typed.format(run=tiny_run, data=tiny_data, settings=" ".join(tiny_settings))
    # The readers end before it starts.
    done = shell(f"( {{ sleep 0.3; protlm {typed}; }} {LOSSES[loss]} )")
    assert "Traceback" not in done.stdout + done.stderr
    assert (tmp_path / made).exists()
    assert [path.name for path in tmp_path.iterdir()] == [made.split("/")[0]]


@pytest.mark.parametrize("loss", [*LOG_LOSSES, "no reader of both"])
def test_a_failure_keeps_its_exit_code(loss, shell, tmp_path):
    shell(f"( {{ sleep 0.3; protlm data info nothing; }} {LOSSES[loss]} )", 3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("reader", ["head -1", "true", "head -c 100000"])
def test_export_ends_silently_without_a_reader(shell, tiny_data, reader):
    done = shell(f"protlm data export {tiny_data} | {reader}")
    assert not done.stderr
    assert reader == "true" or done.stdout.startswith(">")


@pytest.mark.parametrize("command", ["info", "export"])
def test_output_on_a_full_disk_is_one_sentence(shell, tiny_data, command):
    done = shell(f"protlm data {command} {tiny_data} > /dev/full", 4)
    assert done.stderr.startswith("protlm: standard output: no space left")
    assert len(done.stderr.splitlines()) == 1


def test_a_pipe_to_another_process_is_not_standard_output(shell):
    assert "internal error" in shell(f"{sys.executable} -c '{WRITE}'", 1).stderr


def test_standard_input_is_prepared(shell, tmp_path):
    """Plain FASTA cut short is undetectable; its last record is shorter."""
    (tmp_path / "plain.fasta").write_bytes(gzip.decompress(TINY.read_bytes()))
    for number, command in enumerate((f"zcat {TINY}", "head -c 20000 plain.fasta")):
        shell(f"{command} | protlm prepare - --out data-{number}")
        assert (tmp_path / f"data-{number}" / "manifest.json").exists()


@pytest.mark.parametrize("given", [f"head -c 20000 {TINY} |", "true |", ""])
def test_input_that_ends_early_is_one_sentence(shell, tmp_path, given):
    done = shell(f"{given} protlm prepare - --out data {'' if given else '<&-'}", 3)
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("protlm: standard input")]
    assert list(tmp_path.iterdir()) == []
