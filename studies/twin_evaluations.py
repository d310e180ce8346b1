"""Evaluations of twins: the splits, their groups, and the columns of the tables made of them."""

import argparse
import json
from pathlib import Path

from protlm.system.paths import sample_dir
from studies.runs import protlm
from studies.twin_tables import Column

# Rows of this length hold one protein each; longer ones hold joined proteins.
LENGTH = 512
# The folder of a run's evaluations in that of the run.
EVALUATED = "evaluated"
# The last of them.
LAST = "sample_families"
SAMPLE, FAMILIES = ("test_iid", "test_remote_homolog", "test_ood_cluster"), "test_ood_family"
SAMPLE_GROUPS = sample_dir() / "uniprot_sample.splits.tsv.gz"


def is_evaluated(run: Path) -> bool:
    """Whether a run has been trained and evaluated on all splits."""
    return (run / EVALUATED / f"{LAST}.json").exists()


def evaluate(run: Path, objective: str, given: argparse.Namespace) -> None:
    """Evaluates a run on all splits, unless that is done; writes the sums into its folder."""
    iid = [split for split in test_splits(given) if split != FAMILIES]
    for name, data, splits, groups, column in (
        ("test", given.test, iid, given.groups, "cluster30"),
        ("test_families", given.test, [FAMILIES], given.groups, "pfam_family"),
        ("sample", given.sample, SAMPLE, SAMPLE_GROUPS, "cluster30"),
        (LAST, given.sample, [FAMILIES], SAMPLE_GROUPS, "pfam_family"),
    ):
        folder = run / EVALUATED
        output, sums = folder / f"{name}.json", folder / f"{name}.tsv"
        if output.exists():
            continue
        folder.mkdir(exist_ok=True)
        joined = f"concatenated={str(given.length != LENGTH).lower()}"
        options = (f"max_length={given.length}", joined, f"per_sequence={sums}")
        for left in folder.glob(f"{name}.test_*.tsv"):
            left.unlink()
        protlm(
            *("evaluate", f"checkpoint={run}", f"evaluation=[{objective}]"),
            *(f"data.dir={data}", "data.verify=sizes", f"split=[{','.join(splits)}]"),
            *(f"evaluation.{objective}.{option}" for option in options),
            *(f"evaluation.{objective}.groups={groups}", f"evaluation.{objective}.column={column}"),
            f"output={output}",
        )


def test_splits(given: argparse.Namespace) -> list[str]:
    """Returns the names of the test splits of TEST."""
    manifest = json.loads((given.test / "manifest.json").read_text())
    return sorted(name for name in manifest["splits"] if name.startswith("test"))


def columns(given: argparse.Namespace) -> list[Column]:
    """The columns of the tables."""
    name = given.test.name
    iid = [split for split in test_splits(given) if split != FAMILIES]
    test, sample = (f"{EVALUATED}/{one}_families.{FAMILIES}.tsv" for one in ("test", "sample"))
    return [
        *(Column(f"{name}, {split}", f"{EVALUATED}/test.{split}.tsv") for split in iid),
        Column(f"{name}, {FAMILIES}", test),
        Column("its kinases", test, kinases=True),
        Column("the others", test, kinases=False),
        Column("mean over families", test, by_family=True),
        *(Column(f"sample, {split}", f"{EVALUATED}/sample.{split}.tsv") for split in SAMPLE),
        Column(f"sample, {FAMILIES}", sample),
    ]
