"""The measurement on a GPU reports steps that fail or hang, and its script runs on a CPU."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import Step, run
from benchmarks.gpu_page import page_text

ROOT = Path(__file__).resolve().parents[2]


def script(*arguments: str, python: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "benchmarks" / "gpu.sh", *arguments],
        env={**os.environ, "PYTHON": str(python), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def step(folder: Path, code: str) -> Step:
    (folder / "step_of_a_test.py").write_text(code)
    return Step("x", ("step_of_a_test",), 60)


def test_results_before_a_failure_are_kept(here: Path) -> None:
    code = "print('{\"length\": 8}')\nprint('something else')\nraise RuntimeError('no kernel')"
    (outcome,) = run([step(here, code)], end=time.monotonic() + 60, patience=1)
    assert outcome.results == [{"length": 8}]
    assert outcome.failure == "ended with 1: RuntimeError: no kernel"
    (late,) = run([step(here, code)], end=time.monotonic(), patience=1)
    assert late.failure == "no time was left for it"


def test_only_steps_that_measure_no_time_run_side_by_side(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import json, sys, time\n"
        "start = time.time()\n"
        "time.sleep(1)\n"
        "print(json.dumps({'name': sys.argv[1], 'start': start, 'end': time.time()}))\n"
    )
    (here / "step_of_a_test.py").write_text(code)
    steps = [
        Step(name, ("step_of_a_test", name), 60, is_timed=name[0] == "t")
        for name in ("t1", "u1", "u2", "t2", "t3")
    ]
    found: dict[str, dict] = {}
    monkeypatch.setattr(gpu, "all_steps", lambda *_: steps)
    monkeypatch.setattr(
        gpu,
        "page_text",
        lambda results: found.update({name: one[0] for name, (one, _) in results.items()}) or "",
    )
    gpu.measure(gpu.parse(["--device", "cpu", "--page", str(here / "page.md")]))
    assert found["u1"]["start"] < found["u2"]["end"] and found["u2"]["start"] < found["u1"]["end"]
    assert found["t1"]["end"] < min(found["u1"]["start"], found["u2"]["start"])
    assert max(found["u1"]["end"], found["u2"]["end"]) < found["t2"]["start"]
    assert found["t2"]["end"] < found["t3"]["start"]


@pytest.mark.slow
def test_a_step_that_hangs_is_ended_with_its_children(here: Path) -> None:
    code = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(here / 'child')!r}, 'w').write(str(child.pid))\n"
        "print('{\"length\": 8}', flush=True)\n"
        "time.sleep(600)\n"
    )
    (outcome,) = run([step(here, code)], end=time.monotonic() + 3, patience=1)
    assert outcome.failure.startswith("did not finish within 3 s")
    assert outcome.results == [{"length": 8}]
    child = Path("/proc", (here / "child").read_text())
    for _ in range(100):
        if not child.exists() or "\nState:\tZ" in (child / "status").read_text():
            return
        time.sleep(0.05)
    pytest.fail("the child of the step still runs")


def test_failures_are_on_the_page() -> None:
    agreed = {"kernel": "ReLU", "causal": True, "values": "float32", "channels": 64}
    agreed |= {"features": 8, "failure": ""}
    text = page_text(
        {
            "machine": ([], "ended with 1"),
            "kernels": ([agreed, agreed | {"channels": 24, "failure": "no digits"}], ""),
            "resume": ([], "did not finish within 90 s"),
            "training paper_36, compiled": ([{"length": 1024, "failure": "out of memory"}], ""),
            "attention, causal": ([], "ended with 1: no kernel"),
        }
    )
    assert "# Results on an unknown device" in text
    assert "| ReLU | yes | float32 | 64 | 8 | agrees |" in text
    assert "| ReLU | yes | float32 | 24 | 8 | no digits |" in text
    assert "The step did not finish within 90 s." in text
    assert "L=1,024: out of memory" in text
    assert "The step ended with 1: no kernel." in text


def test_a_missing_package_is_named_at_once(tmp_path: Path) -> None:
    # An interpreter without any packages: isolated, and without its site.
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    done = script("--device", "cpu", python=bare)
    assert done.returncode == 1
    assert re.search(r"gpu\.sh: .* has no torch, numpy, .*; install what is missing", done.stderr)


@pytest.mark.slow
def test_on_a_cpu_the_script_runs_through(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    options = ("--device", "cpu", "--quick", "--page", str(page))
    done = script(*options, python=Path(sys.executable))
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text in done.stdout
    assert "| softmax | no | bfloat16 | 64 | 128 | needs a GPU |" in text
    assert "weights are equal bit for bit, and losses are equal." in text
    assert re.search(r"\| tiny \| performer_relu \| 0\.1 M \| 128 \| 512 \| [\d,]+ \|", text)
    assert "| performer_relu | 128 |" in text
    assert not re.search("ended with|did not finish", text)
