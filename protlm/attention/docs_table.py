"""Writes the table of all mechanisms in `docs/mechanisms.md` from their class attributes.

python -m protlm.attention.docs_table docs/mechanisms.md writes it into the page.
"""

import sys
import textwrap
from pathlib import Path

import torch
import yaml
from torch import Tensor

from protlm.attention import Attention, create, mechanism, names
from protlm.attention.base import Recurrent, SharesParameters
from protlm.system.errors import UserError
from protlm.system.paths import conf_dir

BEGIN = "<!-- The table below is written by `make docs`. -->"
END = "<!-- The table above is written by `make docs`. -->"

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


def with_table(page: str) -> str:
    """Returns the page with the table and the list of maps between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UserError(f"the page has no place for the table: add {BEGIN} and {END} to it")
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
    made = f"{table}\n\n{rule}\n\n{maps}"
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def _row(name: str) -> tuple[str, ...]:
    cls = mechanism(name)
    shipped = yaml.safe_load((conf_dir() / "attention" / f"{name}.yaml").read_text())
    options = {key: value for key, value in shipped.items() if key != "name"}
    torch.manual_seed(0)
    made = create(name, options, **SIZES)
    return (
        f"`{name}`",
        (cls.__doc__ or "").partition("\n")[0].rstrip("."),
        _modes(made),
        cls.cost,
        "any" if made.max_length is None else "`model.max_length`",
        _state(made),
        _parameters(made),
        cls.advice,
    )


def _modes(made: Attention) -> str:
    if made.supports_bidirectional and made.supports_causal:
        return "both"
    return "causal" if made.supports_causal else "bidirectional"


def _parameters(made: Attention) -> str:
    count = sum(parameter.numel() for parameter in made.parameters())
    shared = isinstance(made, SharesParameters) and count > 0
    return f"{count:,}{', shared by all layers' if shared else ''}" if count else "0"


@torch.no_grad()
def _state(made: Attention) -> str:
    if not isinstance(made, Recurrent):
        return "none"
    x_BHK = torch.ones(1, SIZES["num_heads"], SIZES["head_dim"])
    hidden_BD = torch.ones(1, SIZES["model_dim"])
    state, sizes = made.initial_state(x_BHK, x_BHK), []
    for _ in range(300):
        state, _ = made.step(state, x_BHK, x_BHK, x_BHK, hidden_BD=hidden_BD)
        sizes.append(_num_elements(state))
    return f"{sizes[0] // SIZES['num_heads']:,}" if sizes[0] == sizes[-1] else "grows with L"


def _num_elements(state: object) -> int:
    if isinstance(state, Tensor):
        return state.numel()
    return sum(_num_elements(part) for part in getattr(state, "__dict__", {}).values())


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
