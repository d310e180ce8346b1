"""`protlm checkpoint info|verify|import|export|convert` and `protlm models`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from protlm import interop
from protlm.analysis.contact_regression import SavedFit, read_fit
from protlm.attention.layers import attention_label
from protlm.checkpoints import format as checkpoints
from protlm.checkpoints.description import ModelDescription
from protlm.checkpoints.format import CARD, RESULTS, default_model, shipped_models
from protlm.checkpoints.validations import best_checkpoints
from protlm.config import BestMetric, TrainConfig
from protlm.config.composition import compose, to_plain
from protlm.config.fields import as_typed
from protlm.conversion import convert
from protlm.interop import hugging_face, onnx_file
from protlm.interop.base import ContactHead
from protlm.loading import load_model, model_of, read_model
from protlm.model.transformer import num_parameters
from protlm.options.checkpoint import ExportOptions, WeightFormat
from protlm.system.errors import InputDataError, UserError
from protlm.system.json_file import to_json, write_json
from protlm.system.paths import all_or_none, check_output
from protlm.system.terminal import print_table, printable

_FIGURES = ("perplexity", "accuracy")


def info(path: Path) -> None:
    """Describes the newest checkpoint of a run, a checkpoint or an exported model."""
    found = read_model(path)
    model = model_of(found)
    rows = {
        "file": str(found.path),
        "objective": model.description.objective.value,
        "parameters": f"{num_parameters(model.network):,}",
        "longest input": "unbounded" if model.max_length is None else str(model.max_length),
        "weights hash": model.hash,
        "vocabulary hash": model.description.vocabulary,
    }
    described = model.description.to_plain()
    rows |= {
        f"{section}.{key}": str(value)
        for section in ("model", "attention")
        for key, value in described[section].items()
    }
    rows |= {f"source.{key}": value for key, value in (model.description.source or {}).items()}
    for metric in BestMetric:
        rows |= {f"best by {metric}": str(best) for best in best_checkpoints(path, metric, 1)}
    for key, value in rows.items():
        print(f"{printable(key):<26} {printable(value)}")


def verify(path: Path) -> None:
    """Verifies every checkpoint of a run, one checkpoint, or an exported model."""
    is_run = (path / checkpoints.CHECKPOINTS).is_dir()
    files = checkpoints.all_checkpoints(path) if is_run else [path]
    if not files:
        raise InputDataError(f"{path} does not contain a checkpoint yet")
    faults, newest = [], None
    if is_run:
        try:
            newest = checkpoints.latest(path)
        except InputDataError as error:
            faults.append(str(error))
    for file in files:
        try:
            load_model(file)
            print(f"{file}: good{', the latest' if file == newest else ''}")
        except InputDataError as error:
            print(f"{file}: damaged")
            faults.append(str(error))
    if newest is not None and newest not in files:
        faults.append(f"{newest}, the latest, is missing")
    if faults:
        raise InputDataError("\n".join(faults))


def export_model(path: Path, output: Path, options: ExportOptions) -> None:
    """Writes a model in the format of protlm, of Hugging Face transformers or of ONNX."""
    if options.format is WeightFormat.hf:
        export_to_hugging_face(path, output, options.fit)
    elif options.format is WeightFormat.onnx:
        # It is written once it computes what the model computes.
        print(onnx_file.export(load_model(path), output), file=sys.stderr)
        print(output)
    else:
        export(path, output, options.dtype or "float32")


def export(path: Path, output: Path, dtype: str = "float32") -> None:
    """Writes a model to a new folder; `bfloat16` rounds parameters, not buffers."""
    found = read_model(path)
    parameters = [name for name, _ in model_of(found).network.named_parameters()]
    checkpoints.export(found, output, rounded=parameters if dtype == "bfloat16" else [])
    print(output)


def export_to_hugging_face(path: Path, output: Path, fit: Path | None = None) -> None:
    """Writes a folder that Hugging Face transformers loads; `fit` is the contact head of an ESM."""
    found = read_model(path)
    # The weights are compared with the description.
    model = model_of(found)
    contacts = found.contacts if isinstance(found, interop.ForeignModel) else None
    if fit is not None:
        saved = read_fit(fit)
        if not hugging_face.is_esm(found.description):
            raise UserError(
                f"--fit {fit} needs a model with the architecture of ESM, which {path} does not "
                "have; leave --fit out"
            )
        if saved.model_hash != model.hash:
            raise UserError(f"--fit {fit} was fitted with another model; leave it out")
        contacts = ContactHead(saved.weights, saved.intercept)
    if hugging_face.export(found, output, contacts):
        say = "the folder contains code: load it with trust_remote_code=True"
    elif contacts is None:
        say = (
            "no contact head: predict_contacts of transformers will have random weights; "
            "--fit NAME.fit.json of protlm contacts adds one"
        )
    else:
        say = "transformers loads it as EsmForMaskedLM"
    print(say, file=sys.stderr)
    print(output)


def import_model(path: Path, output: Path, base: Path | None = None) -> None:
    """Converts the model of another program; its contact head becomes NAME.fit.json.

    An adapter of PEFT is merged into its `base`, by default the one that it names.
    """
    path = interop.local_path(path)
    if not interop.is_foreign(path):
        raise InputDataError(
            f"{path} is not a model of another program: give a Hugging Face folder, a .pt file of "
            "fair-esm, or a .safetensors file with its .json; protlm's own models need no import"
        )
    found = interop.read(path, base)
    model = model_of(found)
    fit = output.with_name(f"{output.name}.fit.json")
    with all_or_none() as written:
        if found.contacts is not None:
            check_output(fit)
            write_json(fit, to_json(SavedFit(model.hash, 0, **asdict(found.contacts))))
            written.append(fit)
        checkpoints.export(found, output)
    if found.contacts is not None:
        print(f"contact head saved: protlm contacts --fit {fit} uses it", file=sys.stderr)
    print(output)


def _mechanism(found: ModelDescription, name: str, settings: Sequence[str]) -> list[str]:
    """Returns the settings of attention as `protlm train` takes them."""
    own = found.attention_options if name == found.attention else {}
    typed = [f"attention={name}", *(f"++attention.{x}={as_typed(own[x])}" for x in own)]
    for setting in settings:
        option, _, value = setting.lstrip("+").removeprefix("attention.").partition("=")
        if not (option.replace(".", "_").isidentifier() and value):
            raise UserError(f"--set {setting} is not OPTION=VALUE; type --set {option}=VALUE")
        typed.append(f"{'++' * option.startswith('options')}attention.{option}={value}")
    return typed


def convert_model(
    path: Path, output: Path, *, attention: str, settings: Sequence[str], seed: int | None
) -> None:
    """Writes a model with another mechanism, whose settings are OPTION=VALUE, to a new folder."""
    found = read_model(path)
    typed = _mechanism(found.description, attention, settings)
    try:
        done = convert(found, to_plain(compose(TrainConfig, typed))["attention"], seed=seed)
    except UserError as error:
        advice = "; here, attention.OPTION=VALUE is typed as --set OPTION=VALUE" if settings else ""
        raise type(error)(f"{error}{advice}") from None
    checkpoints.export(done.checkpoint, output)
    for what, names in (("initialized", done.initialized), ("left out", done.left_out)):
        print(f"{what}: {', '.join(names) or 'none'}", file=sys.stderr)
    print(output)


def print_models() -> None:
    """Prints a table of the shipped models, and the paths of their model cards."""
    rows, in_context = [], list[str]()
    for folder in shipped_models():
        model = load_model(folder)
        described = model.description
        in_context += [folder.name] * (described.model.relatives is not None)
        rows.append(
            (
                folder.name,
                f"{num_parameters(model.network):,}",
                f"{attention_label(described.attention_config)}, {described.objective.value}",
                *_figures(folder),
            )
        )
    notes = [
        "Masked residues of the shipped sample's split test_iid.",
        f"These read relatives, too: {', '.join(in_context)}.",
        f"Without -m, commands use {default_model().name}. Model cards:",
        *(f"  {folder / CARD}" for folder in shipped_models()),
    ]
    print_table(("name", "parameters", "attention", *_FIGURES), rows, notes)


def _figures(folder: Path) -> tuple[str, ...]:
    results: dict[str, Any] = json.loads((folder / RESULTS).read_text(encoding="utf-8"))["sample"]
    figures = results["results"]["test_iid"]["masked"]["model"]
    return f"{figures['perplexity']:.2f}", f"{figures['accuracy']:.1%}"
