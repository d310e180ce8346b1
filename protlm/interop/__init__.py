"""Models of other programs: one file per family, found by the name that the model gives.

`names()` lists the families, `is_foreign()` recognizes a model of one, `read()` reads it, and
`local_path()` downloads it from the Hugging Face Hub.
"""

import pkgutil
from dataclasses import replace
from pathlib import Path

from protlm.config.fields import classes_in
from protlm.interop.base import Family, ForeignModel, refuse_parts
from protlm.interop.hub import download, is_hub_name
from protlm.interop.source import is_foreign, read_source
from protlm.system.errors import InputDataError, UserError, one_of

# Bytes of a number in single precision.
_SINGLE = 4

__all__ = ["Family", "ForeignModel", "is_foreign", "local_path", "names", "read"]


def local_path(path: Path) -> Path:
    """Returns the folder of a model that is named as on the Hugging Face Hub; otherwise `path`."""
    return download(str(path)) if is_hub_name(path) else path


def names() -> list[str]:
    """Lists the families."""
    return sorted(_families())


def _families() -> dict[str, type[Family]]:
    """Returns the families, each of which is the class that a module of this package defines."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if module.name != "base"]
    found = {name: classes_in(f"{__name__}.{name}", Family) for name in names}
    return {name: classes[0] for name, classes in found.items() if classes}


def read(path: Path) -> ForeignModel:
    """Reads a model of another program: a folder or a file for which `is_foreign` is true.

    A license that restricts its users is printed on standard error, and kept in the description.
    """
    source = read_source(path)
    family = _families().get(source.family)
    if family is None:
        raise InputDataError(
            f"{path} is a model of the type {source.family!r:.40}; protlm reads: {one_of(names())}"
        )
    refuse_parts(source, family.output_layer)
    try:
        found = family().translate(source)
    except InputDataError:
        raise
    except UserError as error:
        raise InputDataError(f"{path} describes an impossible model: {error}") from error
    # Half precision is a format for files here; the network has float32.
    weights = {n: v.float() if v.itemsize < _SINGLE else v for n, v in found.weights.items()}
    return replace(found, weights=weights)
