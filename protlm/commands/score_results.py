"""The results of `protlm score`: tables of scores, and metrics for the terminal and as JSON."""

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from protlm.downstream.estimators import Estimator, Scores
from protlm.downstream.score_metrics import METRICS, Agreement, averages
from protlm.downstream.variants import Assay
from protlm.errors import UserError
from protlm.paths import complete_file
from protlm.terminal import console, printable

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
# By estimator and selection type.
Averages = Mapping[Estimator, Mapping[str, float]]


@dataclass(frozen=True)
class Result:
    """The scores of an assay by one estimator."""

    assay: str
    estimator: Estimator
    scores: Scores
    agreement: Agreement | None


def is_table(output: Path) -> bool:
    """Returns whether a name is that of a table."""
    return output.suffix.lower() in _SEPARATORS


def check_table_output(output: Path) -> None:
    """Refuses a name that is not that of a table.

    Raises:
        UserError: the suffix is neither .csv nor .tsv.
    """
    if not is_table(output):
        raise UserError(f"{output}: the output is a table; type: -o {output.with_suffix('.csv')}")


def write_table(path: Path, header: Iterable[str], rows: Iterable[Sequence[str]]) -> None:
    """Writes a table, comma-separated or, if its name ends with .tsv, tab-separated.

    Raises:
        OutputError: the file exists already, or there is no space or permission.
    """
    with (
        complete_file(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        delimiter = _SEPARATORS[path.suffix.lower()]
        writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def score_text(value: float) -> str:
    """Formats a score for a table; NaN is an empty cell."""
    return "" if math.isnan(value) else f"{value:.6f}"


def averages_of(results: Sequence[Result], assays: Mapping[str, Assay]) -> Averages:
    """Returns the averages of Spearman's correlation over assays, for each estimator."""
    found: dict[Estimator, dict[str, float]] = {}
    for one in results:
        if one.agreement is not None and not math.isnan(one.agreement.values["Spearman"]):
            values = found.setdefault(one.estimator, {})
            values[one.assay] = one.agreement.values["Spearman"]
    return {estimator: averages(values, assays) for estimator, values in found.items()}


def print_results(results: Sequence[Result], means: Averages) -> None:
    """Prints a row for each assay and estimator, the definitions, and the averages."""
    rows = [_row(result) for result in results]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    table = Table(*columns, box=SIMPLE)
    for row in rows:
        table.add_row(*(escape(row[name]) for name in columns))
    out = console()
    out.print(table)
    for estimator, definition in _definitions(results).items():
        out.print(f"{estimator}: {definition}", highlight=False, markup=False)
    for estimator, values in means.items():
        shown = ", ".join(f"{name} {value:.3f}" for name, value in values.items() if name)
        out.print(f"average Spearman, {estimator}: {shown}", highlight=False, markup=False)


def _row(result: Result) -> dict[str, str]:
    found, perplexity = result.agreement, result.scores.perplexity
    row = {
        "assay": printable(result.assay),
        "estimator": str(result.estimator),
        "variants": f"{len(result.scores.values):,}",
        "measured": "" if found is None else f"{found.num_variants:,}",
    }
    for metric in METRICS:
        row[metric] = "" if found is None else f"{found.values[metric]:.3f}"
        if metric == "Spearman":
            bounds = found.intervals[metric] if found is not None else ()
            row["95 %"] = " to ".join(f"{bound:.3f}" for bound in bounds)
    row["perplexity of wild type"] = "" if perplexity is None else f"{perplexity:.2f}"
    return row


def write_json(path: Path, results: Sequence[Result], means: Averages, *, model_hash: str) -> None:
    """Writes all metrics and intervals; undefined ones are null.

    Raises:
        OutputError: the file exists already, or there is no space or permission.
    """
    assays: dict[str, dict[str, object]] = {}
    for one in results:
        values: dict[str, object] = {
            "variants": len(one.scores.values),
            "perplexity_of_wild_type": one.scores.perplexity,
        }
        if (found := one.agreement) is not None:
            values["measured"] = found.num_variants
            values["classes"] = found.classes
            values["metrics"] = {name: _defined(value) for name, value in found.values.items()}
            values["intervals"] = {
                name: [_defined(bound) for bound in bounds]
                for name, bounds in found.intervals.items()
            }
        assays.setdefault(one.assay, {})[one.estimator] = values
    content = {
        "model_hash": model_hash,
        "definitions": _definitions(results),
        "assays": assays,
        "average_spearman": means,
    }
    with complete_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _definitions(results: Sequence[Result]) -> dict[Estimator, str]:
    return {result.estimator: result.scores.definition for result in results}


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value
