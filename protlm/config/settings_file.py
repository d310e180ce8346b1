"""Settings in a file: `protlm train --config FILE` reads it as if its lines had been typed."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from protlm.config import TrainConfig
from protlm.config.composition import (
    PATHS,
    check_setting,
    drop_removed,
    key_of,
    load_yaml,
    reason_of,
)
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import in_home


def with_file(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
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
    return [*arguments], []


def settings_of(path: Path, arguments: Sequence[str]) -> list[str]:
    """Returns the settings of a file as arguments, less those that `arguments` set themselves.

    The file has the form of `conf/experiment/NAME.yaml` or of the `config.yaml` of a run.
    """
    try:
        loaded = load_yaml(path, "the settings of --config")
        if not isinstance(loaded, DictConfig):
            raise ValueError("it has no settings of the form name: value")
        drop_removed(loaded)
        content = OmegaConf.to_container(loaded)
        assert isinstance(content, dict)
        found = [*_choices(content), *_values(content)]
        for one in found:
            check_setting(one, TrainConfig)
    except InputDataError:
        raise
    except Exception as error:
        raise InputDataError(f"{path} cannot be read as settings: {reason_of(error)}") from error
    typed = set(map(key_of, arguments))
    return [one for one in found if not {key_of(one), key_of(one).split(".")[0]} & typed]


def _choices(content: Mapping[Any, Any]) -> Iterator[str]:
    """Yields `model=medium` for `- override /model: medium`, and the name of the mechanism."""
    chosen: dict[str, object] = {}
    for one in content.get("defaults") or []:
        if one == "_self_":
            continue
        (name, value), *_ = one.items() if isinstance(one, dict) else [(str(one), None)]
        group = re.fullmatch(r"(?:override )?/?(\w+)", name)
        if group is None or value is None:
            raise ValueError(f"defaults has {one}, and not an entry such as override /model: small")
        chosen[group[1]] = value
    if name := (content.get("attention") or {}).get("name"):
        chosen["attention"] = name
    yield from (f"{group}={value}" for group, value in chosen.items())


def _values(content: Mapping[Any, Any]) -> Iterator[str]:
    for section, values in content.items():
        if section == "defaults":
            continue
        if not isinstance(values, dict):
            yield _typed(str(section), values)
            continue
        for key, value in values.items():
            name = f"{section}.{key}"
            if name == "attention.options":
                # The mechanism that has them is not known to the grammar.
                yield from _options(f"++{name}", value)
            elif name != "attention.name":
                yield _typed(name, value)


def _options(name: str, value: object) -> Iterator[str]:
    if not isinstance(value, dict):
        yield _typed(name, value)
        return
    for one, inner in value.items():
        yield from _options(f"{name}.{one}", inner)


def _typed(name: str, value: object) -> str:
    # A path is quoted where it is composed.
    return f"{name}={value if name in PATHS and isinstance(value, str) else _in_grammar(value)}"


def _in_grammar(value: object) -> str:
    """Returns a value in Hydra's grammar of overrides.

    >>> _in_grammar({"dir": "a b", "weight": 2.0, "split": None, "list": [True, "it's"]})
    "{dir:'a b',weight:2.0,split:null,list:[true,'it\\\\'s']}"
    """
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_in_grammar(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_in_grammar, value)) + "]"
    if isinstance(value, str):
        return "'" + re.sub(r"(\\*)(?='|$)", r"\1\1", value).replace("'", r"\'") + "'"
    return json.dumps(value)
