"""Mistakes at the command line: an exit code, one sentence, and nothing left behind."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.marks import slow_but

Command = Callable[..., "subprocess.CompletedProcess[str]"]

# Arguments, the exit code, and what the sentence says.
WRONG: dict[str, tuple[list[str], int, list[str]]] = {
    "adapters without a rank": (
        ["finetune", "x.tsv", "-m", "run", "-o", "o", "--lora-targets", "query"],
        2,
        ["--lora-targets query needs --lora RANK"],
    ),
    **{
        f"{arguments[0]} {flag} {value[:12]}": (
            [*arguments, flag, value],
            2,
            [flag, value[:12], range],
        )
        for arguments, flag, value, range in (
            (["probe", "x.tsv", "-o", "o"], "--seed", "-1", "at least 0"),
            (["probe", "x.tsv", "-o", "o"], "--toks-per-batch", "0", "at least 1"),
            (["predict", "x.fasta", "-o", "o"], "--toks-per-batch", "0", "at least 1"),
            (["score", "x.csv", "-o", "o"], "--toks-per-batch", "0", "at least 1"),
            (["finetune", "x.tsv", "-o", "o"], "--devices", "0", "at least 1"),
            (["finetune", "x.tsv", "-o", "o"], "--epochs", "0", "at least 1"),
            (["finetune", "x.tsv", "-o", "o"], "--lora", "0", "at least 1"),
            (["finetune", "x.tsv", "-o", "o"], "--learning-rate", "0", "above 0"),
            (["generate", "-m", "run", "-o", "o"], "--number", "0", "at least 1"),
            (["generate", "-m", "run", "-o", "o"], "--batch-size", "0", "at least 1"),
            (["generate", "-m", "run", "-o", "o"], "--sweeps", "0", "at least 1"),
            (["generate", "-m", "run", "-o", "o"], "--seed", "-1", "at least 0"),
            (["probe", "x.tsv", "-o", "o"], "--seed", str(2**64), "below 2^63"),
            (["finetune", "x.tsv", "-o", "o"], "--seed", str(2**63), "below 2^63"),
            (["finetune", "x.tsv", "-o", "o"], "--lora", str(10**30), "below 2^63"),
            (["finetune", "x.tsv", "-o", "o"], "--learning-rate", "inf", "below 2^63"),
            (["finetune", "x.tsv", "-o", "o"], "--learning-rate", "nan", "above 0"),
            (["probe", "x.tsv", "-o", "o"], "--min-count", "-1", "at least 0"),
            (["generate", "-m", "run", "-o", "o"], "--number", str(10**30), "100000000"),
            (["generate", "-m", "run", "-o", "o"], "--batch-size", str(10**30), "below 2^63"),
            (["generate", "-m", "run", "-o", "o"], "--top-k", "-3", "at least 1"),
            (["embed", "x.fasta", "-o", "o.h5"], "--toks-per-batch", "0", "at least 1"),
            (["embed", "x.fasta", "-o", "o.h5"], "--processes", str(10**9), "1000"),
            (["embed", "x.fasta", "-o", "o.h5"], "--shard", "9" * 5000, "I/N"),
            (["score", "x.csv", "-o", "o.csv"], "--first-residue", str(10**30), "1000000000"),
        )
    },
    **{
        f"an empty {word}": (arguments, 2, [f"the value of {word} is empty"])
        for word, arguments in {
            "-m": ["embed", "x.fasta", "-m", "", "-o", "o.h5"],
            "-o": ["prepare", "x.fasta", "--out", "data", "-o", ""],
            "--output": ["embed", "x.fasta", "--output="],
        }.items()
    },
    "a negative seed": (["train", "seed=-1", "run_dir=o"], 2, ["seed=-1 must be at least 0"]),
    "a long seed": (["train", f"seed={2**64}", "run_dir=o"], 2, ["must be below 2^63"]),
    "an infinite rate": (
        ["train", "optimizer.learning_rate=inf", "run_dir=o"],
        2,
        ["optimizer.learning_rate=inf must be below 2^63"],
    ),
    "an empty source": (["prepare", "", "--out", "o"], 2, ["an argument is empty"]),
    "a name without room": (
        ["embed", "x.fasta", "-m", "run", "-o", f"{'n' * 246}.h5"],
        4,
        ["at most 247 bytes", "NAME.partial"],
    ),
    "a name in two bytes a letter": (["prepare", "x.fasta", "--out", "é" * 124], 4, ["247 bytes"]),
    "a scan onto the folder": (
        ["score", "x.fasta", "--scan", "-m", "run", "-o", "."],
        4,
        ["exists"],
    ),
    "predictions onto the folder": (["predict", "x.fasta", "-p", "run", "-o", "."], 4, ["exists"]),
    "unknown command": (["embedd"], 2, ["embedd", "--help"]),
    "missing option": (["embed", "x.fasta"], 2, ["--output"]),
    "wrong choice": (
        ["embed", "x.fasta", "-m", "run", "-o", "o.h5", "--include", "median"],
        2,
        ["median", "mean"],
    ),
    "no such fasta": (["embed", "none.fasta", "-m", "run", "-o", "o.h5"], 3, ["none.fasta"]),
    "no such model": (["embed", "x.fasta", "-m", "none", "-o", "o.h5"], 3, ["none"]),
    "a misspelled model": (
        ["embed", "x.fasta", "-m", "hybird-6m", "-o", "o.h5"],
        3,
        ["hybird-6m: no such model (did you mean hybrid-6m?); give a run"],
    ),
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
    "score without a wild type": (
        ["score", "x.csv", "-m", "run", "-o", "o.csv"],
        2,
        ["--wild-type", "--reference"],
    ),
    "score no variants": (
        ["score", "none.csv", "-m", "run", "-o", "o.csv", "--wild-type", "x.fasta"],
        3,
        ["none.csv"],
    ),
    "score sequences": (
        ["score", "x.fasta", "-m", "run", "-o", "o.csv", "--wild-type", "x.fasta"],
        2,
        ["--scan", "--wild-type x.fasta"],
    ),
    "score by no estimator": (
        ["score", "x.csv", "-m", "run", "-o", "o.csv", "--estimator", "esm"],
        2,
        ["esm", "masked-marginals"],
    ),
    "score into HDF5": (["score", "x.fasta", "--scan", "-m", "run", "-o", "o.h5"], 2, ["o.csv"]),
    "scan by a causal estimator": (
        [
            "score",
            "x.fasta",
            "--scan",
            "-m",
            "run",
            "-o",
            "o.csv",
            "--estimator",
            "causal-likelihood",
        ],
        2,
        ["masked model", "masked-marginals"],
    ),
    "scan of several": (
        ["score", "x.fasta", "y.fasta", "--scan", "-m", "run", "-o", "o.csv"],
        2,
        ["one sequence file"],
    ),
    "a figure of no scan": (
        ["score", "x.csv", "-m", "run", "-o", "o.csv", "--figure", "o.png"],
        2,
        ["--scan"],
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
        ["prepare", "x.fasta", "--out", "o", "--split-table", "t.tsv", "--family-table", "f.tsv"],
        2,
        ["--split-table", "--family-table"],
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
    "an unknown organism": (
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
    "a misspelled choice": (
        ["train", "model=tyni", "run_dir=o"],
        2,
        ["model=tyni does not exist (did you mean model=tiny?); there are: esm2_8m, medium"],
    ),
    "a misspelled choice, and a flag": (
        ["evaluate", "--cfg", "job", "evaluation=contact"],
        2,
        ["evaluation=contact does not exist (did you mean evaluation=contacts?); there are: "],
    ),
    "train on nothing": (["train", "data.dir=none", "run_dir=o"], 3, ["none", "protlm prepare"]),
    "single quotes": (["train", "run_dir=$J", "trainer.max_steps=1"], 2, ["$J", "${oc.env:J}"]),
    "train on no split": (
        ["train", "data.dir=data", "data.train_split=tran", "run_dir=o"],
        2,
        ["tran", "train"],
    ),
    "another recipe": (
        ["train", "trainer.accumulate_grad_batches=3", "data.dir=data", "run_dir=run"],
        2,
        ["run_dir"],
    ),
    "a flag hydra does not know": (["train", "--max-steps", "5"], 2, ["--max-steps", "key=value"]),
    "a model after -m": (["evaluate", "-m", "runs/x"], 2, ["type checkpoint=runs/x"]),
    "a model after -m, and a setting": (
        ["evaluate", "-m", "hybrid-6m", "data.dir=data"],
        2,
        ["type checkpoint=hybrid-6m"],
    ),
    "two settings in one argument": (
        ["train", "trainer.max_steps=5 run_dir=x"],
        2,
        ["'trainer.max_steps=5 run_dir=x'", "two settings", "without quotes"],
    ),
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
    "sweep on two devices": (
        ["train", "--multirun", "trainer.devices=2", "seed=0,1", "run_dir=o", "data.dir=data"],
        2,
        ["--multirun"],
    ),
    "evaluate nothing": (["evaluate", "evaluation=[masked]"], 2, ["data.dir=DIR"]),
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

UNUSABLE = {
    "embed": ["-o", "o.h5"],
    "attention": ["-o", "o.h5"],
    "contacts": ["-o", "o.h5"],
    "inspect": ["-o", "o.html"],
    "score": ["--scan", "-o", "o.csv"],
}
WRONG |= {
    f"{command} of no protein": (
        [command, "unusable.fasta", "-m", "run", *rest],
        3,
        ["unusable.fasta: none of the 2 records can be used, the first of them 2: digit, line 3"],
    )
    for command, rest in UNUSABLE.items()
}


# An interpreter takes seconds to start: one mistake for each way in which a command is begun.
IN_A_PROCESS_OF_ITS_OWN = (
    "unknown command",
    "broken model",
    "prepare onto something",
    "wrong key",
    "evaluate a broken run",
)


def assert_one_sentence(run: Command, case: str, workplace: Path) -> None:
    """Makes a mistake, and looks at what is said, at the exit code and at the folder."""
    arguments, code, words = WRONG[case]
    before = {path: path.stat().st_mtime_ns for path in workplace.rglob("*")}
    done = run(*arguments, cwd=workplace)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    told = [line for line in done.stderr.splitlines() if line.startswith("protlm: ")]
    assert len(told) == 1, done.stderr
    for word in words:
        assert word in told[0]
    assert {path: path.stat().st_mtime_ns for path in workplace.rglob("*")} == before


@pytest.mark.parametrize("case", [case for case in WRONG if case not in IN_A_PROCESS_OF_ITS_OWN])
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    case: str, workplace: Path, protlm_in_process: Command
) -> None:
    assert_one_sentence(protlm_in_process, case, workplace)


@pytest.mark.parametrize(
    "case", slow_but(IN_A_PROCESS_OF_ITS_OWN, "unknown command", "broken model")
)
def test_a_mistake_ends_a_process_with_one_sentence(
    case: str, workplace: Path, protlm_command: Command
) -> None:
    assert_one_sentence(protlm_command, case, workplace)
