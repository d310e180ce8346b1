"""`make demo`: ordinary commands on the shipped sample, with the shipped model and a new small one.

A step whose output exists is not repeated, so an interrupted demo resumes.
"""

import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from protlm.system.errors import InputDataError, exit_with_message
from protlm.system.paths import sample_dir
from protlm.system.terminal import console

SPLITS = ("test_iid", "test_remote_homolog", "test_ood_cluster", "test_ood_family")
FOLDER = Path("demo")
# The results of the model that the demo trains, and of the shipped one.
TRAINED, SHIPPED = "metrics_run.json", "metrics_shipped.json"
# P10081, yeast eIF4A: 119 residues with homologs in the training split.
STRUCTURE = "1fuk_A.pdb.gz"


@dataclass(frozen=True)
class Step:
    """One command of the demo, its title, its output, and a note that is printed before it."""

    title: str
    arguments: list[str]
    output: Path
    note: str = ""


def steps(folder: Path, sample: Path) -> list[Step]:
    """Returns the demo's commands in order."""
    data, run, fasta = folder / "data", folder / "run", sample / "uniprot_tiny.fasta.gz"
    protein = sample / "structures" / "test" / STRUCTURE
    evaluate = [
        "evaluate",
        # As long as the rows of training: whole proteins take longer.
        *("evaluation.masked.max_length=512", f"data.dir={data}", f"split=[{','.join(SPLITS)}]"),
    ]
    return [
        Step(
            "Prepare 12,373 UniProt sequences: FASTA to verified HDF5 shards",
            [
                "prepare",
                str(sample / "uniprot_sample.fasta.gz"),
                *("--out", str(data)),
                *("--split-table", str(sample / "uniprot_sample.splits.tsv.gz")),
            ],
            data,
        ),
        Step(
            "Train a small Performer-ReLU",
            ["train", "experiment=demo", f"data.dir={data}", f"run_dir={run}"],
            run / "loss.png",
            "In training a fifth of the targets is not masked (BERT's 80/10/10), so its validation "
            "perplexity is lower than that of the evaluations below, which mask all of them.",
        ),
        Step(
            "Evaluate it in and out of distribution, against residue frequencies",
            [*evaluate, f"checkpoint={run}", f"output={folder / TRAINED}"],
            folder / TRAINED,
        ),
        Step(
            "Evaluate the shipped model in the same way, and on contacts",
            [*evaluate, "evaluation=[masked,contacts]", f"output={folder / SHIPPED}"],
            folder / SHIPPED,
        ),
        Step(
            "Embed the 180 proteins of a FASTA file",
            ["embed", str(fasta), "-o", str(folder / "embeddings.h5")],
            folder / "embeddings.h5",
        ),
        Step(
            "Write the attention maps of BPT1_BOVIN",
            [
                "attention",
                str(sample / "bpt1_bovin.fasta"),
                *("-o", str(folder / "attention.h5")),
                *("--figure", str(folder / "attention.png")),
            ],
            folder / "attention.h5",
        ),
        Step(
            "Predict the contacts of a protein of known structure",
            [
                "contacts",
                str(protein),
                *("-o", str(folder / "contacts.h5")),
                *("--figure", str(folder / "contacts.png")),
            ],
            folder / "contacts.h5",
            "The precision of so small a model is a few percent on average. In "
            "the figure, crosses are predictions that are wrong, and dots those that are right.",
        ),
    ]


def demo(folder: Path = FOLDER) -> None:
    """Runs every step, prints the results table and lists the files that were written."""
    start = time.monotonic()
    sample = sample_dir()
    folder.mkdir(exist_ok=True)
    for step in steps(folder, sample):
        _run(step)
    _print_results(folder)
    print(f"\nWritten to {folder}/ in {time.monotonic() - start:.0f} seconds:")
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            print(f"  {path}  ({path.stat().st_size:,} bytes)")
    print("\nNext: the table under Documentation in README.md has a page for each job.")


def _run(step: Step) -> None:
    print(f"\n== {step.title}")
    if step.note:
        print(step.note)
    print(f"$ protlm {shlex.join(step.arguments)}", flush=True)
    if step.output.exists():
        print(f"{step.output} exists already")
        return
    code = subprocess.run([sys.executable, "-m", "protlm", *step.arguments], check=False).returncode
    if code:
        sys.exit(code)


def _print_results(folder: Path) -> None:
    """Prints the perplexities of both models beside that of residue frequencies."""
    print("\n== Compare both models with residue frequencies", flush=True)
    trained, shipped = (
        json.loads((folder / name).read_text())["results"] for name in (TRAINED, SHIPPED)
    )
    columns = ("perplexity of masked residues", "shipped model", "this run", "residue frequencies")
    table = Table(*columns, box=SIMPLE)
    for split in SPLITS:
        figures = [
            shipped[split]["masked"]["model"],
            *(trained[split]["masked"][who] for who in ("model", "empirical")),
        ]
        table.add_row(split, *(f"{one['perplexity']:.2f}" for one in figures))
    console().print(table)
    iid = trained["test_iid"]["masked"]
    if iid["model"]["perplexity"] >= iid["empirical"]["perplexity"]:
        raise InputDataError("the model is no better than residue frequencies on test_iid")


if __name__ == "__main__":
    exit_with_message(demo)
