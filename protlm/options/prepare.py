"""The options of `protlm prepare` and `protlm data leakage`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protlm.config.fields import ANY_NUMBER, Checked, above, at_least, by_flag, flag
from protlm.options import shared
from protlm.system.errors import UserError


@dataclass(frozen=True)
class ReadOptions(Checked):
    r"""Deviations from the formats that are accepted.

    Args:
        allow_comments: skips lines of a FASTA file that begin with `;`, `#` or `!`.
        allow_gaps: removes the gaps `-`, `.` and `~` of alignments (A2M, A3M), and the lines
            `#A3M#` and `#59\t1` of the MPI toolkit and of ColabFold.
        ignore_trailing_garbage: ignores other data after the gzip data.
        origins: parses taxon, organism and fragment status in FASTA headers, which doubles the
            time for reading.
        rows: reads an alignment: the records keep their letters as rows of it, annotation of
            HH-suite is left out, and a second alignment in the file is refused.
    """

    allow_nucleotides: bool = flag("Accept files that look like DNA or RNA.", False)
    allow_comments: bool = flag("Skip FASTA lines that begin with ; # or !.", False)
    allow_gaps: bool = flag("Remove alignment gaps (- . ~).", False)
    ignore_trailing_garbage: bool = flag("Accept other bytes after gzip data.", False)
    origins: bool = True
    features: bool = False
    rows: bool = False


@dataclass(frozen=True)
class Selection(Checked):
    """Criteria for records to keep; the default keeps all.

    Args:
        no_fragments: records whose source does not say whether they are fragments are kept.
        organisms: names, which include strains, or NCBI taxon numbers; a record must match one of
            them. Records without an organism in the source are left out.
    """

    min_length: int | None = flag("Minimum number of residues.", None, allowed=ANY_NUMBER)
    max_length: int | None = flag("Maximum number of residues.", None, allowed=ANY_NUMBER)
    no_fragments: bool = flag("Exclude fragments.", False)
    organisms: tuple[str, ...] = flag(
        "Keep only records of this organism, by name or NCBI taxon; repeatable.",
        (),
        "--organism",
        words=r"\d+",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        shortest = 1 if self.min_length is None else self.min_length
        longest = self.max_length
        if shortest < 1 or (longest is not None and longest < shortest):
            bounds = {"--min-length": self.min_length, "--max-length": self.max_length}
            given = " ".join(f"{flag} {n}" for flag, n in bounds.items() if n is not None)
            raise UserError(
                f"{given}: no record has such a length; both are numbers of residues, at least 1, "
                "the first not above the second"
            )
        if not all(organism.strip() for organism in self.organisms):
            raise UserError("--organism '' is empty; give a name or a number: 9606")


@dataclass(frozen=True)
class SplitOptions(Checked):
    """Options of the split rule; the default is a random split.

    Args:
        split_table: table of the split of each accession; excludes all options except clusters.
        ood_families: words of the family table, separate or joined by commas; if empty, the Pfam
            families of the Performer paper.
        cluster_table: the `cluster.tsv` of MMseqs2; determines the clusters, and without a split
            table also the splits.
        cluster: creates such a table with MMseqs2.
    """

    split_table: Path | None = flag(
        "TSV with the columns accession and split.",
        None,
        excludes=("valid_fraction", "test_fraction", "family_table"),
    )
    valid_fraction: float = flag(
        "Fraction of the records for the split valid.", 0.01, allowed=ANY_NUMBER
    )
    test_fraction: float = flag(
        "Fraction of the records for the split test.", 0.01, allowed=ANY_NUMBER
    )
    family_table: Path | None = flag(
        "TSV with the families of each accession, for --ood-families.", None
    )
    ood_families: tuple[str, ...] = flag(
        "Families held out as test_ood_family, by words of any column of the table (PF00069 "
        "IPR000719 'Globin family'); default: the paper's 20 of Pfam.",
        (),
        words=r"[A-Z]+\d+|[A-Za-z\d]+:[\w.]+|[^/]+ [^/]+",
    )
    cluster_table: Path | None = flag(
        "cluster.tsv of MMseqs2. Clusters are stored for data.sampling=cluster, and each stays in "
        "one split; --split-table overrides this. Needs 40 bytes of memory for each row.",
        None,
        excludes=("cluster",),
    )
    cluster: bool = flag("Cluster the sequences with MMseqs2 linclust.", False)
    cluster_identity: float | None = flag(
        "Minimum sequence identity of --cluster; default: 0.5.",
        None,
        allowed=above(0, at_most=1),
        needs="--cluster",
    )
    cluster_coverage: float | None = flag(
        "Minimum fraction of a member that is aligned by --cluster; default: 0.8.",
        None,
        allowed=above(0, at_most=1),
        needs="--cluster",
    )
    no_homologs: bool = flag(
        "Exclude training sequences at least 30 % identical over 80 % of a sequence in "
        "test_ood_family (MMseqs2).",
        False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ood_families and self.family_table is None:
            raise UserError(
                "--ood-families requires --family-table TABLE, which lists the families of "
                "accessions: at uniprot.org choose Download, TSV, and the columns Entry and Pfam"
            )
        if self.no_homologs and self.family_table is None and self.split_table is None:
            raise UserError(
                "--no-homologs needs held-out families: --family-table TABLE, or a --split-table "
                "with the split test_ood_family"
            )


@dataclass(frozen=True)
class PrepareOptions(Checked):
    """Options of a build, except those of its splits.

    Args:
        workers: number of processes that parse and encode; it does not change the result.
        deduplicate: keeps only the first of identical sequences.
        shard_residues: minimum number of residues of a segment, which becomes one shard in each
            split, unless its sequences are very short.
        is_share: the data set will be merged with others, so it may lack held-out families, and no
            report is printed.
    """

    workers: int = flag(
        "Number of processes; the result does not depend on it.",
        1,
        allowed=at_least(1, at_most=256),
    )
    selection: Selection = field(default_factory=Selection)
    deduplicate: bool = flag("Keep only the first of identical sequences.", False)
    max_reject_rate: float = flag(
        "Stop if a larger fraction of the records is rejected.",
        0.01,
        allowed=at_least(0, at_most=1),
    )
    shard_residues: int = flag(
        "Approximate number of residues in a shard.", 256_000_000, allowed=at_least(1)
    )
    reading: ReadOptions = field(default_factory=ReadOptions)
    restart: bool = flag("Start over instead of resuming.", False)
    break_lock: bool = shared.break_lock()
    is_share: bool = False

    def settings(self) -> dict[str, Any]:
        """Returns the settings that the result depends on, by flag."""
        return {
            "--shard-residues": self.shard_residues,
            "--deduplicate": self.deduplicate,
            **by_flag(self.reading),
            **by_flag(self.selection),
        }


@dataclass(frozen=True)
class LeakageOptions(Checked):
    """`min_shared` is the fraction of a sequence's k-mers that a close relative must contain."""

    min_shared: float = flag(
        "Fraction of k-mers that two similar sequences share.",
        0.5,
        allowed=above(0, at_most=1),
    )
    json: Path | None = flag("Also write the counts as JSON.", None)
    mmseqs: bool = flag("Also search for remote homologs with MMseqs2.", False)
