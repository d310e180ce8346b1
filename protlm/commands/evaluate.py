"""`protlm evaluate checkpoint=RUN evaluation=[...] data.dir=DIR split=...`: JSON and a table."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from protlm import __version__, evaluation
from protlm.checkpoints.format import announced_default
from protlm.config import EvaluateConfig
from protlm.config.composition import RUN_CONFIG, data_dir_of, to_plain
from protlm.data.shards.data_set import open_split
from protlm.data.shards.manifest import MANIFEST, read_manifest
from protlm.evaluation.base import NO_SPLIT, Evaluation, EvaluationData, of_split
from protlm.loading import load_model
from protlm.model.pretrained import PretrainedModel
from protlm.model.relatives import drawn_beside, in_contexts
from protlm.options.relatives import FamilyOptions, RelativesOptions
from protlm.plots import relatives_curve, save_figure
from protlm.system.errors import UserError, interrupt_explained, one_of
from protlm.system.json_file import write_json
from protlm.system.paths import all_or_none, check_output, sha256_of
from protlm.system.terminal import print_table, printable

# The names that `protlm prepare` and the shipped split table give to the test split.
_TEST_SPLITS = ("test", "test_iid")


@contextmanager
def _advising() -> Iterator[None]:
    """Adds what to type to an error in its block that names settings."""
    try:
        yield
    except UserError as error:
        known = EvaluateConfig.__dataclass_fields__.keys() & error.options.keys()
        typed = [f"type {name}={error.options[name]}".replace("=True", "=true") for name in known]
        if typed:
            error.args = (f"{error}; {' or '.join(typed)}",)
        raise


@_advising()
@interrupt_explained("nothing was written; the same command starts again")
def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluates a model; prints tables, and writes what it returns as JSON if asked to."""
    output = None if config.output is None else Path(config.output)
    evaluations = {
        label: evaluation.create(label, settings) for label, settings in config.evaluation.items()
    }
    if not evaluations:
        raise UserError("evaluation=[] is empty; type for instance evaluation=[masked,causal]")
    each = [made for made in evaluations.values() if made.needs_data]
    if each and (found := data_dir_of(config)) != config.data.dir:
        config.data.dir = found
        written = Path(config.checkpoint or "") / RUN_CONFIG
        print(printable(f"data.dir={found}, as in {written}"), file=sys.stderr)
    alone = [label for label, made in evaluations.items() if not made.sees_relatives]
    if alone and config.relatives is not None:
        raise UserError(f"evaluation={alone[0]} reads sequences alone; leave it out, or relatives=")
    splits = _splits(config) if each else []
    outputs = [one for made in each for split in splits for one in made.outputs_of(split)]
    for one in [*filter(None, [output]), *outputs]:
        check_output(one)
    given = config.checkpoint
    path = announced_default("checkpoint=MODEL") if given is None else Path(given)
    model = load_model(path, device=config.device)
    if any(made.reads_tokens for made in each):
        _check_alphabet(model, config)
    data = [_data(config, split) for split in splits]
    queries = [query for one in data for query in one.queries()] if config.relatives else []
    draws = any(made.draws_contexts for made in each)
    contexts = in_contexts(
        model, _relatives(config), (name for name, _ in queries), only_first=not draws
    )
    data = [replace(one, contexts=contexts) for one in data]
    with all_or_none() as written:
        report = {
            "checkpoint": given or path.name,
            "model_hash": model.hash,
            **provenance(config),
            "results": _results(model, evaluations, data, written),
        }
        for label, made in evaluations.items():
            for split, results in report["results"].items():
                if made.figure is not None:
                    save_figure(relatives_curve(results[label]), of_split(made.figure, split))
        if output is not None:
            with drawn_beside(contexts if draws else None, output, queries):
                write_json(output, report)
    _print(evaluations, report["results"])
    for file in [*outputs, *filter(None, [output])]:
        print(printable(f"written: {file}"), file=sys.stderr)
    return report


def provenance(config: EvaluateConfig) -> dict[str, Any]:
    """Returns what decides results beside the model: data, settings and version."""
    places = "checkpoint", "output"
    manifest = Path(config.data.dir or "") / MANIFEST
    return {
        "data": sha256_of(manifest) if config.data.dir and manifest.is_file() else None,
        "settings": {key: x for key, x in to_plain(config).items() if key not in places},
        "version": __version__,
    }


def _relatives(config: EvaluateConfig) -> RelativesOptions:
    paths = config.relatives, config.whole_relatives
    relatives, whole = [None if path is None else Path(path) for path in paths]
    number = FamilyOptions.contexts if config.contexts is None else config.contexts
    family = FamilyOptions(
        *(number, config.relatives_tokens, whole),
        alignment=config.alignment,
        allow_none=config.allow_none,
    )
    return RelativesOptions(relatives, family, config.force_relatives)


def _check_alphabet(model: PretrainedModel, config: EvaluateConfig) -> None:
    if read_manifest(_directory(config)).vocabulary != model.vocabulary.hash:
        raise UserError(
            f"data.dir={config.data.dir} has shards of another alphabet than the model; "
            "evaluations on structures and tables read it: contacts, heads, protlm probe"
        )


def _data(config: EvaluateConfig, split: str) -> EvaluationData:
    directory, verify = _directory(config), config.data.verify
    return EvaluationData(
        split=open_split(directory, split, verify=verify),
        train=open_split(directory, config.data.train_split, verify=verify),
        tokens_per_batch=config.data.tokens_per_batch,
        name=split,
    )


def _results(
    model: PretrainedModel,
    evaluations: dict[str, Evaluation],
    data: Sequence[EvaluationData],
    written: list[Path],
) -> dict[str, Any]:
    """Returns what is found, and adds the files that evaluations have written."""
    results: dict[str, Any] = {}
    for split, label in ((one, label) for one in (*data, None) for label in evaluations):
        made, name = evaluations[label], NO_SPLIT if split is None else split.name
        if made.needs_data == (split is not None):
            results.setdefault(name, {})[label] = made.run(model, split)
            written += made.outputs_of(name)
    return results


def _splits(config: EvaluateConfig) -> list[str]:
    if config.split is None:
        return [_test_split(_directory(config))]
    split = config.split
    names = [str(name) for name in split] if isinstance(split, list) else [str(split)]
    if not names:
        raise UserError("split=[] is empty; type for instance split=test")
    return names


def _test_split(directory: Path) -> str:
    """Returns the one split of a data set that `protlm prepare` makes for tests."""
    splits = read_manifest(directory).splits
    found = [name for name in _TEST_SPLITS if name in splits]
    if len(found) != 1:
        which = "both test and test_iid" if found else "neither test nor test_iid"
        raise UserError(
            f"{directory} has {which}; choose among its splits, for instance "
            f"split={sorted(splits)[0]}; it has: {one_of(list(splits))}"
        )
    return found[0]


def _directory(config: EvaluateConfig) -> Path:
    if config.data.dir is None:
        raise UserError(
            f"evaluation=[{','.join(config.evaluation)}] needs a prepared data set; type "
            "data.dir=DIR"
        )
    return Path(config.data.dir)


def _print(evaluations: dict[str, Evaluation], results: dict[str, Any]) -> None:
    tables: dict[tuple[str, ...], list[Sequence[str]]] = {}
    captions: dict[tuple[str, ...], dict[str, None]] = {}
    for label, made in evaluations.items():
        by_split = {split: values[label] for split, values in results.items() if label in values}
        found = made.table(by_split)
        columns = tuple(found.columns)
        tables.setdefault(columns, []).extend(found.rows)
        captions.setdefault(columns, {}).update(dict.fromkeys(found.caption.splitlines()))
        if note := _other_objective(label, made, by_split):
            captions[columns][note] = None
    for columns, rows in tables.items():
        print_table(columns, rows, (f"  {line}" for line in captions[columns]))


def _other_objective(label: str, made: Evaluation, by_split: dict[str, dict[str, Any]]) -> str:
    """Describes a model that was trained with another objective than it is evaluated with."""
    asked = getattr(made, "objective", None)
    trained = {values.get("trained_as", asked) for values in by_split.values()} - {asked}
    if asked is None or not trained:
        return ""
    return f"{label}: the model was trained with objective={trained.pop()}, not {asked}"
