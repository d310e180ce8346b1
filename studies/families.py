"""Families: what adapting a model to the homologs of a protein adds to the contacts it predicts.

    python -m studies.families GENERAL STRUCTURES [--proteins 1FUK_A ...] [--steps 200]
        [--tokens 4096] [--rate 2e-4] [--weights 1 1] [--methods contacts jacobian]
        [--alignment-methods NAME ...] [--model MODEL] [--out runs/families]

STRUCTURES has alignments, `msa/1FUK_A.a3m.gz` with the protein as its first row, and structures,
`pdb/1fuk_A.pdb.gz`. For each protein the distinct homologs, without gaps and in clusters at 50 %
identity of which a twentieth is held out, are mixed (`--weights`) with samples of GENERAL, a
prepared data set with clusters, and the model is trained further on them (`experiment=family`).
Masked residues of the held-out homologs, with intervals over their clusters, and contacts by
attention regression, fitted on the shipped chains, and by the categorical Jacobian are evaluated
before and after. Beside them are a Potts model, factored attention and the inverse covariance of
the columns of the alignment (`alignments.py`), pairs in the order of their separation, and the
fraction of all pairs that are contacts. Finished parts are not repeated, and interrupted ones
continue. Clustering the homologs needs MMseqs2.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from protlm.analysis.bootstrap import ratio_interval
from protlm.analysis.intervals import in_words
from protlm.analysis.precision import SEPARATIONS, nearest_in_sequence, precision_at
from protlm.analysis.structures import read_structure
from protlm.checkpoints.format import DEFAULT
from protlm.data.shards.data_set import open_split
from protlm.evaluation.base import NO_SPLIT
from protlm.loading import read_model
from protlm.system.json_file import write_json
from studies import alignments
from studies.alignments import aligned_columns, factored_attention, inverse_covariance, potts
from studies.runs import protlm
from studies.settings import keep_settings
from studies.tables import markdown, write_text

DEEPEST = ("1EGA_B", "2C78_A", "6CNH_A", "4PY2_A", "4ZKD_A", "1FUK_A")
# Of the family and of general data.
WEIGHTS = [1.0, 1.0]
# That of conf/experiment/family.yaml.
RATE = 2e-4
HELD_OUT, CLUSTER_IDENTITY = 0.05, 0.5
# The warm-up of long runs, and that of shorter ones as a fraction.
WARMUP_STEPS, WARMUP_FRACTION = 100, 1 / 12
# A held-out homolog is close to a homolog of training with this fraction of its 6-mers.
MIN_SHARED = 0.2
# The smallest number of proteins with a bootstrap interval.
FEWEST = 6
METHODS = ("contacts", "jacobian")
# Where the settings of shipped models differ from experiment=family, beside their attention.
SIZES = ("num_layers", "num_heads", "model_dim", "feedforward_dim")
# From minutes for a protein of 120 residues to half an hour of two cores for one of 400.
ALIGNMENT_METHODS = {
    "Potts model": potts,
    "factored attention": factored_attention,
    "inverse covariance": inverse_covariance,
}


def structure_file(structures: Path, protein: str) -> Path:
    """Returns the file with the coordinates of a protein, by its name in the alignments."""
    identifier, chain = protein.split("_")
    return structures / "pdb" / f"{identifier.lower()}_{chain}.pdb.gz"


def homologs(protein: str, given: argparse.Namespace) -> Path:
    """Prepares the homologs of a protein, unless that is done; returns the data set."""
    family = given.out / protein / "data"
    alignment = given.structures / "msa" / f"{protein}.a3m.gz"
    if not (family / "manifest.json").exists():
        identity = ("--cluster-identity", str(given.cluster_identity))
        select = ("--allow-gaps", "--deduplicate", "--cluster", *identity)
        split = ("--valid-fraction", str(given.held_out), "--test-fraction", "0")
        protlm("prepare", str(alignment), *select, *split, "--out", str(family))
    counts = family.parent / "leakage.json"
    if not counts.exists():
        shared = ("--min-shared", str(given.min_shared))
        protlm("data", "leakage", str(family), *shared, "--json", str(counts))
    return family


def write_clusters(family: Path, table: Path) -> None:
    """Writes the cluster of each held-out homolog, so that intervals are over clusters."""
    split = open_split(family, "valid", verify="sizes")
    clusters = enumerate(split.clusters_of(np.arange(len(split))))
    rows = [f"{split.identifier(member)}\t{cluster}\n" for member, cluster in clusters]
    write_text(table, "".join(["accession\tcluster\n", *rows]))


def adapt(protein: str, given: argparse.Namespace) -> Path:
    """Trains on the homologs, or resumes that; returns the run."""
    description = read_model(Path(given.model)).description
    sizes = [f"model.{name}={getattr(description.model, name)}" for name in SIZES]
    family, run = homologs(protein, given), given.out / protein / "run"
    sets = zip((family, given.general), given.weights, strict=True)
    mixture = ", ".join(f"{{dir: {path}, weight: {weight}}}" for path, weight in sets)
    protlm(
        *("train", "experiment=family", f"attention={description.attention}", *sizes),
        f"model.init_from={given.model}",
        *(f"data.mixture=[{mixture}]", f"data.valid_dir={family}", "data.sampling=cluster"),
        *("data.verify=sizes", f"data.tokens_per_batch={given.tokens}"),
        f"optimizer.learning_rate={given.rate}",
        f"schedule.warmup_steps={min(WARMUP_STEPS, round(given.steps * WARMUP_FRACTION))}",
        *(f"trainer.max_steps={given.steps}", f"trainer.valid_every={max(given.steps // 4, 1)}"),
        *(f"trainer.checkpoint_every={max(given.steps // 2, 1)}", f"run_dir={run}"),
    )
    return run


def evaluate(protein: str, model: str, name: str, given: argparse.Namespace) -> None:
    """Evaluates the contacts of one protein, and held-out homologs, unless results are there."""
    folder = given.out / protein
    output = folder / f"{name}.json"
    if output.exists():
        return
    tested = folder / "structure"
    tested.mkdir(parents=True, exist_ok=True)
    source = structure_file(given.structures, protein)
    shutil.copyfile(source, tested / source.name)
    settings = [f"evaluation.{method}.structures={tested}" for method in given.methods]
    settings += [f"evaluation.{method}.max_residues=510" for method in given.methods]
    family, table = homologs(protein, given), folder / "held_out_clusters.tsv"
    write_clusters(family, table)
    held_out = (f"data.dir={family}", "split=valid")
    settings += [f"evaluation.masked.groups={table}", "evaluation.masked.column=cluster"]
    chosen = f"evaluation=[{','.join(given.methods)},masked]"
    protlm("evaluate", f"checkpoint={model}", chosen, *held_out, *settings, f"output={output}")


def baselines(protein: str, given: argparse.Namespace) -> dict[str, float]:
    """Returns long-range P@L of methods without a language model, computed unless it is there."""
    output = given.out / protein / "baselines.json"
    if not output.exists():
        write_json(output, _baselines(protein, given))
    return json.loads(output.read_text())


def _baselines(protein: str, given: argparse.Namespace) -> dict[str, float]:
    structure = read_structure(structure_file(given.structures, protein))
    ((nearness_LL, contacts_LL),) = nearest_in_sequence([structure])
    path = given.structures / "msa" / f"{protein}.a3m.gz"
    columns_BL = aligned_columns(path)
    if columns_BL.shape[1] != len(structure):
        sys.exit(f"{path} has {columns_BL.shape[1]} columns for {len(structure)} residues")
    found = {}
    for name in given.alignment_methods:
        print(f"{protein}: {name}, {len(columns_BL):,} rows of {len(structure)}", file=sys.stderr)
        scores_LL = ALIGNMENT_METHODS[name](columns_BL)
        found[name] = precision_at(scores_LL, contacts_LL, SEPARATIONS["long"])
    known = contacts_LL[(-nearness_LL >= SEPARATIONS["long"][0]) & (contacts_LL >= 0)]
    nearest = precision_at(nearness_LL, contacts_LL, SEPARATIONS["long"])
    return found | {"nearest in sequence": nearest, "all pairs": float(known.mean())}


def figures(protein: str, given: argparse.Namespace) -> dict[str, float]:
    """Returns long-range P@L of one protein, by predictor."""
    found = {}
    for name in ("before", "after"):
        report = json.loads((given.out / protein / f"{name}.json").read_text(encoding="utf-8"))
        for method in given.methods:
            scores = report["results"][NO_SPLIT][method]["model"]
            found[f"{method}, {name}"] = scores["long"]["P@L"]["mean"]
    return found | baselines(protein, given)


def perplexities(protein: str, given: argparse.Namespace) -> list[str]:
    """Returns the row of a protein: perplexity of masked residues of its held-out homologs."""
    before, after = (
        json.loads((given.out / protein / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("before", "after")
    )
    leaked = json.loads((given.out / protein / "leakage.json").read_text(encoding="utf-8"))
    masked, adapted = (one["results"]["valid"]["masked"] for one in (before, after))
    close = leaked["splits"]["valid"]["near"]
    cells = [protein, f"{leaked['train_sequences']:,}", f"{masked['sequences']:,}", f"{close:,}"]
    for one in (masked, adapted):
        low, high = one["interval"]["perplexity"]
        cells.append(f"{one['model']['perplexity']:.1f} ({low:.1f} to {high:.1f})")
    return cells + [f"{adapted[name]['perplexity']:.1f}" for name in ("three_mers", "empirical")]


def perplexity_table(rows: Sequence[Sequence[str]]) -> str:
    """Formats the rows of `perplexities` in Markdown."""
    counts = ("training homologs", "held out", "of these close to one of training")
    predictors = ("before", "after", "3-mers of the homologs", "residue frequencies")
    return markdown([("protein", *counts, *predictors), *rows])


def interval(values: Sequence[float]) -> str:
    """Formats the mean over proteins, with a bootstrap interval or, of few, the range."""
    if len(values) < FEWEST:
        return f"{np.mean(values):.1%} (range {min(values):.1%} to {max(values):.1%})"
    return in_words(ratio_interval(np.array(values)), ".1%")


def report(found: Mapping[str, Mapping[str, float]]) -> str:
    """Formats long-range P@L by predictor and protein, and differences, in Markdown."""
    rows = [["long-range P@L", *found, "mean"]]
    for name in next(iter(found.values())):
        values = [one[name] for one in found.values()]
        rows.append([name, *(f"{value:.1%}" for value in values), interval(values)])
    lines = [markdown(rows), ""]
    shown = next(iter(found.values()))
    for method in (name for name in METHODS if f"{name}, after" in shown):
        gains = [one[f"{method}, after"] - one[f"{method}, before"] for one in found.values()]
        lines.append(f"{method}, after less before: {interval(gains)}")
        for name in (name for name in ALIGNMENT_METHODS if name in shown):
            rest = [one[f"{method}, after"] - one[name] for one in found.values()]
            lines.append(f"{method}, after less {name}: {interval(rest)}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing, and prints the table after each protein."""
    parser = argparse.ArgumentParser(description="Contacts before and after adapting to families.")
    parser.add_argument("general", type=Path, help="a data set with clusters, split train")
    parser.add_argument("structures", type=Path, help="a folder with msa/ and pdb/")
    parser.add_argument("--proteins", nargs="+", default=DEEPEST)
    parser.add_argument("--steps", type=int, default=200, help="steps of training for each protein")
    parser.add_argument("--tokens", type=int, default=4096, help="per step")
    parser.add_argument("--rate", type=float, default=RATE, help="learning rate")
    parser.add_argument(
        "--weights", type=float, nargs=2, default=WEIGHTS, help="of the family and general data"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    methods = {"nargs": "+", "choices": ALIGNMENT_METHODS, "default": list(ALIGNMENT_METHODS)}
    parser.add_argument("--alignment-methods", **methods, help="beside the model")
    parser.add_argument("--model", default=DEFAULT)
    parser.add_argument("--out", type=Path, default=Path("runs/families"))
    # These decide the results too.
    fits = {name: value for name, value in vars(alignments).items() if name.isupper()}
    homology = {"cluster_identity": CLUSTER_IDENTITY, "min_shared": MIN_SHARED}
    parser.set_defaults(**homology, held_out=HELD_OUT, alignments=fits)
    given = parser.parse_args(arguments)
    inputs = ("general", "structures", "steps", "tokens", "rate", "weights", "model")
    shown = ("methods", "alignment_methods")
    keep_settings(given, *inputs, *homology, *shown, "held_out", "alignments")
    found, masked = {}, []
    for protein in given.proteins:
        evaluate(protein, given.model, "before", given)
        evaluate(protein, str(adapt(protein, given)), "after", given)
        found[protein] = figures(protein, given)
        masked.append(perplexities(protein, given))
        print(f"{perplexity_table(masked)}\n\n{report(found)}", flush=True)


if __name__ == "__main__":
    main()
