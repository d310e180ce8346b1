"""One SHA-256 for each result of the main commands: what a change that claims no change keeps.

`make fingerprint` runs prepare, train (three mechanisms, masked and causal), evaluate, embed,
contacts and score on the shipped sample, on one thread, and prints a line for each result.
The hashes are of values, not of files, and hold on one machine.
"""

import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "data_prep" / "sample"
WILD_TYPE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"
# What differs from run to run, or says where and by what it was made.
VOLATILE = ("second", "time", "date", "version", "path", "file", "memory", "hash", "settings")


def commands(folder: Path) -> Iterator[tuple[list[str], str]]:
    """Yields each command and the name of its result in the folder, in order."""
    splits = str(SAMPLE / "uniprot_sample.splits.tsv.gz")
    source = [str(SAMPLE / "uniprot_sample.fasta.gz"), "--split-table", splits]
    yield ["prepare", *source, "--out", "data"], "data"
    limits = ["data.dir=data", "model=tiny", "trainer.max_steps=20", "data.tokens_per_batch=4096"]
    for mechanism, objective in product(
        ("performer_relu", "performer_softmax", "hybrid"), ("masked", "causal")
    ):
        run = f"{mechanism}-{objective}"
        settings = [f"attention={mechanism}", f"objective={objective}", f"run_dir={run}"]
        yield ["train", *settings, *limits], f"{run}/checkpoints/step-00000020.ckpt"
        asked = [f"checkpoint={run}", f"evaluation={objective}", f"output={run}.json"]
        yield ["evaluate", *asked, "data.dir=data", "split=test_ood_cluster"], f"{run}.json"
    model, fasta = ["-m", "hybrid-masked"], str(SAMPLE / "uniprot_tiny.fasta.gz")
    yield ["embed", fasta, *model, "-o", "embed.h5"], "embed.h5"
    structure = str(SAMPLE / "structures" / "test" / "1fuk_A.pdb.gz")
    yield ["contacts", structure, "-o", "contacts.h5"], "contacts.h5"
    rows = "".join(f"{residue}{place}G\n" for place, residue in enumerate(WILD_TYPE, 1))
    (folder / "variants.csv").write_text("mutant\n" + rows.replace("G9G\n", ""))
    (folder / "wild_type.fasta").write_text(f">wild_type\n{WILD_TYPE}\n")
    wild_type = ["--wild-type", "wild_type.fasta"]
    yield ["score", "variants.csv", *wild_type, "-o", "score.csv"], "score.csv"


def values(path: Path) -> Iterator[Any]:
    """Yields the values of a file: arrays, numbers and words."""
    match path.suffix:
        case ".h5":
            found = dict[str, Any]()
            with h5py.File(path) as file:
                file.visititems(
                    lambda name, x: found.update({name: x[()]}) if hasattr(x, "shape") else None
                )
            yield from (found[name] for name in sorted(found))
        case ".ckpt":
            weights = torch.load(path, weights_only=True)["state_dict"]
            yield from (weights[name].numpy() for name in sorted(weights))
        case ".json":
            yield from leaves(json.loads(path.read_text()))
        case ".csv" | ".tsv":
            with path.open(newline="") as file:
                yield from csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        case _:
            return


def leaves(value: Any) -> Iterator[Any]:
    """Yields the numbers and words of JSON, without what differs from run to run."""
    if isinstance(value, dict):
        for key in sorted(value):
            if not any(word in key for word in VOLATILE):
                yield from leaves(value[key])
    elif isinstance(value, list):
        for one in value:
            yield from leaves(one)
    else:
        yield value


def digest(result: Path) -> str:
    """Returns the SHA-256 of the values of a file, or of all files of a folder."""
    total = hashlib.sha256()
    for path in sorted(result.rglob("*")) if result.is_dir() else [result]:
        for value in values(path):
            is_array = isinstance(value, np.ndarray) and value.dtype != object
            total.update(value.tobytes() if is_array else repr(value).encode())
    return total.hexdigest()


def main(folder: Path) -> None:
    """Runs the commands in a folder, and prints the hash of each result."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for command, result in commands(folder):
        subprocess.run(
            [sys.executable, "-m", "protlm", *command],
            cwd=folder,
            env=environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=True,
        )
        print(digest(folder / result), result, flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
