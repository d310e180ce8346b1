"""`protlm embed FASTA... -m MODEL -o OUT.h5`: one vector, or one per residue, for every protein.

The proteins are divided into blocks. Finished blocks are files in the folder `OUT.h5.partial`, from
which an interrupted command continues, and from which the output is written.
"""

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protlm.analysis.features.autoencoder import read_features
from protlm.commands.embedding.estimate import print_estimate
from protlm.commands.embedding.inputs import Inputs
from protlm.commands.embedding.job import Job, stored
from protlm.commands.embedding.plan import Plan
from protlm.commands.embedding.results import EMBEDDING, Blocks, Results, compute, opened
from protlm.commands.outputs import check_suffix
from protlm.data.records.source import STANDARD_INPUT
from protlm.loading import load_model, pick_device
from protlm.model.embedding import Embedder
from protlm.model.relatives import drawn_beside, in_contexts
from protlm.options.embed import EmbedOptions, Format, Pooling
from protlm.options.jobs import Share, Submission
from protlm.system.errors import InputDataError, OutputError, UserError
from protlm.system.memory import readable_size
from protlm.system.paths import beside, check_output, explain_os_error
from protlm.system.shares import here
from protlm.system.terminal import printable
from protlm.system.work_folder import read_begun, refuse_other, unfinished

# Suffixes that only one format has.
_FORMAT_OF = {
    ".npz": Format.npz,
    ".parquet": Format.parquet,
    ".h5ad": Format.anndata,
    ".csv": Format.csv,
}
# Marks a folder of jobs, which is removed when the output is complete.
_OURS = ".protlm-jobs"


def embed(
    sources: Path | Sequence[Path],
    model_path: Path,
    output: Path,
    options: EmbedOptions,
    submission: Submission | None = None,
) -> None:
    """Embeds sequence files into a new file or folder, as cluster jobs if asked to."""
    form = import_module(f"protlm.commands.embedding.formats.{options.format}")
    if options.format is Format.parquet:
        form.pyarrow()
    named = _FORMAT_OF.get(output.suffix.lower())
    otherwise = None if named is None else f"--format {named}"
    check_suffix(output, form.SUFFIXES, form.WHAT, otherwise=otherwise)
    # A job, too, may find that the output is there.
    check_output(output)
    files = [sources] if isinstance(sources, Path) else [*sources]
    _refuse_sharing(files, options, submission)
    if submission is not None:
        _submit(files, model_path, output, options, submission)
        return
    job = plan_job(files, model_path, options)
    if options.dry_run:
        _estimate(job, output)
        return
    _check_space(job, output)
    with opened(job, output, _begun_with(job, output)) as blocks:
        if not options.merge:
            _compute(job, blocks, partial(_compute_beside_others, files, model_path, output))
        if options.share is None:
            _write(job, blocks, output, form)


def _submit(
    files: Sequence[Path],
    model_path: Path,
    output: Path,
    options: EmbedOptions,
    submission: Submission,
) -> None:
    """Computes each share in a job, and merges them here."""
    submission.check()
    folder, shares = _job_folder(output), _shares(options)
    submission.run(partial(embed, files, model_path, output), shares, folder)
    # The machine that submits jobs need not have their devices.
    embed(files, model_path, output, replace(options, processes=1, merge=True, device="cpu"))
    shutil.rmtree(folder)


def plan_job(files: Sequence[Path], model_path: Path, options: EmbedOptions) -> Job:
    """Loads the model, reads the proteins, and divides the work.

    The model is the first, because it may not have what is asked for, and files may be large.
    """
    model = load_model(model_path, device=options.device)
    typed_layers = options.layers or range(model.num_layers + 1)
    layers = [model.layer_number(layer, first=0) for layer in typed_layers]
    layers_of = dict.fromkeys(options.include, tuple(dict.fromkeys(layers)))
    options = replace(options, include=tuple(layers_of), layers=tuple(dict.fromkeys(layers)))
    autoencoder = None
    if options.features is not None:
        if options.relatives.relatives is not None:
            raise UserError("features are of proteins alone; leave out --features or --relatives")
        autoencoder = read_features(options.features).to(model.device)
        autoencoder.settings.check(model)
        layers_of[Pooling.features] = (autoencoder.settings.layer,)
    keys = tuple((kind, layer) for kind, own in layers_of.items() for layer in own)
    distinct_layers = tuple(dict.fromkeys(layer for _, layer in keys))
    inputs = Inputs(files, options, model.max_residues)
    embedder = Embedder(
        model,
        options.include,
        distinct_layers,
        getattr(torch, options.compute_dtype),
        contexts=in_contexts(model, options.relatives, inputs.names),
        context_tokens=options.tokens_per_batch,
    )
    rows = np.sum([inputs.num_rows(kind) for kind, _ in keys], axis=0)
    plan = Plan(
        inputs.lengths,
        inputs.first_equal(),
        rows * (model.description.model.model_dim * stored(options.dtype).itemsize),
        options.tokens_per_batch,
        around=model.vocabulary.num_around,
        # After its relatives, a protein takes longer than many alone.
        one_by_one=embedder.contexts is not None,
    )
    name = model_path.absolute().name.removesuffix(".ckpt").removesuffix(".pt")
    return Job(options, name, keys, embedder, autoencoder, inputs, plan)


def device_of(device: str, number: int) -> str:
    """Returns the device of a process, counted from 1: they take turns on the GPUs."""
    if pick_device(device).type != "cuda" or ":" in device:
        return device
    return f"cuda:{(number - 1) % torch.cuda.device_count()}"


def _refuse_sharing(
    files: Sequence[Path], options: EmbedOptions, submission: Submission | None
) -> None:
    """Refuses several processes, or jobs, that would read standard input or have one share."""
    flag = "--processes" if submission is None else "--executor"
    if (options.processes > 1 or submission) and STANDARD_INPUT in files:
        raise UserError(f"{flag} reads the sequences several times: write them to a file first")
    if submission and (options.share or options.merge or options.dry_run):
        raise UserError(
            "--executor computes and merges all shares, which excludes --shard, --merge and "
            "--dry-run; type: --executor slurm --processes N"
        )


def _shares(options: EmbedOptions) -> list[EmbedOptions]:
    return [
        replace(options, processes=1, share=Share(number, options.processes))
        for number in range(1, options.processes + 1)
    ]


def _job_folder(output: Path) -> Path:
    folder = beside(output, ".jobs")
    try:
        if folder.exists() and not (folder / _OURS).is_file():
            raise OutputError(f"{folder} exists and is not a folder of jobs of protlm; move it")
        folder.mkdir(exist_ok=True)
        (folder / _OURS).touch()
    except OSError as error:
        raise explain_os_error(error, folder) from error
    return folder


def _free_space(output: Path) -> int:
    folder = next(one for one in output.absolute().parents if one.exists())
    return shutil.disk_usage(folder).free


def _estimate(job: Job, output: Path) -> None:
    blocks, finished = Blocks(output, job.plan), set[int]()
    if read_begun(blocks.folder, EMBEDDING) is not None:
        refuse_other(blocks.folder, _begun_with(job, output), EMBEDDING)
        finished = {block.number for block in job.plan.blocks if blocks.too_large(block) == set()}
    print_estimate(job, _free_space(output), finished)


def _check_space(job: Job, output: Path) -> None:
    """Refuses a disk without space for what this command adds: unfinished parts, the output."""
    free, needed = _free_space(output), 0
    if not job.options.merge:
        needed += Blocks(output, job.plan).missing_bytes(job.options.share or Share())
    if job.options.share is None:
        needed += int(job.plan.num_bytes.sum())
    if needed > free:
        raise OutputError(
            f"the vectors of {output} need {readable_size(needed)} more, and "
            f"{readable_size(free)} are free; choose another disk, fewer layers or --dtype float16"
        )


def _begun_with(job: Job, output: Path) -> dict[str, Any]:
    """Returns what the work is begun with; shares may be merged on a machine without their GPUs."""
    if not job.options.merge:
        return job.begun_with(job.model.device.type)
    begun = read_begun(unfinished(output), EMBEDDING)
    if begun is None:
        raise UserError(
            f"--merge: there is no folder {unfinished(output)}; first run every share: "
            "--shard 1/N to --shard N/N"
        )
    return job.begun_with(begun.get("--device", ""))


def _compute(job: Job, blocks: Blocks, in_process: Callable[[EmbedOptions], int]) -> None:
    """Computes what is not finished: a share or everything, here or in several processes."""
    options, share, folder = job.options, job.options.share or Share(), blocks.folder
    if options.processes == 1:
        halved = compute(job, blocks, share)
    else:
        # They divide the threads and the GPUs of this machine.
        shares = [
            replace(one, device=device_of(options.device, number))
            for number, one in enumerate(_shares(options), start=1)
        ]
        halved = sum(here(in_process, shares, options.processes, "use fewer --processes", folder))
    if halved:
        print(f"the memory of the device was full: {halved:,} batches were halved", file=sys.stderr)
    if options.share is not None:
        print(printable(f"share {share.number} of {share.count} is finished"), file=sys.stderr)


def _compute_beside_others(
    files: Sequence[Path], model_path: Path, output: Path, options: EmbedOptions
) -> int:
    """Computes the share of one process; returns the number of batches that were halved."""
    assert options.share is not None
    torch.set_num_threads(max(1, torch.get_num_threads() // options.share.count))
    job = plan_job(files, model_path, options)
    with opened(job, output, _begun_with(job, output), quiet=True) as blocks:
        return compute(job, blocks, options.share, quiet=options.share.number > 1)


def _write(job: Job, blocks: Blocks, output: Path, form: Any) -> None:
    """Writes the output, unless another share is being computed."""
    blocks.work.refuse_others()
    results = Results(job, blocks)
    if not len(results):
        raise InputDataError("no protein fits into the memory of this device; use another one")
    with drawn_beside(job.embedder.contexts, output, job.inputs.queries()):
        form.write(results, output)
    job.inputs.proteins.report("embedded", further=results.too_large)
    blocks.work.is_published = True
    print(output)
