"""A part of a command's work, and the options of jobs of a cluster that compute the parts."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeVar

from protlm.config.fields import Checked, flag
from protlm.system.errors import UserError, one_of

Item = TypeVar("Item")
_WORD = re.compile(r"[\w.:,@+-]{1,100}", re.ASCII)
# Settings of `--slurm`: submitit's name of each, and the type of its value.
_PARAMETERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "partition": ("slurm_partition", str),
    "time": ("slurm_time", str),
    "account": ("slurm_account", str),
    "qos": ("slurm_qos", str),
    "constraint": ("slurm_constraint", str),
    "mem_gb": ("mem_gb", float),
    "cpus": ("cpus_per_task", int),
    "gpus": ("gpus_per_node", int),
    "parallel": ("slurm_array_parallelism", int),
}
# What runs the jobs.
Executor = StrEnum("Executor", ["slurm"])


@dataclass(frozen=True)
class Share:
    """The part of the work that one process does: parts number, number + count, ..."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `I/N`.

        >>> Share.parse("2/8")
        Share(number=2, count=8)
        """
        number, _, count = text.partition("/")
        numbers = number.isdecimal() and count.isdecimal() and len(text) < 20
        if numbers and 1 <= int(number) <= int(count):
            return cls(int(number), int(count))
        raise UserError(f"--shard {text} is not I/N with I from 1 to N; type for instance 1/4")

    def __contains__(self, part: object) -> bool:
        """Returns whether a part, counted from 0, belongs to this share."""
        return isinstance(part, int) and part % self.count == self.number - 1


def _executor(text: str) -> Executor:
    if text not in [*Executor]:
        instead = "; for processes of this machine leave it out, and type --processes N (prepare: "
        told = f"{instead}--workers N)" if text == "local" else ""
        raise UserError(f"--executor {text} is not slurm{told}")
    return Executor(text)


@dataclass(frozen=True)
class Submission(Checked):
    """Options of jobs, each of which computes a share."""

    executor: Executor | None = flag("Submit jobs to a cluster: slurm.", None, read=_executor)
    slurm: tuple[str, ...] = flag(
        "Settings of a job, such as partition=gpu or time=4:00:00; repeatable.",
        (),
        words="[a-z_]+=.+",
        needs="--executor slurm",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.parameters

    @property
    def parameters(self) -> dict[str, Any]:
        """The settings of jobs, by submitit's names."""
        return dict(map(_parameter, self.slurm))

    def check(self) -> None:
        """Refuses a machine that cannot submit jobs."""
        from protlm.system.cluster import submitit

        submitit()

    def run(
        self, function: Callable[[Item], Any], items: Sequence[Item], folder: Path, cores: int = 1
    ) -> None:
        """Applies a function to every item, each in a job; raises the error of a job that fails.

        Jobs have this number of cores, unless `--slurm` says another.
        """
        from protlm.system.cluster import on_cluster

        on_cluster(function, items, folder, cores, self.parameters)


def _parameter(setting: str) -> tuple[str, Any]:
    key, _, value = setting.partition("=")
    if key not in _PARAMETERS:
        raise UserError(
            f"--slurm {setting}: {key!r} is unknown; choose one of: {one_of([*_PARAMETERS])}"
        )
    name, kind = _PARAMETERS[key]
    try:
        if not _WORD.fullmatch(value):
            raise ValueError
        return name, kind(value)
    except ValueError:
        raise UserError(
            f"--slurm {setting} is not a value of {key}; for instance: partition=cpu time=12:00:00 "
            "mem_gb=8 cpus=4"
        ) from None
