"""The shares of `embed --processes N`: one process each, on one device each."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from protlm.commands.embedding.compute import compute
from protlm.commands.embedding.job import Job, Named
from protlm.commands.embedding.options import EmbedOptions
from protlm.commands.embedding.parts import opened
from protlm.data.records.source import STANDARD_INPUT
from protlm.loading import load_model, pick_device
from protlm.system.errors import UserError
from protlm.system.shares import Share, here


def check_processes(fasta: Path, options: EmbedOptions, *, with_jobs: bool) -> None:
    """Refuses several processes, or jobs, that would read standard input or have one share."""
    flag = "--executor" if with_jobs else "--processes"
    if (options.processes > 1 or with_jobs) and fasta == STANDARD_INPUT:
        raise UserError(f"{flag} reads the sequences several times: write them to a file first")
    if with_jobs and (options.share or options.merge or options.dry_run):
        raise UserError(
            "--executor computes and merges all shares, which excludes --shard, --merge and "
            "--dry-run; type: --executor slurm --processes N"
        )


def compute_in_processes(fasta: Path, model_path: Path, output: Path, options: EmbedOptions) -> int:
    """Computes all batches that are not finished in `options.processes` processes.

    They divide the threads and the GPUs of this machine.

    Returns:
        The number of batches that were halved.
    """
    count = options.processes
    shares = [
        replace(
            options, processes=1, share=Share(one, count), device=device_of(options.device, one)
        )
        for one in range(1, count + 1)
    ]
    threads = max(1, torch.get_num_threads() // count)
    computed = partial(_compute, threads, (fasta, model_path, output))
    return sum(here(computed, shares, count, "use fewer --processes"))


def device_of(device: str, number: int) -> str:
    """Returns the device of a process, counted from 1: they take turns on the GPUs."""
    if pick_device(device).type != "cuda" or ":" in device:
        return device
    return f"cuda:{(number - 1) % torch.cuda.device_count()}"


def _compute(threads: int, paths: tuple[Path, Path, Path], options: EmbedOptions) -> int:
    """Computes a share, and returns the number of batches that were halved."""
    torch.set_num_threads(threads)
    fasta, model_path, output = paths
    share = options.share or Share()
    job = Job(fasta, Named.of(load_model(model_path, device=options.device), model_path), options)
    with opened(output, job.plan, job.fingerprint(), options, quiet=True) as parts:
        return compute(job, parts, share, quiet=share.number > 1)
