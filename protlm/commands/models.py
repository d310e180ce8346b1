"""`protlm models`: the models that come with protlm, and the default of the other commands."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from protlm.checkpoints.format import CARD, RESULTS, default_model, shipped_models
from protlm.loading import load_model
from protlm.model.transformer import num_parameters
from protlm.system.terminal import console


def announced_default(option: str) -> Path:
    """Returns the default model, and prints on standard error that it is used.

    Args:
        option: what to type for another model.
    """
    folder = default_model()
    print(f"model: {folder.name}, shipped with protlm; {option} uses another", file=sys.stderr)
    return folder


def print_models() -> None:
    """Prints a table of the shipped models, and the paths of their model cards."""
    default = default_model()
    table = Table("name", "parameters", "attention", "layers", "width", *_FIGURES, box=SIMPLE)
    for folder in shipped_models():
        model = load_model(folder)
        described = model.description
        table.add_row(
            folder.name,
            f"{num_parameters(model.network):,}",
            f"{described.attention}, {described.objective.value}",
            *map(str, (described.model.num_layers, described.model.model_dim)),
            *_figures(folder),
        )
    console().print(table)
    print("Masked residues of the shipped sample's split test_iid.")
    print(f"Without -m, commands use {default.name}. Model cards:")
    for folder in shipped_models():
        print(f"  {folder / CARD}")


_FIGURES = ("perplexity", "accuracy")


def _figures(folder: Path) -> tuple[str, ...]:
    results: dict[str, Any] = json.loads((folder / RESULTS).read_text(encoding="utf-8"))["sample"]
    figures = results["results"]["test_iid"]["masked"]["model"]
    return f"{figures['perplexity']:.2f}", f"{figures['accuracy']:.1%}"
