"""`protlm benchmark NAME FOLDER -m MODEL -o RESULTS`: the tasks of a benchmark, on any model.

The results of each task and model, and the mean vectors of proteins, which tasks share, are files
in the folder `RESULTS.partial`, from which an interrupted command continues.
"""

import hashlib
import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import chain, groupby, repeat
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np

from protlm.analysis.intervals import SCORE, in_words, shown
from protlm.analysis.pace import token_seconds
from protlm.analysis.precision import METRIC, NEAREST
from protlm.analysis.structures import longest_read, read_folder
from protlm.data.tables import write_table
from protlm.data.vocabulary import RESIDUES
from protlm.downstream.benchmarks import (
    COLUMNS,
    LESS,
    BenchmarkTask,
    average,
    figure_of,
    find,
    lacks,
    table,
)
from protlm.downstream.estimators import LogProbabilities, default_estimator, score
from protlm.downstream.examples import left_out_by_length, read_examples, read_labeled, targets_from
from protlm.downstream.metrics import LABEL_METRICS, agreement, positions_of
from protlm.downstream.probe_results import Result, content_of, mean_over
from protlm.downstream.probing import MODEL, RANDOM, probe_folds
from protlm.downstream.splits import folds_of, split_of
from protlm.downstream.variants import VariantTable, read_variants
from protlm.evaluation.base import compared
from protlm.evaluation.contacts import LONGEST, Contacts
from protlm.loading import load_model
from protlm.model.embedding import IN_MEMORY, Embedder
from protlm.model.memory import Room
from protlm.model.pretrained import PretrainedModel
from protlm.model.vector_store import VectorStore
from protlm.options.embed import Pooling
from protlm.options.labels import BenchmarkOptions, ProbeOptions
from protlm.options.score import Estimator
from protlm.plots import benchmark_figure, save_figure
from protlm.system.errors import InputDataError, UserError, refuse_unknown
from protlm.system.json_file import write_json
from protlm.system.memory import free_memory, readable_size
from protlm.system.parts import read_part, write_facts
from protlm.system.paths import sha256_of
from protlm.system.terminal import print_table
from protlm.system.work_folder import Kind, WorkFolder, begun_with, unfinished, work_folder

_KIND = Kind("benchmark", "being run", "--output")
# Names that are shown of missing tasks, and of files.
_SHOWN = 4


def benchmark(
    name: str, folder: Path, paths: Sequence[Path], output: Path, options: BenchmarkOptions
) -> None:
    """Runs tasks on each model, and writes results.json, .tsv and .png to a new folder."""
    in_folder, missing, unknown = find(name, folder)
    asked = {*options.tasks}
    tasks = [task for task in in_folder if not asked or asked & {task.group, task.name}]
    for unmet in asked - {known for task in tasks for known in (task.name, task.group)}:
        lacking = {x: ends for x, ends in missing.items() if unmet in (x, x.partition("/")[0])}
        if lacking:
            raise InputDataError(f"--tasks={unmet}: in {folder}, {lacks(lacking)}")
        refuse_unknown("--tasks", unmet, {x.group if x.assay else x.name for x in in_folder})
    models = {path.absolute().name: load_model(path, device=options.device) for path in paths}
    if len(models) < len(paths):
        raise UserError("two models have one name; rename one of them, or give it once")
    # All models are tested on the same proteins.
    limits = [model.max_residues for model in models.values() if model.max_residues]
    longest = min(limits, default=None)
    tasks = [replace(task, reading=replace(task.reading, longest=longest)) for task in tasks]
    left_out = {"missing": missing, "not known": unknown}
    notes = [
        f"{what}: {len(names):,} ({', '.join([*names][:_SHOWN])})"
        for what, names in left_out.items()
        if names
    ]
    if options.dry_run:
        _estimate(tasks, models, options.probe.tokens_per_batch, notes)
        return
    settings = {
        "the benchmark": name,
        "the files": {
            str(file.relative_to(folder)): sha256_of(file)
            for task in in_folder
            for file in task.files
        },
        "--toks-per-batch": options.probe.tokens_per_batch,
        "--seed": options.probe.seed,
        "--device": [model.device.type for model in models.values()],
    }
    identities = [f"{model_name} {model.identity}" for model_name, model in models.items()]
    begun = begun_with(settings, models={"--model": identities})
    with work_folder(unfinished(output), begun, _KIND, break_lock=options.break_lock) as work:
        contents = {
            model_name: {task.name: _content(task, model, options.probe, work) for task in tasks}
            for model_name, model in models.items()
        }
        figures = {
            model_name: _figures(tasks, results, options.probe.seed)
            for model_name, results in contents.items()
        }
        rows = table(name, figures)
        assays = {task.name for task in tasks if task.assay is not None} - asked
        # Hundreds of assays are printed as averages.
        printed = [row for row in rows if len(assays) <= _SHOWN or row[0] not in assays]
        made = work.path / "results"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        content = {
            **begun,
            **left_out,
            "table": [dict(zip(COLUMNS, row, strict=True)) for row in rows],
            "tasks": contents,
        }
        write_json(made / "results.json", content)
        cells = (["" if x is None else str(x) for x in row] for row in rows)
        write_table(made / "results.tsv", COLUMNS, cells)
        drawn = benchmark_figure([row for row in printed if LESS not in row[2]], [*models])
        save_figure(drawn, made / "results.png")
        work.publish(made, output)
    print_table(("task", "by", "value (95 %)"), _screen(printed), notes)
    print(output)


def _screen(rows: Iterable[tuple]) -> Iterator[list[str]]:
    """Yields the cells of rows, in 80 columns: the first has the task, its metric and proteins."""
    for (task, metric), rows_of_task in groupby(rows, lambda row: row[:2]):
        group = list(rows_of_task)
        proteins = group[0][-2]
        number = "1 protein" if proteins == 1 else f"{proteins:,} proteins"
        heads = chain([*task.split("/"), metric, number], repeat(""))
        for head, (_, _, by, *numbers, _, source) in zip(heads, group, strict=False):
            name, less, baseline = by.partition(" of ")[0].partition(LESS)
            score = dict(zip(SCORE, numbers, strict=True))
            text = f"{shown(score['value'])} (published)" if source else in_words(score)
            yield [head, f"{less.strip()} {baseline}" if less else name, text]


def _content(
    task: BenchmarkTask, model: PretrainedModel, options: ProbeOptions, work: WorkFolder
) -> dict[str, Any]:
    """Returns the results of a task; those that are finished are read, with their vectors.

    The vectors of a task that are lost are computed by that task: others would make other batches.
    """
    name = hashlib.sha256(f"{task.name} {model.identity}".encode()).hexdigest()
    part = read_part(path := work.path / f"{name}.json")
    if part is not None and all(read_part(work.path / one) for one in part.facts["vectors"]):
        print(f"{task.name}: finished before", file=sys.stderr)
        return part.facts["results"]
    store = VectorStore(work.path, work.lock.check)
    try:
        content = _RUN[task.kind](task, model, options, store)
    except UserError as error:
        raise type(error)(f"{task.name}: {error}; --tasks runs other tasks") from None
    # As they are when they are read.
    facts = json.loads(json.dumps({"results": content, "vectors": sorted(store.used)}))
    write_facts(path, facts, check=work.lock.check)
    return facts["results"]


def _labels(
    task: BenchmarkTask, model: PretrainedModel, options: ProbeOptions, store: VectorStore
) -> dict[str, Any]:
    labeled = read_labeled(task.files[0], Room(model), task.reading, seed=options.seed)
    folds, targets = labeled.folds or {"": labeled.split}, labeled.targets
    heads_of = probe_folds(model, labeled.sequences, targets, folds, options, store=store)
    results = {fold: Result("", model.identity, labeled, x) for fold, x in heads_of.items()}
    result = next(iter(results.values()))
    if task.assay is None and labeled.leaks:
        print(f"warning: {task.name}: {labeled.leaks}", file=sys.stderr)
    sets = {name: len(rows) for name, rows in labeled.split.test_sets.items()}
    if labeled.folds:
        result = replace(result, predictors=mean_over(results))
        sets = {"": len(labeled.sequences)}
    figures = {}
    is_complete = not any(map(left_out_by_length, labeled.proteins.left_out))
    metric = task.metric or LABEL_METRICS[targets.task][0]
    for name, proteins in sets.items():
        scores = {
            who: head.by_set.get(name, head.scores) for who, head in result.predictors.items()
        }
        suffix = f"/{name}" if len(sets) > 1 else ""
        figures[suffix] = figure_of(scores, metric, proteins) | {"complete": is_complete}
    return {**content_of(result, options), "figures": figures}


def _read_variants(
    task: BenchmarkTask, model: PretrainedModel
) -> tuple[str, VariantTable, Estimator]:
    """Returns the wild type, its variants, without rows that have no score, and the estimator."""
    assert task.assay is not None
    wild_type, estimator = task.assay.wild_type, default_estimator(LogProbabilities(model))
    variants = read_variants(task.files[0], wild_type)
    if not model.causal and any(one.indel is not None for one in variants.variants):
        estimator = Estimator.pseudo_log_likelihood
    return wild_type, variants, estimator


def _variants(
    task: BenchmarkTask, model: PretrainedModel, options: ProbeOptions, _: VectorStore
) -> dict[str, Any]:
    wild_type, assay, estimator = _read_variants(task, model)
    if assay.measured is None or np.isnan(assay.measured).all():
        raise InputDataError("the table has no measured scores in a column DMS_score")
    predictors = {
        who: LogProbabilities(network, options.tokens_per_batch)
        for who, network in compared(model, options.seed).items()
    }
    predicted = {
        who: score(estimator, predictor, wild_type, assay.variants).values
        for who, predictor in predictors.items()
    }
    # The log-likelihood by the residue frequencies of the wild type, with pseudocounts.
    total = len(wild_type) + len(RESIDUES)
    log_p = {letter: math.log((wild_type.count(letter) + 1) / total) for letter in RESIDUES}
    sequences = (variant.apply(wild_type) for variant in assay.variants)
    predicted["composition"] = np.array([sum(log_p[x] for x in one) for one in sequences])
    places = positions_of(assay.variants)
    named = {"seed": options.seed, "is_clinical": assay.is_clinical}
    scores = {}
    for who, values in predicted.items():
        found = agreement(assay.measured, values, assay.is_fit, places, **named)
        assert found is not None
        scores[who] = found
    return {
        "estimator": estimator,
        "variants": len(assay.variants),
        "left_out": len(assay.unscored),
        "predictors": {who: {"metrics": one.to_plain()} for who, one in scores.items()},
        "figures": {"": figure_of(scores, scores[MODEL].metric, 1)},
    }


def _contacts(
    task: BenchmarkTask, model: PretrainedModel, options: ProbeOptions, _: VectorStore
) -> dict[str, Any]:
    folder, seed = str(task.files[0].parent), options.seed
    values = Contacts(structures=folder, fit_structures="sample", seed=seed).run(model, None)
    too_long = ", ".join(values["left_out"]) or "no structure"
    print(f"{task.name}: {values['num_test']} structures; too long: {too_long}", file=sys.stderr)
    over = values["over_best_baseline"]["long"]
    found = {
        MODEL: values[MODEL]["long"][METRIC],
        f"{MODEL}{LESS}{over['baseline']}": over,
        **{x: values[x]["long"][METRIC] for x in values if x.startswith((RANDOM, NEAREST))},
    }
    by = {who: {"value": x["mean"], "low": x["low"], "high": x["high"]} for who, x in found.items()}
    figure = {
        "metric": f"long-range {METRIC}",
        "proteins": over["count"],
        "by": by,
        "complete": not values["left_out"],
    }
    return {**values, "figures": {"": figure}}


_RUN = {"labels": _labels, "variants": _variants, "contacts": _contacts}


def _figures(
    tasks: Sequence[BenchmarkTask], contents: Mapping[str, Any], seed: int
) -> dict[str, dict[str, Any]]:
    """Returns the figures of all test sets of all tasks, and averages over assays."""
    figures, groups = {}, dict[str, list[BenchmarkTask]]()
    for task in tasks:
        for suffix, figure in contents[task.name]["figures"].items():
            figures[f"{task.name}{suffix}"] = figure
        if task.assay is not None:
            groups.setdefault(task.group, []).append(task)
    for group, members in groups.items():
        assays = {task.name: task.assay for task in members if task.assay is not None}
        figures[group] = average({name: figures[name] for name in assays}, assays, seed)
        figures[group]["complete"] = len(members) == members[0].of
    return figures


def _estimate(
    tasks: Sequence[BenchmarkTask],
    models: Mapping[str, PretrainedModel],
    size: int,
    notes: list[str],
) -> None:
    """Prints the passes of each task, and the time and memory of each model."""
    rows = []
    for name, model in models.items():
        room, seen, longest, total, kept = Room(model), set[str](), 1, 0.0, 0
        seconds = token_seconds(Embedder(model, (Pooling.mean,), (model.num_layers,)), size)
        for task in tasks:
            residues, of_residues = _passes(task, room, seen)
            kept = max(kept, sum(residues) * of_residues)
            lengths = [length + model.vocabulary.num_around for length in residues]
            # The model, and random weights.
            time = 2 * sum(length * seconds(length) for length in lengths)
            longest, total = max(longest, *lengths, 0), total + time
            counts = len(residues), sum(residues), round(time)
            rows.append((task.name, name, *(f"{n:,}" for n in counts)))
        needs = readable_size(max(size // longest, 1) * room.needs(longest))
        free, time = readable_size(free_memory(model.device)), timedelta(seconds=round(total))
        notes.append(f"{name}: without fits about {time} and {needs} of memory; {free} are free")
        width = model.description.model.model_dim
        if (states := kept * width * (model.num_layers + 1)) > IN_MEMORY:
            notes.append(
                f"{name}: {readable_size(2 * states)} of temporary files in {gettempdir()}"
            )
    print_table(("task", "model", "passes", "residues", "seconds"), rows, notes)


def _passes(task: BenchmarkTask, room: Room, seen: set[str]) -> tuple[list[int], bool]:
    """Returns the residues of each pass of a task, and whether residues have its labels.

    Mean vectors that others have `seen` need no pass.
    """
    if task.kind == "contacts":
        structures, _ = read_folder(task.files[0].parent, longest_read(room.model, LONGEST))
        return [len(one.sequence) for one in structures], False
    if task.kind == "variants":
        wild_type, table, estimator = _read_variants(task, room.model)
        if estimator.scores_indels:
            lengths = [len(variant.apply(wild_type)) for variant in table.variants]
            if room.model.causal:
                return lengths, False
            # One pass for each residue.
            return [length for length in lengths for _ in range(length)], False
        places = {one.position for variant in table.variants for one in variant.substitutions}
        return [len(wild_type)] * len(places), False
    proteins = read_examples(task.files[0], room, task.reading)
    targets_from(task.files[0], proteins, task.reading)
    # They refuse what the command itself would refuse.
    split = split_of if task.reading.form.fold is None else folds_of
    split(proteins.examples, seed=0)
    sequences = [example.sequence for example in proteins.examples]
    if not proteins.per_residue:
        sequences = [*{*sequences} - seen]
        seen.update(sequences)
    return [*map(len, sequences)], proteins.per_residue
