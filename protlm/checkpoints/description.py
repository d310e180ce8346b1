"""The description of a model in its checkpoint, checked as untrusted data before it is used.

A matching SHA-256 shows that a file is unchanged, not who wrote it. Values are plain data: strings
such as `${oc.env:TOKEN}` are never resolved.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Self

from protlm.checkpoints.checks import not_usable
from protlm.config import Frame, ModelConfig, Norm, Objective, Positions
from protlm.config.fields import as_typed
from protlm.system.errors import InputDataError, UserError
from protlm.system.json_file import Count, from_json, to_json

# The version of the stored form.
FORMAT = 1
# Settings of the model that belong to training or to the use of memory.
_SAME_FUNCTION = ("init_from", "dropout", "feedforward_chunk")
# The epsilon of norms whose setting is null.
_EPSILON = {Norm.layer: 1e-5, Norm.rms: 1e-6}
# Of settings that an earlier version did not have.
_DEFAULTS = {f.name: to_json(f.default) for f in fields(ModelConfig) if f.default is not MISSING}


@dataclass(frozen=True)
class ModelDescription:
    """Everything that is needed to rebuild a model, except its weights.

    Attributes:
        seed: seed of the first weights and of the projections.
        max_length: the longest row in training, special tokens included.
        source: of an imported model and of those trained from it, its `family`, the `sha256` of its
            weights and, if there are these, the `contacts_sha256` of its contact head's own file,
            the `adapter_sha256` of what was merged into it, a restrictive `license`, and the
            `class` of an encoder; of a converted one, the mechanism `converted_from` and the hash
            of the original's weights, `converted_hash`.
        frame: the frame and the further tokens of a model; None of those with `<cls>` and `<eos>`.
        relatives_tokens: the most tokens of a family in training; None without families, and 0 if
            all proteins of families were read alone.
    """

    vocabulary: str
    objective: Objective
    model: ModelConfig
    attention: str
    attention_options: Mapping[str, Any]
    seed: Count
    max_length: Annotated[int, range(3, 1 << 63)]
    source: Mapping[str, str] | None = None
    frame: Frame | None = None
    relatives_tokens: Count | None = None

    @property
    def attention_config(self) -> dict[str, Any]:
        """The options of the mechanism with its name, as in `conf/attention/NAME.yaml`."""
        return {"name": self.attention, **self.attention_options}

    def to_plain(self) -> dict[str, Any]:
        """Returns the plain values that are stored in checkpoints and `config.json`."""
        plain = {"format": FORMAT, **to_json(self), "attention": self.attention_config}
        # The origin of the first weights is not part of the architecture.
        del plain["attention_options"], plain["model"]["init_from"]
        if self.model.relatives is None:
            # As it was before there were relatives, and with it the identity of a model.
            model = plain["model"].items()
            plain["model"] = {key: x for key, x in model if not key.startswith("relatives")}
        elif not self.model.relatives_heads:
            del plain["model"]["relatives_heads"], plain["model"]["relatives_around"]
        return {key: value for key, value in plain.items() if value is not None}

    @classmethod
    def parse(cls, path: Path, stored: object) -> Self:
        """Checks and converts a stored description."""
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise InputDataError(f"{path} was not written by protlm, or by a newer version of it")
        options = stored.get("attention")
        if not isinstance(options, dict) or not isinstance(options.get("name"), str):
            raise not_usable(
                path, f"attention={options!r:.60} must be the name of a mechanism and its options"
            )
        values = {
            **{key: value for key, value in stored.items() if key != "format"},
            "attention": options["name"],
            "attention_options": {key: value for key, value in options.items() if key != "name"},
        }
        if isinstance(model := stored.get("model"), dict):
            values["model"] = {**_DEFAULTS, **model}
        try:
            return from_json(cls, values)
        except (ValueError, UserError) as error:
            raise not_usable(path, str(error)) from error


def differences(found: ModelConfig, asked: ModelConfig) -> list[tuple[str, str, str]]:
    """Returns the settings in which two models are different functions of their weights.

    One of single proteins may become one that sees relatives, and one with heads of relatives is
    one of single proteins without them.

    Each with its value in `found` and in `asked`, as in a config.
    """
    named = [f.name for f in fields(ModelConfig) if f.name not in _SAME_FUNCTION]
    pairs = [(name, _effective(found, name), _effective(asked, name)) for name in named]
    if found.relatives is None or (found.relatives_heads and asked.relatives is None):
        pairs = [pair for pair in pairs if not pair[0].startswith("relatives")]
    return [(name, as_typed(one), as_typed(other)) for name, one, other in pairs if one != other]


def _effective(config: ModelConfig, name: str) -> Any:
    value = getattr(config, name)
    if name == "norm_epsilon":
        return value or _EPSILON[config.norm]
    unused = {
        "max_length": config.positions is not Positions.learned,
        # The width of a head without it.
        "head_dim": value == config.model_dim // config.num_heads,
        "relative_": config.positions is not Positions.relative,
        "relatives_": config.relatives is None,
        "global_base": not config.global_every,
    }
    return None if any(name.startswith(x) and unused[x] for x in unused) else value
