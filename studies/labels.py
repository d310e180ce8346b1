"""Labels from frozen embeddings or a fine-tuned model: location, function, secondary structure.

    python -m studies.labels MODEL --swissprot DIR --structures DIR [--proteins 2500] [--out FOLDER]
    python -m studies.labels MODEL --swissprot DIR --structures DIR --finetune [...]

DIR/swissprot_full.fasta.gz has the sequences, location.tsv.gz labels with a split at 30 % identity,
go_terms.tsv.gz GO terms (column F), swissprot_full.splits.tsv.gz clusters at 50 % identity; the
tables of the structures have DSSP strings. Functions are split by whole clusters, one protein each.
Writes a probe for each job and the table in `labels.md`; a job whose probe is in FOLDER is not
repeated. With `--finetune`, the model is trained on the locations and the structures instead, with
the default settings of `protlm finetune` but for the epochs.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protlm.commands.finetune import HEAD, MERGED, finetune_labels
from protlm.commands.probe import probe_labels
from protlm.data.records import Tally, read_records
from protlm.downstream.probe_results import comparison, metric_rows
from protlm.loading import pick_device
from protlm.options.labels import FinetuneOptions, FinetuneSettings, LabelOptions, ProbeOptions
from studies.settings import keep_settings
from studies.tables import markdown, rows_of, write_text

# DSSP's eight states as helix, strand and coil.
_STATES = str.maketrans("HGIEBTSC", "HHHEECCC")
_MIN_COUNT = 50
Rows = Iterable[Sequence[str]]


@dataclass(frozen=True)
class Job:
    """A table of labels: its columns, its rows, how they are read, and epochs of training."""

    name: str
    columns: Sequence[str]
    rows: Callable[[argparse.Namespace], Rows]
    reading: LabelOptions
    epochs: int | None = None


def sequences(given: argparse.Namespace, wanted: Iterable[str]) -> dict[str, str]:
    """Sequences by accession; those that are too long are left out."""
    names = set(wanted)
    records = read_records(given.swissprot / "swissprot_full.fasta.gz", Tally())
    found = ((record.identifier.split("|")[-1], record.sequence) for record in records)
    return {name: one for name, one in found if name in names and len(one) <= given.longest}


def locations(given: argparse.Namespace) -> Rows:
    """Subcellular locations, with their splits."""
    drawn = rows_of(given.swissprot / "location.tsv.gz")
    random.Random(0).shuffle(drawn)
    drawn = drawn[: given.proteins]
    found = sequences(given, (row["accession"] for row in drawn))
    for row in drawn:
        if row["accession"] in found:
            yield row["accession"], found[row["accession"]], row["label"], row["split"]


def functions(given: argparse.Namespace) -> Rows:
    """Terms of molecular function, one protein of each cluster."""
    terms = {row["accession"]: row["F"] for row in rows_of(given.swissprot / "go_terms.tsv.gz")}
    first: dict[str, str] = {}
    for row in rows_of(given.swissprot / "swissprot_full.splits.tsv.gz"):
        if terms.get(row["accession"]):
            first.setdefault(row["cluster50"], row["accession"])
    clusters = random.Random(0).sample(sorted(first), given.proteins)
    found = sequences(given, (first[one] for one in clusters))
    for one in clusters:
        if first[one] in found:
            yield first[one], found[first[one]], terms[first[one]], one


def states(given: argparse.Namespace) -> Rows:
    """Secondary structure: chains to fit to, and chains without homologs among them."""
    train = rows_of(given.structures / "structures_train.tsv")
    random.Random(0).shuffle(train)
    for row in train[: given.chains]:
        yield row["key"], row["sequence"], row["dssp"].translate(_STATES), "train"
    for row in rows_of(given.structures / "index.tsv"):
        if row["tier"] == "novel":
            name = f"{row['pdb_id']}_{row['chain']}"
            yield name, row["sequence"], row["dssp"].translate(_STATES), "test"


JOBS = (
    Job("location", ("identifier", "sequence", "label", "split"), locations, LabelOptions(), 4),
    Job(
        "function",
        ("identifier", "sequence", "label", "cluster"),
        functions,
        LabelOptions(min_count=_MIN_COUNT),
    ),
    Job(
        "structure",
        ("identifier", "sequence", "label", "split"),
        states,
        LabelOptions(per_residue=True),
        20,
    ),
)


def run(job: Job, given: argparse.Namespace) -> dict[str, Any]:
    """The results of a job, from its probe or its fine-tuned model if there is one."""
    folder = given.out / (f"{job.name}-tuned" if given.finetune else job.name)
    probe = folder / HEAD if given.finetune else folder
    if not (folder / MERGED if given.finetune else folder).exists():
        print(f"== {job.name}", flush=True)
        learn(job, given, folder)
    return json.loads((probe / "results.json").read_text())


def learn(job: Job, given: argparse.Namespace, folder: Path) -> None:
    """Writes the table of a job, and a probe or a fine-tuned model."""
    table, model = given.out / f"{job.name}.tsv", Path(given.model)
    lines = ["\t".join(row) for row in (job.columns, *job.rows(given))]
    write_text(table, "\n".join(lines) + "\n")
    if not given.finetune:
        probe_labels(table, model, folder, ProbeOptions(), job.reading)
        return
    assert job.epochs is not None
    training = FinetuneSettings(epochs=job.epochs, device=str(pick_device("auto")))
    finetune_labels(table, model, folder, FinetuneOptions(training), job.reading)


def section(name: str, results: dict[str, Any]) -> str:
    """The table of a job."""
    sides = results["proteins"]
    counts = ", ".join(f"{number:,} {side}" for side, number in sides.items() if number)
    leaks = results["test_proteins_with_relatives_to_fit_to"]
    lines = [
        f"**{name}**: {len(results['classes'])} classes; proteins: {counts}; of the test proteins "
        f"{leaks['identical']} have an identical sequence and {leaks['similar']} a similar one to "
        "fit to.",
        "",
        markdown(metric_rows(results)),
        "",
        f"{comparison(results)}.",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the study with the arguments of this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--swissprot", type=Path, required=True)
    parser.add_argument("--structures", type=Path, required=True)
    parser.add_argument("--proteins", type=int, default=2_500)
    parser.add_argument("--longest", type=int, default=1_000)
    parser.add_argument("--chains", type=int, default=150)
    parser.add_argument("--jobs", nargs="+", default=[job.name for job in JOBS])
    parser.add_argument("--finetune", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("labels"))
    given = parser.parse_args(arguments)
    keep_settings(given, "model", "swissprot", "structures", "proteins", "longest", "chains")
    jobs = [job for job in JOBS if job.name in given.jobs and (job.epochs or not given.finetune)]
    page = given.out / ("tuned.md" if given.finetune else "labels.md")
    parts = [section(job.name, run(job, given)) for job in jobs]
    write_text(page, "\n\n".join(parts) + "\n")
    print(page.read_text())


if __name__ == "__main__":
    main()
