"""Composes configs from overrides and reads those of runs; errors are one sentence."""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import accumulate
from operator import eq
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from protlm.config import EvaluateConfig, TrainConfig
from protlm.config.choices import added, choices, options_file, refuse_unknown_choice
from protlm.config.fields import number_typed
from protlm.system.errors import InputDataError, UserError, did_you_mean, one_of
from protlm.system.paths import existing_file, in_home, shipped

_FLAGS_WITH_VALUE = ("--cfg", "--info", "--config")
# Flags of `protlm train` that are not Hydra's; the first two stay out of settings.
OWN_FLAGS = ("--debug", "--break-lock")
TRAIN_FLAGS = ("--config", "--break-lock", "--debug")
HYDRA_FLAGS = ("--help", "--cfg", "--resolve", "--info", "--multirun", "-m")
# Settings that are paths or names: their values are taken as they were typed.
PATHS = {
    "run_dir",
    "data.dir",
    "data.valid_dir",
    "model.init_from",
    "objective.teacher",
    "trainer.measure_assay",
    "trainer.measure_wild_type",
    "logger.wandb_project",
    "checkpoint",
    "output",
}
# The config of a run, some kilobytes in its folder.
RUN_CONFIG = "config.yaml"
_LARGEST = 1 << 20
# Parsers of deeper brackets or YAML call themselves too often, or take hours.
_DEEPEST = 32
# "a.b=1 c.d=2" in one argument: a value and, after a space, another key.
_TWO_SETTINGS = re.compile(r"[^\s=]+=[^\s'\"\[{]*\s+[\w.]+=")
_EXPECTED = {
    float: "a number, e.g. 1e-3",
    int: "a whole number, e.g. 8",
    bool: "true or false",
    str: "a name or a path",
    list: "a list of numbers, e.g. [0.1,0.5]",
}
GROUP = "settings of the form name: value"
# The place in Hydra's store of the settings of a file.
_FILE = "settings_file"
_SECTIONS = ("attention", "data", "model", "objective", "optimizer", "trainer")
Config = TypeVar("Config", TrainConfig, EvaluateConfig)


def register_schemas() -> None:
    """Registers the schemas that `conf/train.yaml` and `conf/evaluate.yaml` start from."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainConfig)
    store.store(name="evaluate_schema", node=EvaluateConfig)


def compose(schema: type[Config], overrides: Sequence[str], stored: Sequence[str] = ()) -> Config:
    """Composes `conf/train.yaml` or `conf/evaluate.yaml` with overrides such as `model=tiny`."""
    config = composed(schema, overrides, stored)
    if schema is TrainConfig:
        check_options(str(config.attention.name), overrides, config)
    return to_schema(config, schema)


def composed(schema: type[Config], overrides: Sequence[str], stored: Sequence[str] = ()) -> Any:
    """Composes without comparing settings with each other, and options with their mechanism.

    `stored` are overrides that choose what is in Hydra's store, such as those of `store_settings`.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    register_schemas()
    for override in overrides:
        check_setting(override, schema)
        if key_of(override).startswith("hydra"):
            raise UserError(
                f"{override} has no effect without --multirun; a file of settings is read by "
                "protlm train --config FILE"
            )
    name = "train" if schema is TrainConfig else "evaluate"
    # Which mechanism has its options is known when all is composed.
    given = [f"++{one}" if one.startswith("attention.") else one for one in map(quoted, overrides)]
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        try:
            config = hydra_compose(name, [*given, *stored])
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(_explain(error, overrides, schema)) from error
    with _interpolations_explained(schema):
        _refuse_missing(config, schema)
    return _with_home(config, schema)


def store_settings(values: Mapping[str, Any]) -> list[str]:
    """Stores settings where Hydra finds them; returns the override that chooses them.

    Those that are typed override them.
    """
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(_FILE, dict(values), _FILE, "_global_")
    return [f"+{_FILE}={_FILE}"]


def check_options(name: str, overrides: Sequence[str], config: Any) -> None:
    """Refuses options that the file of a mechanism does not have, unless a `+` adds them."""
    typed = [key_of(override) for override in overrides if override.startswith("attention.")]
    if not typed or name not in choices("attention"):
        return
    known = OmegaConf.create({"attention": _options_of("attention", name)})
    for key in typed:
        value = OmegaConf.select(config, key)
        is_group = isinstance(value, DictConfig)
        for option in [f"{key}.{inner}" for inner in value] if is_group else [key]:
            group, _, last = option.rpartition(".")
            options = OmegaConf.select(known, group)
            if not isinstance(options, DictConfig) or last not in options:
                raise UserError(_not_there(option, name, options))


def check_setting(argument: str, schema: type) -> None:
    """Refuses the name of a setting or of a choice that does not exist."""
    if "=" not in argument and not argument.startswith("~"):
        is_model = schema is EvaluateConfig
        advice = f"type checkpoint={argument}" if is_model else "settings are written key=value"
        raise UserError(f"{argument} is not a setting; {advice}")
    is_path = key_of(argument) in PATHS
    depths = accumulate((one in "[{(") - (one in "]})") for one in argument)
    if (argument.count("${") if is_path else max(depths, default=0)) > _DEEPEST:
        raise UserError(
            f"the value of {key_of(argument)[:100]} is nested more than {_DEEPEST} deep; type "
            "another one"
        )
    if not is_path and _TWO_SETTINGS.match(argument):
        raise UserError(
            f"{argument!r} is two settings in one argument; type them without quotes around both"
        )
    type_of(key_of(argument), schema)
    _check_choice(key_of(argument), argument.partition("=")[2])


def type_of(key: str, schema: type) -> Any:
    """Returns the type of a setting, and None for an option; refuses a name that is not one."""
    here: Any = schema
    walked: list[str] = []
    for part in key.split("."):
        if not is_dataclass(here):
            return None
        known = {one.name: one.type for one in fields(here)}
        if part not in known and not (not walked and part in ("experiment", "hydra")):
            hint = did_you_mean(part, {name: ".".join([*walked, name]) for name in known})
            listed = f"; {'.'.join(walked) or 'the config'} has: {one_of(list(known))}"
            raise UserError(f"{key} is not a setting{hint or listed}")
        here = known.get(part, str if part == "experiment" else dict)
        walked.append(part)
    return here


def expected_of(kind: Any) -> str:
    """Returns what a setting of a type has to be.

    >>> expected_of(int | None), expected_of(list[float])
    ('a whole number, e.g. 8, or null', 'a list of numbers, e.g. [0.1,0.5]')
    """
    members = get_args(kind)
    if NoneType in members:
        return f"{expected_of(members[0])}, or null"
    if members and is_dataclass(members[0]):
        return f"a list of {{{', '.join(one.name for one in fields(members[0]))}}}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of: {one_of([str(one) for one in kind])}"
    return _EXPECTED.get(get_origin(kind) or kind, GROUP)


def _check_choice(group: str, value: str) -> None:
    known = choices(group)
    if known and value.startswith("[") and group != "evaluation":
        raise UserError(f"{group}={value} is a list; type one of: {one_of(known)}")
    for name in re.findall(r"[^][\s,'\"]+", value) if known and "${" not in value else ():
        refuse_unknown_choice(group, name, known)
        if name in added(group):
            from hydra.core.config_store import ConfigStore

            # Where Hydra finds the options of what an installed package adds.
            ConfigStore.instance().store(name, _options_of(group, name), group)


def _options_of(group: str, name: str) -> Any:
    """Returns the options of a choice of a group, shipped or added, with their defaults."""
    is_shipped = name not in added(group)
    path = shipped("conf") / group / f"{name}.yaml" if is_shipped else options_file(group, name)
    try:
        return load_yaml(path, f"the options of {group}={name}")
    except (ValueError, yaml.YAMLError) as error:
        raise InputDataError(f"{path} cannot be read: {reason_of(error)}") from error


def check_arguments(arguments: Sequence[str], schema: type, own_flags: Sequence[str] = ()) -> None:
    """Refuses names that are not settings, and flags that are neither Hydra's nor `own_flags`."""
    known = [*HYDRA_FLAGS, *own_flags]
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if not argument.startswith("-"):
            if before not in _FLAGS_WITH_VALUE:
                check_setting(argument, schema)
        elif argument.split("=")[0] not in known:
            name = "train" if schema is TrainConfig else "evaluate"
            raise UserError(
                f"{argument} is not a flag of protlm {name}; settings are written key=value, and "
                f"the flags are: {', '.join(known)}"
            )


def through_hydra(
    schema: type[Config],
    arguments: Sequence[str],
    action: Callable[[Config], object],
    stored: Sequence[str] = (),
) -> None:
    """Runs an action under Hydra, which handles its own flags: --cfg, --info, --multirun."""
    import hydra
    from hydra.errors import HydraException

    register_schemas()
    name = "train" if schema is TrainConfig else "evaluate"
    check_arguments(arguments, schema)

    @hydra.main(config_path=str(shipped("conf")), config_name=name, version_base="1.3")
    def run(config: DictConfig) -> None:
        action(to_schema(_with_home(config, schema), schema))

    # In a sweep a comma separates runs.
    is_sweep = bool({"-m", "--multirun"} & set(arguments))
    # Hydra's parser takes settings in one place only: here before the flags with their values.
    pairs = zip(["", *arguments], arguments, strict=False)
    ordered = sorted(pairs, key=lambda two: two[1][:1] == "-" or two[0] in _FLAGS_WITH_VALUE)
    given = [one if is_sweep and "," in one else quoted(one) for _, one in ordered]
    sys.argv[1:] = [*stored, *given]
    # What --info logs may lose its reader: `| head`.
    logging.raiseExceptions = False
    # Errors are raised here, and reported in one sentence.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        run()
    except HydraException as error:
        raise UserError(_explain(error, arguments, schema)) from error


def quoted(override: str) -> str:
    r"""Quotes a path or a name, so that Hydra's grammar does not read it.

    Numbers are as they are typed.

    >>> quoted("run_dir=run (1)"), quoted("data.dir=null"), quoted("seed=1e1")
    ("run_dir='run (1)'", 'data.dir=null', 'seed=10')
    >>> quoted("logger.wandb_project=1e3")
    "logger.wandb_project='1e3'"
    """
    name, equals, value = override.partition("=")
    if name == "data.mixture":
        # Within a list, Hydra's grammar has no `~`.
        return re.sub(r"(\bdir:\s*)(~[^,}]*)", r"\1'\2'", override)
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    if key_of(name) not in PATHS:
        return (
            name
            + equals
            + number_typed(f"{name}=", value, "; for a run with each value, add --multirun")
        )
    if not equals or is_quoted or value in ("", "null", "???"):
        return override
    # In Hydra's grammar, backslashes escape only when they precede a quote.
    escaped = re.sub(r"(\\*)(?='|$)", r"\1\1", value).replace("'", r"\'")
    return f"{name}='{escaped}'"


@contextmanager
def _interpolations_explained(schema: type) -> Iterator[None]:
    """Turns errors about values such as `${SLURM_JOB_ID}` into one sentence.

    It does not have what a variable stands for, which may be a secret.
    """
    try:
        yield
    except OmegaConfBaseException as error:
        key = str(error.full_key or "a setting")
        if isinstance(error, ValidationError):
            kind = type_of(key.partition("[")[0], schema)
            text = f"what it stands for is not {expected_of(kind)}"
        else:
            text = " ".join(str(error).partition("full_key:")[0].split())
        raise UserError(
            f"{key}: {text}; ${{...}} stands for another setting: for a variable of the shell, "
            "type double quotes in place of single ones, or ${oc.env:NAME}"
        ) from error


def _with_home(config: Any, schema: type) -> Any:
    with _interpolations_explained(schema):
        values = [(name, OmegaConf.select(config, name)) for name in sorted(PATHS)]
        mixture = OmegaConf.select(config, "data.mixture") or []
        values += [(f"data.mixture[{n}].dir", part.get("dir")) for n, part in enumerate(mixture)]
    for name, value in values:
        if isinstance(value, str) and value.startswith("~"):
            OmegaConf.update(config, name, in_home(value))
    return config


def to_schema(config: Any, schema: type[Config]) -> Config:
    """Turns a composed config into its dataclass; refuses one that lacks a value."""
    with _interpolations_explained(schema):
        _refuse_missing(config, schema)
        built = OmegaConf.to_object(config)
    assert isinstance(built, schema)
    return built


def _refuse_missing(config: Any, schema: type[Config]) -> None:
    removed = {section.name for section in fields(schema)} - {*config}
    # A mechanism that is removed leaves an empty section.
    if config.get("attention") == {}:
        removed.add("attention")
    if missing := sorted(OmegaConf.missing_keys(config) | removed):
        raise UserError(f"{missing[0]} has no value; type: {missing[0]}=VALUE")


def from_plain(settings: dict[Any, Any], schema: type[Config]) -> Config:
    """Turns plain containers and values, as `to_plain` returns them, into a config."""
    return to_schema(OmegaConf.merge(OmegaConf.structured(schema), settings), schema)


def to_plain(config: Any) -> dict[str, Any]:
    """Returns a config, composed or typed, as plain values, as written to `config.yaml`."""
    is_composed = isinstance(config, DictConfig)
    with _interpolations_explained(TrainConfig):
        plain = OmegaConf.to_container(
            config if is_composed else OmegaConf.structured(config),
            resolve=is_composed,
            enum_to_str=True,
        )
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def key_of(override: str) -> str:
    """Returns the dotted name of the setting that an override such as `+model.dropout=0` sets."""
    return re.split(r"[=@]", override.lstrip("+~"), maxsplit=1)[0].replace("/", ".")


def _explain(error: Exception, overrides: Sequence[str], schema: type) -> str:
    """Returns Hydra's refusal as a sentence: the override, and what it has to be."""
    from hydra.errors import OverrideParseException

    if isinstance(error, OverrideParseException):
        return (
            f"{error.override} cannot be read; put a value with commas, brackets, blanks or quotes "
            "into quotes of its own: 'KEY=\"VALUE\"'"
        )
    cause = error.__cause__ or error
    key = re.sub(r"\[\d+\]", "", str(getattr(cause, "full_key", None) or ""))
    # What sets the key, a group that it is in, or something in it; or has it in a list.
    along = [o for o in overrides if all(map(eq, key.split("."), key_of(o).split(".")))]
    along = along or [o for o in overrides if key and key in o]
    if not along:
        return re.sub(r"\s*Config search path:.*", "", " ".join(str(cause).split()))
    typed = max(along, key=lambda override: len(key_of(override)))
    if typed.startswith("~"):
        return f"{typed} deletes a setting; type {key}=VALUE"
    kind = type_of(key_of(typed), schema)
    if kind is None and isinstance(cause, AttributeError | KeyError):
        return _not_there(key, "", getattr(cause, "parent_node", None))
    return f"{typed} must be {expected_of(kind)}"


def _not_there(key: str, choice: str, options: Any) -> str:
    """Says that a mechanism or an evaluation has no such option, and which ones it has."""
    *where, last = key.split(".")
    known = options if isinstance(options, DictConfig) else {}
    there = [str(name) for name in known if name != "name"]
    if key == "attention.kernel" and "backend" in there:
        return "attention.kernel is now called attention.backend; type attention.backend=VALUE"
    if where[:2] == ["attention", "options"]:
        return f"{key} is not a setting; to give it to the inner mechanism, type +{key}=VALUE"
    hint = did_you_mean(last, {name: ".".join([*where, name]) for name in there})
    of = f"attention={choice}" if where == ["attention"] and choice else ".".join(where)
    listed = f"; {of} has: {one_of(there)}" if there else f"; {of} has no settings"
    if not hint and where == ["attention"] and "options" in there:
        inner = "options.MECHANISM" if "layers" in there else "options"
        listed += f"; to set that of its mechanism, type +attention.{inner}.{last}=VALUE"
    if where == ["evaluation"] and not hint:
        listed += f"; to set those of another evaluation, type evaluation=[{last}], too"
    return f"{key} is not a setting{hint}{listed}"


def read_run_config(path: Path) -> dict[Any, Any]:
    """Reads the settings of a run as plain values; newer settings have their defaults."""
    try:
        settings = load_yaml(path, "the config of a run")
        if missing := [name for name in _SECTIONS if name not in settings]:
            raise ValueError(f"it has no section {missing[0]!r}")
        loaded = OmegaConf.merge(OmegaConf.structured(TrainConfig), settings)
        before = OmegaConf.to_container(loaded, enum_to_str=True)
    except InputDataError:
        raise
    except Exception as error:
        raise InputDataError(
            f"{path} cannot be read as the config of a run: {reason_of(error)}; restore it, or "
            "choose another run_dir="
        ) from error
    assert isinstance(before, dict)
    return before


def reason_of(error: Exception) -> str:
    """Returns why a file of settings cannot be read, with the line if YAML says it."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        # What YAML says of a tab is that no token starts with it.
        what = "a tab; indent with blanks" if "\\t" in str(error.problem) else error.problem
        return f"line {error.problem_mark.line + 1}: {what}"
    return str(error).strip().split("\n", 1)[0][:300]


def data_dir_of(config: EvaluateConfig) -> str | None:
    """Returns the data set of an evaluation: unless it has one, that of the run."""
    written = Path(config.checkpoint or "", RUN_CONFIG)
    is_of_run = config.checkpoint and config.data.dir is None and written.is_file()
    return read_run_config(written)["data"]["dir"] if is_of_run else config.data.dir


def load_yaml(path: Path, role: str) -> Any:
    """Reads a YAML file of bounded size and depth, and without aliases; raises ValueError."""
    with existing_file(path, role).open("rb") as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST:,} bytes")
    text = content.decode("utf-8")
    if not text.strip():
        raise ValueError("it is empty")
    # Protlm does not write aliases, and nested ones can expand without bound.
    depth = num_groups = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it contains YAML aliases")
        depth += isinstance(event, yaml.CollectionStartEvent)
        num_groups += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ValueError(f"it is nested more than {_DEEPEST} deep")
    if not num_groups:
        raise ValueError("it has no settings of the form name: value")
    return OmegaConf.create(text)
