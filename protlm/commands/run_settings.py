"""The settings of a run that exists: those that are stored, and those that were typed.

A run continues with its stored settings. Of those that decide what is learned, none may be typed
with another value.
"""

import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from protlm.attention import mechanism
from protlm.checkpoints.format import CHECKPOINTS, all_checkpoints
from protlm.commands.unused_settings import refuse_unused
from protlm.config import TrainConfig
from protlm.config.composition import (
    compose,
    compose_plain,
    from_plain,
    key_of,
    read_run_config,
    to_plain,
)
from protlm.system.errors import OutputError, UserError
from protlm.system.lock import LOCK
from protlm.system.paths import check_output, complete_file, conf_dir, explain_os_error
from protlm.training.launch import is_first_rank
from protlm.training.optimization import check_schedule, fitting_warmup

CONFIG = "config.yaml"
_WARMUP = "schedule.warmup_steps"
# Sections of settings that may change when a run continues.
_MAY_CHANGE = {"logger", "run_dir"}
# The checkpoint has fingerprints of the data sets, and the weights of a mixture.
_DATA_MAY_CHANGE = {"dir", "mixture", "num_workers", "verify", "valid_dir", "valid_split"}
_TRAINER_DECIDES = {
    "accumulate_grad_batches",
    "ema_decay",
    "gradient_clip",
    "precision",
    "tokens_per_step",
}
# The sections in the order in which differences are listed: the most telling ones first.
_TELLING = ("attention.name", "objective.name", "model", "data", "optimizer")
_LISTED = 5


def compose_run(arguments: Sequence[str]) -> TrainConfig:
    """Composes the settings of a run.

    Settings that were not typed have the values that are stored in the run directory, if there is
    a run in it. Typed are dotted overrides, all settings of a group that was chosen (`model=tiny`),
    and with `experiment=` every setting; once there is a checkpoint, a warm-up is typed by its own
    name only.
    """
    run_dir = _run_dir(arguments)
    stored = _stored(run_dir)
    if stored is None:
        config = compose(TrainConfig, arguments)
        refuse_unused(arguments, to_plain(config))
        return with_fitting_warmup(config, arguments)
    # The typed settings are compared with each other beside those of the run.
    typed = compose_plain(TrainConfig, [*_stored_choices(stored, arguments), *arguments])
    names = _typed_names(arguments, stored, typed)
    if _WARMUP not in map(key_of, arguments) and all_checkpoints(run_dir):
        # That of the run may have been shortened to fit.
        names.discard(_WARMUP)
    elif _WARMUP in names:
        typed = to_plain(with_fitting_warmup(from_plain(typed, TrainConfig), arguments))
    settings = copy.deepcopy(stored)
    for name in names:
        _copy_value(name, typed, settings)
    settings["run_dir"] = typed["run_dir"]
    _refuse_differences(run_dir, stored, settings)
    refuse_unused(arguments, settings)
    config = from_plain(settings, TrainConfig)
    _check_length(config, before=int(stored["trainer"]["max_steps"]))
    return config


def _check_length(config: TrainConfig, *, before: int) -> None:
    """Refuses to shorten a run of `before` steps until its warm-up does not fit."""
    schedule, max_steps = config.schedule, config.trainer.max_steps
    try:
        check_schedule(schedule, max_steps=max_steps)
    except UserError as error:
        raise UserError(
            f"trainer.max_steps={max_steps} is too few for the run in {config.run_dir}, whose "
            f"warm-up has {schedule.warmup_steps} steps; type more, such as "
            f"trainer.max_steps={before}"
        ) from error


def write_config(run_dir: Path, config: TrainConfig) -> None:
    """Writes the config, which contains no secrets, into the run directory."""
    # Another process may have used the directory since it was checked.
    refuse_another_run(run_dir, config)
    with complete_file(run_dir / CONFIG, overwrite=True) as temporary:
        OmegaConf.save(to_plain(config), temporary)
    try:
        (run_dir / CHECKPOINTS).mkdir(exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, run_dir) from error


def with_fitting_warmup(config: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """Shortens a warm-up that was not typed and does not fit into the run, and reports it."""
    if _WARMUP in map(key_of, arguments):
        return config
    schedule, max_steps = config.schedule, config.trainer.max_steps
    try:
        check_schedule(schedule, max_steps=max_steps)
    except UserError:
        before = schedule.warmup_steps
        schedule.warmup_steps = fitting_warmup(schedule, max_steps=max_steps)
        if is_first_rank():
            print(
                f"{_WARMUP}={before} does not fit into trainer.max_steps={max_steps}; "
                f"using {_WARMUP}={schedule.warmup_steps}",
                file=sys.stderr,
                flush=True,
            )
    return config


def refuse_another_run(run_dir: Path, config: TrainConfig) -> None:
    """Refuses a directory that contains another run, or files that are not those of a run."""
    stored = _stored(run_dir)
    if stored is not None:
        _refuse_differences(run_dir, stored, to_plain(config))
        return
    if run_dir.exists() and not (run_dir.is_dir() and _is_empty(run_dir)):
        raise OutputError(f"{run_dir} exists and does not contain a run; choose another run_dir=")
    check_output(run_dir, overwrite=True)


def _run_dir(arguments: Sequence[str]) -> Path:
    chosen = [one for one in arguments if key_of(one) in ("run_dir", "experiment")]
    # Interpolations such as ${seed} need the other settings.
    is_interpolated = any("${" in one for one in chosen)
    return Path(compose_plain(TrainConfig, arguments if is_interpolated else chosen)["run_dir"])


def _stored(run_dir: Path) -> dict[Any, Any] | None:
    written = run_dir / CONFIG
    try:
        return read_run_config(written) if written.is_file() else None
    except OSError as error:
        raise explain_os_error(error, run_dir) from error


def _stored_choices(stored: Mapping[Any, Any], arguments: Sequence[str]) -> list[str]:
    """Chooses the mechanism and the stage of the run, so that their options can be typed alone."""
    typed = set(map(key_of, arguments))
    name, stage = str(stored["attention"].get("name")), stored["objective"].get("stage")
    is_shipped = (conf_dir() / "attention" / f"{name}.yaml").is_file()
    choices = []
    if is_shipped and not typed & {"attention", "experiment"}:
        choices.append(f"attention={name}")
    if stage is not None and not typed & {"objective", "objective.stage", "experiment"}:
        choices.append(f"objective.stage={stage}")
    return choices


def _typed_names(arguments: Sequence[str], *configs: Mapping[Any, Any]) -> set[str]:
    """Returns the dotted names, of one or two parts, of the settings that were typed."""
    everything = set().union(*map(_names, configs))
    typed = set()
    for key in map(key_of, arguments):
        if key == "experiment":
            return everything
        name = ".".join(key.split(".")[:2])
        typed |= {name} | {one for one in everything if one.startswith(f"{key}.")}
    return typed & everything


def _names(config: Mapping[Any, Any]) -> set[str]:
    names = set()
    for section, values in config.items():
        inner = [f"{section}.{key}" for key in values] if isinstance(values, dict) else [section]
        names |= set(inner)
    return names


def _copy_value(name: str, source: Mapping[Any, Any], target: dict[Any, Any]) -> None:
    section, _, key = name.partition(".")
    if not key:
        target[section] = source[section]
    elif key in source[section]:
        target[section][key] = source[section][key]
    else:
        # An option of the run's mechanism that the typed mechanism does not have.
        target[section].pop(key, None)


def _refuse_differences(run_dir: Path, before: Mapping[Any, Any], now: Mapping[Any, Any]) -> None:
    before, now = _stored_attention(before), _stored_attention(now)
    differing = [
        name
        for name in _decisive(before) | _decisive(now)
        if _value(before, name) != _value(now, name)
    ]
    if not differing:
        return
    if "attention.name" in differing:
        # The options of two mechanisms cannot be compared.
        differing = [
            n for n in differing if n == "attention.name" or n.split(".")[0] != "attention"
        ]
    differing.sort(key=_rank)
    listed = [f"{n}={_value(before, n)}, not {_value(now, n)}" for n in differing[:_LISTED]]
    if len(differing) > _LISTED:
        listed.append(f"and {len(differing) - _LISTED} more")
    raise UserError(
        f"{run_dir} contains a run with {'; '.join(listed)}; to continue it with its own settings "
        f"type protlm train run_dir={run_dir}, or choose another run_dir="
    )


def _stored_attention(config: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the settings without those that do not decide what attention computes."""
    attention = config["attention"]
    return {**config, "attention": mechanism(str(attention["name"])).stored_options(attention)}


def _rank(name: str) -> tuple[int, str]:
    """Sorts the telling settings first, and the options of a mechanism last."""
    for rank, telling in enumerate(_TELLING):
        if name == telling or name.startswith(f"{telling}."):
            return rank, name
    return len(_TELLING) + name.startswith("attention."), name


def _decisive(config: Mapping[Any, Any]) -> set[str]:
    """Returns the dotted names of the settings that decide what a run learns."""
    names = set()
    for name in _names(config):
        section, _, key = name.partition(".")
        may_change = (
            section in _MAY_CHANGE
            or (section == "data" and key in _DATA_MAY_CHANGE)
            # The checkpoint has the hash of its weights.
            or name == "objective.teacher"
            or (section == "trainer" and key not in _TRAINER_DECIDES)
        )
        if not may_change:
            names.add(name)
    if config["trainer"].get("tokens_per_step") is not None:
        # Then it is only the part of a step that is computed at a time.
        names.discard("data.tokens_per_batch")
    return names


def _value(config: Mapping[Any, Any], name: str) -> Any:
    section, _, key = name.partition(".")
    found = config.get(section)
    return found.get(key) if key and isinstance(found, dict) else found


def _is_empty(folder: Path) -> bool:
    # A run that was killed at its start leaves only its lock.
    return {path.name for path in folder.iterdir() if path.suffix != ".part"} <= {LOCK}
