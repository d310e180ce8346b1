"""The command line as a user meets it: what commands write and print, and how they end."""

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from inspect import signature
from pathlib import Path

import pytest

from protlm.cli import commands as declared
from protlm.cli import main as cli
from protlm.cli.flags import advising, flags_of, help_text, imported, read
from protlm.config.fields import ANYTHING, Checked, at_least, flag
from protlm.model.transformer import ProteinLM
from protlm.options.embed import Pooling
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import check_output
from protlm.system.terminal import JobProgress, print_table
from tests.fixtures.commands import ROOT, Command


def test_debug_shows_the_traceback(workplace: Path, protlm_in_process: Command) -> None:
    for arguments in (["data", "verify", "none"], ["train", "data.dir=none", "run_dir=o"]):
        assert "Traceback" in protlm_in_process(*arguments, "--debug", cwd=workplace, code=3).stderr


def test_an_unwritable_output_is_4(workplace: Path, protlm_in_process: Command) -> None:
    # This imports what the command needs, which the other user may be unable to read.
    protlm_in_process("prepare", "x.fasta", "--out", "first", cwd=workplace)
    locked = workplace / "locked"
    locked.mkdir(mode=0o555)
    for folder in [workplace, *workplace.parents]:
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o055)
    # Root may write anywhere: this process becomes that of another user.
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        typed = ["prepare", "x.fasta", "--out", "locked/data"]
        done = protlm_in_process(*typed, cwd=workplace, code=4)
    finally:
        os.seteuid(user)
    assert "locked/data cannot be written" in done.stderr
    assert list(locked.iterdir()) == []


def test_ctrl_c_while_training_starts_is_silent(tmp_path: Path) -> None:
    started = subprocess.Popen(
        [sys.executable, "-m", "protlm", "train", "run_dir=o", "seed=1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    # Until the program that trains, which replaces the one that was started, imports PyTorch.
    while "libtorch" not in Path(f"/proc/{started.pid}/maps").read_text():
        assert started.poll() is None
        time.sleep(0.02)
    started.send_signal(signal.SIGINT)
    told = started.communicate(timeout=60)[1]
    assert started.returncode == 130, told
    assert "Traceback" not in told
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Options(Checked):
    """Flags of all kinds, of a command that does not exist."""

    # ruff: noqa: RUF009

    files: tuple[Path, ...] = flag("", MISSING, "FILES")
    output: Path = flag("", MISSING, "--output", "-o")
    include: tuple[Pooling, ...] = flag("", ())
    layers: tuple[int, ...] | None = flag("", (-1,), allowed=None)
    organisms: tuple[str, ...] = flag("", (), "--organism", words=r"\d+")
    splits: tuple[str, ...] = flag("", (), words=r"\w+=.+")
    k: int = flag("", 1, allowed=at_least(1), excludes=("is_quick",))
    top_p: float | None = flag("", None)
    prefix: str = flag("", "M", words=ANYTHING)
    label: str = flag("", "x", needs="--prefix TEXT")
    is_quick: bool = flag("", False, "--quick")
    draws: bool = flag("", True)


TYPED = {
    "--include mean bos a b": {"include": ("mean", "bos"), "files": (Path("a"), Path("b"))},
    "a --include mean, bos b": {"include": ("mean", "bos"), "files": (Path("a"), Path("b"))},
    "a --include=mean,bos --include cls": {"include": ("mean", "bos", "cls")},
    "a --layers -1 0 --layers=2,3": {"layers": (-1, 0, 2, 3)},
    "a --layers all": {"layers": None},
    "a --layers 1 b -o y": {"layers": (1,), "files": (Path("a"), Path("b")), "output": Path("y")},
    "--organism 9606 10090 a": {"organisms": ("9606", "10090")},
    "--organism Mus,musculus a": {"organisms": ("Mus,musculus",)},
    "a --splits x=a,b y=c": {"splits": ("x=a,b", "y=c")},
    "a -oy": {"output": Path("y")},
    "FILES FILES=b --k 2": {"files": (Path("FILES"), Path("FILES=b")), "k": 2},
    "a -o=y": {"output": Path("y")},
    "a --k 1e3 --top-p -1e-3": {"k": 1000, "top_p": -1e-3},
    "a --k 2 --k=3.0": {"k": 3},
    "--prefix M a": {"prefix": "M", "files": (Path("a"),)},
    "a --prefix= --no-draws": {"prefix": "", "draws": False},
    "a --prefix -x --label -y --draws --quick": {"prefix": "-x", "is_quick": True},
    "- --": {"files": (Path("-"),)},
    "-- --k -o": {"files": (Path("--k"), Path("-o"))},
}


@pytest.mark.parametrize("typed", TYPED)
def test_what_is_typed_fills_the_fields(typed: str) -> None:
    found = vars(read("x", Options, ["-o", "o", *typed.split()]))
    assert found | TYPED[typed] == found


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("a --kk 1", "^there is no --kk .did you mean --k.*type: x --help$"),
        ("a -x", "^there is no -x "),
        ("a --k", "^--k needs a value; type: x --help$"),
        ("a --k --quick", "^--k needs a value"),
        ("a --quick=yes", "^--quick takes no value"),
        ("", "^FILES is missing; type"),
        ("a --k=", "^the value of --k is empty, like a shell variable"),
        ("a --k 1.5", "^--k 1.5 is not a whole number$"),
        ("a --k 1,5", "^--k 1,5 is not a whole number$"),
        ("a --k x", "^--k x is not a whole number$"),
        ("a --top-p x", "^--top-p x is not a number$"),
        ("a --top-p=1,5", "^--top-p 1,5 has a comma for a point; write 1.5$"),
        ("a --k 0", "^--k 0 must be at least 1$"),
        ("a --layers 1,x", "^--layers 1,x is not a number; type numbers, or --layers all$"),
        ("a --layers all 1", "^--layers all is all of them; leave the other values out$"),
        ("a --include meen", "^--include meen is not one of mean, .*did you mean mean.*$"),
        ("a --k 2 --quick", "^--k and --quick exclude each other; omit one of them$"),
        ("a --label y", "^--label y needs --prefix TEXT$"),
        # An empty argument is not taken for a value.
        *(
            (f"{before} ''", "an argument is empty")
            for before in ("", "a", "a --quick", "a -o o", "a --include mean")
        ),
    ],
)
def test_what_cannot_be_read_is_one_sentence(typed: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        read("x", Options, ["-o", "o", *shlex.split(typed)])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"k": 3}, "it is; type --k 3"),
        ({"is_quick": True, "layers": "LAYERS"}, "it is; type --quick or --layers LAYERS"),
        ({"label": None, "splits": None}, "it is; leave --label and --splits out"),
        ({"output": "x", "organisms": None}, "it is; type --output x, or leave --organism out"),
        ({"of_another_command": 1}, "it is"),
        ({}, "it is"),
    ],
)
def test_a_command_says_what_to_type(options: dict[str, object], told: str) -> None:
    with pytest.raises(InputDataError) as error, advising(Options):
        raise InputDataError("it is", options)
    assert str(error.value) == told


def test_options_are_checked_in_python_as_well() -> None:
    with pytest.raises(UserError, match=r"^k=0 must be at least 1$"):
        Options((), Path(), k=0)


@pytest.mark.parametrize("name", declared.COMMANDS)
def test_a_command_is_declared_as_its_function_takes_it(name: str) -> None:
    """An output has the same names everywhere, and no flag is declared twice."""
    command = declared.COMMANDS[name]
    flags = [*flags_of(command.options)]
    names = [one for flag in flags for one in flag.names]
    assert len(names) == len({*names})
    outputs = [flag.names for flag in flags if {"-o", "--out", "--output"} & {*flag.names}]
    assert outputs in ([], [("--output", "--out", "-o")])
    assert all(flag.field.metadata["help"] for flag in flags)
    if command.function:
        taken = signature(imported(command.function)).parameters
        assert ([*taken] and {*taken} == {one.name for one in fields(command.options)}) or not taken
    shown = help_text("protlm x", command.sentence, command.options)
    assert max(map(len, shown.splitlines())) <= 100


def test_a_dollar_sign_is_refused_where_it_was_typed(own_folder: None) -> None:
    """Outputs may have names from data, with any letters, and files that exist any name."""
    for name in ("$JOB.h5", "${JOB}/x.h5", "a/$JOB"):
        with pytest.raises(UserError, match=r"the shell keeps \$.*JOB in single quotes; type dou"):
            read("x", Options, ["a", "-o", name])
    Path("a$b").mkdir()
    assert read("x", Options, ["a", "-o", "a$b/x.h5"]).output == Path("a$b/x.h5")
    check_output(Path("maps.P$x1.png"))


def test_a_command_that_a_cluster_ends_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it writes is tidied up, as at Ctrl-C."""

    def work(arguments: list[str]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(cli, "run", work)
    monkeypatch.setattr(sys, "argv", ["protlm", "data", "export", "data"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "protlm: interrupted\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        *(("~/x", "/home/me/x"), ("--output=~/x", "--output=/home/me/x"), ("-o~", "-o/home/me")),
        *((same, same) for same in ("a/~/x", "--output=a~", "--output=./~/x", "MK~", "")),
    ],
)
def test_a_home_folder_is_found_where_the_shell_does_not_look(
    typed: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert cli._in_home(typed) == found


OVER = "no part is finished: the same command starts over"
AGAIN = "nothing was written; the same command starts again"
COMMANDS = {
    "embed": (["x.fasta", "-o", "o.h5"], OVER),
    "attention": (["x.fasta", "-o", "o.h5"], AGAIN),
    "contacts": (["x.fasta", "-o", "o.h5"], AGAIN),
    "score": (
        ["v.csv", "-o", "o.csv", "--wild-type", "x.fasta"],
        "tables named as complete are kept",
    ),
}


@pytest.mark.parametrize("command", [*COMMANDS, "evaluate"])
def test_ctrl_c_says_how_to_continue(
    command: str, workplace: Path, protlm_in_process: Command, fail_at: Callable[..., None]
) -> None:
    (workplace / "v.csv").write_text("mutant\nM1A\n")
    before = {path.name for path in workplace.iterdir()}
    fail_at(ProteinLM, "_context", KeyboardInterrupt())
    if command == "evaluate":
        settings = ["data.dir=data", "split=test", "evaluation=[masked]", "output=o.json"]
        arguments, says = ["checkpoint=run", *settings], AGAIN
    else:
        arguments, says = COMMANDS[command]
        arguments = [*arguments, "-m", "run"]
    done = protlm_in_process(command, *arguments, cwd=workplace, code=130)
    last = "".join(done.stderr.splitlines()[-2:])
    assert "protlm: interrupted" in last and says in last
    assert {path.name for path in workplace.iterdir()} == before


def test_progress_has_a_rate_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 1_000.0)
    with JobProgress("residues", 3_000, done=1_000) as progress:
        monkeypatch.setattr("time.monotonic", lambda: 1_010.0)
        progress.update(1_100)
        monkeypatch.setattr("time.monotonic", lambda: 1_020.0)
        progress.update(2_000)
        monkeypatch.setattr("time.monotonic", lambda: 1_040.0)
        progress.update(3_000)
    # The first piece, which starts everything, says nothing about the others.
    assert capsys.readouterr().err.splitlines() == [
        "residues 1,100/3,000  10/s",
        "residues 2,000/3,000  50/s  0:00:11 left",
        "residues 3,000/3,000  50/s",
    ]


@pytest.mark.parametrize("number", [1, 9])
@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_terminal_and_a_pipe_cut_no_name_in_a_table(
    width: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows are shown as columns; a pipe has 100."""
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: width == 80)
    monkeypatch.setattr("sys.stdout", written)
    monkeypatch.setenv("COLUMNS", "80")
    rows = [[f"masked-marginals-{n}{row}" for n in range(8)] for row in range(number)]
    print_table([f"perplexity {n}" for n in range(8)], rows)
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", written.getvalue())
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width
    assert ("  perplexity 7  masked-marginals-70  \n" in shown) == (number == 1)
    assert number == 1 or all(f"  masked-marginals-0{row}  " in shown for row in range(number))


@pytest.mark.parametrize("typed", ["-h", "embed -h", "data info -h", "train -h", "evaluate -h"])
def test_h_is_help(typed: str, protlm_in_process: Command) -> None:
    done = protlm_in_process(*typed.split(), cwd=Path())
    assert done.stdout.startswith("Usage: protlm"), done.stderr


@pytest.mark.parametrize(
    ("typed", "found"), [("e", "embed evaluate"), ("embed --outp", "--output"), ("data i", "info")]
)
def test_the_shell_completes(typed: str, found: str, protlm_in_process: Command) -> None:
    made = protlm_in_process("--completion", cwd=Path()).stdout
    words = f"COMP_WORDS=(protlm {typed}); COMP_CWORD={len(typed.split())}"
    shown = f"{made}{words}; _protlm; echo ${{COMPREPLY[*]}}"
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True)
    assert done.stdout.split() == found.split(), done.stderr
