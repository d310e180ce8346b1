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
        "Type of the weights: float32, or bfloat16, which is half as large; default: as trained.",
        None,
        needs="--format protlm",
    )
    format: WeightFormat = flag(
        "protlm, hf for Hugging Face transformers, or onnx for ONNX runtimes.", WeightFormat.protlm
    )
    fit: Path | None = flag(
        "NAME.fit.json of protlm contacts, for the contact head of an ESM model.",
        None,
        needs="--format hf",
    )
