"""The options of `protlm checkpoint`."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from protlm.config.fields import Checked, flag

WeightDtype = StrEnum("WeightDtype", ["float32", "bfloat16"])
WeightFormat = StrEnum("WeightFormat", ["protlm", "hf", "onnx"])


@dataclass(frozen=True)
class ExportOptions(Checked):
    """How a model is exported."""

    dtype: WeightDtype | None = flag(
        "float32, or bfloat16, which is half as large; only of protlm's format.",
        None,
        needs="--format protlm",
    )
    format: WeightFormat = flag(
        "protlm, hf for Hugging Face transformers, or onnx for ONNX runtimes.", WeightFormat.protlm
    )
    fit: Path | None = flag(
        "The NAME.fit.json of the contact head; only of an ESM with hf.", None, needs="--format hf"
    )
