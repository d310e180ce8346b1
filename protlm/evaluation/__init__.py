"""Evaluations behind one interface: one file and one YAML each.

`names()` lists them and `create()` builds one.
"""

import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any

from protlm.config.choices import added, class_of
from protlm.config.fields import check_types
from protlm.evaluation.base import Evaluation
from protlm.system.errors import OptionError, UserError, one_of

__all__ = ["Evaluation", "create", "evaluation", "names"]


def names() -> list[str]:
    """Lists the evaluations: modules of this package, and those that installed packages add."""
    own = {module.name for module in pkgutil.iter_modules(__path__)} - {"base"}
    return sorted(own | added("evaluation").keys())


def evaluation(name: str) -> type[Evaluation]:
    """Returns the class of an evaluation."""
    return class_of("evaluation", name, Evaluation, names())


def create(label: str, settings: Mapping[str, Any]) -> Evaluation:
    """Builds an evaluation from its `name` and settings; its label is for messages."""
    options, section = dict(settings), f"evaluation.{label}"
    cls: Any = evaluation(str(options.pop("name", "")))
    allowed = list(inspect.signature(cls).parameters)
    if unknown := sorted(set(options) - set(allowed)):
        raise UserError(f"{section}.{unknown[0]} is not a setting; it has: {one_of(allowed)}")
    try:
        check_types(cls, options)
        if options.get("seed", 0) < 0:
            raise OptionError(f"seed={options['seed']} must be at least 0")
        return cls(**options)
    except OptionError as error:
        raise UserError(error.sentence(f"{section}.")) from None
    except TypeError as error:
        raise UserError(f"{section}: {error}; settings: {one_of(allowed)}") from error
