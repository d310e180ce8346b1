"""The names of the tensors and sizes of a foreign model, and the use of its tensors.

Every token of protlm is read as one of the other alphabet. If several are read as the same one,
they have its embedding, and its probability is divided evenly between them.
"""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from protlm.checkpoints.checks import check_numbers
from protlm.interop.source import Source
from protlm.system.errors import InputDataError

# The rotary frequencies, of which layers may have copies.
FREQUENCY = "rotary.frequency"
# Names of tensors in a message.
_MOST_NAMED = 4
# The keys of sizes in the settings of Hugging Face.
SIZES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "model_dim": "hidden_size",
}
HUGGING_FACE = {
    **SIZES,
    "feedforward_dim": "intermediate_size",
    "max_length": "max_position_embeddings",
}
# BERT's first names of the parameters of norms.
FIRST_NORMS = ((r"\.gamma$", ".weight"), (r"\.beta$", ".bias"))

# The names in a layer of BERT and of what was made from it.
BERT_LAYER = {
    "attention.{query,key,value}.*": "attention.self.{query,key,value}.*",
    "attention.output.*": "attention.output.dense.*",
    "feedforward.{up,down}.*": "{intermediate,output}.dense.*",
}
# The names of fairseq's transformer, which fair-esm has too.
FAIRSEQ_NAMES = {
    "embedding.weight": "embed_tokens.weight",
    "positions.table": "embed_positions.weight",
    "head_transform.{dense,norm}.*": "lm_head.{dense,layer_norm}.*",
    "head.bias": "lm_head.bias",
}
FAIRSEQ_LAYER = {
    "{attention,feedforward}_norm.*": "{self_attn,final}_layer_norm.*",
    "attention.{query,key,value,output}.*": "self_attn.{q,k,v,out}_proj.*",
    "feedforward.{up,down}.*": "{fc1,fc2}.*",
}
FAIRSEQ_COPIES = {"lm_head.weight": "embed_tokens.weight"}


@dataclass(frozen=True)
class Layout:
    """How a file names the tensors and sizes of a model.

    `{query,key}` stands for several names, and `*` for `{weight,bias}`.

    Attributes:
        names: those of tensors outside the layers, ours to theirs.
        layers: what the number of a layer follows.
        layer: the names in a layer, ours to theirs.
        sizes: the keys of sizes in the settings, ours to theirs; the others are those of tensors.
        epsilon: the key of the epsilon of norms, and its value if the settings lack it.
        spellings: patterns of other names for the same tensors, and what replaces them.
        unused: a pattern of the names of tensors that protlm does not use.
        stacks: the ends of the names of tensors that stack the rows of several matrices, and the
            ends of the names of those, in order.
        by_head: those of the stacks that contain a head's rows of all matrices, then the next's.
        copies: tensors that may be stored twice, as tied embedding and output layer often are: the
            names of the second and of the first.
    """

    names: Mapping[str, str]
    layers: str
    layer: Mapping[str, str]
    sizes: Mapping[str, str] = field(default_factory=lambda: HUGGING_FACE)
    epsilon: tuple[str, float] = ("layer_norm_eps", 1e-12)
    spellings: Sequence[tuple[str, str]] = ()
    unused: str = ""
    stacks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    by_head: Collection[str] = ()
    copies: Mapping[str, str] = field(default_factory=dict)

    def all_names(self, layers: Iterable[int]) -> dict[str, str]:
        """Returns the names of all tensors of a model with these layers, ours to theirs."""
        names = dict(self.names)
        for number in layers:
            ours, theirs = f"blocks.{number}.", f"{self.layers}{number}."
            names |= {ours + one: theirs + other for one, other in self.layer.items()}
        pairs = (zip(each(ours), each(name), strict=True) for ours, name in names.items())
        return dict(itertools.chain.from_iterable(pairs))

    def of_encoder(self) -> "Layout":
        """Returns the layout without an output layer."""
        names = {ours: name for ours, name in self.names.items() if not ours.startswith("head")}
        return replace(self, names=names)

    def weights(self, source: Source) -> dict[str, Tensor]:
        """Returns the tensors by our names; each must be used exactly once."""
        path, tensors = source.path, self._unstacked(source, self._spelled(source))
        for copy, first in self.copies.items():
            value, expected = tensors.pop(copy, None), tensors.get(first)
            if value is None and "head.bias" in self.names and not first.endswith("bias"):
                source.choice("tie_word_embeddings", (True,))
            if value is not None and expected is not None and not value.equal(expected):
                raise InputDataError(
                    f"{path}: {copy} differs from {first}; only models in which they are tied are "
                    "supported"
                )
        return used_once(path, tensors, self.all_names(self._numbers(tensors)), unused=self.unused)

    def _spelled(self, source: Source) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, value in source.tensors.items():
            new = name
            for pattern, replacement in self.spellings:
                new = re.sub(pattern, replacement, new, count=1)
            if new in tensors:
                raise InputDataError(f"{source.path} has {new!r:.90} in two layouts")
            tensors[new] = value
        return tensors

    def _unstacked(self, source: Source, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        separate: dict[str, Tensor] = {}
        for name, value in tensors.items():
            stack = next((end for end in self.stacks if name.endswith(end)), None)
            if stack is None:
                separate[name] = value
                continue
            parts = self.stacks[stack]
            groups = source.number(self.sizes["num_heads"]) if stack in self.by_head else 1
            if value.ndim == 0 or len(value) % (groups * len(parts)):
                raise InputDataError(
                    f"{source.path}: {name!r:.90} must have {len(parts)} matrices of one size"
                )
            rows = len(value) // (groups * len(parts))
            chunks = value.unflatten(0, (groups, len(parts), rows)).transpose(0, 1).flatten(1, 2)
            start = name.removesuffix(stack)
            separate |= {start + part: x for part, x in zip(parts, chunks, strict=True)}
        return separate

    def _numbers(self, names: Iterable[str]) -> range:
        pattern = re.compile(re.escape(self.layers) + r"(\d{1,4})\.")
        counts = Counter(int(found[1]) for name in names if (found := pattern.match(name)))
        # One tensor alone is not a layer: it is reported as unused.
        numbers = [number for number, count in counts.items() if 2 * count > max(counts.values())]
        return range(max(numbers, default=-1) + 1)


def each(pattern: str) -> list[str]:
    """Returns the names of a pattern with alternatives."""
    parts = re.split(r"[{}]", pattern.replace("*", "{weight,bias}"))
    return ["".join(one) for one in itertools.product(*(part.split(",") for part in parts))]


def used_once(
    path: Path, tensors: Mapping[str, Tensor], names: Mapping[str, str], *, unused: str = ""
) -> dict[str, Tensor]:
    """Returns the tensors by our names; each must be used exactly once, or match `unused`."""
    wanted = list(names.values())
    if missing := [name for name in wanted if name not in tensors]:
        raise InputDataError(
            f"{path} lacks {listed(missing)}: it is incomplete, or another model than its "
            "settings say; get it again"
        )
    others = sorted(name for name in set(tensors) - set(wanted) if not re.fullmatch(unused, name))
    if others:
        raise InputDataError(f"{path} has {listed(others)} that its architecture does not have")
    check_numbers(path, {name: tensors[name] for name in wanted})
    return {ours: tensors[name] for ours, name in names.items()}


def listed(names: list[str]) -> str:
    """Returns the number of tensors, and the first of their names."""
    more = len(names) - _MOST_NAMED
    shown = ", ".join(f"{name!r:.90}" for name in names[:_MOST_NAMED])
    rest = f" and {more} more" if more > 0 else ""
    return f"{len(names)} {'tensor' if len(names) == 1 else 'tensors'} ({shown}{rest})"


def gather_rows(weights: dict[str, Tensor], tokens: Sequence[int]) -> None:
    """Puts the embedding and the output layer into the order of the vocabulary, in place."""
    count = Counter(tokens)
    shared_V = torch.tensor([count[token] for token in tokens], dtype=torch.float64)
    for name in {"embedding.weight", "head.weight"} & weights.keys():
        weights[name] = weights[name][list(tokens)]
    if "head.bias" in weights:
        bias_V = weights["head.bias"][list(tokens)]
        weights["head.bias"] = (bias_V.double() - shared_V.log()).to(bias_V.dtype)
