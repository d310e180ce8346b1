"""The choices of a group of settings: shipped files, and what installed packages add.

A package adds a mechanism or an evaluation by an entry point of the group `protlm.attention` or
`protlm.evaluation`: a name and a module. `NAME.yaml` beside the module has the options. Configs and
checkpoints have the bare name, so that no file decides what is imported.
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from protlm.config.fields import classes_in
from protlm.system.errors import UserError, did_you_mean, one_of
from protlm.system.paths import shipped

T = TypeVar("T")
# The groups that packages can add to.
_OPEN = ("attention", "evaluation")


def choices(group: str) -> list[str]:
    """Returns the names that a group can be set to."""
    return sorted(
        {path.stem for path in (shipped("conf") / group).glob("*.yaml")} | added(group).keys()
    )


@cache
def added(group: str) -> dict[str, EntryPoint]:
    """Returns what installed packages add to a group, by name, without importing it."""
    found = [*entry_points(group=f"protlm.{group}")] if group in _OPEN else []
    folders = shipped("conf") / group, Path(__file__).parents[1] / group
    taken = [path.stem for folder in folders if found for path in folder.iterdir()]
    names = [*taken, *(one.name for one in found)]
    for one in found:
        if names.count(one.name) > 1:
            raise UserError(
                f"{one.module} adds {group}={one.name}, a name that protlm or another installed "
                "package has; uninstall its package, or rename it there"
            )
    return {one.name: one for one in found}


def options_file(group: str, name: str) -> Path:
    """Returns the YAML file of what a package adds, without importing the package."""
    top, *inner = added(group)[name].module.split(".")
    spec = find_spec(top)
    if spec is None or spec.origin is None:
        raise UserError(f"{group}={name}: there is no package {top} with an __init__.py")
    return Path(spec.origin).parent.joinpath(*inner[:-1], f"{name}.yaml")


def refuse_unknown_choice(group: str, name: str, names: list[str]) -> None:
    """Refuses a name that a group cannot be set to."""
    if name not in names:
        hint = did_you_mean(name, {one: f"{group}={one}" for one in names})
        own = {"experiment": "; for settings of your own type --config FILE"}.get(group, "")
        if group in _OPEN:
            own = "; one of your own is found when its package is installed (docs/extend.md)"
        raise UserError(f"{group}={name} does not exist{hint}; there are: {one_of(names)}{own}")


def class_of(group: str, name: str, base: type[T], names: list[str]) -> type[T]:
    """Returns the class of a mechanism or an evaluation that is shipped or added.

    The name comes from a config or a checkpoint: it must not reach any module but these.
    """
    refuse_unknown_choice(group, name, names)
    entry = added(group).get(name)
    module = f"protlm.{group}.{name}" if entry is None else entry.module
    try:
        (found,) = classes_in(module, base)
    except Exception as error:
        if entry is None:
            raise
        raise UserError(
            f"{group}={name}: {module} must be importable and define one {base.__name__}: {error}"
        ) from error
    return found
