"""Tables of what `protlm features describe` found in several files of annotations.

    python -m studies.features NAMES...

NAMES are its folders, whose names become those of the annotations. Prints the counts of each
predictor, and for each concept that is not of the sequence alone the F1 of the best feature of each
predictor with its interval over proteins; in bold those of features that are beyond all controls.
"""

import argparse
import json
from pathlib import Path

from protlm.downstream.concepts import contexts
from studies.tables import markdown, rows_of

Row = dict[str, str]


def counts(folders: list[Path]) -> str:
    """Returns a table of the concepts and features with names, of each predictor."""
    table = [["annotations", "proteins", "predictor"]]
    for folder in folders:
        results = json.loads((folder / "results.json").read_text())
        for name, found in results["predictors"].items():
            table[0] = [*table[0][:3], *found]
            table.append([folder.name, str(results["proteins"]), name, *map(str, found.values())])
    return markdown(table)


def concepts(folders: list[Path], of_sequence: bool) -> str:
    """Returns a table of F1 by concept and predictor, of those of the sequence alone or others."""
    table, plain = [["concept", "to exceed"]], contexts("")
    for folder in folders:
        best = [row for row in rows_of(folder / "names.tsv") if row["chosen"] == "True"]
        table[0] = [*table[0][:2], *dict.fromkeys(row["predictor"] for row in best)]
        for concept in dict.fromkeys(row["concept"] for row in best):
            if (concept in plain) == of_sequence and not concept.startswith("residue "):
                own = [row for row in best if row["concept"] == concept]
                cells = [f"{folder.name}: {concept}", f"{float(own[-1]['by chance']):.2f}"]
                table.append([*cells, *map(_shown, own)])
    return markdown(table)


def _shown(row: Row) -> str:
    f1, low, high = (f"{float(row[name]):.2f}" for name in ("F1", "low", "high"))
    mark = "**" if row["beyond controls"] == "True" else ""
    return f"{mark}{f1}{mark} ({low} to {high})" + ("" if row["named"] == "True" else " -")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="+", type=Path, help="folders of protlm features describe")
    folders = parser.parse_args().names
    print(counts(folders), concepts(folders, False), concepts(folders[:1], True), sep="\n\n")


if __name__ == "__main__":
    main()
