"""Contacts with and without relatives, beside the inverse covariance of the same alignments.

    python -m studies.relative_contacts MODEL STRUCTURES [--rows 100] [--seed 0]
        [--out runs/relatives/contacts]

STRUCTURES has alignments and structures as of `studies.families`; chains with at least --rows
aligned rows are used. `protlm contacts` predicts them from the attention maps of the model alone;
in contexts of their relatives, without those that have the sequence of the chain in them; and, as a
control, in contexts of the same alignments, the residues of each column of which are permuted among
its rows. That leaves the gaps and frequencies of the file as they are, and nothing of covariance;
what is drawn from it also loses insertions, and rows that were near copies of others. All have one
regression, fitted on the shipped chains without relatives. Finished parts are not repeated.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from protlm.analysis.bootstrap import ratio_interval
from protlm.analysis.intervals import in_words
from protlm.analysis.precision import SEPARATIONS, precision_at
from protlm.system.json_file import write_json
from studies.alignments import GAP, LETTERS, aligned_columns
from studies.families import baselines, structure_file
from studies.runs import protlm
from studies.settings import keep_settings
from studies.tables import markdown

ALONE, RELATIVES, PERMUTED = "model alone", "with relatives", "with permuted columns"
COVARIANCE = "inverse covariance"


def permuted(columns_BL: np.ndarray, seed: int) -> np.ndarray:
    """Permutes the residues of each column among the rows that have one; the first row stays.

    >>> permuted(np.array([[1, 1], [2, 7], [3, 20], [4, 9], [5, 8]], np.uint8), 0).tolist()
    [[1, 1], [4, 8], [2, 20], [3, 9], [5, 7]]
    """
    rng, found_BL = np.random.default_rng(seed), columns_BL.copy()
    for column in found_BL[1:].T:
        has_one = np.flatnonzero(column != GAP)
        column[has_one] = column[rng.permutation(has_one)]
    return found_BL


def collect(given: argparse.Namespace) -> list[str]:
    """Writes the chains, their alignments and the controls; returns the names of the chains."""
    chains = []
    for folder in ("pdb", RELATIVES, PERMUTED):
        (given.out / folder).mkdir(exist_ok=True)
    for path in sorted((given.structures / "msa").glob("*.a3m.gz")):
        columns_BL, protein = aligned_columns(path), path.name.partition(".")[0]
        if len(columns_BL) <= given.rows:
            continue
        source = structure_file(given.structures, protein)
        shutil.copyfile(source, given.out / "pdb" / source.name)
        chain = source.name.partition(".")[0]
        shutil.copyfile(path, given.out / RELATIVES / f"{chain}.a3m.gz")
        letters_BL = np.array([*LETTERS, "-"])[permuted(columns_BL, given.seed)]
        rows = (f">{n}\n{''.join(row)}\n" for n, row in enumerate(letters_BL))
        (given.out / PERMUTED / f"{chain}.a3m").write_text("".join(rows), encoding="ascii")
        chains.append(protein)
    return chains


def predicted(given: argparse.Namespace, chains: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns the long-range P@L of chains by predictor."""
    fit, found = given.out / f"{ALONE}.fit.json", {}
    for name in (ALONE, RELATIVES, PERMUTED):
        output = given.out / f"{name}.h5"
        options = ["--relatives", str(given.out / name)] if name != ALONE else []
        options += ["--fit", str(fit)] if fit.exists() else []
        if not output.exists():
            command = ("contacts", str(given.out / "pdb"), "-m", str(given.model))
            protlm(*command, "-o", str(output), *options)
        with h5py.File(output) as file:
            found[name] = {chain: _precision(file, chain) for chain in chains}
    others = {chain: baselines(chain, given) for chain in chains}
    names = next(iter(others.values()))
    return found | {name: {chain: others[chain][name] for chain in chains} for name in names}


def _precision(file: h5py.File, chain: str) -> float:
    entry = structure_file(Path(), chain).name.partition(".")[0]
    probabilities_LL, contacts_LL = (
        np.asarray(file[f"{entry}/{name}"]) for name in ("probabilities", "contacts")
    )
    return precision_at(probabilities_LL, contacts_LL, SEPARATIONS["long"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Predicts what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description="Contacts with and without relatives.")
    parser.add_argument("model", type=Path, help="a model of relatives")
    parser.add_argument("structures", type=Path, help="a folder with msa/ and pdb/")
    parser.add_argument("--rows", type=int, default=100, help="an alignment has, at least")
    parser.add_argument("--seed", type=int, default=0, help="of the permutations")
    parser.add_argument("--out", type=Path, default=Path("runs/relatives/contacts"))
    parser.set_defaults(alignment_methods=[COVARIANCE])
    given = parser.parse_args(arguments)
    keep_settings(given, "model", "rows", "seed")
    output = given.out / "long_range.json"
    if not output.exists():
        write_json(output, predicted(given, collect(given)))
    found = {name: [*by.values()] for name, by in json.loads(output.read_text()).items()}
    alone = np.array(found[ALONE])
    rows = [("long-range P@L", f"mean of {len(alone)} chains", f"less that of the {ALONE}")]
    for name, values in found.items():
        both = (ratio_interval(one) for one in (np.array(values), values - alone))
        mean, difference = (in_words(one, ".1%") for one in both)
        rows.append((name, mean, difference))
    print(markdown(rows))


if __name__ == "__main__":
    main()
