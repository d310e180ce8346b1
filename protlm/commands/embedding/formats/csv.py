"""A table with a row for each protein, as PROBE reads it: the columns `Entry` and 0, 1, 2, ..."""

from itertools import chain
from pathlib import Path

from protlm.commands.embedding.results import Results
from protlm.data.tables import write_rows
from protlm.system.paths import complete_file
from protlm.system.terminal import watched

SUFFIXES, WHAT = (".csv",), "a CSV table"


def write(results: Results, output: Path) -> None:
    """Writes the rows in the order of the input; numbers have all digits of their type."""
    (key,), width = results.job.keys, results.job.width
    rows = (
        [one.record.identifier, *one.vectors[key].astype(str)]
        for one in watched("writing", results)
    )
    with (
        complete_file(output, check=results.check) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        write_rows(file, ",", chain([["Entry", *map(str, range(width))]], rows))
