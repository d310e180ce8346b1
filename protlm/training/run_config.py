"""The settings of a run that exists: those that are stored, and those that were typed.

A run continues with its stored settings. Of those that decide what is learned, none may be typed
with another value.
"""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from protlm.config import TrainConfig
from protlm.config.composition import (
    RUN_CONFIG,
    check_options,
    composed,
    from_plain,
    key_of,
    read_run_config,
    to_plain,
    to_schema,
)
from protlm.config.fields import as_typed
from protlm.config.settings import may_change, used_with
from protlm.config.settings_file import NO_FILE, FileSettings
from protlm.system.errors import InputDataError, OutputError, UserError, one_of
from protlm.system.lock import LOCK
from protlm.system.paths import check_output, complete_file, failures_explained
from protlm.training.schedule import check_schedule, fitting_warmup

_WARMUP = "schedule.warmup_steps"
_LISTED = 5
SAMPLE_DATA = Path("data/uniprot_sample")


def compose_run(typed: Sequence[str], file: FileSettings = NO_FILE) -> TrainConfig:
    """Composes the settings of a run; those not given are the ones stored in its directory.

    A chosen group (`model=tiny`) types all its settings, and `experiment=` every one, but not a
    warm-up, which may have been shortened to fit. A run whose directory was not typed continues
    only if the settings, typed and not, are its own.
    """
    arguments = [*file.choices, *typed]
    composed_settings = composed(TrainConfig, arguments, file.stored)
    keys = {*file.keys, *map(key_of, arguments)}
    run_dir = Path(composed_settings.run_dir)
    stored = _stored(run_dir)
    if stored is None:
        if keys == {"run_dir"}:
            raise UserError(
                f"{run_dir} contains no run to continue; to start one there, type its settings, "
                "such as data.dir=DIR, or data=sample for the shipped sample"
            )
        return _new_config(composed_settings, typed, file)
    if not keys & {"run_dir", "experiment"}:
        refuse_differences(_new_config(composed_settings, typed, file))
    before, now = _flat(stored), _flat(to_plain(composed_settings))
    given = {name for name in {**before, **now} if _is_given(name, keys)}
    nested = _nested(
        {name: value for name, value in before.items() if name not in given}
        | {name: now[name] for name in now if name in given or name == "run_dir"}
    )
    # Settings are compared with each other only when all are those of the run.
    _check_options(str(nested["attention"]["name"]), composed_settings, typed, file)
    config = from_plain(nested, TrainConfig)
    refuse_unused(typed, nested)
    check_schedule(config.schedule, max_steps=config.trainer.max_steps, is_continued=True)
    return config


def check_run(typed: Sequence[str], file: FileSettings = NO_FILE) -> None:
    """Refuses what can be refused without torch, whose import takes seconds."""
    config = compose_run(typed, file)
    refuse_differences(config)
    from protlm.data.shards.manifest import read_manifest

    data = config.data
    for directory in (data.dir, data.valid_dir, *(part.dir for part in data.mixture)):
        # The sample is made when it is needed.
        if directory is not None and Path(directory).absolute() != SAMPLE_DATA.absolute():
            read_manifest(Path(directory))


def _new_config(config: Any, typed: Sequence[str], file: FileSettings) -> TrainConfig:
    _check_options(str(config.attention.name), config, typed, file)
    made = to_schema(config, TrainConfig)
    refuse_unused(typed, to_plain(made))
    return with_fitting_warmup(made, {*file.keys, *map(key_of, typed)})


def _check_options(name: str, config: Any, typed: Sequence[str], file: FileSettings) -> None:
    check_options(name, typed, config)
    # Those of an inner mechanism are free in a file.
    keys = [key for key in file.keys if key != "attention.options"]
    try:
        check_options(name, keys, config)
    except UserError as error:
        raise InputDataError(f"{file.path} cannot be used: {error}") from error


def refuse_unused(
    arguments: Sequence[str], config: Mapping[Any, Any], *, swept: Container[str] = ()
) -> None:
    """Rejects settings that were typed and are not used, unless a sweep decides that."""
    conditions = used_with()
    for key in map(key_of, arguments):
        if key == "data.train_split" and config["data"]["mixture"]:
            raise UserError(
                "data.train_split has no effect with data.mixture, whose data sets have a split "
                "each; type split: in the data sets"
            )
        for condition in conditions.get(key, []):
            name, _, values = condition.partition("=")
            section, _, setting = name.partition(".")
            value = str(config[section][setting])
            if value not in values.split(",") and not (section in swept or name in swept):
                raise UserError(
                    f"{key} has no effect with {name}={value}; leave it out, or type "
                    f"{name}={one_of(values.split(','))}"
                )


def with_fitting_warmup(config: TrainConfig, keys: Container[str]) -> TrainConfig:
    """Shortens a warm-up that was not typed and does not fit into the run, and notes it."""
    if _WARMUP in keys:
        return config
    schedule, max_steps = config.schedule, config.trainer.max_steps
    try:
        check_schedule(schedule, max_steps=max_steps)
    except UserError:
        before = schedule.warmup_steps
        schedule.warmup_steps = fitting_warmup(schedule, max_steps=max_steps)
        schedule.notice = (
            f"{_WARMUP}={before} does not fit into trainer.max_steps={max_steps}; "
            f"using {_WARMUP}={schedule.warmup_steps}"
        )
    return config


def write_config(config: TrainConfig, stored: Mapping[Any, Any] | None) -> None:
    """Writes the config, which contains no secrets, into the run directory.

    `stored` is what `refuse_another_run` compared it with.
    """
    run_dir = Path(config.run_dir)
    if _stored(run_dir) != stored:
        raise UserError(
            f"another process has trained in {run_dir} since this one started; type the same "
            "command again, or choose another run_dir="
        )
    plain = to_plain(config)
    data, objective = plain["data"], plain["objective"]
    sets = [(part, "dir") for part in (data, *data["mixture"])]
    for section, name in [*sets, (data, "valid_dir"), (objective, "teacher")]:
        # So that the run continues from any folder. A teacher can also be the name of a model.
        if section[name] is not None and Path(section[name]).exists():
            section[name] = str(Path(section[name]).absolute())
    with complete_file(run_dir / RUN_CONFIG, overwrite=True) as temporary:
        OmegaConf.save(plain, temporary)
    from protlm.checkpoints.format import CHECKPOINTS

    with failures_explained(run_dir):
        (run_dir / CHECKPOINTS).mkdir(exist_ok=True)


def refuse_another_run(config: TrainConfig) -> dict[Any, Any] | None:
    """Refuses a directory that contains another run, or files that are not those of a run.

    Returns the settings that are stored there; None in a new directory.
    """
    run_dir = Path(config.run_dir)
    stored = refuse_differences(config)
    if stored is None:
        # A run that was killed at its start leaves only its lock.
        if run_dir.exists() and not (
            run_dir.is_dir()
            and {path.name for path in run_dir.iterdir() if path.suffix != ".part"} <= {LOCK}
        ):
            raise OutputError(
                f"{run_dir} exists and does not contain a run; choose another run_dir="
            )
        check_output(run_dir, overwrite=True)
    return stored


def _stored(run_dir: Path) -> dict[Any, Any] | None:
    written = run_dir / RUN_CONFIG
    with failures_explained(run_dir):
        return read_run_config(written) if written.is_file() else None


def _is_given(name: str, keys: set[str]) -> bool:
    if name == _WARMUP:
        return name in keys
    parts = {".".join(key.split(".")[:2]) for key in keys}
    return "experiment" in keys or name in parts or name.partition(".")[0] in keys


def _flat(config: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns settings by their dotted names, of one or two parts."""
    flat = {}
    for section, values in config.items():
        inner = values if isinstance(values, dict) else {"": values}
        flat |= {f"{section}.{key}".rstrip("."): value for key, value in inner.items()}
    return flat


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, key = name.split(".", 1)
        (nested.setdefault(sections[0], {}) if sections else nested)[key] = value
    return nested


def refuse_differences(config: TrainConfig) -> dict[Any, Any] | None:
    """Refuses other settings than those that decide the stored run; returns what is stored."""
    run_dir = Path(config.run_dir)
    stored = _stored(run_dir)
    differing = [] if stored is None else _differences(stored, to_plain(config))
    if not differing:
        return stored
    # The most telling first.
    differing.sort(key=lambda difference: not difference[0].endswith(".name"))
    listed = [
        f"{name}={as_typed(there)}, not {as_typed(here)}"
        for name, there, here in differing[:_LISTED]
    ]
    if len(differing) > _LISTED:
        listed.append(f"and {len(differing) - _LISTED} more")
    raise UserError(
        f"{run_dir} contains a run with {'; '.join(listed)}; to continue it with its own settings "
        f"type protlm train run_dir={run_dir}; to start anew from its weights, choose another "
        f"run_dir= and add model.init_from={run_dir}"
    )


def _differences(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[tuple[str, Any, Any]]:
    """Returns the settings that decide what is learned and differ, each with both values."""
    free, configs = may_change(), (before, now)
    if all(config["trainer"].get("tokens_per_step") is not None for config in configs):
        # Then it is only the part of a step that is computed at a time.
        free.add("data.tokens_per_batch")
    rows = [(config["data"].get("batching"), config["data"]["mode"]) for config in configs]
    if any(
        batching in ("packed", "relatives") or mode == "concatenated" for batching, mode in rows
    ):
        # There are no padded lengths to compile for.
        free.add("trainer.compile")
    one, other = (_flat({**c, "attention": {"name": c["attention"]["name"]}}) for c in configs)
    found = [(key, one.get(key), other.get(key)) for key in {**one, **other} if key not in free]
    name, attention = now["attention"]["name"], [config["attention"] for config in configs]
    # The options of two mechanisms cannot be compared.
    if attention[0] != attention[1] and attention[0]["name"] == name:
        # This imports torch, which takes seconds.
        from protlm.attention.layers import option_differences

        found += [
            (f"attention.{option}", there, here)
            for option, there, here in option_differences(str(name), *attention)
        ]
    return [(key, there, here) for key, there, here in found if there != here]
