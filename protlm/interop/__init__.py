"""Models of other programs: one file per family, found by the name that the model gives.

`names()` lists the families, `is_foreign()` recognizes a model of one, `read()` reads it, and
`local_path()` downloads it from the Hugging Face Hub.
"""

import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

from protlm.checkpoints.description import ModelDescription
from protlm.config import Objective
from protlm.data.vocabulary import VOCABULARY
from protlm.interop.base import Family, ForeignModel, refuse_parts
from protlm.interop.hub import download, is_hub_name
from protlm.interop.source import Source, is_foreign, read_source
from protlm.system.errors import InputDataError, UserError, one_of

# Bytes of a number in single precision.
_SINGLE = 4

__all__ = ["Family", "ForeignModel", "is_foreign", "local_path", "names", "read"]


def local_path(path: Path) -> Path:
    """Returns the folder of a model that is named as on the Hugging Face Hub; otherwise `path`."""
    return download(str(path)) if is_hub_name(path) else path


def names() -> list[str]:
    """Lists the families: the modules of this package that define one."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if _defined_in(name))


def _defined_in(name: str) -> list[type[Family]]:
    module = importlib.import_module(f"{__name__}.{name}")
    return [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, Family) and not inspect.isabstract(member)
    ]


def _origin(source: Source, license_: str | None) -> dict[str, str]:
    """Returns what the description of an imported model says of its origin."""
    told = {
        "family": source.family,
        "sha256": source.sha256,
        "contacts_sha256": source.contacts_sha256,
        "license": license_,
    }
    return {key: value for key, value in told.items() if value is not None}


def read(path: Path) -> ForeignModel:
    """Reads a model of another program: a folder or a file for which `is_foreign` is true.

    A license that restricts its users is printed on standard error, and kept in the description.
    """
    source = read_source(path)
    # The name comes from the file: it must not reach any module but those of this package.
    if source.family not in names():
        raise InputDataError(
            f"{path} is a model of the type {source.family!r:.40}; protlm reads: {one_of(names())}"
        )
    (family,) = _defined_in(source.family)
    refuse_parts(source)
    try:
        translated = family().translate(source)
    except InputDataError:
        raise
    except UserError as error:
        raise InputDataError(f"{path} describes an impossible model: {error}") from error
    if translated.license is not None:
        print(f"license: {translated.license}", file=sys.stderr)
    description = translated.description or ModelDescription(
        vocabulary=VOCABULARY.hash,
        objective=Objective.masked,
        model=translated.model,
        attention="softmax",
        attention_options={},
        seed=0,
        max_length=translated.model.max_length,
        source=_origin(source, translated.license),
    )
    weights = {
        # Half precision is a format for files here; the network has float32.
        name: value.float() if value.itemsize < _SINGLE else value
        for name, value in translated.weights.items()
    }
    return ForeignModel(path, description, weights, translated.contacts)
