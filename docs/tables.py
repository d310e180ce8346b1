"""Writes the tables of docs/mechanisms.md and docs/settings.md from the code: `make docs`."""

import textwrap
from pathlib import Path

import torch
import yaml
from torch import Tensor

from protlm.attention import Attention, create, mechanism, names
from protlm.attention.base import Context, Recurrent, SharesParameters
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.config.settings import Setting, settings_of
from protlm.system.errors import UserError
from protlm.system.paths import shipped

# The marks around what is written, by page.
MECHANISMS = (
    "<!-- The table below is written by `make docs`. -->\n\n",
    "\n\n<!-- The table above is written by `make docs`. -->",
)
SETTINGS = ("<!-- settings -->\n", "<!-- end of settings -->\n")

# The sizes of the presets with 36 layers, and heads of 64.
SIZES = {"num_heads": 8, "head_dim": 64, "model_dim": 512, "max_length": 1024}

_HEADER = (
    "`attention=`",
    "idea",
    "modes",
    "time of a head grows as",
    "longest protein",
    "decoding state, numbers per head",
    "parameters per layer",
    "for proteins",
)


def within(page: str, marks: tuple[str, str], text: str) -> str:
    """Returns the page with a text between its two marks."""
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise UserError(f"the page has no place for the table: add {' and '.join(marks)} to it")
    return f"{before}{begin}{text}{end}{after}"


def mechanisms() -> str:
    """Returns the table of all mechanisms, from their class attributes, and the list of maps."""
    lines = [_HEADER, ("---",) * len(_HEADER), *(_row(name) for name in names())]
    escaped = ((cell.replace("|", r"\|") for cell in cells) for cells in lines)
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)
    usual = Attention.map_meaning
    meanings = {name: mechanism(name).map_meaning for name in names()}
    maps = "\n".join(
        textwrap.fill(f"- `{name}`: {meaning}.", 100, subsequent_indent="  ")
        for name, meaning in meanings.items()
        if meaning != usual
    )
    rule = f"Entry (i, j) of a map is {usual}, except in these mechanisms:"
    return f"{table}\n\n{rule}\n\n{maps}"


def _row(name: str) -> tuple[str, ...]:
    cls = mechanism(name)
    values = yaml.safe_load((shipped("conf") / "attention" / f"{name}.yaml").read_text())
    options = {key: value for key, value in values.items() if key != "name"}
    torch.manual_seed(0)
    made = create(name, options, **SIZES)
    modes = "causal" if made.supports_causal else "bidirectional"
    count = sum(parameter.numel() for parameter in made.parameters())
    shared = ", shared by all layers" if isinstance(made, SharesParameters) and count else ""
    return (
        f"`{name}`",
        (cls.__doc__ or "").partition("\n")[0].rstrip("."),
        "both" if made.supports_bidirectional and made.supports_causal else modes,
        cls.cost,
        "any" if made.max_length is None else "`model.max_length`",
        _state(made),
        f"{count:,}{shared}",
        cls.advice,
    )


@torch.no_grad()
def _state(made: Attention) -> str:
    if not isinstance(made, Recurrent):
        return "none"
    x_BHK = torch.ones(1, SIZES["num_heads"], SIZES["head_dim"])
    context = Context(torch.ones(1, 1, SIZES["model_dim"]), torch.ones(1, 1).bool(), causal=True)
    state, sizes = made.initial_state(x_BHK, x_BHK), []
    for _ in range(300):
        state, _ = made.step(state, x_BHK, x_BHK, x_BHK, context)
        sizes.append(_num_elements(state))
    return f"{sizes[0] // SIZES['num_heads']:,}" if sizes[0] == sizes[-1] else "grows with L"


def _num_elements(state: object) -> int:
    if isinstance(state, Tensor):
        return state.numel()
    return sum(_num_elements(part) for part in getattr(state, "__dict__", {}).values())


def settings() -> str:
    """Returns the tables of all settings of a run, one for each section."""
    listed = list(settings_of(compose(TrainConfig, [])))
    sections = dict.fromkeys(setting.section for setting in listed)
    return "".join(
        _table(section, [s for s in listed if s.section == section]) for section in sections
    )


def _table(section: str, listed: list[Setting]) -> str:
    rows = [f"| {section or 'setting'} | value | fixed | meaning |", "|---|---|---|---|"]
    for one in listed:
        rows.append(f"| `{one.name}` | `{one.value}` | {'yes' * one.decides} | {one.help} |")
    return "\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    folder = Path(__file__).parent
    for name, marks, text in (
        ("mechanisms.md", MECHANISMS, mechanisms()),
        ("settings.md", SETTINGS, settings()),
    ):
        page = within((folder / name).read_text(encoding="utf-8"), marks, text)
        (folder / name).write_text(page, encoding="utf-8")
