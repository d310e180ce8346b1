"""What a model knows: the figures of its model card, each by an ordinary `protlm evaluate`.

    python -m studies.results MODEL --sample DATA [--swissprot50 DATA] [--structures FOLDER]
        [--locations TABLE --sequences FASTA] [--out results.json]

The sample is prepared with its shipped split table. Evaluations whose data are not given are left
out. A finished evaluation is not repeated: its JSON stays in the folder OUT.parts.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from protlm.paths import complete_file, sample_dir

SPLITS = "[test_iid,test_remote_homolog,test_ood_cluster,test_ood_family]"
LONGEST = 512


@dataclass(frozen=True)
class Part:
    """One call of `protlm evaluate`: the name of its results, and its settings."""

    name: str
    settings: tuple[str, ...]


def parts(given: argparse.Namespace) -> Iterator[Part]:
    """The evaluations for which there are data."""
    sample = sample_dir()
    families = sample / "uniprot_sample.splits.tsv.gz"
    masked = ("evaluation=[masked]", f"evaluation.masked.max_length={LONGEST}")
    yield Part("sample", (*masked, f"data.dir={given.sample}", f"split={SPLITS}"))
    by_family = (*masked, f"evaluation.masked.groups={families}")
    ood = "split=test_ood_family"
    yield Part("sample_families", (*by_family, f"data.dir={given.sample}", ood))
    retrieval = ("evaluation=[retrieval]", f"evaluation.retrieval.labels={families}")
    yield Part("retrieval", (*retrieval, f"data.dir={given.sample}", "split=test_iid"))
    yield Part("secondary_structure", ("evaluation=[secondary_structure]",))
    yield Part("contacts_shipped", ("evaluation=[contacts,jacobian]",))
    if given.swissprot50:
        data = f"data.dir={given.swissprot50}"
        yield Part("swissprot50", (*masked, data, "split=[test_iid,test_ood_family]"))
    if given.structures:
        tiers = tiers_of(given.structures, given.parts)
        folder = given.structures / "pdb"
        settings = ["evaluation=[contacts,jacobian]"]
        for label in ("contacts", "jacobian"):
            settings.append(f"evaluation.{label}.structures={folder}")
            settings.append(f"evaluation.{label}.groups={tiers}")
        yield Part("contacts", tuple(settings))
    if given.locations:
        label = "evaluation.sequence_labels"
        settings = (f"{label}.labels={given.locations}", f"{label}.sequences={given.sequences}")
        yield Part("location", ("evaluation=[sequence_labels]", *settings))


def tiers_of(structures: Path, folder: Path) -> Path:
    """Writes the groups of the structures, with and without homologs in training."""
    path = folder / "tiers.tsv"
    with (structures / "index.tsv").open(encoding="utf-8") as file:
        rows = [(row["file"], row["tier"]) for row in csv.DictReader(file, delimiter="\t")]
    names = [Path(name).name.split(".")[0] for name, _ in rows]
    lines = [f"{name}\t{tier}\n" for name, (_, tier) in zip(names, rows, strict=True)]
    path.write_text("structure\tgroup\n" + "".join(lines), encoding="utf-8")
    return path


def run(part: Part, given: argparse.Namespace) -> dict[str, object]:
    """Evaluates, unless the results are there; ends the study if that fails."""
    output = given.parts / f"{part.name}.json"
    if not output.exists():
        print(f"== {part.name}", flush=True)
        command = [sys.executable, "-m", "protlm.commands.evaluate", f"checkpoint={given.model}"]
        subprocess.run([*command, *part.settings, f"output={output}"], check=True)
    return json.loads(output.read_text())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the study with the arguments of this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--sample", type=Path, required=True)
    for name in ("swissprot50", "structures", "locations", "sequences"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    given = parser.parse_args(arguments)
    given.parts = given.out.with_name(f"{given.out.name}.parts")
    given.parts.mkdir(parents=True, exist_ok=True)
    found = {part.name: run(part, given) for part in parts(given)}
    with complete_file(given.out, overwrite=True) as temporary:
        temporary.write_text(json.dumps(found, indent=1) + "\n")
    print(given.out)


if __name__ == "__main__":
    main()
