"""Settings in a file: `protlm train --config FILE` reads it as if its lines had been typed."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigKeyError,
    ConfigTypeError,
    InterpolationResolutionError,
    ValidationError,
)

from protlm.config import TrainConfig
from protlm.config.choices import choices
from protlm.config.composition import (
    GROUP,
    check_setting,
    expected_of,
    key_of,
    load_yaml,
    reason_of,
    store_settings,
    type_of,
)
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import in_home


@dataclass(frozen=True)
class FileSettings:
    """What a file sets.

    Attributes:
        path: the file.
        choices: those of groups, such as `model=medium`.
        keys: the names of the other settings, `attention.window` among them.
        stored: the override that chooses their values, which are in Hydra's store.
    """

    path: Path = Path()
    choices: Sequence[str] = ()
    keys: Sequence[str] = ()
    stored: Sequence[str] = ()


NO_FILE = FileSettings()


def with_file(arguments: Sequence[str]) -> tuple[list[str], FileSettings]:
    """Returns the arguments without `--config FILE`, and the settings of the file."""
    for number, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag == "--config":
            rest = arguments[number + 1 :]
            if not equals:
                value, rest = (rest or [""])[0], rest[1:]
            if not value:
                raise UserError("--config needs a file; type --config FILE.yaml")
            typed = [*arguments[:number], *rest]
            return typed, settings_of(Path(in_home(value)), typed)
    return [*arguments], NO_FILE


def settings_of(path: Path, arguments: Sequence[str]) -> FileSettings:
    """Returns the settings of a file, less those of groups that `arguments` choose.

    The file has the form of `conf/experiment/NAME.yaml` or of the `config.yaml` of a run.
    """
    try:
        chosen, values = _read(load_yaml(path, "the settings of --config"))
        # Hydra's own settings can name code that it then runs.
        if "hydra" in values:
            raise ValueError("settings of hydra are not read from a file; type hydra.KEY=VALUE")
        for group, value in chosen.items():
            check_setting(f"{group}={value}", TrainConfig)
        typed = {key_of(argument) for argument in arguments}
        keys = [key for section, value in values.items() for key in _checked(section, value)]
    except InputDataError:
        raise
    except Exception as error:
        raise InputDataError(f"{path} cannot be read as settings: {reason_of(error)}") from error
    return FileSettings(
        path,
        [f"{group}={value}" for group, value in chosen.items() if group not in typed],
        [key for key in keys if key.partition(".")[0] not in typed],
        store_settings({name: value for name, value in values.items() if name not in typed}),
    )


def _read(loaded: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the choices of groups, such as that of the mechanism, and the other settings."""
    if not isinstance(loaded, DictConfig):
        raise ValueError("it has no settings of the form name: value")
    content = OmegaConf.to_container(loaded)
    assert isinstance(content, dict)
    values = {str(key): value for key, value in content.items()}
    chosen = _choices(values.pop("defaults", None) or [])
    for section, value in [*values.items()]:
        # As `model=medium` is typed.
        if isinstance(value, str) and choices(section):
            chosen[section] = values.pop(section)
    attention = values.get("attention")
    if isinstance(attention, dict) and "name" in attention:
        chosen["attention"] = attention["name"]
    return chosen, values


def _choices(defaults: Any) -> dict[str, Any]:
    """Returns those of entries such as `- override /model: medium`."""
    chosen: dict[str, Any] = {}
    for entry in defaults if isinstance(defaults, list) else [defaults]:
        if entry == "_self_":
            continue
        (name, value), *more = entry.items() if isinstance(entry, dict) else [(str(entry), None)]
        group = re.fullmatch(r"(?:override )?/?(\w+)", str(name))
        if group is None or value is None or more:
            raise ValueError(
                f"defaults has {entry}, and not an entry such as override /model: small"
            )
        chosen[group[1]] = value
    return chosen


def _checked(section: str, value: Any) -> Iterator[str]:
    """Yields the names of settings, such as `attention.window`; refuses names and wrong types."""
    kind = type_of(section, TrainConfig)
    if "." in section:
        raise ValueError(f"{section} has to be written as a setting in its section")
    if expected_of(kind) != GROUP:
        _check_type(TrainConfig, section, section, value)
        yield section
        return
    if not isinstance(value, dict):
        raise ValueError(f"{section} must be {GROUP}")
    for key in value:
        name = f"{section}.{key}"
        _check_type(kind, name, key, value[key])
        yield name


def _check_type(schema: Any, name: str, key: str, value: Any) -> None:
    """Refuses a value of another type than its setting; does not say what a variable holds."""
    kind = type_of(name, TrainConfig)
    if kind is None and (name != "attention.options" or isinstance(value, dict)):
        return
    try:
        OmegaConf.select(OmegaConf.merge(OmegaConf.structured(schema), {key: value}), key)
    except (ValidationError, ConfigTypeError, ConfigKeyError) as error:
        raise ValueError(f"{name} must be {expected_of(kind)}") from error
    except InterpolationResolutionError:
        # Other settings, and what Hydra knows, are there when all is composed.
        return
