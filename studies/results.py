"""The figures of a model card, each computed by `protlm evaluate`.

    python -m studies.results MODEL --sample DATA [--swissprot50 DATA] [--structures FOLDER]
        [--families TABLE] [--jacobian] [--out FOLDER]

The sample is prepared with its shipped split table; `--families` is a table of the Pfam families of
`--swissprot50`. Evaluations whose data are not given are left out. Writes `results.json` and the
tables in `results.md`; an evaluation whose JSON is in FOLDER is not repeated. A FOLDER with results
of another model, of other settings or of a data set that was prepared anew is refused; structures
and tables are compared by their paths alone.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protlm import evaluation
from protlm.commands.evaluate import evaluate, provenance
from protlm.config import EvaluateConfig
from protlm.config.composition import compose
from protlm.loading import load_model
from protlm.system.errors import UserError
from protlm.system.paths import sample_dir
from studies.settings import keep_settings
from studies.tables import markdown, rows_of, write_text

SPLITS = "[test_iid,test_remote_homolog,test_ood_cluster,test_ood_family]"
FAMILIES = sample_dir() / "uniprot_sample.splits.tsv.gz"
MASKED = ("evaluation=[masked]", "evaluation.masked.max_length=512")


@dataclass(frozen=True)
class Part:
    """One call of `protlm evaluate`: the name of its results, a title, and its settings."""

    name: str
    title: str
    settings: tuple[str, ...]


def parts(given: argparse.Namespace) -> Iterator[Part]:
    """The evaluations for which there are data."""
    sample = f"data.dir={given.sample}"
    title = "Masked residues, splits of the shipped sample"
    yield Part("sample", title, (*MASKED, sample, f"split={SPLITS}"))
    by_family = (*MASKED, f"evaluation.masked.groups={FAMILIES}", sample, "split=test_ood_family")
    yield Part("sample_families", "The same, by family out of distribution", by_family)
    if given.swissprot50:
        data = (f"data.dir={given.swissprot50}", "split=[test_iid,test_ood_family]")
        yield Part("swissprot50", "Masked residues, Swiss-Prot at 50 % identity", (*MASKED, *data))
    if given.swissprot50 and given.families:
        groups = f"evaluation.masked.groups={given.families}"
        data = (f"data.dir={given.swissprot50}", "split=test_ood_family", groups)
        title = "Swiss-Prot at 50 % identity, by family out of distribution"
        yield Part("swissprot50_families", title, (*MASKED, *data))
    retrieval = ("evaluation=[retrieval]", f"evaluation.retrieval.labels={FAMILIES}")
    title = "Relatives among the nearest neighbors, clusters at 30 % identity"
    yield Part("retrieval", title, (*retrieval, sample, "split=test_iid"))
    title = "Secondary structure, 20 chains to fit and 20 to test"
    yield Part("secondary_structure", title, ("evaluation=[secondary_structure]",))
    structures = given.structures or sample_dir() / "structures"
    title = "Contacts from attention maps, by tier of the structures"
    yield Part("contacts", title, _with_tiers("contacts", structures, given.out))
    if given.jacobian:
        title = "Contacts from the categorical Jacobian, shipped structures"
        shipped = sample_dir() / "structures"
        yield Part("jacobian", title, _with_tiers("jacobian", shipped, given.out))


def _with_tiers(label: str, structures: Path, out: Path) -> tuple[str, ...]:
    """Writes the column `tier` of `index.tsv` as a table of groups; returns the settings."""
    path = out / f"{label}_tiers.tsv"
    rows = rows_of(structures / "index.tsv")
    names = [r["identifier"] if "identifier" in r else Path(r["file"]).name for r in rows]
    pairs = zip(names, rows, strict=True)
    lines = [f"{name.split('.')[0]}\t{row['tier']}\n" for name, row in pairs]
    path.write_text("structure\tgroup\n" + "".join(lines), encoding="utf-8")
    folder = next(path for path in (structures / "pdb", structures / "test") if path.is_dir())
    settings = (f"evaluation.{label}.structures={folder}", f"evaluation.{label}.groups={path}")
    return (f"evaluation=[{label}]", *settings)


def run(part: Part, given: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Evaluates, unless the results are there; returns them, and their tables in Markdown."""
    output = given.out / f"{part.name}.json"
    config = compose(EvaluateConfig, [f"checkpoint={given.model}", *part.settings])
    if not output.exists():
        print(f"== {part.title}", flush=True)
        config.output = str(output)
        evaluate(config)
    report = json.loads(output.read_text(encoding="utf-8"))
    if report["model_hash"] != given.model_hash:
        raise UserError(f"{output} has the results of another model; give another --out")
    asked = provenance(config)
    for key, what in (("data", "of another data set"), ("settings", "with other settings")):
        if report.get(key) != asked[key]:
            raise UserError(f"{output} has results {what}; give another --out")
    tables = [f"## {part.title}"]
    for label, settings in config.evaluation.items():
        results = report["results"]
        by_split = {split: found[label] for split, found in results.items() if label in found}
        table = evaluation.create(label, settings).table(by_split)
        tables.append(markdown([table.columns, *table.rows]))
        tables += table.caption.splitlines()
    return report, "\n\n".join(tables)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the study with the arguments of this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--sample", type=Path, required=True)
    data = ("swissprot50", "families", "structures")
    for name in data:
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument(
        "--jacobian",
        action="store_true",
        help="of the 20 shipped chains: a quarter of an hour on a CPU for 3 M parameters",
    )
    parser.add_argument("--out", type=Path, default=Path("results"))
    given = parser.parse_args(arguments)
    if given.families and not given.swissprot50:
        parser.error("--families are those of --swissprot50: give both")
    keep_settings(given, "model", "sample", *data)
    given.model_hash = load_model(Path(given.model)).hash
    found = {part.name: run(part, given) for part in parts(given)}
    reports = {name: report for name, (report, _) in found.items()}
    tables = "\n\n".join(text for _, text in found.values())
    for name, text in (("results.json", json.dumps(reports, indent=1)), ("results.md", tables)):
        write_text(given.out / name, text + "\n")
        print(given.out / name)


if __name__ == "__main__":
    main()
