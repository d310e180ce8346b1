"""The command line. Each command imports the heavy modules that it needs."""

import os
import re
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from protlm import __version__
from protlm.cli_checkpoint import checkpoint_app
from protlm.cli_data import data_app
from protlm.cli_labels import finetune, predict, probe
from protlm.cli_look import attention, contacts, inspect
from protlm.cli_values import choice, model_or_default
from protlm.data_prep import interruption
from protlm.errors import ExitCode, UserError, exit_with_message
from protlm.options import (
    AllowComments,
    AllowGaps,
    AllowNucleotides,
    BreakLock,
    CausalModel,
    Cluster,
    ClusterIdentity,
    ClusterTable,
    Deduplicate,
    Device,
    Duplicates,
    EmbeddingDtype,
    EmbedExecutor,
    FamilyTable,
    FirstResidue,
    IgnoreTrailingGarbage,
    JobExecutor,
    MaxRejectRate,
    Model,
    NoFragments,
    OodFamilies,
    Organism,
    Output,
    PerResidue,
    RangeTable,
    Reference,
    Restart,
    SequenceFile,
    ShardResidues,
    SlurmSettings,
    SplitTable,
    WildType,
    Windows,
    Workers,
)

app = typer.Typer(
    name="protlm",
    help="Train protein language models with linear-cost attention, embed proteins, and inspect "
    "attention.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")
_SEVERAL = {
    "--include": "mean|max|std|cls|bos|per_tok|ranges",
    "--repr-layers": r"-?\d+",
    "--layers": r"-?\d+",
    "--heads": r"\d+",
    "--estimator": "(wt|masked|mutant)-marginals|pseudo-log-likelihood|causal-likelihood",
    "--ood-families": r"PF\d+(,PF\d+)*,?",
}
_HYDRA = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _print_version(requested: bool) -> None:
    if requested:
        print(f"protlm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Defines the options before the command."""


@app.command()
def prepare(
    sources: Annotated[
        list[Path], typer.Argument(help="Sequence files or folders; - reads standard input.")
    ],
    out: Annotated[Path, typer.Option(help="The folder of the new data set.")],
    split_table: SplitTable = None,
    valid_fraction: Annotated[
        float, typer.Option(help="Fraction of the records for the split valid.")
    ] = 0.01,
    test_fraction: Annotated[
        float, typer.Option(help="Fraction of the records for the split test.")
    ] = 0.01,
    family_table: FamilyTable = None,
    ood_families: OodFamilies = None,
    cluster_table: ClusterTable = None,
    cluster: Cluster = False,
    cluster_identity: ClusterIdentity = None,
    min_length: Annotated[int | None, typer.Option(help="Minimum number of residues.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Maximum number of residues.")] = None,
    no_fragments: NoFragments = False,
    organism: Organism = None,
    deduplicate: Deduplicate = False,
    max_reject_rate: MaxRejectRate = 0.01,
    allow_nucleotides: AllowNucleotides = False,
    allow_comments: AllowComments = False,
    allow_gaps: AllowGaps = False,
    ignore_trailing_garbage: IgnoreTrailingGarbage = False,
    workers: Workers = 1,
    shard_residues: ShardResidues = 256_000_000,
    restart: Restart = False,
    break_lock: BreakLock = False,
    executor: JobExecutor = None,
    slurm: SlurmSettings = None,
) -> None:
    """Convert FASTA, .dat or XML files to HDF5 shards; resumable."""
    from protlm.data.records import ReadOptions
    from protlm.data_prep import prepare as building
    from protlm.data_prep import rules, select, submission
    from protlm.data_prep import sources as files_of

    split = rules.SplitOptions(
        valid_fraction=valid_fraction,
        test_fraction=test_fraction,
        split_table=split_table,
        ood_families=tuple(ood_families or ()),
        family_table=family_table,
        cluster_table=cluster_table,
        cluster=cluster,
        cluster_identity=cluster_identity,
    )
    options = building.PrepareOptions(
        workers=workers,
        selection=select.Selection(min_length, max_length, no_fragments, tuple(organism or ())),
        deduplicate=deduplicate,
        max_reject_rate=max_reject_rate,
        shard_residues=shard_residues,
        reading=ReadOptions(allow_nucleotides, allow_comments, allow_gaps, ignore_trailing_garbage),
        restart=restart,
        break_lock=break_lock,
    )
    runner = None if executor is None else choice("--executor", executor, submission.Executor)
    jobs = submission.Submission.parse(runner, slurm)
    files = files_of.list_files(sources)
    rule, clusters = rules.make_rule(split, files, out, options)
    if jobs is None:
        building.prepare(files, out, split_rule=rule, clusters=clusters, options=options)
    else:
        submission.prepare_by_jobs(
            files, out, split_rule=rule, clusters=clusters, options=options, submission=jobs
        )


@app.command(context_settings=_HYDRA)
def train(context: typer.Context) -> None:
    """Train a model or continue a run: protlm train [key=value ...]."""
    _replace_by("protlm.train", context.args)


@app.command(context_settings=_HYDRA)
def evaluate(context: typer.Context) -> None:
    """Evaluate a model: protlm evaluate checkpoint=RUN [...]."""
    _replace_by("protlm.commands.evaluate", context.args)


@app.command()
def embed(
    fasta: SequenceFile,
    output: Output,
    model: Model = None,
    include: Annotated[
        list[str] | None,
        typer.Option(help="mean (default), max, std, cls (or bos), per_tok, ranges."),
    ] = None,
    repr_layers: Annotated[
        list[int] | None,
        typer.Option(help="0: embedding; n: output of block n; -1: last (default)."),
    ] = None,
    toks_per_batch: Annotated[
        int, typer.Option(help="Tokens per batch, including padding.")
    ] = 4096,
    format: Annotated[
        str,
        typer.Option(
            help="hdf5, ragged (one array, for very many), parquet, npz, or pt (a folder)."
        ),
    ] = "hdf5",
    dtype: EmbeddingDtype = "float32",
    compute_dtype: EmbeddingDtype = "float32",
    ranges: RangeTable = None,
    windows: Windows = False,
    device: Device = "auto",
    duplicates: Duplicates = "error",
    processes: Annotated[
        int, typer.Option(help="Processes, each on another device, or jobs of --executor.")
    ] = 1,
    shard: Annotated[
        str | None, typer.Option(help="I/N: compute only this share, for --merge.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Write the output of all shares.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate time, memory and size on a few batches.")
    ] = False,
    executor: EmbedExecutor = None,
    slurm: SlurmSettings = None,
) -> None:
    """Embed the proteins of a sequence file; resumable."""
    from protlm.commands.embed import embed as run
    from protlm.commands.embedding.options import Dtype, EmbedOptions, Format, Share
    from protlm.commands.inputs import Duplicates
    from protlm.data_prep import submission
    from protlm.model.pooling import Pooling

    options = EmbedOptions(
        include=tuple(choice("--include", name, Pooling) for name in include or ["mean"]),
        layers=tuple(repr_layers or [-1]),
        tokens_per_batch=toks_per_batch,
        dtype=choice("--dtype", dtype, Dtype),
        compute_dtype=choice("--compute-dtype", compute_dtype, Dtype),
        device=device,
        duplicates=choice("--duplicates", duplicates, Duplicates),
        ranges=ranges,
        windows=windows,
        format=choice("--format", format, Format),
        processes=processes,
        share=None if shard is None else Share.parse(shard),
        merge=merge,
        dry_run=dry_run,
    )
    runner = None if executor is None else choice("--executor", executor, submission.Executor)
    jobs = submission.Submission.parse(runner, slurm)
    run_jobs = None if jobs is None else submission.submitter(jobs, 1)
    run(fasta, model_or_default(model), output, options, run_jobs)


app.command()(attention)
app.command()(contacts)
app.command()(inspect)


@app.command()
def generate(
    model: CausalModel,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="x.fasta or x.fasta.gz; - prints."),
    ],
    prefix: Annotated[str, typer.Option(help="Residues at the start of every sequence.")] = "",
    number: Annotated[
        int | None,
        typer.Option(help="Number of sequences; default: 10, or one for each of --start."),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(help="Sequences that a masked model starts from."),
    ] = None,
    sweeps: Annotated[
        int | None,
        typer.Option(help="With --start: how often each residue is drawn; default: 10."),
    ] = None,
    mask_fraction: Annotated[
        float | None,
        typer.Option(help="With --start: fraction of residues masked at a time; default: 0.1."),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(help="Maximum residues, including the prefix; default: as in training."),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(help="Below 1 favors probable residues; 0 takes the most probable."),
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from the K most probable residues.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the most probable residues, up to this probability."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed makes the same file.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Sequences per batch.")] = 32,
    device: Device = "auto",
) -> None:
    """Sample proteins from a causal or a masked model and write them as FASTA."""
    from protlm.commands.generate import GenerateOptions
    from protlm.commands.generate import generate as run
    from protlm.model.decoding import Sampling
    from protlm.model.gibbs import Sweeps

    given = {"number": sweeps, "mask_fraction": mask_fraction}
    typed = {key: value for key, value in given.items() if value is not None}
    options = GenerateOptions(
        prefix=prefix,
        number=number,
        max_length=max_length,
        sampling=Sampling(temperature, top_k, top_p),
        seed=seed,
        batch_size=batch_size,
        device=device,
        start=start,
        sweeps=Sweeps(**typed) if typed else None,
    )
    run(model, output, options)


@app.command()
def models() -> None:
    """List the models that come with protlm."""
    from protlm.commands.models import print_models

    print_models()


@app.command()
def doctor(
    fasta: Annotated[Path | None, typer.Argument(help="A sequence file to check as well.")] = None,
    model: Model = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Device = "auto",
) -> None:
    """Check this machine, a model and an input before a job."""
    from protlm.commands.doctor import doctor as run

    # Without a file, no model is needed.
    needed = model is not None or fasta is not None
    run(fasta, model_or_default(model) if needed else None, device=device, as_json=json)


@app.command()
def score(
    variants: Annotated[
        list[Path],
        typer.Argument(help="Tables with the column mutant (A1P:D2N) or mutated_sequence."),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="x.csv or x.tsv; or a folder, for several tables."),
    ],
    model: Model = None,
    wild_type: WildType = None,
    reference: Reference = None,
    estimator: Annotated[
        list[str] | None,
        typer.Option(
            help="wt-marginals, masked-marginals (default), mutant-marginals, "
            "pseudo-log-likelihood; causal-likelihood of a causal model."
        ),
    ] = None,
    first_residue: FirstResidue = 1,
    per_residue: PerResidue = False,
    toks_per_batch: Annotated[int, typer.Option(help="Tokens per batch.")] = 16_384,
    json: Annotated[Path | None, typer.Option(help="Also write the metrics as JSON.")] = None,
    scan: Annotated[
        bool,
        typer.Option("--scan", help="Score all substitutions of the protein in a sequence file."),
    ] = False,
    figure: Annotated[Path | None, typer.Option(help="Also draw a heat map of --scan.")] = None,
    device: Device = "auto",
) -> None:
    """Score variants of a protein, beside measured scores."""
    from protlm.commands.score import ScoreOptions, scan_protein, score_variants
    from protlm.downstream.estimators import Estimator

    options = ScoreOptions(
        wild_type=wild_type,
        reference=reference,
        estimators=tuple(choice("--estimator", name, Estimator) for name in estimator or ()),
        first_residue=first_residue,
        per_residue=per_residue,
        tokens_per_batch=toks_per_batch,
        json=json,
        device=device,
        figure=figure,
    )
    (scan_protein if scan else score_variants)(variants, model_or_default(model), output, options)


app.command()(probe)
app.command()(finetune)
app.command()(predict)


def main() -> NoReturn:
    """Runs the command that the arguments of this process name."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    hydra = bool(arguments) and arguments[0] in ("train", "evaluate")
    if debug and not hydra:
        arguments.remove("--debug")
    # On SIGTERM, clean up and print a message.
    with interruption.sigterm_as_interrupt():
        exit_with_message(lambda: _run(arguments), debug=debug)


def _run(arguments: list[str]) -> None:
    """Parses the arguments and runs the command; raises usage errors as `UserError`."""
    if arguments in ([], ["data"], ["checkpoint"]):
        arguments = [*arguments, "--help"]
    try:
        code = app(_spread(arguments), prog_name="protlm", standalone_mode=False)
    except TyperException as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        known = arguments[:1] if arguments[0] in _command_names() else []
        raise UserError(f"{message}; type: {' '.join(['protlm', *known, '--help'])}") from None
    except SystemExit as end:
        # Click turns any broken pipe into exit code 1 without a message.
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None
        raise
    if code == ExitCode.INTERRUPTED:
        # Click turned Ctrl-C into this exit code without printing anything.
        raise KeyboardInterrupt
    if code:
        sys.exit(code)


def _command_names() -> set[str]:
    groups = [group.name for group in app.registered_groups]
    commands = [getattr(command.callback, "__name__", "") for command in app.registered_commands]
    return {name for name in [*groups, *commands] if name}


def _spread(arguments: list[str]) -> list[str]:
    """Allows several values after one flag: `--include mean per_tok`, as in esm-extract.

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
    # Launchers start the other ranks as `python -m MAIN_MODULE ARGUMENTS`, so the main module has
    # to be the one that trains.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606


if __name__ == "__main__":
    main()
