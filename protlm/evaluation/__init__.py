"""Evaluations behind one interface: one file and one YAML each.

`names()` lists them and `create()` builds one.
"""

import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any

from protlm.config.fields import check_types, classes_in
from protlm.evaluation.base import Evaluation
from protlm.system.errors import UserError, one_of

__all__ = ["Evaluation", "create", "evaluation", "names"]


def names() -> list[str]:
    """Lists the evaluations: the modules of this package that define one."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if classes_in(f"{__name__}.{name}", Evaluation))


def evaluation(name: str) -> type[Evaluation]:
    """Returns the class of an evaluation."""
    # The name comes from a config: it must not reach any module but those of this package.
    modules = {module.name for module in pkgutil.iter_modules(__path__)}
    classes = classes_in(f"{__name__}.{name}", Evaluation) if name in modules else []
    if not classes:
        raise UserError(f"evaluation {name!r} does not exist; there are: {one_of(names())}")
    assert len(classes) == 1, f"{__name__}.{name} must define exactly one Evaluation"
    return classes[0]


def create(label: str, settings: Mapping[str, Any]) -> Evaluation:
    """Builds an evaluation from its `name` and settings; its label is for messages."""
    options = dict(settings)
    cls: Any = evaluation(str(options.pop("name", "")))
    allowed = list(inspect.signature(cls).parameters)
    if unknown := sorted(set(options) - set(allowed)):
        raise UserError(
            f"evaluation.{label}.{unknown[0]} is not a setting; it has: {one_of(allowed)}"
        )
    section = f"evaluation.{label}"
    check_types(cls, options, section=section)
    if options.get("seed", 0) < 0:
        raise UserError(f"{section}.seed={options['seed']} must be at least 0")
    try:
        return cls(**options)
    except TypeError as error:
        raise UserError(f"{section}: {error}; settings: {one_of(allowed)}") from error
