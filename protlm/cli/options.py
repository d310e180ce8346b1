"""The options that several commands share, and those of `prepare` and `score`."""

from pathlib import Path
from typing import Annotated

import typer

from protlm.config.fields import above, at_least

# The numbers that options allow, in all commands that have them.
RANGES = {
    **dict.fromkeys(["--seed", "--min-count"], at_least(0)),
    **dict.fromkeys(["--toks-per-batch", "--batch-size", "--shard-residues"], at_least(1)),
    **dict.fromkeys(["--max-length", "--top-k", "--sweeps", "--epochs", "--patience"], at_least(1)),
    **dict.fromkeys(["--lora", "--devices"], at_least(1)),
    "--learning-rate": above(0),
    "--number": at_least(1, at_most=10**8),
    "--processes": at_least(1, at_most=1_000),
    "--first-residue": at_least(-(10**9), at_most=10**9),
}
Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        "-m",
        help="A run, a .ckpt file, an exported or foreign model (docs/interop.md), OWNER/MODEL of "
        "the Hugging Face Hub, or a shipped model's name; default: hybrid-6m.",
    ),
]
Models = Annotated[
    list[Path] | None,
    typer.Option("--model", "-m", help="A model, as for protlm attention; repeat to compare two."),
]
Layers = Annotated[list[int] | None, typer.Option(help="From 1; -1 is the last. Default: all.")]
Heads = Annotated[list[int] | None, typer.Option(help="From 1. Default: all.")]
CausalModel = Annotated[
    Path,
    typer.Option(
        "--model",
        "-m",
        help="A run, a .ckpt file, an exported model or a shipped model's name: causal, or masked "
        "with --start.",
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="The HDF5 file to write.")]
EmbeddingOutput = Annotated[
    Path, typer.Option("--output", "-o", help="The file to write, or the folder of --format pt.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda (or gpu), cuda:1, ...")]
Figure = Annotated[
    Path | None, typer.Option(help="Also draw a PNG; the input must contain one protein.")
]
Duplicates = Annotated[
    str,
    typer.Option(
        help="Repeated identifiers: error, first (skip others), suffix (ID_2); or header: name all "
        "proteins by the whole header, not by its first word."
    ),
]
FamilyTable = Annotated[
    Path | None, typer.Option(help="TSV with the columns Entry and Pfam, for --ood-families.")
]
OodFamilies = Annotated[
    list[str] | None,
    typer.Option(
        help="Pfam accessions held out as test_ood_family (PF00069 ...); default: the paper's 20."
    ),
]
ClusterTable = Annotated[
    Path | None,
    typer.Option(
        help="cluster.tsv of MMseqs2. Clusters are stored for data.sampling=cluster, and each "
        "stays in one split; --split-table overrides this. Takes 40 bytes of memory for a row."
    ),
]
Cluster = Annotated[
    bool, typer.Option("--cluster", help="Cluster the sequences with MMseqs2 linclust.")
]
ClusterIdentity = Annotated[
    float | None, typer.Option(help="Minimum sequence identity of --cluster; default: 0.5.")
]
SplitTable = Annotated[Path | None, typer.Option(help="TSV with the columns accession and split.")]
NoFragments = Annotated[
    bool, typer.Option("--no-fragments", help="Exclude records that UniProt marks as fragments.")
]
Organism = Annotated[
    list[str] | None,
    typer.Option(help="Keep only this name or NCBI taxon; repeatable."),
]
Deduplicate = Annotated[
    bool, typer.Option("--deduplicate", help="Keep only the first of identical sequences.")
]
MaxRejectRate = Annotated[
    float, typer.Option(help="Stop when more than this fraction of the records is rejected.")
]
AllowNucleotides = Annotated[
    bool, typer.Option("--allow-nucleotides", help="Accept files that look like DNA or RNA.")
]
AllowComments = Annotated[
    bool, typer.Option("--allow-comments", help="Skip FASTA lines that begin with ; # or !.")
]
AllowGaps = Annotated[bool, typer.Option("--allow-gaps", help="Remove alignment gaps (- . ~).")]
IgnoreTrailingGarbage = Annotated[
    bool, typer.Option("--ignore-trailing-garbage", help="Accept other bytes after gzip data.")
]
SequenceFile = Annotated[
    Path, typer.Argument(help="A sequence file, plain or gzip; - reads standard input.")
]
Dtype = Annotated[str, typer.Option(help="float32 or float16.")]
EmbeddingDtype = Annotated[str, typer.Option(help="float32, float16 or bfloat16.")]
RangeTable = Annotated[
    Path | None,
    typer.Option(help="TSV with the columns accession, first, last; for --include ranges."),
]
Windows = Annotated[
    bool,
    typer.Option("--windows", help="Embed proteins that are too long in overlapping windows."),
]
Workers = Annotated[int, typer.Option(help="Worker processes; the result does not depend on them.")]
ShardResidues = Annotated[
    int, typer.Option(help="Approximate residues per shard, over all splits.")
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Start over instead of resuming a killed build.")
]
BreakLock = Annotated[
    bool,
    typer.Option(
        "--break-lock",
        help="Take over a lock from another machine; first make sure that no process runs there.",
    ),
]
JobExecutor = Annotated[
    str | None, typer.Option(help="Run one job per file: slurm, or local (processes).")
]
EmbedExecutor = Annotated[
    str | None, typer.Option(help="Run --processes N as jobs: slurm, or local (processes).")
]
SlurmSettings = Annotated[
    list[str] | None, typer.Option(help="partition=, time=, mem_gb=, ... of a job; repeatable.")
]
WildType = Annotated[
    Path | None, typer.Option(help="A sequence file of one protein, the wild type.")
]
Reference = Annotated[
    Path | None,
    typer.Option(help="In place of --wild-type: ProteinGym's reference file (DMS_id, target_seq)."),
]
FirstResidue = Annotated[
    int, typer.Option(help="Number of the wild type's first residue in the column mutant.")
]
SkipInvalid = Annotated[
    bool, typer.Option("--skip-invalid", help="Leave rows unscored that cannot be scored.")
]
PerToken = Annotated[
    bool,
    typer.Option(
        "--per-token", help="Divide whole-sequence log-likelihoods by the number of tokens."
    ),
]
