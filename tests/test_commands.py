"""The command line as a user meets it: exit codes, one sentence, nothing left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from protlm import cli
from protlm.cli import _spread
from protlm.paths import conf_dir, sample_dir

Command = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = Path(__file__).resolve().parent.parent
FASTA = ">P1\nMKTAYIAKQRQISFVKSHFSRQ\n"


@pytest.fixture
def workplace(tmp_path: Path, tiny_run: Path, tiny_data: Path) -> Path:
    """A folder with a FASTA file, links to a run and to shards, and a damaged run."""
    (tmp_path / "x.fasta").write_text(FASTA)
    (tmp_path / "run").symlink_to(tiny_run)
    (tmp_path / "data").symlink_to(tiny_data)
    shutil.copytree(tiny_run, tmp_path / "broken")
    checkpoint = next((tmp_path / "broken" / "checkpoints").glob("*.ckpt"))
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    return tmp_path


WRONG = {
    "unknown command": (["embedd"], 2, ["embedd", "--help"]),
    "missing option": (["embed", "x.fasta"], 2, ["--model"]),
    "wrong choice": (
        ["embed", "x.fasta", "-m", "run", "-o", "o.h5", "--include", "max"],
        2,
        ["max", "mean"],
    ),
    "no such fasta": (["embed", "none.fasta", "-m", "run", "-o", "o.h5"], 3, ["none.fasta"]),
    "no such model": (["embed", "x.fasta", "-m", "none", "-o", "o.h5"], 3, ["none"]),
    "broken model": (["embed", "x.fasta", "-m", "broken", "-o", "o.h5"], 3, ["step-00000004.ckpt"]),
    "output is there": (["embed", "x.fasta", "-m", "run", "-o", "x.fasta"], 4, ["x.fasta"]),
    "output under a file": (
        ["embed", "x.fasta", "-m", "run", "-o", "x.fasta/o.h5"],
        4,
        ["x.fasta"],
    ),
    "maps of no layer": (
        ["attention", "x.fasta", "-m", "run", "-o", "o.h5", "--layers", "9"],
        2,
        ["9"],
    ),
    "contacts of nothing": (["contacts", "none.pdb", "-m", "run", "-o", "o.h5"], 3, ["none.pdb"]),
    "generate by a masked model": (
        ["generate", "-m", "run", "-o", "o.fasta"],
        2,
        ["objective=causal"],
    ),
    "generate onto something": (["generate", "-m", "run", "-o", "x.fasta"], 4, ["x.fasta"]),
    "generate by no model": (["generate", "-m", "none", "-o", "o.fasta"], 3, ["none"]),
    "generate at no temperature": (
        ["generate", "-m", "run", "-o", "o.fasta", "--temperature", "-1"],
        2,
        ["-1"],
    ),
    "generate from no mass": (
        ["generate", "-m", "run", "-o", "o.fasta", "--top-p", "0"],
        2,
        ["top-p 0"],
    ),
    "generate after no residues": (
        ["generate", "-m", "run", "-o", "o.fasta", "--prefix", "MK1"],
        2,
        ["--prefix", "'1' at residue 3"],
    ),
    "no shards": (["data", "verify", "none"], 3, ["none"]),
    "no such split": (["data", "export", "data", "--split", "tset"], 2, ["tset", "test"]),
    "prepare nothing": (["prepare", "none.fasta", "--out", "o"], 3, ["none.fasta"]),
    "prepare onto something": (["prepare", "x.fasta", "--out", "broken"], 4, ["broken"]),
    "fractions above one": (
        ["prepare", "x.fasta", "--out", "o", "--test-fraction", "1.5"],
        2,
        ["1.5"],
    ),
    "two split rules": (
        ["prepare", "x.fasta", "--out", "o", "--split-table", "t.tsv", "--cluster"],
        2,
        ["--split-table", "--cluster"],
    ),
    "families of no table": (
        ["prepare", "x.fasta", "--out", "o", "--ood-families", "PF00069", "PF00001"],
        2,
        ["--family-table", "uniprot.org"],
    ),
    "no such cluster table": (
        ["prepare", "x.fasta", "--out", "o", "--cluster-table", "none.tsv"],
        3,
        ["none.tsv"],
    ),
    "leakage of nothing": (["data", "leakage", "none"], 3, ["none", "protlm prepare"]),
    "leakage at no share": (["data", "leakage", "data", "--min-shared", "50"], 2, ["50", "1"]),
    "prepare by no worker": (
        ["prepare", "x.fasta", "--out", "o", "--workers", "0"],
        2,
        ["--workers 0"],
    ),
    "prepare what cannot be": (
        ["prepare", "x.fasta", "--out", "o", "--min-length", "9", "--max-length", "3"],
        2,
        ["--min-length 9", "--max-length 3"],
    ),
    "an organism that nobody is": (
        ["prepare", "x.fasta", "--out", "o", "--organism", "9606"],
        3,
        ["none of the 1 records is left", "organism"],
    ),
    "an executor that is none": (
        ["prepare", "x.fasta", "--out", "o", "--executor", "pbs"],
        2,
        ["pbs", "slurm", "local"],
    ),
    "settings of no executor": (
        ["prepare", "x.fasta", "--out", "o", "--slurm", "time=1"],
        2,
        ["--slurm time=1", "--executor slurm"],
    ),
    "a source that is no sequences": (["prepare", "run", "--out", "o"], 3, ["run"]),
    "merge with itself": (["data", "merge", "data", "data", "--out", "o"], 2, ["once"]),
    "merge nothing": (["data", "merge", "none", "--out", "o"], 3, ["none", "protlm prepare"]),
    "broken checkpoint": (["checkpoint", "verify", "broken"], 3, ["step-00000004.ckpt"]),
    "no such checkpoint": (["checkpoint", "info", "none"], 3, ["none"]),
    "wrong key": (["train", "data.dirr=data"], 2, ["data.dirr", "data.dir"]),
    "wrong choice of a group": (["train", "model=huge"], 2, ["huge", "small"]),
    "train on nothing": (["train", "data.dir=none", "run_dir=o"], 3, ["none", "protlm prepare"]),
    "train on no split": (
        ["train", "data.dir=data", "data.train_split=tran", "run_dir=o"],
        2,
        ["tran", "train"],
    ),
    "another recipe": (
        ["train", "trainer.accumulate=3", "data.dir=data", "run_dir=run"],
        2,
        ["run_dir"],
    ),
    "a flag hydra does not know": (["train", "--max-steps", "5"], 2, ["--max-steps", "key=value"]),
    "a path for a setting": (["evaluate", "./run"], 2, ["checkpoint=./run"]),
    "no model by its name": (["checkpoint", "info", "x.fasta"], 3, ["x.fasta", ".ckpt"]),
    "no structures to fit on": (
        ["contacts", "x.fasta", "-m", "run", "-o", "o.h5", "--fit", "none"],
        3,
        ["none"],
    ),
    "more processes than they are of use": (
        ["train", "trainer.accelerator=cpu", "trainer.devices=9999", "run_dir=o"],
        2,
        ["trainer.devices=9999", "processors"],
    ),
    "no gpu": (["train", "trainer.accelerator=gpu", "trainer.devices=99"], 2, ["GPUs"]),
    "no layers": (["train", "model.num_layers=0", "run_dir=o"], 2, ["model.num_layers=0"]),
    "no split at all": (["evaluate", "checkpoint=run", "data.dir=data", "split=[]"], 2, ["split"]),
    "train onto something": (["train", "data.dir=data", "run_dir=x.fasta"], 4, ["x.fasta"]),
    "train something else there": (
        ["train", "model=small", "data.dir=data", "run_dir=run"],
        2,
        ["run_dir"],
    ),
    "train in float16": (["train", "trainer.precision=16-mixed", "run_dir=o"], 2, ["16-mixed"]),
    "more positions than there are": (
        ["train", "model.positions=learned", "data.max_length=4096", "run_dir=o"],
        2,
        ["data.max_length"],
    ),
    "look ahead with a causal model": (
        ["train", "attention=linformer", "objective=causal", "run_dir=o"],
        2,
        ["attention=linformer", "objective=masked", "performer_relu", "hybrid"],
    ),
    "a misspelt setting of attention": (
        ["train", "attention=performer_softmax", "attention.estimatr=positive", "run_dir=o"],
        2,
        ["attention.estimatr", "did you mean attention.estimator?", "num_features"],
    ),
    "an inner setting without its plus": (
        ["train", "attention=hybrid", "attention.options.num_features=64", "run_dir=o"],
        2,
        ["+attention.options.num_features=VALUE"],
    ),
    "a table too short": (
        ["train", "attention=aft_full", "data.max_length=4096", "run_dir=o"],
        2,
        ["data.max_length=4096", "model.max_length"],
    ),
    "keep what is not there": (
        ["train", "model.reversible=true", "trainer.activation_checkpointing=true", "run_dir=o"],
        2,
        ["trainer.activation_checkpointing"],
    ),
    "sweep on two devices": (
        ["train", "--multirun", "trainer.devices=2", "seed=0,1", "run_dir=o", "data.dir=data"],
        2,
        ["--multirun"],
    ),
    "evaluate nothing": (["evaluate", "evaluation=[masked]"], 2, ["checkpoint"]),
    "evaluate what is not": (["evaluate", "checkpoint=run", "evaluation=[maskd]"], 2, ["maskd"]),
    "evaluate on no split": (
        ["evaluate", "checkpoint=run", "data.dir=data", "split=none", "output=o.json"],
        2,
        ["none", "valid"],
    ),
    "evaluate without data": (["evaluate", "checkpoint=run"], 2, ["data.dir=DIR"]),
    "evaluate a broken run": (
        ["evaluate", "checkpoint=broken", "data.dir=data", "split=test", "output=o.json"],
        3,
        ["step-00000004.ckpt"],
    ),
}


# A process that trains imports for seconds: of those all but a few are left to `make test-all`.
QUICK = ("wrong key", "a misspelt setting of attention", "train onto something", "another recipe")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * (words[0] == "train" and case not in QUICK))
        for case, (words, *_) in WRONG.items()
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    case: str, workplace: Path, protlm_command: Command
) -> None:
    arguments, code, words = WRONG[case]
    before = {path: path.stat().st_mtime_ns for path in workplace.rglob("*")}
    done = protlm_command(*arguments, cwd=workplace)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    told = [line for line in done.stderr.splitlines() if line.startswith("protlm: ")]
    assert len(told) == 1, done.stderr
    for word in words:
        assert word in told[0]
    assert {path: path.stat().st_mtime_ns for path in workplace.rglob("*")} == before


def test_debug_shows_the_traceback(workplace: Path, protlm_command: Command) -> None:
    for arguments in (["data", "verify", "none"], ["train", "data.dir=none", "run_dir=o"]):
        done = protlm_command(*arguments, "--debug", cwd=workplace)
        assert done.returncode == 3
        assert "Traceback" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="needs setpriv")
def test_an_unwritable_output_is_4(workplace: Path) -> None:
    """As another user than root, for whom nothing is unwritable."""
    locked = workplace / "locked"
    locked.mkdir(mode=0o555)
    command = [sys.executable, "-m", "protlm", "prepare", "x.fasta", "--out", "locked/data"]
    drop = ["setpriv", "--reuid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    for folder in [workplace, *workplace.parents]:
        if folder != Path("/") and folder.stat().st_uid == os.geteuid() and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    done = subprocess.run(
        [*drop, *command],
        cwd=workplace,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "Permission denied" in done.stderr and "protlm:" not in done.stderr:
        pytest.skip("the interpreter cannot be run by another user")
    assert done.returncode == 4, done.stderr
    assert "locked/data cannot be written" in done.stderr
    assert list(locked.iterdir()) == []


def test_the_sample_comes_back_whole(protlm_command: Command, tmp_path: Path) -> None:
    sample = sample_dir()
    arguments = ["--split-table", sample / "uniprot_sample.splits.tsv.gz", "--out", "D"]
    made = protlm_command("prepare", sample / "uniprot_sample.fasta.gz", *arguments, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert protlm_command("data", "verify", "D", cwd=tmp_path).returncode == 0
    assert protlm_command("data", "info", "D", cwd=tmp_path).returncode == 0
    exported = protlm_command("data", "export", "D", cwd=tmp_path)
    (tmp_path / "back.fasta").write_text(exported.stdout)

    from protlm.data.records import Tally, read_records

    def sequences(path: Path) -> dict[str, str]:
        return {r.identifier: r.sequence for r in read_records(path, Tally())}

    whole = sequences(sample / "uniprot_sample.fasta.gz")
    assert len(whole) == 12_373
    assert sequences(tmp_path / "back.fasta") == whole


def test_evaluate_writes_what_it_prints(workplace: Path, protlm_command: Command) -> None:
    done = protlm_command(
        "evaluate",
        "checkpoint=run",
        "evaluation=[masked,causal]",
        "data.dir=data",
        "split=[test,valid]",
        "output=metrics.json",
        cwd=workplace,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((workplace / "metrics.json").read_text())
    assert set(report["results"]) == {"test", "valid"}
    perplexity = report["results"]["test"]["masked"]["model"]["perplexity"]
    assert f"{perplexity:.2f}" in done.stdout


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_ctrl_c_while_starting_is_silent(command: str, tmp_path: Path) -> None:
    started = subprocess.Popen(
        [sys.executable, "-m", "protlm", command, "run_dir=o"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    # Until the command has replaced the process that was started.
    while f"protlm.{command}" not in Path(f"/proc/{started.pid}/cmdline").read_text():
        time.sleep(0.02)
    time.sleep(0.3)
    started.send_signal(signal.SIGINT)
    told = started.communicate(timeout=60)[1]
    assert started.returncode == 130, told
    assert "Traceback" not in told
    assert list(tmp_path.iterdir()) == []


def test_export_and_use_of_an_exported_folder(workplace: Path, protlm_command: Command) -> None:
    assert (
        protlm_command("checkpoint", "export", "run", "-o", "model", cwd=workplace).returncode == 0
    )
    assert protlm_command("checkpoint", "verify", "model", cwd=workplace).returncode == 0
    done = protlm_command("embed", "x.fasta", "-m", "model", "-o", "o.h5", cwd=workplace)
    assert done.returncode == 0, done.stderr
    told = protlm_command("checkpoint", "info", "model", cwd=workplace).stdout
    assert "performer_relu" in told and "86,497" in told


def test_contacts_of_a_structure(workplace: Path, protlm_command: Command) -> None:
    import h5py

    structure = sample_dir() / "structures" / "test" / "1fuk_A.pdb.gz"
    arguments = ["-m", "run", "-o", "c.h5", "--figure", "c.png"]
    done = protlm_command("contacts", structure, *arguments, cwd=workplace)
    assert done.returncode == 0, done.stderr
    with h5py.File(workplace / "c.h5") as file:
        (entry,) = file.values()
        assert entry["probabilities"].shape == entry["contacts"].shape == (119, 119)
        assert set(entry["contacts"][:].ravel()) <= {-1, 0, 1}
    assert (workplace / "c.png").is_file()


def test_contacts_account_for_every_record(workplace: Path, protlm_command: Command) -> None:
    (workplace / "x.fasta").write_text(f"{FASTA}>P2\nMK1V\n>P3\n\n")
    done = protlm_command("contacts", "x.fasta", "-m", "run", "-o", "c.h5", cwd=workplace)
    assert done.returncode == 0, done.stderr
    assert "3 records: 1 predicted, 2 skipped" in done.stderr
    assert "1 blank sequence" in done.stderr and "1 digit" in done.stderr


def test_one_flag_takes_several_values() -> None:
    together = "--repr-layers 0 -1 --include mean bos x.fasta"
    apart = "--repr-layers 0 --repr-layers -1 --include mean --include bos x.fasta"
    assert _spread(together.split()) == apart.split()


def test_a_mechanism_is_one_py_and_one_yaml(tmp_path: Path, tiny_data: Path) -> None:
    """The example of CONTRIBUTING.md, added to a copy of the program, trains."""
    for folder in ("protlm", "data_prep"):
        ignore = shutil.ignore_patterns("__pycache__", "*.gz", "conf")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignore)
    shutil.copytree(conf_dir(), tmp_path / "conf")
    blocks = (ROOT / "CONTRIBUTING.md").read_text().split("```")
    (python,) = [b.removeprefix("python\n") for b in blocks if b.startswith("python\n")]
    (yaml,) = [b.removeprefix("yaml\n") for b in blocks if b.startswith("yaml\n")]
    (tmp_path / "protlm" / "attention" / "mean_pooling.py").write_text(python)
    (tmp_path / "conf" / "attention" / "mean_pooling.yaml").write_text(yaml)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "protlm", "train", "model=tiny", "attention=mean_pooling"),
            *("attention.scale=0.5", f"data.dir={tiny_data}", "run_dir=run", "data.max_length=64"),
            *("trainer.max_steps=2", "schedule.warmup_steps=0", "trainer.accelerator=cpu"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "mean_pooling" in done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-00000002.ckpt").is_file()


def test_a_command_that_a_cluster_ends_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it writes is tidied up, as at Ctrl-C."""

    def work(arguments: list[str]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(cli, "_run", work)
    monkeypatch.setattr(sys, "argv", ["protlm", "data", "export", "data"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "protlm: interrupted\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
