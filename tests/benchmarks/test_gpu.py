"""The measurement on a GPU: on a CPU it runs through; what fails or hangs is a row of the page."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import Step, run
from benchmarks.gpu_page import Page

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"


def script(*arguments: str, python: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments],
        env={**os.environ, "PYTHON": str(python), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def module(folder: Path, code: str) -> str:
    """Writes a module that a step can run, and returns its name."""
    (folder / "step_of_a_test.py").write_text(code)
    return "step_of_a_test"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_what_a_step_printed_before_its_failure_is_kept(here: Path) -> None:
    code = "print('{\"length\": 8}')\nprint('something else')\nraise RuntimeError('no kernel')"
    outcome = run(Step("x", (module(here, code),), 60), seconds=60)
    assert outcome.results == [{"length": 8}]
    assert outcome.failure == "ended with 1: RuntimeError: no kernel"


def test_a_step_that_hangs_is_ended_with_all_it_has_started(here: Path) -> None:
    code = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(here / 'child')!r}, 'w').write(str(child.pid))\n"
        "print('{\"length\": 8}', flush=True)\n"
        "time.sleep(600)\n"
    )
    outcome = run(Step("x", (module(here, code),), 60), seconds=2)
    assert outcome.failure.startswith("was not done after 2 s")
    assert outcome.results == [{"length": 8}]
    child = Path("/proc", (here / "child").read_text())
    for _ in range(100):
        if not child.exists() or "\nState:\tZ" in (child / "status").read_text():
            return
        time.sleep(0.05)
    pytest.fail("the child of the step goes on")


def test_without_time_left_a_step_is_not_begun() -> None:
    outcome = run(Step("x", ("this_module_is_not_there",), 60), seconds=0)
    assert outcome.failure == "no time was left for it"


def test_all_time_outs_together_are_under_nine_minutes() -> None:
    arguments = gpu.parse([])
    steps = [step for _, _, step in gpu.training_steps(arguments)]
    steps += [gpu.attention_step(arguments, mode, Path())[0] for mode in gpu.MODES]
    assert {"paper_36", "133M"} <= {word for step in steps for word in step.arguments}
    for length in ("1024", "8192", "32768"):
        assert all(length in step.arguments for step in steps)
    assert gpu.MOST_SECONDS < 9 * 60
    assert arguments.page == Path("docs/results-gpu.md")
    assert gpu.parse(["--device", "cpu", "--quick"]).page != arguments.page


def test_failures_are_rows_of_the_page() -> None:
    page = Page()
    page.machine([], "ended with 1")
    page.resume([], "was not done after 90 s")
    page.training("paper_36", 1024, True, {"failure": "was not done after 110 s"})
    page.attention("causal", [], "ended with 1: no | kernel")
    text = page.text()
    assert "# Results on an unknown device" in text
    assert "| paper_36 |  | 1,024 | yes | was not done after 110 s |" in text
    assert "The resume check was not done after 90 s." in text
    assert "The benchmark ended with 1" in text
    assert "paper_36 at L=1,024 was not measured." in text


def test_losses_that_differ_are_told_with_their_size() -> None:
    page = Page()
    found = {"stopped_with": 75, "stopped_after": 4, "steps": 40, "weights_differ_by": 2e-4}
    page.resume([found | {"first_loss_differs_by": 0.0, "losses_differ_by": 3e-3}], "")
    text = page.text()
    assert "weights differ by up to 2.0e-04" in text
    assert "losses differ by up to 3.0e-03 of themselves, the first after the stop by 0.0e" in text


def test_the_target_is_judged_by_the_fastest() -> None:
    page = Page()
    page.machine(
        [
            {"device": "NVIDIA H200", "memory_gb": 141.0, "torch": "2.11", "cuda": "13"}
            | {"flops": 8e14, "bandwidth": 4e12}
        ],
        "",
    )
    for rate, compiled in ((4e5, False), (6e5, True)):
        found = {"parameters": 76e6, "tokens_of_a_step": 65536, "tokens_per_second": rate}
        found |= {"flops_per_second": 4e14, "mfu": 0.4, "memory_gb": 60.0}
        page.training("paper_36", 1024, compiled, found)
    text = page.text()
    assert "# Results on NVIDIA H200" in text
    assert "paper_36 at L=1,024: 600,000 residues/s; 500,000 were asked on an H200: met." in text
    assert "| 400,000 | 400 | 40.0% | 50.0% | 60.0 |" in text


def test_a_missing_package_is_named_at_once(tmp_path: Path) -> None:
    # An interpreter without any packages: isolated, and without its site.
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    done = script("--device", "cpu", python=bare)
    assert done.returncode == 1
    assert re.search(r"gpu\.sh: .* has no torch, numpy, .*; install what is missing", done.stderr)


def test_an_old_torch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '2.9.1+cu128'")
    done = script("--device", "cpu", python=Path(sys.executable), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "has torch 2.9.1+cu128, and 2.10 or newer is needed" in done.stderr


@pytest.mark.slow
def test_without_a_gpu_one_is_told_what_to_type(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    done = script("--page", str(page), python=Path(sys.executable), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "benchmarks/gpu.sh --device cpu --quick" in done.stderr
    assert not page.exists()


@pytest.mark.slow
def test_on_a_cpu_the_script_runs_through(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    options = ("--device", "cpu", "--quick", "--page", str(page))
    done = script(*options, python=Path(sys.executable))
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text in done.stdout
    assert re.search(
        r"stopped by SIGTERM \(exit code 75\) after step \d+ and continued: weights equal bit for "
        "bit, losses equal to those",
        text,
    )
    rows = [line for line in text.splitlines() if line.startswith("| tiny |")]
    assert [row.split(" | ")[2] for row in rows] == ["64", "128"]
    assert all(re.search(r"\| 0\.1 M \|.* \| no \| 512 \| [\d,]+ \|", row) for row in rows)
    assert "| performer_relu | 64 | 128 |" in text
    assert not re.search("ended with|not done", text)
