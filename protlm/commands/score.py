"""`protlm score VARIANTS.csv -m MODEL -o SCORES.csv`: scores of variants, beside measured ones."""

import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import numpy as np

from protlm.analysis.intervals import HEADING, score_cells, shown
from protlm.data.records.proteins import one_protein
from protlm.data.tables import check_table_output, is_table, write_table
from protlm.data.vocabulary import STANDARD
from protlm.downstream.estimators import (
    LogProbabilities,
    Scores,
    averaged,
    check_estimator,
    default_estimator,
    score,
)
from protlm.downstream.metrics import Agreement, agreement, averages, caution, positions_of
from protlm.downstream.variants import (
    Assay,
    Substitution,
    Variant,
    VariantTable,
    read_reference,
    read_variants,
)
from protlm.loading import load_model
from protlm.model.relatives import InContexts, drawn_beside, in_contexts, models_of
from protlm.options.score import Estimator, ScoreOptions
from protlm.plots import save_figure, scan_figure
from protlm.system.errors import InputDataError, UserError, interrupt_explained
from protlm.system.json_file import write_json
from protlm.system.paths import all_or_none, check_output
from protlm.system.terminal import print_table, printable

# Parts of the names that people give to measured scores.
_LIKELY = re.compile("dms|score|fitness|measured", re.IGNORECASE)


# By metric and estimator: averages over assays by type of selection, and assays without the metric.
Averages = Mapping[tuple[str, Estimator], tuple[Mapping[str, float], Sequence[str]]]


@dataclass(frozen=True)
class Result:
    """The scores of an assay by one estimator."""

    assay: str
    estimator: Estimator
    scores: Scores
    agreement: Agreement | None

    def cells(self) -> dict[str, str]:
        """Returns the cells of the table by column, without those of what is unknown."""
        found, perplexity = self.agreement, self.scores.perplexity
        row = {
            "assay": self.assay,
            "estimator": str(self.estimator),
            "variants": f"{len(self.scores.values):,}",
        }
        if found is not None:
            scores = found.to_plain()
            row["measured"] = f"{found.num_variants:,}"
            row[found.metric], row[HEADING] = score_cells(scores.pop(found.metric))
            # Of clinical variants, AUC alone is meant.
            if found.metric != "AUC":
                row |= {name: shown(score["value"]) for name, score in scores.items()}
        if perplexity is not None:
            row["perplexity of wild type"] = f"{perplexity:.2f}"
        return row

    def to_plain(self) -> dict[str, object]:
        """Returns all metrics and intervals for JSON; undefined ones are None."""
        plain: dict[str, object] = {
            "variants": len(self.scores.values),
            "perplexity_of_wild_type": self.scores.perplexity,
        }
        if (found := self.agreement) is not None:
            scores = found.to_plain()
            plain |= {
                "measured": found.num_variants,
                "classes": found.classes,
                "metrics": {name: one["value"] for name, one in scores.items()},
                "intervals": {name: [x["low"], x["high"]] for name, x in scores.items()},
            }
        return plain


def score_files(
    sources: Sequence[Path], model_path: Path, output: Path, options: ScoreOptions
) -> None:
    """Scores the variants of tables, or all substitutions of a protein."""
    (scan_protein if options.scan else score_variants)(sources, model_path, output, options)


@interrupt_explained("tables named as complete are kept; the others start over")
def score_variants(
    sources: Sequence[Path], model_path: Path, output: Path, options: ScoreOptions
) -> None:
    """Writes each table with a column of scores for each estimator, and prints the metrics."""
    _refuse_sequences(sources)
    outputs = _outputs(sources, output)
    if options.figure is not None:
        raise UserError("--figure draws the table of --scan; add --scan, or leave --figure out")
    _check_outputs([output, *outputs.values()], options.json)
    assays = _assays(sources, options)
    queries = {source: _query(source, assays, options) for source in sources}
    predictor, estimators, contexts = _predictor(model_path, options, queries.values())
    for source in sources:
        # All tables, before the first is scored, which may take hours.
        wild_type, table = _read(source, assays, options)
        _report_table(source, table)
        _check_table(source, table, wild_type, estimators, predictor)
    results, size = list[Result](), options.tokens_per_batch
    for source, path in outputs.items():
        wild_type, table = _read(source, assays, options)
        models = models_of(predictor.model, contexts, queries[source], size)
        given = averaged(models, size), wild_type, table.variants
        found = {name: score(name, *given, per_token=options.per_token) for name in estimators}
        with drawn_beside(contexts, path, [queries[source]]):
            _write_scores(path, table, found)
        print(printable(f"{path} is complete"), file=sys.stderr)
        results += _results(source, table, found)
    means = _averages_of(results, assays) if options.reference is not None else {}
    _print_results(results, means)
    if options.json is not None:
        _write_json(options.json, results, means, model_hash=predictor.model.hash)
    print(*filter(None, (output, options.json)), sep="\n")


def _results(
    source: Path, table: VariantTable, found: Mapping[Estimator, Scores]
) -> Iterator[Result]:
    """Yields the scores of each estimator, compared with measured ones."""
    positions = positions_of(table.variants)
    for estimator, scores in found.items():
        given = scores.values, table.is_fit, positions
        compared = (
            None
            if table.measured is None
            else agreement(table.measured, *given, is_clinical=table.is_clinical)
        )
        yield Result(_name(source), estimator, scores, compared)


@interrupt_explained("nothing was written; the same command starts again")
def scan_protein(
    sources: Sequence[Path], model_path: Path, output: Path, options: ScoreOptions
) -> None:
    """Writes the scores of all substitutions of a protein: a row for each position."""
    if len(sources) > 1 or options.wild_type or options.reference or options.json:
        raise UserError(
            "--scan takes one sequence file, the wild type, without --wild-type, --reference and "
            "--json; type: protlm score PROTEIN.fasta --scan -m MODEL -o SCORES.csv"
        )
    # One of several tables may be in a folder.
    check_output(output)
    check_table_output(output)
    protein = one_protein(sources[0])
    wild_type = protein.sequence
    query = protein.identifier, wild_type
    predictor, estimators, contexts = _predictor(model_path, options, [query])
    size = options.tokens_per_batch
    predictor = averaged(models_of(predictor.model, contexts, query, size), size)
    if len(estimators) > 1:
        raise UserError(f"--scan takes one --estimator, and {len(estimators)} were given")
    (estimator,) = estimators
    variants = [
        Variant((Substitution(own, position, letter),))
        for position, own in enumerate(wild_type)
        if own in STANDARD
        for letter in STANDARD
    ]
    found = score(estimator, predictor, wild_type, variants, per_token=options.per_token)
    first = options.first_residue
    scores = np.full((len(wild_type), len(STANDARD)), np.nan)
    scores[[own in STANDARD for own in wild_type]] = found.values.reshape(-1, len(STANDARD))
    rows = (
        [str(first + position), wild_type[position], *map(_score_text, row)]
        for position, row in enumerate(scores)
    )
    with drawn_beside(contexts, output, [query]), all_or_none() as written:
        if options.figure is not None:
            figure = scan_figure(
                np.nan_to_num(scores),
                wild_type,
                title=f"{printable(protein.identifier)}: {estimator}",
                first_residue=first,
            )
            save_figure(figure, options.figure)
            written.append(options.figure)
        write_table(output, ["position", "wild_type", *STANDARD], rows)
    print(f"{estimator}: {found.definition}")
    if found.perplexity is not None:
        print(f"perplexity of the wild type: {found.perplexity:.2f}")
    print(*filter(None, (output, options.figure)), sep="\n")


def _predictor(
    model_path: Path, options: ScoreOptions, queries: Collection[tuple[str, str]]
) -> tuple[LogProbabilities, list[Estimator], InContexts | None]:
    """Returns a model without relatives, what is computed, and the contexts of queries."""
    model = load_model(model_path, device=options.device)
    contexts = in_contexts(model, options.relatives, (name for name, _ in queries))
    if contexts is not None:
        model = contexts.empty
    predictor = LogProbabilities(model, options.tokens_per_batch)
    estimators = list(dict.fromkeys(options.estimators or [default_estimator(predictor)]))
    for estimator in estimators:
        check_estimator(estimator, predictor, per_token=options.per_token)
    return predictor, estimators, contexts


def _query(source: Path, assays: Mapping[str, Assay], options: ScoreOptions) -> tuple[str, str]:
    """Returns the name and the residues of the wild type of a table."""
    name = _name(source)
    return assays[name].protein if options.reference is None else name, assays[name].wild_type


def _name(source: Path) -> str:
    name = source.name.removesuffix(".gz")
    return name.removesuffix(Path(name).suffix)


def _outputs(sources: Sequence[Path], output: Path) -> dict[Path, Path]:
    """Returns the output of each table: `output` itself, or NAME.csv in the folder `output`."""
    if len(sources) == 1 and output.suffix:
        check_table_output(output)
        return {sources[0]: output}
    if is_table(output):
        raise UserError(
            f"{output} is the name of one table, and there are {len(sources)}; give a folder: "
            f"-o {output.with_suffix('')}"
        )
    names = [_name(source) for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name} is the name of several tables; rename one of them")
    return {source: output / f"{name}.csv" for source, name in zip(sources, names, strict=True)}


def _refuse_sequences(sources: Sequence[Path]) -> None:
    for source in sources:
        with source.open("rb") as file:
            if file.read(1) == b">":
                raise UserError(
                    f"{source} is a sequence file, not a table of variants; type: protlm score "
                    f"{source} --scan -o SCORES.csv, or protlm score VARIANTS.csv --wild-type "
                    f"{source} -o SCORES.csv"
                )


def _assays(sources: Sequence[Path], options: ScoreOptions) -> dict[str, Assay]:
    """Returns the wild type of each table, by the name of the table."""
    names = [_name(source) for source in sources]
    if options.wild_type is not None and options.reference is None:
        protein = one_protein(options.wild_type)
        return {name: Assay(protein.sequence, protein.identifier, "") for name in names}
    if options.reference is None or options.wild_type is not None:
        given = "neither is" if options.wild_type is None else "both are"
        raise UserError(
            "the wild type of the variants is read from --wild-type PROTEIN.fasta or from "
            f"--reference FILE.csv (DMS_id, target_seq), and {given} given; give one of them"
        )
    assays = read_reference(options.reference)
    for name in names:
        if name not in assays:
            raise InputDataError(
                f"{options.reference} has no row with the DMS_id {name}; name the table by its "
                "DMS_id, or give --wild-type PROTEIN.fasta"
            )
    return {name: assays[name] for name in names}


def _read(
    source: Path, assays: Mapping[str, Assay], options: ScoreOptions
) -> tuple[str, VariantTable]:
    wild_type = assays[_name(source)].wild_type
    return wild_type, read_variants(
        source,
        wild_type,
        first_residue=options.first_residue,
        skip_invalid=options.skip_invalid,
        label=options.label,
    )


def _check_table(
    source: Path,
    table: VariantTable,
    wild_type: str,
    estimators: Sequence[Estimator],
    predictor: LogProbabilities,
) -> None:
    """Refuses columns that exist, and what an estimator or the model cannot score."""
    for estimator in estimators:
        if estimator in table.columns:
            raise UserError(
                f"{source} already has a column {estimator}; rename the column, or leave out "
                f"--estimator {estimator}"
            )
        try:
            check_estimator(estimator, predictor, table.variants)
        except UserError as error:
            raise UserError(f"{source}: {error}", error.options) from None
    longest = predictor.model.max_residues
    indels = [variant.indel for variant in table.variants if variant.indel is not None]
    length = max(map(len, [wild_type, *indels]))
    # Masked models read longer sequences through windows.
    if predictor.model.causal and longest is not None and length > longest:
        raise UserError(
            f"{source}: a sequence of {length:,} residues is longer than the {longest:,} that this "
            "model accepts; leave it out, or choose a model without this limit"
        )


def _write_scores(path: Path, table: VariantTable, found: Mapping[Estimator, Scores]) -> None:
    columns = np.full((len(table.rows), len(found)), np.nan)
    columns[table.scored] = np.stack([scores.values for scores in found.values()], axis=1)
    rows = (
        [*row, *map(_score_text, values)] for row, values in zip(table.rows, columns, strict=True)
    )
    write_table(path, [*table.columns, *found], rows)


def _check_outputs(outputs: Sequence[Path], other: Path | None) -> None:
    if other is not None and other.resolve() in [path.resolve() for path in outputs]:
        raise UserError(
            f"--json {other} and -o {outputs[0]} would write the same file; give --json another "
            "name"
        )
    for path in filter(None, [*outputs[1:], other]):
        check_output(path)


def _report_table(source: Path, table: VariantTable) -> None:
    if table.unscored:
        text = f"{table.describe_unscored(source)}; rows left unscored: {len(table.unscored):,}"
        print(printable(text), file=sys.stderr)
    for note in table.notes:
        print(printable(f"{source}: {note}"), file=sys.stderr)
    likely = " or ".join(f"--label {quote(one)}" for one in table.columns if _LIKELY.search(one))
    if likely and table.measured is None:
        text = f"{source} has no column DMS_score to compare with; for another, type {likely}"
        print(printable(text), file=sys.stderr)


def _score_text(value: float) -> str:
    """Formats a score for a table; NaN is an empty cell."""
    return "" if math.isnan(value) else f"{value:.6f}"


def _averages_of(results: Sequence[Result], assays: Mapping[str, Assay]) -> Averages:
    by_assay: dict[tuple[str, Estimator], dict[str, float]] = {}
    for result in results:
        if result.agreement is not None:
            metric = result.agreement.metric
            values = by_assay.setdefault((metric, result.estimator), {})
            values[result.assay] = result.agreement.values[metric]
    return {
        key: (averages(values, assays), [name for name, x in values.items() if math.isnan(x)])
        for key, values in by_assay.items()
    }


def _print_results(results: Sequence[Result], means: Averages) -> None:
    rows = [result.cells() for result in results]
    columns = [*dict.fromkeys(column for row in rows for column in row)]
    counts = [one.agreement.num_variants for one in results if one.agreement]
    notes = caution(min(counts), "measured variants") if counts else []
    if notes and "NDCG" in columns:
        # Of fewer than ten, the top 10 % is empty.
        notes.append("NDCG of fewer than ten variants is undefined")
    notes += [f"{estimator}: {text}" for estimator, text in _definitions(results).items()]
    for (metric, estimator), (values, left_out) in means.items():
        parts = [f"{name} {value:.3f}" for name, value in values.items() if name]
        if left_out:
            parts.append(f"without {len(left_out):,} of the assays, where it is undefined")
        notes.append(f"average {metric}, {estimator}: {', '.join(parts)}")
    print_table(columns, ([row.get(name, "") for name in columns] for row in rows), notes)


def _write_json(path: Path, results: Sequence[Result], means: Averages, *, model_hash: str) -> None:
    assays: dict[str, dict[str, object]] = {}
    for result in results:
        assays.setdefault(result.assay, {})[result.estimator] = result.to_plain()
    averages_of = {
        f"average_{metric.lower()}": {
            estimator: values for (one, estimator), (values, _) in means.items() if one == metric
        }
        for metric in ("Spearman", "AUC")
    }
    write_json(
        path,
        {
            "model_hash": model_hash,
            "definitions": _definitions(results),
            "assays": assays,
            **averages_of,
            "left_out_of_average": {one: left_out for (_, one), (_, left_out) in means.items()},
        },
    )


def _definitions(results: Sequence[Result]) -> dict[Estimator, str]:
    return {result.estimator: result.scores.definition for result in results}
