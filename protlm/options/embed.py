"""The options of `protlm embed`."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from protlm.config.data import EMBED_TOKENS
from protlm.config.fields import Checked, at_least, flag
from protlm.options import shared
from protlm.options.jobs import Share
from protlm.options.relatives import RelativesOptions
from protlm.options.shared import Duplicates
from protlm.system.errors import UserError


class Pooling(StrEnum):
    """What is kept of a protein: statistics over residues, `<cls>`, each residue, or ranges.

    `cls` is the first token before the residues; `bos` is its other name, that of esm-extract.
    `std` divides by the number of residues; `features` are states for a sparse autoencoder.
    """

    mean = "mean"
    max = "max"
    std = "std"
    cls = "cls"
    bos = "bos"
    per_tok = "per_tok"
    ranges = "ranges"
    features = "features"

    def num_rows(self, num_residues: int, num_ranges: int) -> int:
        """Returns the number of vectors of a protein."""
        rows = num_ranges if self is Pooling.ranges else num_residues
        return rows if self.is_matrix else 1

    @property
    def is_matrix(self) -> bool:
        """Whether a protein may have several vectors."""
        return self in (Pooling.per_tok, Pooling.ranges, Pooling.features)


# The file formats; `protlm.commands.embedding.formats.NAME` writes each.
Format = StrEnum("Format", ["hdf5", "ragged", "parquet", "npz", "anndata", "pt", "csv"])
# The types of numbers in the output, and of matrix products.
Dtype = StrEnum("Dtype", ["float32", "float16", "bfloat16"])
# What entries of the output are named by.
Key = StrEnum("Key", {"identifier": "identifier", "sequence_hash": "sequence-hash"})


@dataclass(frozen=True)
class EmbedOptions(Checked):
    """The settings of `protlm embed`; negative layers count from the end, and none are all.

    A share is computed alone; without one everything is computed, and the output is written.
    """

    include: tuple[Pooling, ...] = flag(
        "Kinds of vectors to write: mean, max, std, cls, bos, per_tok, ranges, features.",
        (Pooling.mean,),
    )
    layers: tuple[int, ...] = flag(
        "Layers: 0 is the embedding, n the output of block n, -1 the last; or all.",
        (-1,),
        "--repr-layers",
    )
    tokens_per_batch: int = shared.tokens_per_batch(EMBED_TOKENS)
    format: Format = flag(
        "hdf5, ragged (one array, for many), parquet, npz, anndata, pt (a folder) or csv.",
        Format.hdf5,
    )
    key: Key = flag(
        "Names of the entries of hdf5: identifier, or sequence-hash, as biotrainer needs.",
        Key.identifier,
        needs="--format hdf5",
        excludes=("ranges",),
    )
    dtype: Dtype = flag("Type of the stored numbers: float32, float16 or bfloat16.", Dtype.float32)
    compute_dtype: Dtype = flag(
        "Type of the numbers in matrix products: float32, float16 or bfloat16.", Dtype.float32
    )
    ranges: Path | None = flag(
        "TSV with the columns accession, first, last; needs --include ranges.", None
    )
    features: Path | None = flag(
        "Folder of protlm features train; needs --include features.",
        None,
        needs="--format hdf5",
    )
    windows: bool = flag("Embed proteins that are too long in overlapping windows.", False)
    device: str = shared.device()
    duplicates: Duplicates = shared.duplicates()
    processes: int = flag(
        "Number of processes, each on its own device, or of jobs with --executor.",
        1,
        allowed=at_least(1, at_most=1_000),
        excludes=("share", "merge", "dry_run"),
    )
    share: Share | None = flag(
        "I/N: compute only share I of N; when all are finished, type --merge.",
        None,
        "--shard",
        read=Share.parse,
        excludes=("merge", "dry_run", "processes"),
    )
    merge: bool = flag(
        "Write the output, when all shares are finished.", False, excludes=("dry_run",)
    )
    dry_run: bool = shared.dry_run("Estimate time, memory and size on a few batches.")
    break_lock: bool = shared.break_lock()
    relatives: RelativesOptions = field(default_factory=RelativesOptions)

    @property
    def is_single(self) -> bool:
        """Whether a protein has one array: of one kind and one layer."""
        return len(self.include) == len(self.layers) == 1

    def __post_init__(self) -> None:
        """Refuses a file without its kind of vectors, and what the format cannot hold."""
        super().__post_init__()
        if self.dry_run and self.relatives.relatives is not None:
            raise UserError("--dry-run measures proteins alone; leave --relatives or --dry-run out")
        for kind, given, path in (
            (Pooling.ranges, self.ranges, "TABLE.tsv"),
            (Pooling.features, self.features, "SAE"),
        ):
            if (given is not None) != (kind in self.include):
                raise UserError(
                    f"a file of {kind} and its kind need each other; type: --include {kind} "
                    f"--{kind} {path}"
                )
        form = f"--format {self.format}"
        if self.dtype is Dtype.bfloat16 and self.format is not Format.pt:
            raise UserError(f"{form} has no bfloat16: type --dtype float16 or --format pt")
        matrices = [kind.value for kind in self.include if kind.is_matrix]
        if self.format is Format.csv and not self.is_single:
            raise UserError(f"{form} has one vector for a protein: one --include, one layer")
        if matrices and self.format in (Format.parquet, Format.anndata, Format.csv):
            raise UserError(
                f"{form} has one vector for a protein, and --include {matrices[0]} makes several; "
                "type --format ragged"
            )
