"""The shares of `embed --processes N`: one process each, on one device each."""

import signal
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from protlm.commands.embedding.compute import compute
from protlm.commands.embedding.job import Job, Named
from protlm.commands.embedding.options import EmbedOptions, Share
from protlm.commands.embedding.parts import opened
from protlm.commands.inputs import STANDARD_INPUT
from protlm.loading import load_model, pick_device
from protlm.system.errors import LostRankError, UserError, of_the_system

_SECONDS_TO_END = 10.0


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

    Returns:
        The number of batches that were halved.
    """
    context, (threads, shares) = get_context("spawn"), local_shares(options)
    running: dict[Connection, BaseProcess] = {}
    halved = 0
    try:
        for mine in shares:
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, threads, (fasta, model_path, output, mine))
            process = context.Process(target=_share, args=arguments, daemon=True)
            process.start()
            theirs.close()
            running[ours] = process
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                halved += _answer(ready)
                running.pop(ready).join()
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.join(_SECONDS_TO_END)
            # A process that ran out of memory while it started may not react.
            process.kill()
            process.join()
    return halved


def local_shares(options: EmbedOptions) -> tuple[int, list[EmbedOptions]]:
    """Returns the threads of each of `options.processes` on this machine, and their settings.

    They divide the threads and the GPUs.
    """
    count = options.processes
    numbers = range(1, count + 1)
    shares = [
        replace(
            options, processes=1, share=Share(one, count), device=device_of(options.device, one)
        )
        for one in numbers
    ]
    return max(1, torch.get_num_threads() // count), shares


def device_of(device: str, number: int) -> str:
    """Returns the device of a process, counted from 1: they take turns on the GPUs."""
    if pick_device(device).type != "cuda" or ":" in device:
        return device
    return f"cuda:{(number - 1) % torch.cuda.device_count()}"


def _answer(connection: Connection) -> int:
    try:
        answer = connection.recv()
    except EOFError:
        raise LostRankError(
            "a process ended early: type the same command again to continue, perhaps with fewer "
            "--processes"
        ) from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _share(
    connection: Connection, threads: int, given: tuple[Path, Path, Path, EmbedOptions]
) -> None:
    """Computes a share, and sends what was done or the error of the user."""
    # The process that started this one is interrupted, and ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(threads)
    fasta, model_path, output, options = given
    share = options.share or Share()
    try:
        model = load_model(model_path, device=options.device)
        job = Job(fasta, Named.of(model, model_path), options)
        with opened(output, job.plan, job.fingerprint(), options, quiet=True) as parts:
            connection.send(compute(job, parts, share, quiet=share.number > 1))
    except KeyboardInterrupt:
        pass
    except Exception as error:
        known = error if isinstance(error, UserError) else of_the_system(error)
        if known is None:
            raise
        connection.send(known)
