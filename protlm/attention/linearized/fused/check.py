"""The comparison of fused kernels with PyTorch in float64, and what was found before.

python -m protlm.attention.linearized.fused.check CASE

Wrong kernels may read memory outside their arrays, after which a process cannot use the card. They
are therefore compared in a child process, once for each card, driver, version and source. What it
found is kept in the user's cache folder. What ended it is not: the next process tries again.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from protlm.attention.linearized.case import TOLERANCES, Attend, Case
from protlm.attention.linearized.features import FeatureMap, GeneralizedFeatures
from protlm.attention.linearized.function import Weighting, linear_attention
from protlm.attention.linearized.normalization import Denominator
from protlm.attention.linearized.positive import PositiveFeatures
from protlm.system.errors import InputDataError, OutputError
from protlm.system.json_file import from_json, read_json, write_json
from protlm.system.paths import cache_dir, sha256_of

_BATCH, _HEADS, _LENGTHS = 2, 2, (64, 65, 330, 1000)
# Kernels are compiled within a minute, by one processor.
_SECONDS = 300
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Verdict:
    """What is wrong with the kernels of a case, or an empty string, and where this was found."""

    where: str
    case: str
    fault: str


def verdict(case: Case) -> str:
    """Returns what is wrong with the kernels of a case, or an empty string.

    It compares them in a child process, unless this was done before.
    """
    where = _here(case.device)
    path = _folder() / f"{sha256(f'{where}; {case.label}'.encode()).hexdigest()}.json"
    before = _read(path)
    if before is not None and (before.where, before.case) == (where, case.label):
        return before.fault
    fault, is_found = _ask_child(case)
    if is_found:
        # Without a folder to write to, or if another process has written it, nothing is lost.
        with suppress(OSError, OutputError):
            path.unlink(missing_ok=True)
            write_json(path, asdict(Verdict(where, case.label, fault)))
    return fault


def kept_verdicts(device: torch.device) -> list[Verdict]:
    """Returns what was found on a card with its present driver, versions and kernels."""
    found, where = map(_read, sorted(_folder().glob("*.json"))), _here(device)
    return [each for each in found if each is not None and each.where == where]


def _folder() -> Path:
    return cache_dir() / "kernels"


def _read(path: Path) -> Verdict | None:
    try:
        return from_json(Verdict, read_json(path, "a verdict on fused kernels"))
    except (InputDataError, ValueError):
        # There is none, or not a whole one.
        return None


def _here(device: torch.device) -> str:
    """Returns the card, the driver, the versions, and a hash of the kernels."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas_version

    is_card = device.type == "cuda"
    major, minor = torch.cuda.get_device_capability(device) if is_card else (8, 0)
    card = torch.cuda.get_device_name(device) if is_card else device.type
    driver = _DRIVER.read_text().splitlines()[0] if _DRIVER.is_file() else "unknown driver"
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    assembler = get_ptxas_version(10 * major + minor).splitlines()[-1]
    kernels = sha256_of(*sorted(Path(__file__).parent.glob("*.py")))
    return f"{card} {major}.{minor}, {driver}, {versions}, {assembler}, kernels {kernels}"


def _ask_child(case: Case) -> tuple[str, bool]:
    """Returns what is wrong, and whether the child found it rather than ended by it."""
    # Without the working folder, whose modules might hide others.
    command = [sys.executable, "-P", "-m", __name__, case.text]
    # It finds protlm where this process has found it.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"their check did not end within {_SECONDS} s", False
    if done.returncode == 0:
        fault = str(json.loads(done.stdout.splitlines()[-1]))
        # An error of a compiler or a driver may not come from the kernels.
        return fault, not fault or fault.endswith("positions")
    if "out of memory" in done.stderr:
        # Another batch may fit.
        raise torch.OutOfMemoryError(f"no memory for the check of {case.label}")
    if done.returncode < 0:
        return f"their check was killed by signal {-done.returncode}", False
    reason = (done.stderr.splitlines() or [""])[-1]
    return f"their check ended with {done.returncode}: {reason}", False


def failure(case: Case) -> str:
    """Compares fused kernels with PyTorch in float64; returns what is wrong, or an empty string."""
    for length in _LENGTHS:
        inputs = _small_inputs(case, length)
        try:
            errors, is_repeatable = _errors(case, inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers raise errors of many kinds
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        tolerance = max(TOLERANCES[x.dtype] for x in inputs[:3])
        # NaN is not within the tolerance either.
        if not all(error <= tolerance for error in errors):
            listed = ", ".join(f"{error:.1e}" for error in errors)
            return f"relative errors of {listed} at {length} positions"
        if not is_repeatable:
            return f"results differ between two runs at {length} positions"
    return ""


def _errors(case: Case, given: list[Tensor]) -> tuple[list[float], bool]:
    """Returns the relative errors of the output and the gradients, and whether runs are equal."""
    # It imports Triton.
    from protlm.attention.linearized.fused.attention import fused_attention

    *inputs, cotangent_BHLC, mask_BL = given
    exact = Weighting(_small_map(case, torch.float64), Denominator(), case.causal)
    with torch.inference_mode(False), torch.enable_grad():
        fused = fused_attention(_small_map(case, torch.float32), causal=case.causal)
        fused = _packed(fused) if case.is_packed else fused
        found, again = (_with_gradients(fused, inputs, cotangent_BHLC, mask_BL) for _ in range(2))
        wanted = _with_gradients(
            lambda *x: linear_attention(*x, exact),
            [x.double() for x in inputs],
            cotangent_BHLC.double(),
            mask_BL,
        )
    errors = [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, wanted, strict=True)]
    return errors, all(map(torch.equal, found, again))


def _small_map(case: Case, dtype: torch.dtype) -> FeatureMap:
    generator = torch.Generator().manual_seed(0)
    rows_RK = None
    if case.num_rows is not None:
        rows_RK = torch.randn(case.num_rows, case.key_width, generator=generator)
        rows_RK = rows_RK.to(case.device, dtype)
    if case.is_exponential:
        return PositiveFeatures(rows_RK)
    return GeneralizedFeatures(rows_RK, kernel="relu", epsilon=1e-3)


def _small_inputs(case: Case, length: int) -> list[Tensor]:
    generator, device = torch.Generator().manual_seed(1), case.device
    dtypes = case.query_dtype, case.key_dtype, case.value_dtype, case.value_dtype
    widths = case.key_width, case.key_width, case.value_width, case.value_width
    drawn = [
        torch.randn(_BATCH, length, _HEADS, width, generator=generator).to(device, dtype)
        for dtype, width in zip(dtypes, widths, strict=True)
    ]
    mask_BL = torch.ones(_BATCH, length, dtype=torch.bool, device=device)
    mask_BL[1, length // 3 :] = False
    return [*(x.transpose(1, 2) for x in drawn), mask_BL]


def _packed(attend: Attend) -> Attend:
    """Returns attention of padded samples, computed in one row, with bounds."""

    def attend_packed(*given: Tensor) -> Tensor:
        *inputs, mask_BL = given
        batch, length = mask_BL.shape
        # The padding behind each sample is a segment; that of the first sample is empty.
        ends_B2 = torch.stack(
            [mask_BL.sum(dim=1), mask_BL.new_full((batch,), length, dtype=torch.int64)], 1
        )
        ends_B2 += length * torch.arange(batch, device=mask_BL.device)[:, None]
        starts = F.pad(ends_B2.flatten(), (1, 0)).int()
        joined = (x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for x in inputs)
        out_1HLC = attend(*joined, mask_BL.flatten()[None], starts)
        return out_1HLC[0].unflatten(1, (batch, length)).transpose(0, 1)

    return attend_packed


def _with_gradients(
    attend: Attend, inputs: list[Tensor], cotangent: Tensor, mask_BL: Tensor
) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves, mask_BL)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


if __name__ == "__main__":
    print(json.dumps(failure(Case.read(sys.argv[1]))))
