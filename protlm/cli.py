"""The command table. Heavy modules are imported by the command that needs them."""

import os
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer
from typer.exceptions import TyperException

from data_prep.interruption import sigterm_as_interrupt
from protlm.errors import ExitCode, UserError, exit_with_message

app = typer.Typer(
    name="protlm",
    help="Train protein language models with linear-cost attention, embed proteins, look inside.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Check, describe or export prepared shards.")
checkpoint_app = typer.Typer(help="Describe, check or export a model.")
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")

Choice = TypeVar("Choice", bound=StrEnum)
_SEVERAL = {
    "--include": "mean|per_tok|bos",
    "--repr-layers": r"-?\d+",
    "--layers": r"-?\d+",
    "--heads": r"\d+",
    "--ood-families": r"PF\d+(,PF\d+)*,?",
}
_HYDRA = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

Model = Annotated[
    Path, typer.Option("--model", "-m", help="A run folder, a .ckpt file or an exported folder.")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="The HDF5 file to write.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Figure = Annotated[Path | None, typer.Option(help="Also draw the one protein into this PNG.")]
Duplicates = Annotated[
    str, typer.Option(help="A repeated identifier: error, first (skip it), suffix (call it _2).")
]
FamilyTable = Annotated[
    Path | None, typer.Option(help="TSV with the columns Entry and Pfam, for --ood-families.")
]
OodFamilies = Annotated[
    list[str] | None,
    typer.Option(help="PF00069 ...: held out as test_ood_family; default: the paper's 20."),
]
ClusterTable = Annotated[
    Path | None, typer.Option(help="cluster.tsv of MMseqs2: clusters stay together.")
]
Cluster = Annotated[bool, typer.Option("--cluster", help="Make that table with MMseqs2 linclust.")]
ClusterIdentity = Annotated[
    float | None, typer.Option(help="Least identity within its clusters; default: 0.5.")
]
SplitTable = Annotated[Path | None, typer.Option(help="TSV with the columns accession and split.")]
NoFragments = Annotated[
    bool, typer.Option("--no-fragments", help="Leave out what UniProt calls a fragment.")
]
Organism = Annotated[
    list[str] | None, typer.Option(help="Only this one: a name or an NCBI taxon; repeatable.")
]
Deduplicate = Annotated[
    bool, typer.Option("--deduplicate", help="Keep the first of equal sequences only.")
]
MaxRejectRate = Annotated[
    float, typer.Option(help="Stop when more than this share of the records is rejected.")
]
AllowNucleotides = Annotated[
    bool, typer.Option("--allow-nucleotides", help="Accept what looks like DNA or RNA.")
]
AllowComments = Annotated[
    bool, typer.Option("--allow-comments", help="Skip FASTA lines that begin with ; # or !.")
]
AllowGaps = Annotated[
    bool, typer.Option("--allow-gaps", help="Remove the gaps - . ~ of alignments.")
]
IgnoreTrailingGarbage = Annotated[
    bool, typer.Option("--ignore-trailing-garbage", help="Take gzip with junk behind it.")
]


@app.command()
def prepare(
    sources: Annotated[
        list[Path], typer.Argument(help="Files or folders of them; - is standard input.")
    ],
    out: Annotated[Path, typer.Option(help="The folder of shards to make.")],
    split_table: SplitTable = None,
    valid_fraction: Annotated[float, typer.Option(help="Share of the validation split.")] = 0.01,
    test_fraction: Annotated[float, typer.Option(help="Share of the test split.")] = 0.01,
    family_table: FamilyTable = None,
    ood_families: OodFamilies = None,
    cluster_table: ClusterTable = None,
    cluster: Cluster = False,
    cluster_identity: ClusterIdentity = None,
    min_length: Annotated[int | None, typer.Option(help="The fewest residues.")] = None,
    max_length: Annotated[int | None, typer.Option(help="The most residues.")] = None,
    no_fragments: NoFragments = False,
    organism: Organism = None,
    deduplicate: Deduplicate = False,
    max_reject_rate: MaxRejectRate = 0.01,
    allow_nucleotides: AllowNucleotides = False,
    allow_comments: AllowComments = False,
    allow_gaps: AllowGaps = False,
    ignore_trailing_garbage: IgnoreTrailingGarbage = False,
    workers: Annotated[int, typer.Option(help="Processes; the result is the same.")] = 1,
    shard_residues: Annotated[
        int, typer.Option(help="Residues of a shard, about; of all splits together.")
    ] = 256_000_000,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew, not where a killed build was.")
    ] = False,
    break_lock: Annotated[
        bool, typer.Option("--break-lock", help="Take over from a dead process elsewhere.")
    ] = False,
    executor: Annotated[
        str | None, typer.Option(help="One job for each file: slurm, or local processes.")
    ] = None,
    slurm: Annotated[
        list[str] | None, typer.Option(help="A job's partition=, time=, mem_gb=, ...; repeatable.")
    ] = None,
) -> None:
    """Turn FASTA, Swiss-Prot (.dat) or XML into checked HDF5 shards; killed, it goes on."""
    from data_prep.prepare import PrepareOptions
    from data_prep.prepare import prepare as run
    from data_prep.rules import SplitOptions, make_rule
    from data_prep.select import Selection
    from data_prep.sources import list_files
    from data_prep.submission import Executor, Submission, prepare_by_jobs
    from protlm.data.records import ReadOptions

    split = SplitOptions(
        valid_fraction=valid_fraction,
        test_fraction=test_fraction,
        split_table=split_table,
        ood_families=tuple(ood_families or ()),
        family_table=family_table,
        cluster_table=cluster_table,
        cluster=cluster,
        cluster_identity=cluster_identity,
    )
    options = PrepareOptions(
        workers=workers,
        selection=Selection(min_length, max_length, no_fragments, tuple(organism or ())),
        deduplicate=deduplicate,
        max_reject_rate=max_reject_rate,
        shard_residues=shard_residues,
        reading=ReadOptions(allow_nucleotides, allow_comments, allow_gaps, ignore_trailing_garbage),
        restart=restart,
        break_lock=break_lock,
    )
    runner = None if executor is None else _choice("--executor", executor, Executor)
    submission = Submission.parse(runner, slurm)
    files = list_files(sources)
    rule = make_rule(split, files, out, options)
    if submission is None:
        run(files, out, split_rule=rule, options=options)
    else:
        prepare_by_jobs(files, out, split_rule=rule, options=options, submission=submission)


@data_app.command("merge")
def data_merge(
    parts: Annotated[list[Path], typer.Argument(help="Data sets, in the order they are to have.")],
    out: Annotated[Path, typer.Option(help="The data set to make.")],
) -> None:
    """Join data sets that were split by the same rule into one."""
    from data_prep.merge import merge

    merge(parts, out)


@data_app.command("verify")
def data_verify(directory: Path) -> None:
    """Check every shard against the manifest."""
    from protlm.data_sets import verify

    verify(directory)


@data_app.command("info")
def data_info(directory: Path) -> None:
    """Print splits, lengths, sources, and what was dropped or changed."""
    from protlm.data_sets import info

    info(directory)


@data_app.command("export")
def data_export(
    directory: Path,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="x.fasta or x.fasta.gz; default: print.")
    ] = None,
    split: Annotated[
        list[str] | None, typer.Option(help="A split; may be repeated. Default: all.")
    ] = None,
) -> None:
    """Write the sequences back as FASTA."""
    from protlm.data_sets import export

    export(directory, output, split or ())


@data_app.command("leakage")
def data_leakage(
    directory: Path,
    min_shared: Annotated[
        float, typer.Option(help="Share of its k-mers that make a sequence a neighbour.")
    ] = 0.5,
    json: Annotated[Path | None, typer.Option(help="Also write the numbers into this.")] = None,
    mmseqs: Annotated[
        bool, typer.Option("--mmseqs", help="Also search with MMseqs2, for remote homologues.")
    ] = False,
) -> None:
    """Count the sequences of each split that have a near neighbour in train."""
    from data_prep.leakage import LeakageOptions, leakage

    leakage(directory, LeakageOptions(min_shared=min_shared, json=json, mmseqs=mmseqs))


@app.command(context_settings=_HYDRA)
def train(context: typer.Context) -> None:
    """Train a model, or continue a run: protlm train [key=value ...]."""
    _replace_by("protlm.train", context.args)


@app.command(context_settings=_HYDRA)
def evaluate(context: typer.Context) -> None:
    """Evaluate a model: protlm evaluate checkpoint=RUN [key=value ...]."""
    _replace_by("protlm.evaluate", context.args)


@app.command()
def embed(
    fasta: Annotated[Path, typer.Argument(help="Proteins, plain or gzip.")],
    model: Model,
    output: Output,
    include: Annotated[list[str] | None, typer.Option(help="mean, per_tok, bos.")] = None,
    repr_layers: Annotated[
        list[int] | None, typer.Option(help="0: the embedding; n: after block n; -1: the last.")
    ] = None,
    toks_per_batch: Annotated[
        int, typer.Option(help="Tokens in a batch, padding included.")
    ] = 4096,
    dtype: Annotated[str, typer.Option(help="float32 or float16.")] = "float32",
    device: Device = "auto",
    duplicates: Duplicates = "error",
) -> None:
    """Embed the proteins of a file (FASTA, .dat, XML) into one HDF5 file."""
    from protlm.embed import EmbedOptions, Include
    from protlm.embed import embed as run
    from protlm.proteins import Duplicates

    options = EmbedOptions(
        include=tuple(_choice("--include", name, Include) for name in include or ["mean"]),
        layers=tuple(repr_layers or [-1]),
        tokens_per_batch=toks_per_batch,
        dtype=_dtype(dtype),
        device=device,
        duplicates=_choice("--duplicates", duplicates, Duplicates),
    )
    run(fasta, model, output, options)


@app.command()
def attention(
    fasta: Annotated[Path, typer.Argument(help="Proteins, plain or gzip.")],
    model: Model,
    output: Output,
    layers: Annotated[list[int] | None, typer.Option(help="From 1; -1 is the last.")] = None,
    heads: Annotated[list[int] | None, typer.Option(help="From 1.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or float16.")] = "float32",
    device: Device = "auto",
    duplicates: Duplicates = "error",
    figure: Figure = None,
) -> None:
    """Write the exact attention maps of proteins, in blocks of rows."""
    from protlm.attention_maps import MapOptions, attention_maps
    from protlm.proteins import Duplicates

    options = MapOptions(
        layers=tuple(layers) if layers else None,
        heads=tuple(heads) if heads else None,
        dtype=_dtype(dtype),
        device=device,
        duplicates=_choice("--duplicates", duplicates, Duplicates),
        figure=figure,
    )
    attention_maps(fasta, model, output, options)


@app.command()
def contacts(
    protein: Annotated[Path, typer.Argument(help="Proteins, or a PDB or mmCIF structure.")],
    model: Model,
    output: Output,
    fit: Annotated[
        Path | None, typer.Option(help="Structures to fit on; default: the shipped ones.")
    ] = None,
    chain: Annotated[str | None, typer.Option(help="The chain of the structure.")] = None,
    device: Device = "auto",
    figure: Figure = None,
) -> None:
    """Predict contacts from attention maps."""
    from protlm.contacts import ContactOptions
    from protlm.contacts import contacts as run

    run(protein, model, output, ContactOptions(fit, chain, device, figure))


@app.command()
def generate(
    model: Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="x.fasta or x.fasta.gz to write; - prints.")
    ],
    prefix: Annotated[str, typer.Option(help="Residues that all sequences begin with.")] = "",
    number: Annotated[int, typer.Option(help="How many sequences.")] = 10,
    max_length: Annotated[
        int | None,
        typer.Option(help="Residues at most, prefix included; default: as in training."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Below 1: more probable residues; 0: the most probable one.")
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from this many of the most probable residues.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the most probable, of this mass together.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed makes the same file.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Sequences at a time.")] = 32,
    device: Device = "auto",
) -> None:
    """Sample new proteins from a causal model into a FASTA file."""
    from protlm.generate import GenerateOptions
    from protlm.generate import generate as run
    from protlm.model.decoding import Sampling

    options = GenerateOptions(
        prefix=prefix,
        number=number,
        max_length=max_length,
        sampling=Sampling(temperature, top_k, top_p),
        seed=seed,
        batch_size=batch_size,
        device=device,
    )
    run(model, output, options)


@checkpoint_app.command("info")
def checkpoint_info(path: Path) -> None:
    """Print what a run, a checkpoint or an exported folder holds."""
    from protlm.checkpoints import info

    info(path)


@checkpoint_app.command("verify")
def checkpoint_verify(path: Path) -> None:
    """Check the checkpoints of a run, or one checkpoint, against their SHA-256."""
    from protlm.checkpoints import verify

    verify(path)


@checkpoint_app.command("export")
def checkpoint_export(path: Path, output: Annotated[Path, typer.Option("--output", "-o")]) -> None:
    """Write model.safetensors and config.json into a new folder."""
    from protlm.checkpoints import export

    export(path, output)


@checkpoint_app.command("consolidate")
def checkpoint_consolidate(
    path: Path, output: Annotated[Path, typer.Option("--output", "-o")]
) -> None:
    """Write one ordinary .ckpt file of a checkpoint in parts, as trainer=fsdp makes them."""
    from protlm.checkpoints import consolidate

    consolidate(path, output)


def main() -> NoReturn:
    """The entry point: runs the command of this process's arguments."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    hydra = bool(arguments) and arguments[0] in ("train", "evaluate")
    if debug and not hydra:
        arguments.remove("--debug")
    # What a cluster ends tidies up, and says a word.
    with sigterm_as_interrupt():
        exit_with_message(lambda: _run(arguments), debug=debug)


def _run(arguments: list[str]) -> None:
    """Parses and runs; a usage error is a `UserError` like any other."""
    if arguments in ([], ["data"], ["checkpoint"]):
        arguments = [*arguments, "--help"]
    try:
        code = app(_spread(arguments), prog_name="protlm", standalone_mode=False)
    except TyperException as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        known = arguments[:1] if arguments[0] in _command_names() else []
        raise UserError(f"{message}; type: {' '.join(['protlm', *known, '--help'])}") from None
    except SystemExit as end:
        # The parser ends with 1 when nobody reads the output any more, which is no failure.
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None
        raise
    if code == ExitCode.INTERRUPTED:
        # The parser has taken Ctrl-C for this code, and nobody has said a word.
        raise KeyboardInterrupt
    sys.exit(code or 0)


def _command_names() -> set[str]:
    groups = [group.name for group in app.registered_groups]
    commands = [getattr(command.callback, "__name__", "") for command in app.registered_commands]
    return {name for name in [*groups, *commands] if name}


def _spread(arguments: list[str]) -> list[str]:
    """Lets one flag take several values: `--include mean per_tok`, as in esm-extract.

    >>> _spread(["--include", "mean", "per_tok", "--heads", "1", "x.fasta"])
    ['--include', 'mean', '--include', 'per_tok', '--heads', '1', 'x.fasta']
    """
    spread: list[str] = []
    flag, fresh = "", False
    for argument in arguments:
        if argument in _SEVERAL:
            flag, fresh = argument, True
        elif flag and re.fullmatch(_SEVERAL[flag], argument):
            if not fresh:
                spread.append(flag)
            fresh = False
        else:
            flag = ""
        spread.append(argument)
    return spread


def _replace_by(module: str, arguments: list[str]) -> NoReturn:
    # Launchers start the other ranks as `python -m <main module> <arguments>`: that must be the
    # module that trains, so this process becomes it.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606


def _choice(flag: str, value: str, choices: type[Choice]) -> Choice:
    try:
        return choices(value)
    except ValueError:
        allowed = ", ".join(choice.value for choice in choices)
        raise UserError(f"{flag} {value} is not one of {allowed}") from None


def _dtype(value: str) -> str:
    if value not in ("float32", "float16"):
        raise UserError(f"--dtype {value} is not one of float32, float16")
    return value


if __name__ == "__main__":
    main()
