"""The commands that put a model to work. Each imports the heavy modules that it needs."""

from pathlib import Path
from typing import Annotated

import typer

from protlm.cli.options import (
    BreakLock,
    Device,
    Duplicates,
    EmbeddingDtype,
    Model,
    SequenceFile,
    SlurmSettings,
    choice,
    model_or_default,
)


def embed(
    fasta: SequenceFile,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The file to write, or the folder of --format pt."),
    ],
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
            help="hdf5, ragged (one array, for very many), parquet, npz, anndata, or pt (a folder)."
        ),
    ] = "hdf5",
    dtype: EmbeddingDtype = "float32",
    compute_dtype: EmbeddingDtype = "float32",
    ranges: Annotated[
        Path | None,
        typer.Option(help="TSV with the columns accession, first, last; for --include ranges."),
    ] = None,
    windows: Annotated[
        bool,
        typer.Option("--windows", help="Embed proteins that are too long in overlapping windows."),
    ] = False,
    device: Device = "auto",
    duplicates: Duplicates = "error",
    processes: Annotated[
        int, typer.Option(help="Processes, each on another device, or jobs of --executor.")
    ] = 1,
    shard: Annotated[
        str | None, typer.Option(help="I/N: compute share I of N; then run --merge.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Write the output of all shares.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate time, memory and size on a few batches.")
    ] = False,
    break_lock: BreakLock = False,
    executor: Annotated[
        str | None, typer.Option(help="Run --processes N as jobs: slurm, or local (processes).")
    ] = None,
    slurm: SlurmSettings = None,
) -> None:
    """Embed the proteins of a sequence file; resumable."""
    from protlm.commands.embed import embed as run
    from protlm.commands.embedding.job import Dtype, EmbedOptions, Format
    from protlm.data.records.proteins import Duplicates
    from protlm.model.pooling import Pooling
    from protlm.system.shares import Executor, Share, Submission

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
        break_lock=break_lock,
    )
    runner = None if executor is None else choice("--executor", executor, Executor)
    jobs = Submission.parse(runner, slurm)
    run(fasta, model_or_default(model), output, options, jobs)


def generate(
    model: Annotated[
        Path,
        typer.Option(
            "--model",
            "-m",
            help="A run, a .ckpt file, an exported model or a shipped model's name: causal, or "
            "masked with --start.",
        ),
    ],
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
    wild_type: Annotated[
        Path | None, typer.Option(help="A sequence file of one protein, the wild type.")
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            help="In place of --wild-type: ProteinGym's reference file (DMS_id, target_seq)."
        ),
    ] = None,
    estimator: Annotated[
        list[str] | None,
        typer.Option(
            help="wt-marginals, masked-marginals (default), mutant-marginals, "
            "pseudo-log-likelihood; causal-likelihood of a causal model."
        ),
    ] = None,
    first_residue: Annotated[
        int, typer.Option(help="Number of the wild type's first residue in the column mutant.")
    ] = 1,
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="Leave rows unscored that cannot be scored.")
    ] = False,
    per_token: Annotated[
        bool,
        typer.Option(
            "--per-token", help="Divide whole-sequence log-likelihoods by the number of tokens."
        ),
    ] = False,
    toks_per_batch: Annotated[int, typer.Option(help="Tokens per batch.")] = 16_384,
    json: Annotated[Path | None, typer.Option(help="Also write the metrics as JSON.")] = None,
    scan: Annotated[
        bool,
        typer.Option("--scan", help="Score all substitutions of the protein in a sequence file."),
    ] = False,
    figure: Annotated[Path | None, typer.Option(help="Also draw a heat map of --scan.")] = None,
    device: Device = "auto",
) -> None:
    """Score variants of a protein, and compare with measured scores."""
    from protlm.commands.score import ScoreOptions, scan_protein, score_variants
    from protlm.downstream.estimators import Estimator

    options = ScoreOptions(
        wild_type=wild_type,
        reference=reference,
        estimators=tuple(choice("--estimator", name, Estimator) for name in estimator or ()),
        first_residue=first_residue,
        skip_invalid=skip_invalid,
        per_token=per_token,
        tokens_per_batch=toks_per_batch,
        json=json,
        device=device,
        figure=figure,
    )
    (scan_protein if scan else score_variants)(variants, model_or_default(model), output, options)
