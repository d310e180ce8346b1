"""The numeric tests, under the instruction sets and threads that one machine can imitate.

`make test-portable` runs all settings; `python tests/portable.py OMP_NUM_THREADS=2` runs some.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLAIN = "plain"
# One differs at a time. A processor that lacks an instruction set takes the best that it has.
SETTINGS = [
    PLAIN,
    "ATEN_CPU_CAPABILITY=default",
    "ATEN_CPU_CAPABILITY=avx2",
    "ONEDNN_MAX_CPU_ISA=SSE41",
    "ONEDNN_MAX_CPU_ISA=AVX2",
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE",
    "MKL_ENABLE_INSTRUCTIONS=SSE4_2",
    "MKL_ENABLE_INSTRUCTIONS=AVX2",
    # MKL applies the two above on Intel processors only, and this one on all.
    "MKL_CBWR=COMPATIBLE",
    "OMP_NUM_THREADS=2",
    "OMP_NUM_THREADS=4",
]
# What could differ from a processor to another without being asked to.
CLEARED = {setting.partition("=")[0] for setting in SETTINGS} | {"DNNL_DEFAULT_FPMATH_MODE"}
PATHS = [
    "tests/attention",
    "tests/model",
    *(f"tests/training/callbacks/test_{name}.py" for name in ("monitor", "save_checkpoints")),
    "tests/training/test_steps.py",
    *(f"tests/evaluation/test_{name}.py" for name in ("accuracy", "contacts", "jacobian")),
    "tests/evaluation/test_embedding_evaluations.py",
]
CHOSEN = "not peers and (portable or not (contract or slow))"
# What rounding does not touch.
LEFT_OUT = "not (compile or memory_grows)"


def run(setting: str) -> bool:
    """Runs the tests under one setting and prints its line; says whether all passed."""
    environment = {name: value for name, value in os.environ.items() if name not in CLEARED}
    environment["OMP_NUM_THREADS"] = "1"
    if setting != PLAIN:
        name, _, value = setting.partition("=")
        environment[name] = value
    environment["TEST_THREADS"] = environment["OMP_NUM_THREADS"]
    workers = ["--numprocesses", "logical", "--maxprocesses", "4", "--dist", "worksteal"]
    chosen = ["-m", CHOSEN, "-k", LEFT_OUT]
    options = ["--quiet", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *workers, *options, *chosen, *PATHS],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # pytest ends with how many passed and failed, and how long it took.
    print(f"{setting:<32} {found.stdout.splitlines()[-1]}", flush=True)
    if found.returncode:
        print(found.stdout, flush=True)
    return found.returncode == 0


if __name__ == "__main__":
    unknown = set(sys.argv[1:]) - set(SETTINGS)
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: there are {', '.join(SETTINGS)}")
    passed = [run(setting) for setting in sys.argv[1:] or SETTINGS]
    sys.exit(not all(passed))
