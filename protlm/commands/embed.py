"""`protlm embed FASTA -m MODEL -o OUT.h5`: one vector, or one per residue, for every protein.

Batches are finished in the folder `OUT.h5.partial`, and the output is written from there: an
interrupted command continues after its last batch.
"""

import shutil
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from protlm.commands.embedding.compute import compute, finished
from protlm.commands.embedding.estimate import print_estimate
from protlm.commands.embedding.job import Job, Named
from protlm.commands.embedding.options import EmbedOptions, Format
from protlm.commands.embedding.parts import EMBEDDING, Parts, opened
from protlm.commands.embedding.results import Results
from protlm.commands.embedding.share_processes import (
    check_processes,
    compute_in_processes,
)
from protlm.commands.outputs import check_suffix
from protlm.loading import load_model
from protlm.system.errors import InputDataError, OutputError, UserError, interrupt_explained
from protlm.system.memory import readable_size
from protlm.system.paths import beside, check_output, explain_os_error
from protlm.system.shares import Executor, Share, Submission
from protlm.system.terminal import printable
from protlm.system.work_folder import read_begun, refuse_other, unfinished


def embed(
    fasta: Path,
    model_path: Path,
    output: Path,
    options: EmbedOptions,
    submission: Submission | None = None,
) -> None:
    """Embeds every record of a sequence file; records that are too long are reported.

    Args:
        fasta: a sequence file.
        model_path: a run, a checkpoint or an exported model.
        output: the new file, or with `--format pt` the new folder.
        options: the settings.
        submission: computes `options.processes` shares in jobs; then the output is written.
    """
    options.check()
    form = import_module(f"protlm.commands.embedding.formats.{options.format.value}")
    if options.format is Format.parquet:
        form.pyarrow()
    named = _FORMAT_OF.get(output.suffix.lower())
    otherwise = None if named is None else f"--format {named}"
    check_suffix(output, form.SUFFIXES, form.WHAT, otherwise=otherwise)
    check_output(output)
    folder = unfinished(output)
    check_processes(fasta, options, with_jobs=submission is not None)
    if submission is not None and submission.executor is Executor.LOCAL:
        # Jobs of this machine are its processes.
        submission = None
    if submission is not None:
        _compute_in_jobs((fasta, model_path, output), options, submission)
        # The machine that submits jobs need not have their devices.
        options = replace(options, processes=1, merge=True, device="cpu")
    with interrupt_explained(
        f"the same command continues after the last batch that is finished in {folder}"
    ):
        model = load_model(model_path, device=options.device)
        job = Job(fasta, Named.of(model, model_path), options)
        if options.dry_run:
            _estimate(job, output)
        else:
            _run(job, output, form, (fasta, model_path))
    if submission is not None:
        shutil.rmtree(_job_folder(output))


# Suffixes that only one format has.
_FORMAT_OF = {".npz": Format.npz, ".parquet": Format.parquet, ".h5ad": Format.anndata}
# Marks a folder of jobs, which is removed when the output is complete.
_OURS = ".protlm-jobs"


def _compute_in_jobs(
    paths: tuple[Path, Path, Path], options: EmbedOptions, submission: Submission
) -> None:
    """Computes all shares in jobs, each in `output`.partial; the same call continues them."""
    folder, count = _job_folder(paths[-1]), options.processes
    try:
        if folder.exists() and not (folder / _OURS).is_file():
            raise OutputError(f"{folder} exists and is not a folder of jobs of protlm; move it")
        folder.mkdir(exist_ok=True)
        (folder / _OURS).touch()
    except OSError as error:
        raise explain_os_error(error, folder) from error
    shares = [Share(number, count) for number in range(1, count + 1)]
    with interrupt_explained("the same command continues what the jobs have not finished"):
        submission.run(
            partial(embed, *paths),
            [replace(options, processes=1, share=share) for share in shares],
            folder,
        )


def _job_folder(output: Path) -> Path:
    """Returns the folder of what jobs print."""
    return beside(output, ".jobs")


def _estimate(job: Job, output: Path) -> None:
    """Prints what a command will need, beside what is finished."""
    parts, done = Parts(output, job.plan), {}
    if read_begun(parts.folder, EMBEDDING) is not None:
        refuse_other(parts.folder, _fingerprint(job, output), EMBEDDING)
        done = {unit: finished(parts, unit) for unit in range(len(job.plan.units))}
    print_estimate(job, output, done)


def _run(job: Job, output: Path, form: Any, given: tuple[Path, Path]) -> None:
    share = job.options.share or Share()
    _check_space(job, output)
    with opened(output, job.plan, _fingerprint(job, output), job.options) as parts:
        if job.options.processes > 1:
            _say_halved(compute_in_processes(*given, output, job.options))
        elif not job.options.merge:
            _say_halved(compute(job, parts, share))
        if job.options.share is not None:
            print(printable(f"share {share.number} of {share.count} is finished"), file=sys.stderr)
            return
        parts.check_alone()
        results = Results(job, parts)
        if not len(results):
            raise InputDataError("no protein fits into the memory of this device; use another one")
        form.write(results, output)
        job.proteins.report("embedded", further=results.too_large)
        parts.remove()


def _check_space(job: Job, output: Path) -> None:
    """Refuses a disk without space for what this command adds: unfinished batches, the output."""
    folder = output.absolute().parent
    while not folder.exists():
        folder = folder.parent
    free, needed = shutil.disk_usage(folder).free, 0
    if not job.options.merge:
        needed += Parts(output, job.plan).missing_bytes(job.options.share or Share())
    if job.options.share is None:
        needed += int(job.plan.num_bytes.sum())
    if needed > free:
        raise OutputError(
            f"the vectors of {output} need {readable_size(needed)} more, and "
            f"{readable_size(free)} are free; choose another disk, fewer layers or --dtype float16"
        )


def _fingerprint(job: Job, output: Path) -> dict[str, Any]:
    fingerprint = job.fingerprint()
    if job.options.merge:
        begun = read_begun(unfinished(output), EMBEDDING)
        if begun is None:
            raise UserError(
                f"--merge: there is no folder {unfinished(output)}; first run every share: "
                "--shard 1/N to --shard N/N"
            )
        # The vectors may be joined on a machine without the devices that computed them.
        fingerprint["--device"] = begun.get("--device")
    return fingerprint


def _say_halved(number: int) -> None:
    if number:
        message = f"the memory of the device was full: {number:,} batches were halved"
        print(message, file=sys.stderr)
