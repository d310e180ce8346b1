"""Jobs of a cluster: slurm/train.sbatch under a scheduler of thirty lines, and a sweep."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from protlm.checkpoints.format import latest
from tests.fixtures.ranks import ranks_below, wait_for_step

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "slurm" / "train.sbatch"

# Two nodes with a task each, on this machine. The exit code is the largest of the tasks'. As sites
# may set it, the first task that fails has the others killed, unless the option says otherwise.
SRUN = """#!{python}
import os, subprocess, sys, time
arguments = sys.argv[1:]
options = [argument for argument in arguments[: arguments.index("protlm")]]
kill_others = "--kill-on-bad-exit=0" not in options
tasks = []
for task in "01":
    place = {{"SLURM_PROCID": task, "SLURM_NODEID": task}}
    place |= {{"SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"}}
    tasks.append(subprocess.Popen(arguments[len(options) :], env={{**os.environ, **place}}))
while any(task.poll() is None for task in tasks):
    time.sleep(0.001)
    if kill_others and any(task.poll() for task in tasks):
        [task.terminate() for task in tasks]
sys.exit(max(128 - code if code < 0 else code for code in (task.wait() for task in tasks)))
"""
SCONTROL = '#!/usr/bin/env bash\necho "$@" >> scontrol.log\n'


def test_it_is_valid_bash_and_requests_the_options_for_resuming():
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    asked = re.findall(r"^#SBATCH (\S+)", SCRIPT.read_text(), re.MULTILINE)
    assert {"--signal=USR1@120", "--requeue", "--open-mode=append"} <= set(asked)
    assert any(option.startswith("--ntasks-per-node=") for option in asked)
    assert os.access(SCRIPT, os.X_OK)
    # Else the first task that ends with 75 has SIGTERM sent to the others, and 143 is larger.
    (srun,) = re.findall(r"^srun (.*) protlm train", SCRIPT.read_text(), re.MULTILINE)
    assert srun.split()[:2] == ["--kill-on-bad-exit=0", "--wait=60"]
    # sbatch's own --cpus-per-task is not passed on.
    assert srun.endswith('--cpus-per-task="${SLURM_CPUS_PER_TASK:-1}"')


@pytest.fixture
def cluster(tmp_path) -> dict[str, str]:
    """The environment of a job on two nodes, with srun, scontrol and protlm on its PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    protlm = f'#!/usr/bin/env bash\nexec {sys.executable} -m protlm "$@"\n'
    srun = SRUN.format(python=sys.executable)
    for name, text in (("srun", srun), ("scontrol", SCONTROL), ("protlm", protlm)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    with_job = {"JOB_ID": str(os.getpid()), "JOB_NAME": "protlm", "NODELIST": "127.0.0.1"}
    with_job |= {"NTASKS": "2", "NTASKS_PER_NODE": "1", "NNODES": "2"}
    job = {f"SLURM_{name}": value for name, value in with_job.items()}
    return {**job, "PATH": f"{programs}:{os.environ['PATH']}"}


@pytest.mark.slow
def test_a_job_is_requeued_until_it_is_complete(
    cluster, start, pair_settings, tmp_path, assert_same_as_pair
):
    """USR1 to all tasks, as `--signal` sends it; then to one rank alone; then to none."""
    for restart, whom in enumerate(([0, 1], [1], [])):
        job = start(SCRIPT, *pair_settings, **cluster, SLURM_RESTART_COUNT=str(restart))
        if whom:
            wait_for_step(tmp_path / "run", 20 + 40 * restart, job)
            ranks = ranks_below(job.pid)
            assert set(ranks) == {0, 1}
            for rank in whom:
                os.kill(ranks[rank], signal.SIGUSR1)
        code = job.wait(timeout=250)
        assert code == (75 if whom else 0), (tmp_path / "log").read_text()
        requeued = (tmp_path / "scontrol.log").read_text().splitlines()
        assert requeued == [f"requeue {os.getpid()}"] * min(restart + 1, 2)
    assert_same_as_pair(tmp_path / "run")


@pytest.mark.slow
def test_each_run_of_a_sweep_is_a_job(start, tiny_settings, tmp_path):
    """Over two seeds, with Hydra's submitit launcher, on this machine."""
    command = [sys.executable, "-m", "protlm", "train", "--multirun"]
    command += ["hydra/launcher=submitit_local", "seed=0,1", *tiny_settings, "trainer.max_steps=2"]
    done = start(*command, f"run_dir={tmp_path}/run-${{seed}}")
    assert done.wait(timeout=150) == 0, (tmp_path / "log").read_text()
    for seed in (0, 1):
        newest = latest(tmp_path / f"run-{seed}")
        assert newest is not None and newest.name == "step-00000002.ckpt"
        assert f"seed: {seed}\n" in (tmp_path / f"run-{seed}" / "config.yaml").read_text()
