"""The settings of `protlm embed`."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np
import torch

from protlm.data.records.proteins import Duplicates
from protlm.model.pooling import Pooling
from protlm.system.errors import UserError
from protlm.system.shares import Share


class Format(StrEnum):
    """The file formats; `protlm.commands.embedding.formats.NAME` writes each."""

    hdf5 = "hdf5"
    ragged = "ragged"
    parquet = "parquet"
    npz = "npz"
    anndata = "anndata"
    pt = "pt"


class Dtype(StrEnum):
    """The types of numbers in the output, and of matrix products."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"

    @property
    def torch(self) -> torch.dtype:
        """The type of tensors."""
        return getattr(torch, self.value)

    @property
    def stored(self) -> np.dtype:
        """The type of stored numbers; NumPy has no bfloat16, whose bits are kept as integers."""
        return np.dtype(np.uint16 if self is Dtype.bfloat16 else self.value)


@dataclass(frozen=True)
class EmbedOptions:
    """The settings of `protlm embed`, by their flags.

    Attributes:
        layers: negative ones count from the end.
        tokens_per_batch: rows times length of a batch, at most.
        ranges: the table of `--include ranges`.
        windows: computes proteins that are longer than the model accepts in windows.
        share: the share to compute; None computes everything, and writes the output.
        break_lock: takes over the lock of a dead process of another machine.
    """

    include: tuple[Pooling, ...] = (Pooling.mean,)
    layers: tuple[int, ...] = (-1,)
    tokens_per_batch: int = 4_096
    dtype: Dtype = Dtype.float32
    compute_dtype: Dtype = Dtype.float32
    device: str = "auto"
    duplicates: Duplicates = field(default=Duplicates.error)
    ranges: Path | None = None
    windows: bool = False
    format: Format = Format.hdf5
    processes: int = 1
    share: Share | None = None
    merge: bool = False
    dry_run: bool = False
    break_lock: bool = False

    @property
    def is_single(self) -> bool:
        """Whether a protein has one array: of one kind and one layer."""
        return len(self.include) == len(self.layers) == 1

    def check(self) -> None:
        """Refuses settings that exclude each other, and what the format cannot hold."""
        if (self.ranges is not None) != (Pooling.ranges in self.include):
            raise UserError(
                "--include ranges needs a table, and a table needs it; type: "
                "--include ranges --ranges TABLE.tsv"
            )
        ways = {"--shard": self.share, "--merge": self.merge, "--dry-run": self.dry_run}
        given = [flag for flag, value in ways.items() if value]
        if len(given) + (self.processes > 1) > 1:
            several = [*given, *(["--processes"] if self.processes > 1 else [])]
            raise UserError(f"{' and '.join(several)} exclude each other; type one of them")
        form = f"--format {self.format}"
        if self.dtype is Dtype.bfloat16 and self.format is not Format.pt:
            raise UserError(f"{form} has no bfloat16: type --dtype float16 or --format pt")
        matrices = [kind.value for kind in self.include if kind.is_matrix]
        if matrices and self.format in (Format.parquet, Format.anndata):
            raise UserError(
                f"{form} has one vector for a protein, and --include {matrices[0]} makes several; "
                "type --format ragged"
            )
