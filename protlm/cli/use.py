"""The commands that use a model or look inside. Each imports the heavy modules that it needs."""

from pathlib import Path
from typing import Annotated

from protlm.cli.options import (
    BreakLock,
    Device,
    Duplicates,
    EmbeddingDtype,
    Heads,
    Layers,
    Model,
    Output,
    SequenceFile,
    SlurmSettings,
    allowed_value,
    choice,
    input_files,
    model_or_default,
    new_output,
    numbers,
    option,
)
from protlm.config.data import EMBED_TOKENS, TOKENS_PER_BATCH


def embed(
    sources: Annotated[
        list[Path], input_files("Sequence files, plain or gzip; - reads standard input.")
    ],
    output: Annotated[Path, new_output("The file to write, or the folder of --format pt.")],
    model: Model = None,
    include: Annotated[
        list[str] | None, option("mean (default), max, std, cls, bos, per_tok, ranges, features.")
    ] = None,
    repr_layers: Annotated[
        list[str] | None, option("0: embedding; n: output of block n; -1: last (default); or all.")
    ] = None,
    toks_per_batch: Annotated[int, option("Tokens per batch, including padding.")] = EMBED_TOKENS,
    format: Annotated[
        str,
        option("hdf5, ragged (one array, for many), parquet, npz, anndata, pt (a folder) or csv."),
    ] = "hdf5",
    key: Annotated[
        str, option("Names in hdf5: identifier, or sequence-hash, as in files of biotrainer.")
    ] = "identifier",
    dtype: EmbeddingDtype = "float32",
    compute_dtype: EmbeddingDtype = "float32",
    ranges: Annotated[
        Path | None, option("TSV with the columns accession, first, last; for --include ranges.")
    ] = None,
    features: Annotated[Path | None, option("Of features train; for --include features.")] = None,
    windows: Annotated[
        bool, option("Embed proteins that are too long in overlapping windows.", "--windows")
    ] = False,
    device: Device = "auto",
    duplicates: Duplicates = "error",
    processes: Annotated[
        int, option("Processes, each on another device, or jobs of --executor.")
    ] = 1,
    shard: Annotated[str | None, option("I/N: compute share I of N; then run --merge.")] = None,
    merge: Annotated[bool, option("Write the output of all shares.", "--merge")] = False,
    dry_run: Annotated[
        bool, option("Estimate time, memory and size on a few batches.", "--dry-run")
    ] = False,
    break_lock: BreakLock = False,
    executor: Annotated[
        str | None, option("Run --processes N as jobs: slurm, or local (processes).")
    ] = None,
    slurm: SlurmSettings = None,
) -> None:
    """Embed the proteins of sequence files; resumable."""
    from protlm.system.shares import Executor, Share, Submission

    # Before torch is imported.
    share = None if shard is None else Share.parse(shard)
    from protlm.commands.embed import embed as run
    from protlm.commands.embedding.job import Dtype, EmbedOptions, Format
    from protlm.data.records.proteins import Duplicates
    from protlm.model.pooling import Pooling

    options = EmbedOptions(
        include=tuple(choice("--include", name, Pooling) for name in include or ["mean"]),
        layers=numbers("--repr-layers", repr_layers or ["-1"]) or (),
        tokens_per_batch=toks_per_batch,
        dtype=choice("--dtype", dtype, Dtype),
        compute_dtype=choice("--compute-dtype", compute_dtype, Dtype),
        device=device,
        duplicates=choice("--duplicates", duplicates, Duplicates),
        ranges=ranges,
        features=features,
        windows=windows,
        format=choice("--format", format, Format),
        by_hash=allowed_value("--key", key, "identifier", "sequence-hash") != "identifier",
        processes=processes,
        share=share,
        merge=merge,
        dry_run=dry_run,
        break_lock=break_lock,
    )
    runner = None if executor is None else choice("--executor", executor, Executor)
    jobs = Submission.parse(runner, slurm)
    run(sources, model_or_default(model), output, options, jobs)


def generate(
    output: Annotated[Path, new_output("x.fasta or x.fasta.gz; - prints.")],
    model: Model = None,
    prefix: Annotated[str, option("Residues at the start of every sequence.")] = "",
    number: Annotated[
        int | None, option("Number of sequences; default: 10, or one for each of --start.")
    ] = None,
    start: Annotated[Path | None, option("Sequences that a masked model starts from.")] = None,
    sweeps: Annotated[
        int | None, option("With --start: how often each residue is drawn; default: 10.")
    ] = None,
    mask_fraction: Annotated[
        float | None, option("With --start: fraction of residues masked at a time; default: 0.1.")
    ] = None,
    max_length: Annotated[
        int | None, option("Maximum residues, including the prefix; default: as in training.")
    ] = None,
    temperature: Annotated[
        float, option("Below 1 favors probable residues; 0 takes the most probable.")
    ] = 1.0,
    top_k: Annotated[int | None, option("Sample from the K most probable residues.")] = None,
    top_p: Annotated[
        float | None, option("Sample from the most probable residues, up to this probability.")
    ] = None,
    seed: Annotated[int, option("The same seed makes the same file.")] = 0,
    batch_size: Annotated[int, option("Sequences per batch.")] = 32,
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
    run(model_or_default(model), output, options)


def score(
    variants: Annotated[
        list[Path],
        input_files("Tables with the column mutant (A1P:D2N) or mutated_sequence.", "a table"),
    ],
    output: Annotated[
        Path, new_output("x.csv or x.tsv; or a folder, for several tables.", takes_folder=True)
    ],
    model: Model = None,
    wild_type: Annotated[
        Path | None, option("A sequence file of one protein, the wild type.")
    ] = None,
    reference: Annotated[
        Path | None,
        option("In place of --wild-type: ProteinGym's reference file (DMS_id, target_seq)."),
    ] = None,
    label: Annotated[str, option("Column of the measured scores.")] = "DMS_score",
    estimator: Annotated[
        list[str] | None,
        option(
            "wt-marginals, masked-marginals (default), mutant-marginals, "
            "pseudo-log-likelihood; causal-likelihood of a causal model."
        ),
    ] = None,
    first_residue: Annotated[
        int, option("Number of the wild type's first residue in the column mutant.")
    ] = 1,
    skip_invalid: Annotated[
        bool, option("Leave rows unscored that cannot be scored.", "--skip-invalid")
    ] = False,
    per_token: Annotated[
        bool,
        option("Divide whole-sequence log-likelihoods by the number of tokens.", "--per-token"),
    ] = False,
    toks_per_batch: Annotated[int, option("Tokens per batch.")] = TOKENS_PER_BATCH,
    json: Annotated[Path | None, option("Also write the metrics as JSON.")] = None,
    scan: Annotated[
        bool, option("Score all substitutions of the protein in a sequence file.", "--scan")
    ] = False,
    figure: Annotated[Path | None, option("Also draw a heat map of --scan.")] = None,
    device: Device = "auto",
) -> None:
    """Score variants of a protein, and compare with measured scores."""
    from protlm.commands.score import ScoreOptions, scan_protein, score_variants
    from protlm.downstream.estimators import Estimator

    options = ScoreOptions(
        wild_type=wild_type,
        reference=reference,
        label=label,
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


def attention(
    fasta: SequenceFile,
    output: Output,
    model: Model = None,
    layers: Layers = None,
    heads: Heads = None,
    dtype: Annotated[str, option("float32 or float16.")] = "float32",
    device: Device = "auto",
    duplicates: Duplicates = "error",
    figure: Annotated[
        Path | None, option("Also draw a PNG; the input must contain one protein.")
    ] = None,
) -> None:
    """Write exact attention maps, computed in blocks of rows."""
    from protlm.commands.attention import MapOptions, attention_maps
    from protlm.data.records.proteins import Duplicates

    options = MapOptions(
        layers=numbers("--layers", layers),
        heads=numbers("--heads", heads),
        dtype=allowed_value("--dtype", dtype, "float32", "float16"),
        device=device,
        duplicates=choice("--duplicates", duplicates, Duplicates),
        figure=figure,
    )
    attention_maps(fasta, model_or_default(model), output, options)


def contacts(
    proteins: Annotated[
        list[Path],
        input_files(
            "Files of proteins, PDB or mmCIF structures, or folders of structures.",
            "a sequence file, or of a PDB or mmCIF structure",
            takes_folder=True,
        ),
    ],
    output: Output,
    model: Model = None,
    fit: Annotated[
        Path | None,
        option(
            "A folder of structures to fit on, or the NAME.fit.json of an earlier fit; "
            "default: the shipped structures."
        ),
    ] = None,
    chain: Annotated[
        str | None, option("The chain (mmCIF: auth_asym_id); default: the first protein chain.")
    ] = None,
    device: Device = "auto",
    figure: Annotated[
        Path | None, option("Also draw a PNG; of several proteins, NAME.PROTEIN.png each.")
    ] = None,
    duplicates: Duplicates = "error",
) -> None:
    """Predict contact maps from attention maps."""
    from protlm.commands.contacts import ContactOptions
    from protlm.commands.contacts import contacts as run
    from protlm.data.records.proteins import Duplicates

    repeated = choice("--duplicates", duplicates, Duplicates)
    options = ContactOptions(fit, chain, device, figure, repeated)
    run(proteins, model_or_default(model), output, options)


def inspect(
    protein: Annotated[
        Path,
        input_files(
            "A sequence file of one protein, or a PDB or mmCIF structure.",
            "a sequence file, or of a PDB or mmCIF structure",
        ),
    ],
    output: Annotated[Path, new_output("The HTML page to write.")],
    model: Annotated[
        list[Path] | None,
        option("As for protlm attention; give it twice for two models.", "--model", "-m"),
    ] = None,
    layers: Layers = None,
    heads: Heads = None,
    fit: Annotated[
        list[Path] | None, option("NAME.fit.json of protlm contacts, to show predicted contacts.")
    ] = None,
    chain: Annotated[
        str | None, option("The chain (mmCIF: auth_asym_id); default: the first protein chain.")
    ] = None,
    predictions: Annotated[bool, option("Predict every residue: one pass for each.")] = True,
    features: Annotated[Path | None, option("Features of protlm features train, to show.")] = None,
    description: Annotated[Path | None, option("Names, of protlm features describe.")] = None,
    device: Device = "auto",
) -> None:
    """Write one page that shows a model, or two, on a protein."""
    from protlm.commands.inspect import InspectOptions
    from protlm.commands.inspect import inspect as run

    options = InspectOptions(
        layers=numbers("--layers", layers),
        heads=numbers("--heads", heads),
        fits=tuple(fit or ()),
        chain=chain,
        predictions=predictions,
        features=features,
        description=description,
        device=device,
    )
    run(protein, model or [model_or_default(None)], output, options)
