"""The results of `protlm score`: tables of scores, and metrics for the terminal and as JSON."""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from protlm.downstream.estimators import Estimator, Scores
from protlm.downstream.metrics import METRICS, Agreement, averages
from protlm.downstream.variants import Assay, VariantTable
from protlm.system.errors import UserError
from protlm.system.paths import check_output, complete_file
from protlm.system.terminal import print_table, printable

# The top 10 % of fewer variants has none.
_FEW_VARIANTS = 10
# Parts of the names that people give to measured scores.
_LIKELY = re.compile("dms|score|fitness|measured", re.IGNORECASE)


class Average(NamedTuple):
    """Averages over assays by selection type, and the assays whose metric is undefined."""

    values: Mapping[str, float]
    left_out: Sequence[str]


Averages = Mapping[Estimator, Average]


@dataclass(frozen=True)
class Result:
    """The scores of an assay by one estimator."""

    assay: str
    estimator: Estimator
    scores: Scores
    agreement: Agreement | None


def check_outputs(outputs: Sequence[Path], other: Path | None, option: str) -> None:
    """Refuses outputs that cannot be written, and a file that would be written twice.

    The outputs are the tables, or their folder and the tables; `other` is the file of `option`.
    """
    if other is not None and other.resolve() in [path.resolve() for path in outputs]:
        raise UserError(
            f"{option} {other} and -o {outputs[0]} would write the same file; give {option} "
            "another name"
        )
    files = outputs if len(outputs) == 1 else outputs[1:]
    for path in [*files, *([] if other is None else [other])]:
        check_output(path)


def report_table(source: Path, table: VariantTable) -> None:
    """Prints on standard error the rows without scores, and what may be the measured ones."""
    if table.unscored:
        text = f"{table.describe_unscored(source)}; rows left unscored: {len(table.unscored):,}"
        print(printable(text), file=sys.stderr)
    likely = " or ".join(filter(_LIKELY.search, table.columns))
    if likely and "DMS_score" not in table.columns:
        text = f"{source} has no column DMS_score to compare with; if {likely} is that, rename it"
        print(printable(text), file=sys.stderr)


def score_text(value: float) -> str:
    """Formats a score for a table; NaN is an empty cell."""
    return "" if math.isnan(value) else f"{value:.6f}"


def averages_of(results: Sequence[Result], assays: Mapping[str, Assay]) -> Averages:
    """Returns the averages of Spearman's correlation over assays, for each estimator."""
    found: dict[Estimator, dict[str, float]] = {}
    for one in results:
        if one.agreement is not None:
            value = one.agreement.values["Spearman"]
            found.setdefault(one.estimator, {})[one.assay] = value
    return {
        estimator: Average(
            averages(values, assays), [name for name, value in values.items() if math.isnan(value)]
        )
        for estimator, values in found.items()
    }


def print_results(results: Sequence[Result], means: Averages) -> None:
    """Prints a row for each assay and estimator, the definitions, and the averages."""
    rows = [_row(result) for result in results]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    notes = []
    if any(one.agreement and one.agreement.num_variants < _FEW_VARIANTS for one in results):
        few = f"fewer than {_FEW_VARIANTS} measured variants: NDCG is undefined, other metrics are"
        notes.append(f"{few} uncertain, and intervals too narrow")
    notes += [f"{estimator}: {text}" for estimator, text in _definitions(results).items()]
    for estimator, mean in means.items():
        shown = [f"{name} {value:.3f}" for name, value in mean.values.items() if name]
        if mean.left_out:
            shown.append(f"without {len(mean.left_out):,} of the assays, where it is undefined")
        notes.append(f"average Spearman, {estimator}: {', '.join(shown)}")
    print_table(columns, ([row[name] for name in columns] for row in rows), notes)


def _row(result: Result) -> dict[str, str]:
    found, perplexity = result.agreement, result.scores.perplexity
    row = {
        "assay": result.assay,
        "estimator": str(result.estimator),
        "variants": f"{len(result.scores.values):,}",
        "measured": "" if found is None else f"{found.num_variants:,}",
    }
    for metric in METRICS:
        row[metric] = "" if found is None else f"{found.values[metric]:.3f}"
        if metric == "Spearman":
            bounds = found.interval(metric) if found is not None else ()
            row["95 %"] = " to ".join(f"{bound:.3f}" for bound in bounds)
    row["perplexity of wild type"] = "" if perplexity is None else f"{perplexity:.2f}"
    return row


def write_json(path: Path, results: Sequence[Result], means: Averages, *, model_hash: str) -> None:
    """Writes all metrics and intervals; undefined ones are null."""
    assays: dict[str, dict[str, object]] = {}
    for one in results:
        values: dict[str, object] = {
            "variants": len(one.scores.values),
            "perplexity_of_wild_type": one.scores.perplexity,
        }
        if (found := one.agreement) is not None:
            values["measured"] = found.num_variants
            values["classes"] = found.classes
            metrics = found.to_plain()
            values["metrics"] = {name: one["value"] for name, one in metrics.items()}
            values["intervals"] = {name: [x["low"], x["high"]] for name, x in metrics.items()}
        assays.setdefault(one.assay, {})[one.estimator] = values
    content = {
        "model_hash": model_hash,
        "definitions": _definitions(results),
        "assays": assays,
        "average_spearman": {estimator: mean.values for estimator, mean in means.items()},
        "left_out_of_average": {estimator: mean.left_out for estimator, mean in means.items()},
    }
    with complete_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _definitions(results: Sequence[Result]) -> dict[Estimator, str]:
    return {result.estimator: result.scores.definition for result in results}
