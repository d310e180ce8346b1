"""Settings that were typed, but have no effect beside the others."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from protlm.config.composition import key_of
from protlm.system.errors import UserError, one_of

# The setting that decides whether a setting is used, and the values with which it is.
_USED_WITH = {
    "optimizer.momentum": ("optimizer.name", ("muon",)),
    "schedule.min_lr_ratio": ("schedule.name", ("cosine", "wsd")),
    "schedule.decay_fraction": ("schedule.name", ("wsd",)),
    "schedule.decay_shape": ("schedule.name", ("wsd",)),
    "objective.mask_fraction": ("objective.name", ("masked",)),
    "objective.mask_prob": ("objective.name", ("masked",)),
    "objective.random_prob": ("objective.name", ("masked",)),
    "objective.teacher_weight": ("objective.stage", ("logits",)),
    "data.crop": ("data.mode", ("sequences",)),
    "logger.wandb_project": ("logger.wandb", ("offline", "online")),
}


def refuse_unused(
    arguments: Sequence[str], config: Mapping[Any, Any], *, swept: Container[str] = ()
) -> None:
    """Rejects settings that were typed one by one and are not used.

    Args:
        arguments: what was typed.
        config: all settings, in plain containers.
        swept: settings and groups that differ between the runs of a sweep: what they decide may
            be unused in some of the runs.
    """
    for key in map(key_of, arguments):
        if key == "data.train_split" and config["data"]["mixture"]:
            raise UserError(
                "data.train_split has no effect with data.mixture, whose data sets have a split "
                "each; type split: in the data sets"
            )
        if key not in _USED_WITH:
            continue
        name, values = _USED_WITH[key]
        section, _, setting = name.partition(".")
        if section in swept or name in swept:
            continue
        found = str(config[section][setting])
        if found not in values:
            raise UserError(
                f"{key} has no effect with {name}={found}; leave it out, or type "
                f"{name}={one_of(list(values))}"
            )
