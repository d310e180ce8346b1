"""Models of other programs: a class per family, found by the name that the model gives.

`names()` lists the families, `is_foreign()` recognizes a model of one, `read()` reads it, and
`local_path()` downloads it from the Hugging Face Hub.
"""

import pkgutil
import re
from pathlib import Path

from protlm.config.fields import classes_in
from protlm.interop.adapter import adapter_folder, base_of, merged
from protlm.interop.base import Family, ForeignModel, unwrapped
from protlm.interop.hub import local_path
from protlm.interop.source import is_foreign, read_source
from protlm.system.errors import InputDataError, UserError, one_of

__all__ = ["Family", "ForeignModel", "is_foreign", "local_path", "names", "read"]


def names() -> list[str]:
    """Lists the families."""
    return sorted(_families())


def _families() -> dict[str, type[Family]]:
    """Returns the families of the modules of this package by their names: `NvEsm` is nv_esm."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if module.name != "base"]
    found = [one for name in names for one in classes_in(f"{__name__}.{name}", Family)]
    return {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", one.__name__).lower(): one for one in found}


def read(path: Path, base: Path | None = None) -> ForeignModel:
    """Reads a model of another program: a folder or a file for which `is_foreign` is true.

    An adapter is merged into its base, which is the one that it names if None is given.
    A license that restricts its users is printed on standard error, and kept in the description.
    """
    adapter = adapter_folder(path)
    if adapter is not None:
        path = base_of(adapter) if base is None else local_path(base)
    elif base is not None:
        raise UserError(
            f"{base} would be the model of an adapter of PEFT, and {path} is not one",
            {"base": None},
        )
    source = read_source(path)
    family = _families().get(source.family)
    if family is None:
        raise InputDataError(
            f"{path} is a model of the type {source.family!r:.40}; protlm reads: {one_of(names())}"
        )
    source = unwrapped(source, family)
    if adapter is not None:
        source = unwrapped(merged(source, adapter, family), family)
    try:
        return family().translate(source)
    except InputDataError:
        raise
    except UserError as error:
        raise InputDataError(f"{path} describes an impossible model: {error}") from error
