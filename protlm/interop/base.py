"""The interface of a family of foreign models, and the exact use of its tensors."""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from protlm.checkpoints.description import ModelDescription
from protlm.checkpoints.format import Checkpoint
from protlm.checkpoints.weight_checks import check_numbers
from protlm.config import ModelConfig
from protlm.interop.source import Source
from protlm.system.errors import InputDataError

# Names of tensors in a message.
_MOST_NAMED = 4
# What programs put before the names of the tensors of a model.
_WRAPPERS = {
    "module.": "DataParallel or DistributedDataParallel",
    "_orig_mod.": "torch.compile",
    "model.": "a module that contains the model, such as one of Lightning,",
}
# The beginning of the names of the output layer, by family.
_HEADS = {"esm": "lm_head.", "bert": "cls.predictions."}


@dataclass(frozen=True)
class ContactHead:
    """The logistic regression of contacts on attention maps, as `protlm contacts` computes it.

    Attributes:
        weights: of the heads of all layers, those of the first layer first.
        intercept: its constant.
    """

    weights: list[float]
    intercept: float


@dataclass(frozen=True)
class Translated:
    """A foreign model in protlm's terms: its settings, and its weights by protlm's names.

    `description` is None for a masked model with softmax attention. `license` tells users of a
    license that restricts them.
    """

    model: ModelConfig
    weights: dict[str, Tensor]
    contacts: ContactHead | None = None
    description: ModelDescription | None = None
    license: str | None = None


@dataclass(frozen=True)
class ForeignModel(Checkpoint):
    """A foreign model as it was read, with its contact head if it has one."""

    contacts: ContactHead | None = None


class Family(ABC):
    """A family of foreign models."""

    @abstractmethod
    def translate(self, source: Source) -> Translated:
        """Converts a model."""


def modules(
    prefix: str,
    theirs: Mapping[str, str],
    *,
    under: str = "",
    parts: tuple[str, ...] = ("weight", "bias"),
) -> dict[str, str]:
    """Returns the names of weights and biases, ours to theirs, from names of modules.

    >>> modules("b.", {"norm": "LayerNorm"}, under="blocks.0.")
    {'blocks.0.norm.weight': 'b.LayerNorm.weight', 'blocks.0.norm.bias': 'b.LayerNorm.bias'}
    """
    return {
        f"{under}{ours}.{part}": f"{prefix}{name}.{part}"
        for ours, name in theirs.items()
        for part in parts
    }


def layers(
    prefix: str,
    theirs: Mapping[str, str],
    tensors: Iterable[str],
    *,
    parts: tuple[str, ...] = ("weight", "bias"),
) -> dict[str, str]:
    """Returns the names of the tensors of all layers, ours to theirs.

    Args:
        prefix: what a layer's number follows.
        theirs: names of the modules of a layer.
        tensors: all names; they tell how many layers there are.
        parts: the tensors that each of the modules has.
    """
    pattern = re.compile(re.escape(prefix) + r"(\d{1,4})\.")
    counts = Counter(int(found[1]) for name in tensors if (found := pattern.match(name)))
    # A single tensor is no layer, but one that is left over.
    numbers = [number for number, count in counts.items() if 2 * count > max(counts.values())]
    names: dict[str, str] = {}
    for number in range(max(numbers, default=-1) + 1):
        names |= modules(f"{prefix}{number}.", theirs, under=f"blocks.{number}.", parts=parts)
    return names


def with_parts(
    path: Path, tensors: Mapping[str, Tensor], fused: str, parts: Sequence[str]
) -> dict[str, Tensor]:
    """Returns the tensors with several in place of each that stacks the rows of several matrices.

    Args:
        path: the model, for messages.
        tensors: its tensors.
        fused: the end of the name of a stack.
        parts: the ends of the new names, in the order of the stack.
    """
    separate: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if not name.endswith(fused):
            separate[name] = value
        elif value.ndim == 0 or len(value) % len(parts):
            raise InputDataError(
                f"{path}: {name!r:.90} must have {len(parts)} matrices of one size"
            )
        else:
            start = name.removesuffix(fused)
            chunks = value.chunk(len(parts))
            separate |= {start + part: x for part, x in zip(parts, chunks, strict=True)}
    return separate


def refuse_parts(source: Source) -> None:
    """Refuses a model without an output layer, and one in the wrapper of another program."""
    path, names = source.path, source.tensors
    for prefix, wrapper in _WRAPPERS.items():
        if all(name.startswith(prefix) for name in names):
            raise InputDataError(
                f"{path}: the names of all tensors begin with {prefix!r}, as {wrapper} saves them; "
                f"save the model in it, model.{prefix.removesuffix('.')}, and give that"
            )
    head = _HEADS.get(source.family)
    if head and not any(re.search(rf"(^|\.){head}", name) for name in names):
        kind = source.settings.get("architectures")
        raise InputDataError(
            f"{path} has no output layer ({head}*): it is an encoder, or has the head of another "
            f"task (architectures: {kind!r:.60}); protlm reads models that predict residues: give "
            f"the {source.family.title()}ForMaskedLM that it was made from"
        )


def renamed(
    path: Path, tensors: Mapping[str, Tensor], names: Mapping[str, str]
) -> dict[str, Tensor]:
    """Returns the tensors by our names; each must be used exactly once.

    Args:
        path: the model, for messages.
        tensors: its tensors, without those that protlm has no use for.
        names: ours to theirs.
    """
    wanted = list(names.values())
    if missing := [name for name in wanted if name not in tensors]:
        raise InputDataError(
            f"{path} lacks {_listed(missing)}: it is incomplete, or another model than its "
            "settings say; get it again"
        )
    if unused := sorted(set(tensors) - set(wanted)):
        raise InputDataError(f"{path} has {_listed(unused)} that its architecture does not have")
    check_numbers(path, {name: tensors[name] for name in wanted})
    return {ours: tensors[name] for ours, name in names.items()}


def check_sizes(path: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Compares the numbers of layers and heads in the settings with the weights.

    Args:
        path: the model, for messages.
        config: what its settings say.
        weights: by protlm's names.
    """
    num_layers = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    if num_layers != config.num_layers:
        raise InputDataError(
            f"{path} has the weights of {num_layers} layers, and its settings say "
            f"{config.num_layers}; get both again from one place"
        )
    if config.model_dim % config.num_heads:
        raise InputDataError(
            f"{path} has settings of {config.num_heads} heads, which do not divide its width, "
            f"{config.model_dim}; get it again"
        )


def check_shapes(
    path: Path, weights: Mapping[str, Tensor], expected: Mapping[str, tuple[int | None, ...]]
) -> None:
    """Compares shapes with those that the alphabet and the settings give.

    Args:
        path: the model, for messages.
        weights: by protlm's names.
        expected: the shapes of some of them; None is any size but 0.
    """
    for name, sizes in expected.items():
        found = weights[name].shape
        pairs = zip(found, sizes, strict=False)
        fits = all(size > 0 if want is None else size == want for size, want in pairs)
        if len(found) != len(sizes) or not fits:
            wanted = ["at least 1" if size is None else str(size) for size in sizes]
            raise InputDataError(
                f"{path}: the tensor that becomes {name} has the shape {list(found)}; the alphabet "
                f"and the settings need [{', '.join(wanted)}]"
            )


def with_modern_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors with `weight` and `bias` for BERT's first names of norms' parameters."""
    norm = {"gamma": "weight", "beta": "bias"}
    pattern = re.compile(r"(?<=\.)(gamma|beta)$")
    return {pattern.sub(lambda found: norm[found[0]], name): v for name, v in tensors.items()}


def without(tensors: Mapping[str, Tensor], unused: str) -> dict[str, Tensor]:
    """Returns the tensors whose names do not match a regular expression."""
    return {name: value for name, value in tensors.items() if not re.fullmatch(unused, name)}


def without_copy(path: Path, tensors: dict[str, Tensor], copy: str, original: str) -> None:
    """Removes a tied tensor that is stored twice, as embedding and output layer often are."""
    value, expected = tensors.pop(copy, None), tensors.get(original)
    if value is not None and expected is not None and not value.equal(expected):
        raise InputDataError(
            f"{path}: {copy} differs from {original}; only models in which they are tied are "
            "supported"
        )


def without_output_matrix(
    source: Source, tensors: dict[str, Tensor], matrix: str, embedding: str
) -> None:
    """Removes the matrix of an output layer that is the embedding."""
    if matrix not in tensors:
        source.choice("tie_word_embeddings", True, (True,))
    without_copy(source.path, tensors, matrix, embedding)


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    shown = ", ".join(f"{name!r:.90}" for name in names[:_MOST_NAMED])
    rest = f" and {more} more" if more > 0 else ""
    return f"{len(names)} {'tensor' if len(names) == 1 else 'tensors'} ({shown}{rest})"
