"""F41: of two processes that train one run, the second is told who the first is."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.errors import ExitCode, OutputError
from protlm.lock import LOCK, Holder
from protlm.model.checkpoint import latest
from protlm.training.run_lock import locked

Train = Callable[..., Path]
SINCE = "2026-01-01T00:00:00+00:00"


@pytest.fixture
def started() -> Holder:
    """A process that lives for as long as the test does: the one that started the tests."""
    here = Holder.this_process()
    start = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    boot = str(here.start).split()[0]
    return Holder(here.host, os.getppid(), SINCE, f"{boot} {start}")


def write_lock(run: Path, holder: Holder) -> None:
    run.mkdir(exist_ok=True)
    (run / LOCK).write_text(json.dumps(vars(holder)))


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_second_is_refused(
    train_tiny: Train,
    tmp_path: Path,
    started: Holder,
    contents: Callable[[Path], dict[str, bytes]],
) -> None:
    """Both a run that is begun and one that is there already; nothing in it changes."""
    run = tmp_path / "run"
    for steps in (2, 4):
        write_lock(run, started)
        before = contents(run)
        with pytest.raises(OutputError) as refused:
            train_tiny(run, f"trainer.max_steps={steps}")
        assert f"process {started.pid} on {started.host} since {SINCE}" in str(refused.value)
        assert "choose another run_dir=" in str(refused.value)
        assert refused.value.exit_code == ExitCode.OUTPUT
        assert contents(run) == before
        (run / LOCK).unlink()
        train_tiny(run, f"trainer.max_steps={steps}")
        assert not (run / LOCK).exists()


def test_a_process_that_is_gone_is_taken_over(
    train_tiny: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = dead_process()
    write_lock(tmp_path / "run", Holder(socket.gethostname(), pid, SINCE, "0"))
    train_tiny(tmp_path / "run", "trainer.max_steps=2")
    assert f"taking over from process {pid}" in capsys.readouterr().err
    assert latest(tmp_path / "run") is not None


def test_another_machine_is_refused_and_the_advice_helps(train_tiny: Train, tmp_path: Path) -> None:
    lock = tmp_path / "run" / LOCK
    write_lock(tmp_path / "run", Holder("elsewhere", 1, SINCE, "0"))
    with pytest.raises(OutputError, match=f"process 1 on elsewhere.*remove {lock}"):
        train_tiny(tmp_path / "run", "trainer.max_steps=2")
    lock.unlink()
    train_tiny(tmp_path / "run", "trainer.max_steps=2")


@pytest.mark.parametrize(
    ("job", "restarts", "is_taken_over"),
    [("7", "2", True), ("7", "1", False), ("8", "2", False), (None, None, False)],
)
def test_a_requeued_job_of_slurm_takes_its_own_run_over(
    job: str | None,
    restarts: str | None,
    is_taken_over: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After SIGKILL on one node it may start on another; two steps of one job are still two."""
    write_lock(tmp_path, Holder("elsewhere", 1, SINCE, "0", job="/7", restart=1))
    if job is not None and restarts is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    if is_taken_over:
        with locked(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["restart"] == 2
    else:
        with pytest.raises(OutputError, match="elsewhere"), locked(tmp_path):
            pass


def test_other_ranks_of_the_run_pass(
    tmp_path: Path, started: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lock(tmp_path, started)
    for variable in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            with locked(tmp_path):
                pass
    assert (tmp_path / LOCK).exists()


def test_the_lock_goes_with_the_process(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), locked(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).is_file()
        raise KeyboardInterrupt
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.slow
def test_two_commands(tiny_data: Path, tmp_path: Path, protlm_command: Callable) -> None:
    """The first of two ranks, whose second has no part in it, goes on undisturbed."""
    settings = [
        *("model=tiny", f"data.dir={tiny_data}", "run_dir=run", "data.max_length=128"),
        *("trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_steps=100000"),
    ]
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "TORCHELASTIC_")) and "RANK" not in key
    }
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        [sys.executable, "-m", "protlm.train", *settings],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (tmp_path / "run" / "metrics.csv").exists():
            assert first.poll() is None
            time.sleep(0.1)
        second = protlm_command("train", *settings, cwd=tmp_path)
        assert second.returncode == ExitCode.OUTPUT, second.stderr
        assert f"process {first.pid} on {socket.gethostname()}" in second.stderr
        assert "Traceback" not in second.stderr
        first.send_signal(signal.SIGTERM)
        told = first.communicate(timeout=120)[1]
        assert first.returncode == ExitCode.PREEMPTED, told
    finally:
        first.kill()
    assert not (tmp_path / "run" / LOCK).exists()
