"""The training of a model on a card that is lent for minutes: `benchmarks/gpu.sh product`.

    python -m benchmarks.gpu_product pack TRAIN VALID -o PACKED [--members 2]
    benchmarks/gpu.sh product PACKED -o OUT [--seconds 530] [--experiment swissprot_gpu]
        [SETTINGS OF TRAIN]
    python -m benchmarks.gpu_product join OUT/step-N -o MODEL

`pack` writes the sequences of two prepared data sets, without headers and at most some of each
cluster, into a file that is small enough to be carried along. `product` prepares it, trains an
experiment until its time is over, and writes the weights into OUT whenever a checkpoint is new:
safetensors in bfloat16, in shards below 15 MiB with an index, the last set alone, and each set
whole. `join` makes a model of protlm of such a set. The same command continues the run, which is in
OUT.work.
"""

import argparse
import json
import lzma
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import numpy as np
from safetensors.torch import load_file, save_file
from torch import Tensor

from protlm.checkpoints.checks import write_sums
from protlm.checkpoints.format import newest_whole, step_of
from protlm.data.shards.data_set import open_clusters, open_split
from protlm.data.vocabulary import VOCABULARY
from protlm.system.errors import ExitCode, InputDataError, exit_with_message
from protlm.system.paths import beside, check_output, complete_file

MOST_BYTES = 15 << 20
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# The seconds between two looks for a checkpoint, and those for the last step and its export.
_PAUSE, _EXPORT = 5.0, 40.0


def pack(train: Path, valid: Path, output: Path, members: int) -> None:
    """Writes lines of a split, a cluster and a sequence, compressed."""
    check_output(output)
    with complete_file(output) as temporary, lzma.open(temporary, "wt", preset=9) as file:
        reader, clusters = open_split(train, "train"), open_clusters(train, "train")
        numbers, starts = np.arange(len(clusters)), np.zeros(len(clusters), np.uint64)
        turns = [clusters.members(numbers, starts, turn) for turn in range(members)]
        for cluster, own in enumerate(np.stack(turns, axis=1).tolist()):
            # A small cluster has its members several times.
            for sample in dict.fromkeys(own):
                file.write(f"train\t{cluster}\t{VOCABULARY.decode(reader[sample])}\n")
        held_out = open_split(valid, "valid")
        for sample in range(len(held_out)):
            file.write(f"valid\tv{sample}\t{VOCABULARY.decode(held_out[sample])}\n")
    print(f"Wrote {output}, {output.stat().st_size / (1 << 20):.1f} MiB")


def unpack(packed: Path, folder: Path) -> Path:
    """Prepares the packed sequences, unless this was done; returns the data set."""
    data = folder / "data"
    if (data / "manifest.json").exists():
        return data
    fasta, splits, clusters = (folder / n for n in ("all.fasta", "splits.tsv", "clusters.tsv"))
    folder.mkdir(parents=True, exist_ok=True)
    with fasta.open("w") as f, splits.open("w") as s, clusters.open("w") as c:
        s.write("accession\tsplit\n")
        _unpack(packed, f, s, c)
    command = ["prepare", str(fasta), "-o", str(data), "--split-table", str(splits)]
    _protlm(*command, "--cluster-table", str(clusters))
    return data


def _unpack(packed: Path, fasta: TextIO, splits: TextIO, clusters: TextIO) -> None:
    with lzma.open(packed, "rt") as lines:
        for number, line in enumerate(lines):
            split, cluster, sequence = line.rstrip("\n").split("\t")
            fasta.write(f">{number}\n{sequence}\n")
            splits.write(f"{number}\t{split}\n")
            clusters.write(f"{cluster}\t{number}\n")


def product(packed: Path, out: Path, seconds: float, settings: Sequence[str]) -> int:
    """Trains until the time is over; returns the exit code of the run."""
    end, run = time.monotonic() + seconds, beside(out, ".work") / "run"
    out.mkdir(parents=True, exist_ok=True)
    data = unpack(packed, run.parent)
    command = [sys.executable, "-m", "protlm.train", *settings]
    command += [f"data.dir={data}", f"run_dir={run}"]
    with subprocess.Popen(command) as training:
        try:
            while training.poll() is None and time.monotonic() < end - _EXPORT:
                # A checkpoint may be half there.
                with suppress(InputDataError):
                    export_new(run, out)
                with suppress(subprocess.TimeoutExpired):
                    training.wait(_PAUSE)
            training.terminate()
            with suppress(subprocess.TimeoutExpired):
                training.wait(_EXPORT / 2)
        finally:
            # Without effect if it has ended.
            training.kill()
    export_new(run, out)
    return 0 if training.returncode == ExitCode.PREEMPTED else training.returncode


def export_new(run: Path, out: Path) -> None:
    """Exports the last checkpoint of a run, unless its set is there."""
    checkpoint, _ = newest_whole(run)
    if checkpoint is not None and step_of(checkpoint) > _step(out):
        export(checkpoint, out, step_of(checkpoint))


def _step(out: Path) -> int:
    """Returns the step of the set that is there, or -1."""
    return max((int(path.name.removeprefix("step-")) for path in out.glob("step-*")), default=-1)


def export(checkpoint: Path, out: Path, step: int) -> None:
    """Writes the weights of a checkpoint in shards, then removes the set before."""
    whole, parts = (beside(out, ".work") / name for name in ("exported", "shards"))
    for folder in (whole, parts):
        shutil.rmtree(folder, ignore_errors=True)
    _protlm("checkpoint", "export", str(checkpoint), "-o", str(whole), "--dtype", "bfloat16")
    shutil.copytree(whole, parts, ignore=shutil.ignore_patterns(WEIGHTS, "SHA256SUMS"))
    shard(load_file(whole / WEIGHTS), parts)
    before = list(out.glob("step-*"))
    parts.rename(out / f"step-{step}")
    for folder in before:
        shutil.rmtree(folder)


def shard(weights: dict[str, Tensor], folder: Path) -> None:
    """Writes weights in files below the limit, with the index that names the file of each."""
    shards: list[dict[str, Tensor]] = [{}]
    room = MOST_BYTES
    for name, weight in weights.items():
        # The header of a file has some 100 bytes for each tensor.
        size = weight.nbytes + 200
        if size > room:
            shards.append({})
            room = MOST_BYTES
        shards[-1][name], room = weight, room - size
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    for name, own in zip(names, shards, strict=True):
        save_file(own, folder / name)
    where = {key: name for name, own in zip(names, shards, strict=True) for key in own}
    content = {"metadata": {}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(content, indent=1) + "\n")


def join(folder: Path, output: Path) -> None:
    """Makes a model of a set of shards."""
    check_output(output)
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    weights: dict[str, Tensor] = {}
    for name in sorted({*where.values()}):
        weights |= load_file(folder / name)
    shutil.copytree(folder, output, ignore=shutil.ignore_patterns("model-*", INDEX))
    save_file(weights, output / WEIGHTS)
    write_sums(output)
    print(f"Wrote {output}")


def _protlm(*arguments: str) -> None:
    """Runs a command of protlm, whose failure ends this one."""
    if code := subprocess.run([sys.executable, "-m", "protlm", *arguments], check=False).returncode:
        sys.exit(code)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a model in the minutes of a lent card.")
    actions = parser.add_subparsers(dest="action", required=True)
    packing = actions.add_parser("pack", help="write sequences into a small file")
    packing.add_argument("train", type=Path, help="a data set with clusters and the split train")
    packing.add_argument("valid", type=Path, help="a data set with the split valid")
    packing.add_argument("--members", type=int, default=2, help="of a cluster, at most")
    running = actions.add_parser("product", help="train, and export at each checkpoint")
    running.add_argument("packed", type=Path)
    running.add_argument("--seconds", type=float, default=530.0)
    running.add_argument("--experiment", default="swissprot_gpu", help="of conf/experiment")
    joining = actions.add_parser("join", help="make a model of shards")
    joining.add_argument("shards", type=Path)
    for each in (packing, running, joining):
        each.add_argument("-o", "--output", type=Path, required=True)
    given, settings = parser.parse_known_args(arguments)
    # Those of protlm train may stand between the options.
    if wrong := [one for one in settings if given.action != "product" or "=" not in one]:
        parser.error(f"{wrong[0]} is not an option of {given.action} or a setting of train")
    given.settings = settings
    return given


def main() -> None:
    """Packs, trains or joins."""
    given = parse()
    if given.action == "pack":
        pack(given.train, given.valid, given.output, given.members)
    elif given.action == "join":
        join(given.shards, given.output)
    else:
        settings = [f"experiment={given.experiment}", *given.settings]
        sys.exit(product(given.packed, given.output, given.seconds, settings))


if __name__ == "__main__":
    exit_with_message(main)
