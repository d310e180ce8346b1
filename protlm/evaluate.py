"""`protlm evaluate checkpoint=RUN evaluation=[...] data.dir=DIR split=...`: JSON and a table."""

import os
import signal

if __name__ == "__main__":
    # The imports below take seconds; Ctrl-C ends them without a word, as it does the rest.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))

import json
import sys
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from protlm.build import build_evaluation, compose, load_model, through_hydra
from protlm.config import EvaluateConfig
from protlm.console import console
from protlm.data.shards import open_split
from protlm.errors import UserError, exit_with_message
from protlm.evaluation.base import Evaluation, EvaluationData
from protlm.model.pretrained import PretrainedModel
from protlm.paths import check_output, complete_file

ONCE = "any"


def main() -> None:
    """Runs the command with this process's arguments."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1

    def run() -> None:
        if any(argument.startswith("-") for argument in arguments):
            through_hydra(EvaluateConfig, arguments, evaluate)
        else:
            paths = [argument for argument in arguments if "=" not in argument]
            if paths:
                raise UserError(f"{paths[0]} is no setting; type checkpoint={paths[0]}")
            evaluate(compose(EvaluateConfig, arguments))

    exit_with_message(run, debug=debug)


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluates a model; prints a table and writes the JSON when an output is named.

    Returns:
        {"checkpoint", "model_hash", "results": {split: {evaluation: values}}}; what reads no split
        stands under "any".

    Raises:
        UserError: settings, splits or evaluations that do not exist.
        InputDataError: a damaged checkpoint or shard.
    """
    output = None if config.output is None else Path(config.output)
    if output is not None:
        check_output(output)
    evaluations = {
        label: build_evaluation(label, settings) for label, settings in config.evaluation.items()
    }
    if not evaluations:
        raise UserError("there is nothing to evaluate; type evaluation=[masked,causal,contacts]")
    model = load_model(Path(config.checkpoint), device=config.device)
    report = {
        "checkpoint": config.checkpoint,
        "model_hash": model.hash,
        "results": _results(model, evaluations, config),
    }
    if output is not None:
        with complete_file(output) as temporary:
            temporary.write_text(json.dumps(report, indent=2) + "\n")
    _print(report["results"])
    return report


def _results(
    model: PretrainedModel, evaluations: dict[str, Evaluation], config: EvaluateConfig
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    once = {label: e for label, e in evaluations.items() if not e.needs_data}
    each = {label: e for label, e in evaluations.items() if e.needs_data}
    for split in _splits(config.split) if each else []:
        data = _data(config, split)
        results[split] = {label: e.run(model, data) for label, e in each.items()}
    if once:
        results[ONCE] = {label: e.run(model, None) for label, e in once.items()}
    return results


def _splits(split: Any) -> list[str]:
    names = [str(name) for name in split] if isinstance(split, list) else [str(split)]
    if not names:
        raise UserError("split=[] names no split; type for instance split=test_iid")
    return names


def _data(config: EvaluateConfig, split: str) -> EvaluationData:
    if config.data.dir is None:
        raise UserError("these evaluations read shards; type data.dir=DIR")
    directory, verify = Path(config.data.dir), config.data.verify.value
    return EvaluationData(
        split=open_split(directory, split, verify=verify),
        train=open_split(directory, config.data.train_split, verify=verify),
        tokens_per_batch=config.data.tokens_per_batch,
    )


def _print(results: dict[str, Any]) -> None:
    accuracy = Table(
        "split", "objective", "predictor", "accuracy", "perplexity", "targets", box=SIMPLE
    )
    for split, by_label in results.items():
        for label, values in by_label.items():
            for who in ("model", "empirical", "uniform") if "targets" in values else ():
                row = values[who]
                accuracy.add_row(
                    split,
                    label,
                    who,
                    f"{row['accuracy']:.2%}",
                    f"{row['perplexity']:.2f}",
                    f"{values['targets']:,}",
                )
    printed = console()
    if accuracy.row_count:
        printed.print(accuracy)
    contacts = results.get(ONCE, {}).get("contacts")
    if contacts:
        printed.print(_contact_table(contacts))


def _contact_table(contacts: dict[str, Any]) -> Table:
    divisors = ("P@L", "P@L/2", "P@L/5")
    table = Table("contacts", "range", *divisors, "proteins", "heads used", box=SIMPLE)
    for who in ("model", "random_weights"):
        for separation, by_divisor in contacts[who].items():
            cells = [f"{by_divisor[divisor]['mean']:.1%}" for divisor in divisors]
            heads = contacts["heads_used"][who]
            used = str(heads) if heads else "0: chance"
            table.add_row(who, separation, *cells, str(by_divisor["P@L"]["count"]), used)
    return table


if __name__ == "__main__":
    main()
