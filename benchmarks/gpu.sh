#!/usr/bin/env bash
# Measures all that needs a GPU, in one command, in under nine minutes, without a network, and
# writes docs/results-gpu.md. PYTHON names the interpreter; peers are looked for in build/peers too.
#
#   benchmarks/gpu.sh                          on a machine with torch 2.10 or newer and CUDA
#   benchmarks/gpu.sh --device cpu --quick     whether the script works, within a minute
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}

"$python" - <<'PYTHON'
import importlib.util
import sys

needed = {
    "torch": "torch",
    "numpy": "numpy",
    "pytorch_lightning": "pytorch-lightning",
    "hydra": "hydra-core",
    "h5py": "h5py",
    "isal": "isal",
    "rich": "rich",
    "safetensors": "safetensors",
    "matplotlib": "matplotlib",
    "sklearn": "scikit-learn",
}
missing = [name for module, name in needed.items() if importlib.util.find_spec(module) is None]
if missing:
    sys.exit(
        f"gpu.sh: {sys.executable} has no {', '.join(missing)}; install what is missing, or type "
        "PYTHON=another/bin/python benchmarks/gpu.sh"
    )
PYTHON

export PYTHONPATH="$PWD:$PWD/build/peers${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m benchmarks.gpu "$@"
