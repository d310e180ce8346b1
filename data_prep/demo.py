"""`make demo`: ordinary commands on the shipped sample, with the shipped model and a new small one.

A step whose output exists is not repeated, so an interrupted demo resumes.
"""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from protlm.system.errors import InputDataError, exit_with_message
from protlm.system.paths import sample_dir
from protlm.system.terminal import print_table

SPLITS = ("test_iid", "test_remote_homolog", "test_ood_cluster", "test_ood_family")
FOLDER = Path("demo")
# The results of the model that the demo trains, and of the shipped one.
TRAINED, SHIPPED = "metrics_run.json", "metrics_shipped.json"
# With rows as long as those of training: whole proteins take longer.
_EVALUATE = (
    "evaluate evaluation.masked.max_length=512 data.dir={demo}/data "
    f"split=[{','.join(SPLITS)}] output={{demo}}/"
)


class Step(NamedTuple):
    """One command of the demo, its title, its output, and a note that is printed before it.

    Words of the command may have the folders {demo} and {sample}.
    """

    title: str
    command: str
    output: str
    note: str = ""


STEPS = (
    Step(
        "Prepare 12,373 UniProt sequences: FASTA to verified HDF5 shards",
        "prepare {sample}/uniprot_sample.fasta.gz --out {demo}/data "
        "--split-table {sample}/uniprot_sample.splits.tsv.gz",
        "data",
    ),
    Step(
        "Train a small Performer-ReLU",
        "train experiment=demo data.dir={demo}/data run_dir={demo}/run",
        "run/loss.png",
        "In training a fifth of the targets is not masked (BERT's 80/10/10), so its validation "
        "perplexity is lower than that of the evaluations below, which mask all of them.",
    ),
    Step(
        "Evaluate it in and out of distribution, against residue frequencies",
        f"{_EVALUATE}{TRAINED} checkpoint={{demo}}/run",
        TRAINED,
    ),
    Step(
        "Evaluate the shipped model in the same way, and on contacts",
        f"{_EVALUATE}{SHIPPED} evaluation=[masked,contacts]",
        SHIPPED,
    ),
    Step(
        "Embed the 180 proteins of a FASTA file",
        "embed {sample}/uniprot_tiny.fasta.gz -o {demo}/embeddings.h5",
        "embeddings.h5",
    ),
    Step(
        "Write the attention maps of BPT1_BOVIN",
        "attention {sample}/bpt1_bovin.fasta -o {demo}/attention.h5 --figure {demo}/attention.png",
        "attention.h5",
    ),
    # P10081, yeast eIF4A: 119 residues with homologs in the training split.
    Step(
        "Predict the contacts of a protein of known structure",
        "contacts {sample}/structures/test/1fuk_A.pdb.gz -o {demo}/contacts.h5 "
        "--figure {demo}/contacts.png",
        "contacts.h5",
        "The precision of so small a model is a few percent on average. In "
        "the figure, crosses are predictions that are wrong, and dots those that are right.",
    ),
)


def demo(folder: Path = FOLDER) -> None:
    """Runs every step, prints the results table and lists the files that were written."""
    start = time.monotonic()
    folder.mkdir(exist_ok=True)
    for step in STEPS:
        _run(step, folder)
    _print_results(folder)
    print(f"\nWritten to {folder}/ in {time.monotonic() - start:.0f} seconds:")
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            print(f"  {path}  ({path.stat().st_size:,} bytes)")
    print("\nNext: the table under Documentation in README.md has a page for each job.")


def _run(step: Step, folder: Path) -> None:
    print(f"\n== {step.title}")
    if step.note:
        print(step.note)
    # Split first, because a folder may have blanks.
    arguments = [word.format(demo=folder, sample=sample_dir()) for word in step.command.split()]
    print(f"$ protlm {shlex.join(arguments)}", flush=True)
    if (folder / step.output).exists():
        print(f"{folder / step.output} exists already")
        return
    code = subprocess.run([sys.executable, "-m", "protlm", *arguments], check=False).returncode
    if code:
        sys.exit(code)


def _print_results(folder: Path) -> None:
    print("\n== Compare both models with residue frequencies", flush=True)
    trained, shipped = (
        json.loads((folder / name).read_text())["results"] for name in (TRAINED, SHIPPED)
    )
    columns = ("perplexity of masked residues", "shipped model", "this run", "residue frequencies")
    rows = []
    for split in SPLITS:
        figures = [
            shipped[split]["masked"]["model"],
            *(trained[split]["masked"][who] for who in ("model", "empirical")),
        ]
        rows.append([split, *(f"{one['perplexity']:.2f}" for one in figures)])
    print_table(columns, rows)
    iid = trained["test_iid"]["masked"]
    if iid["model"]["perplexity"] >= iid["empirical"]["perplexity"]:
        raise InputDataError("the model is no better than residue frequencies on test_iid")


if __name__ == "__main__":
    exit_with_message(demo)
