#!/usr/bin/env bash
# Measures everything that needs a GPU, with one command, in under nine minutes and without a network,
# and writes outputs/results-gpu.md. PYTHON names the interpreter; missing packages and the peers are
# also looked for in build/peers.
#
#   benchmarks/gpu.sh                          on a machine with torch 2.10 or newer and CUDA
#   benchmarks/gpu.sh kernels                  the comparisons of the fused kernels, in two to three minutes
#   benchmarks/gpu.sh speed                    the rates beside those of peers, in five
#   benchmarks/gpu.sh product PACKED -o OUT    trains experiment=swissprot_gpu for nine minutes
#   benchmarks/gpu.sh --device cpu --quick     to test the script
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD:$PWD/build/peers${PYTHONPATH:+:$PYTHONPATH}"

"$python" - <<'PYTHON'
import importlib.util
import sys

needed = {
    "torch": "torch",
    "numpy": "numpy",
    "pytorch_lightning": "pytorch-lightning",
    "hydra": "hydra-core",
    "omegaconf": "omegaconf",
    "h5py": "h5py",
    "Bio": "biopython",
    "rich": "rich",
    "safetensors": "safetensors",
    "matplotlib": "matplotlib",
}
try:
    import torch
except ImportError:
    pass
else:
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        sys.exit(
            f"gpu.sh: {sys.executable} has torch {torch.__version__}, and 2.10 or newer is needed; "
            "type PYTHON=another/bin/python benchmarks/gpu.sh"
        )
missing = [name for module, name in needed.items() if importlib.util.find_spec(module) is None]
if missing:
    sys.exit(
        f"gpu.sh: {sys.executable} has no {', '.join(missing)}; install what is missing (into "
        "build/peers by pip install --no-deps --target), or type PYTHON=another/bin/python "
        "benchmarks/gpu.sh"
    )
PYTHON

[ "${1:-}" = product ] && exec "$python" -m benchmarks.gpu_product "$@"
exec "$python" -m benchmarks.gpu "$@"
