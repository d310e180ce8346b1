"""The description of a model in its checkpoint, checked as untrusted data before it is used.

A matching SHA-256 shows that a file is unchanged, not who wrote it. Values are plain data: strings
such as `${oc.env:TOKEN}` are never resolved.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_args, get_type_hints

from protlm.checkpoints.weight_checks import not_usable
from protlm.config import ModelConfig, Norm, Objective, Positions, drop_removed
from protlm.system.errors import InputDataError, UserError, one_of

# The version of the stored form.
FORMAT = 1
_KINDS = {
    "vocabulary": (str, "a hash"),
    "objective": (str, "the name of an objective"),
    "model": (dict, "a group of settings"),
    "attention": (dict, "a group of settings"),
    "seed": (int, "a whole number"),
    "max_length": (int, "a whole number"),
}
# Where a model came from: an imported one, and one whose attention was replaced.
_IMPORTED, _CONVERTED = ("family", "sha256"), ("converted_from", "converted_hash")
_SOURCES = [set(_IMPORTED), set(_CONVERTED), {*_IMPORTED, *_CONVERTED}]
_FURTHER = {"contacts_sha256", "license"}
_MAX_SEED = 1 << 63
# Settings of the model that belong to training or to the use of memory.
_SAME_FUNCTION = ("init_from", "dropout", "feedforward_chunk")
# The epsilon of norms whose setting is null.
_EPSILON = {Norm.layer: 1e-5, Norm.rms: 1e-6}
_WORDS = {bool: "true or false", int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class ModelDescription:
    """Everything that is needed to rebuild a model, except its weights.

    Attributes:
        vocabulary: hash of the vocabulary.
        objective: what the model was trained to predict.
        model: settings of the transformer.
        attention: name of the mechanism.
        attention_options: options of the mechanism.
        seed: seed of the first weights and of the projections.
        max_length: the longest row in training, special tokens included.
        source: of an imported model and of those trained from it, its `family`, the `sha256` of its
            weights and, if there are these, the `contacts_sha256` of its contact head's own file
            and a restrictive `license`; of a converted one, the mechanism `converted_from` and the
            hash of the original's weights, `converted_hash`.
    """

    vocabulary: str
    objective: Objective
    model: ModelConfig
    attention: str
    attention_options: Mapping[str, Any]
    seed: int
    max_length: int
    source: Mapping[str, str] | None = None

    @property
    def attention_config(self) -> dict[str, Any]:
        """The options of the mechanism with its name, as in `conf/attention/NAME.yaml`."""
        return {"name": self.attention, **self.attention_options}

    def to_plain(self) -> dict[str, Any]:
        """Returns the plain values that are stored in checkpoints and `config.json`."""
        values = {f.name: getattr(self.model, f.name) for f in fields(ModelConfig)}
        # The origin of the first weights is not part of the architecture.
        del values["init_from"]
        plain = {
            "format": FORMAT,
            "vocabulary": self.vocabulary,
            "objective": self.objective.value,
            "model": {k: v.value if isinstance(v, Enum) else v for k, v in values.items()},
            "attention": self.attention_config,
            "seed": self.seed,
            "max_length": self.max_length,
        }
        return plain if self.source is None else {**plain, "source": dict(self.source)}

    @classmethod
    def parse(cls, path: Path, stored: object) -> Self:
        """Checks and converts a stored description."""
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise InputDataError(f"{path} was not written by protlm, or by a newer version of it")
        for key, (kind, allowed) in _KINDS.items():
            if type(stored.get(key)) is not kind:
                raise not_usable(path, f"{key}={stored.get(key)!r:.60} must be {allowed}")
        if stored["objective"] not in [objective.value for objective in Objective]:
            known = one_of([objective.value for objective in Objective])
            raise not_usable(path, f"objective={stored['objective']!r:.60} must be one of {known}")
        if not 0 <= stored["seed"] < _MAX_SEED:
            raise not_usable(path, f"seed={stored['seed']} must be at least 0 and below 2^63")
        if stored["max_length"] < 3:
            raise not_usable(path, f"max_length={stored['max_length']} must be at least 3")
        options = dict(stored["attention"])
        if not all(isinstance(key, str) for key in options):
            raise not_usable(path, "the settings of its attention have no names")
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise not_usable(path, f"attention.name={name!r:.60} must be the name of a mechanism")
        return cls(
            vocabulary=stored["vocabulary"],
            objective=Objective(stored["objective"]),
            model=_model_config(path, stored["model"]),
            attention=name,
            attention_options=options,
            seed=stored["seed"],
            max_length=stored["max_length"],
            source=_source(path, stored.get("source")),
        )


def _source(path: Path, stored: object) -> dict[str, str] | None:
    if stored is None:
        return None
    values = stored if isinstance(stored, dict) else {}
    keys = set(values) - (_FURTHER if "sha256" in values else set())
    if keys not in _SOURCES or not all(isinstance(v, str) for v in values.values()):
        allowed = f"{one_of(list(_IMPORTED))}; {one_of(list(_CONVERTED))}; or all of them"
        raise not_usable(path, f"source={stored!r:.60} must have {allowed}")
    return values


def _model_config(path: Path, settings: dict[Any, Any]) -> ModelConfig:
    settings = dict(settings)
    drop_removed(path, settings)
    hints = get_type_hints(ModelConfig)
    if unknown := [key for key in settings if key not in hints]:
        raise not_usable(path, f"model.{unknown[0]!r:.60} is not a setting of this protlm")
    required = [f.name for f in fields(ModelConfig) if f.default is MISSING]
    if missing := [name for name in required if name not in settings]:
        raise not_usable(path, f"model.{missing[0]} is missing")
    values = {name: _typed(path, name, v, hints[name]) for name, v in settings.items()}
    try:
        return ModelConfig(**values)
    except UserError as error:
        raise not_usable(path, str(error)) from error


def _typed(path: Path, name: str, value: Any, hint: Any) -> Any:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    for kind in kinds:
        if kind is type(None) and value is None:
            return None
        if isinstance(kind, type) and issubclass(kind, Enum):
            if isinstance(value, str) and value in [member.value for member in kind]:
                return kind(value)
        elif kind is float:
            if type(value) in (int, float) and math.isfinite(float(value)):
                return value
        elif type(value) is kind:
            return value
    allowed = " or ".join(_allowed(kind) for kind in kinds)
    raise not_usable(path, f"model.{name}={value!r:.60} must be {allowed}")


def _allowed(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {one_of([str(member.value) for member in kind])}"
    return _WORDS.get(kind, "null")


def differences(found: ModelConfig, asked: ModelConfig) -> list[tuple[str, str, str]]:
    """Returns the settings in which two models are different functions of their weights.

    Each with its value in `found` and in `asked`, as in a config.
    """
    named = [f.name for f in fields(ModelConfig) if f.name not in _SAME_FUNCTION]
    pairs = [(name, _effective(found, name), _effective(asked, name)) for name in named]
    return [(name, as_typed(one), as_typed(other)) for name, one, other in pairs if one != other]


def _effective(config: ModelConfig, name: str) -> Any:
    value = getattr(config, name)
    if name == "norm_epsilon":
        return value or _EPSILON[config.norm]
    if name == "max_length" and config.positions is not Positions.learned:
        return None
    return value


def as_typed(value: Any) -> str:
    """Returns a value as it is typed after `model.NAME=`, which Hydra reads without quotes."""
    return json.dumps(value).replace('"', "")
