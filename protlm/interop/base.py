"""The families of foreign models: what each consists of, and the one reader of all.

A family is a subclass of `Family` in a module of its name. Its attributes are data that the reader
uses; it overrides methods for what is particular to it.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from protlm.checkpoints.checks import check_sizes
from protlm.checkpoints.description import ModelDescription
from protlm.checkpoints.format import Checkpoint
from protlm.config import Activation, Frame, HeadKind, ModelConfig, NormOrder, Objective, Positions
from protlm.data.alphabet import alphabet_of
from protlm.data.vocabulary import RESIDUES, STANDARD, VOCABULARY, vocabulary_of
from protlm.interop.layout import Layout, gather_rows, listed
from protlm.interop.source import Source
from protlm.system.errors import InputDataError

Shapes = Mapping[str, tuple[int | None, ...]]
# The rotary positions of every model with such, by its settings.
ROTARY = {
    "rope_theta": (10_000, 10_000.0),
    "rope_scaling": (None,),
    "rope_parameters": (None, {"rope_type": "default", "rope_theta": 10_000.0}),
}
# BERT, RoBERTa and AbLang have these settings in common.
POST_NORM = {
    "positions": Positions.learned,
    "norm_order": NormOrder.post,
    "activation": Activation.gelu,
    "attention_bias": True,
    "embedding_norm": True,
    "head": HeadKind.dense_norm,
}
# What torch.compile and FSDP put into the names of tensors.
_INFIXES = re.compile(r"(^|(?<=\.))(_orig_mod|_fsdp_wrapped_module)\.")
# Settings that are the numbers of special tokens.
_SPECIAL = {f"{one}_token_id": f"<{one}>" for one in ("cls", "pad", "eos", "mask")}


@dataclass(frozen=True)
class ContactHead:
    """The logistic regression of contacts on the maps of the heads of all layers, in order."""

    weights: list[float]
    intercept: float


@dataclass(frozen=True)
class ForeignModel(Checkpoint):
    """A foreign model as it was read, with its contact head if it has one."""

    contacts: ContactHead | None = None


class Family:
    """A family of foreign models: masked models with softmax attention.

    Attributes:
        fixed: settings of protlm that all its models have.
        allowed: supported values of its own settings; a missing setting has the first.
        output_layer: the beginning of the names of an output layer; files without it are encoders.
        encoder: what precedes the names of an encoder in a model with a head.
        anchor: the name of the embedding in an encoder, by which other prefixes are recognized.
        other_heads: a pattern of the names of tensors that are left out, and said to be.
        frame: that of its models, if it is not protlm's; its own tokens have protlm's names.
        special: its names of `<cls>`, `<pad>`, `<eos>`, `<unk>` and `<mask>`; none if its alphabet
            is that of protlm.
        read_as: residues that are read as another token, where the alphabet has that.
        left_out: patterns of tokens that protlm does not have and sequences do not contain.
        spare_rows: whether embeddings have rows after those of the tokens, which are left out.
        rotary_pairs: whether rotary positions pair coordinates 2i and 2i + 1 of a head; those of
            protlm pair i and i + K/2, and the rows of both projections are reordered.
        first_position: the row of the first token in the table of positions.
        licenses: terms that restrict users, by the width of a model, or by None of every model.
    """

    layout: ClassVar[Layout]
    fixed: ClassVar[Mapping[str, Any]] = {}
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    output_layer: ClassVar[str] = ""
    encoder: ClassVar[str] = ""
    anchor: ClassVar[str] = ""
    other_heads: ClassVar[str] = r"(.*\.)?pooler\..*|(classifier|score|qa_outputs)\..*"
    frame: Frame | None = None
    special: ClassVar[Sequence[str]] = ()
    read_as: ClassVar[Mapping[str, str]] = {}
    left_out: ClassVar[Sequence[str]] = ()
    spare_rows: ClassVar[bool] = False
    rotary_pairs: ClassVar[bool] = False
    first_position: ClassVar[int] = 0
    licenses: ClassVar[Mapping[int | None, str]] = {}

    def translate(self, source: Source) -> ForeignModel:
        for key, values in self.allowed.items():
            source.choice(key, values)
        layout, origin = self.layout_of(source), {"family": source.family, **source.hashes}
        is_encoder = self.is_encoder(source)
        if is_encoder:
            layout = layout.of_encoder()
            origin |= {"class": str((source.settings.get("architectures") or ["unknown"])[0])[:60]}
        weights = layout.weights(source)
        config = self.config(source, layout, weights)
        if is_encoder:
            config = replace(config, head=HeadKind.none)
        alphabet = self.alphabet(source)
        tokens = self.tokens(source.path, alphabet) if self.special else []
        for key, token in _SPECIAL.items() if tokens else ():
            source.choice(key, (tokens[VOCABULARY[token]], None))
        check_sizes(source.path, config, weights)
        self._check_shapes(source.path, config, weights, len(alphabet))
        if "positions.table" in weights:
            weights["positions.table"] = weights["positions.table"][self.first_position :]
        if self.spare_rows:
            for name in {"embedding.weight", "head.weight", "head.bias"} & weights.keys():
                weights[name] = weights[name][: len(alphabet)].clone()
        if tokens:
            gather_rows(weights, tokens)
        if "types" in weights:
            # The first type of token is the only one that is used.
            types_TD, table_LD = weights.pop("types"), weights["positions.table"]
            check_shapes(source.path, {"types": types_TD}, {"types": (None, config.model_dim)})
            weights["positions.table"] = (table_LD.double() + types_TD[0].double()).to(
                table_LD.dtype
            )
        if self.rotary_pairs:
            _pair_halves(source.path, config, weights)
        if terms := self.licenses.get(config.model_dim) or self.licenses.get(None):
            print(f"license: {terms}", file=sys.stderr)
            origin["license"] = terms
        description = ModelDescription(
            vocabulary=vocabulary_of(self.frame).hash,
            objective=Objective.masked,
            model=config,
            attention="softmax",
            attention_options={},
            seed=0,
            max_length=config.max_length,
            source=origin,
            frame=self.frame,
        )
        return ForeignModel(source.path, description, weights)

    @classmethod
    def is_encoder(cls, source: Source) -> bool:
        """Whether a model has no output layer, where its family has one."""
        head = re.compile(rf"(.*\.)?{cls.output_layer}")
        return bool(cls.output_layer) and not any(map(head.match, source.tensors))

    def layout_of(self, source: Source) -> Layout:
        return self.layout

    def config(self, source: Source, layout: Layout, weights: Mapping[str, Tensor]) -> ModelConfig:
        """Returns the settings of a model."""
        sizes: dict[str, int] = {}
        if "feedforward_dim" not in layout.sizes:
            sizes["feedforward_dim"] = num_rows(source, weights, "blocks.0.feedforward.up.weight")
        if "max_length" not in layout.sizes and "positions.table" in weights:
            sizes["max_length"] = num_rows(source, weights, "positions.table")
        sizes |= {ours: source.number(theirs) for ours, theirs in layout.sizes.items()}
        if "max_length" in sizes:
            sizes["max_length"] -= self.first_position
        return ModelConfig(**sizes, norm_epsilon=source.fraction(*layout.epsilon), **self.fixed)

    def alphabet(self, source: Source) -> Sequence[str]:
        """Returns the tokens of a model in order."""
        return alphabet_of(source.folder)[1] if self.special else VOCABULARY.tokens

    def tokens(self, path: Path, alphabet: Sequence[str]) -> list[int]:
        """Returns the number in the alphabet of each token of protlm; it may lack residues."""
        number = {token: place for place, token in enumerate(alphabet)}
        if len(number) != len(alphabet):
            raise InputDataError(f"{path}: the alphabet repeats a token")
        words = vocabulary_of(self.frame)
        for token in (*self.special, *STANDARD, *words.frame.own_tokens):
            if token not in number:
                raise InputDataError(f"{path}: the alphabet lacks {token!r:.20}")
        names = {
            **{one: one for one in (*RESIDUES, *words.frame.own_tokens) if one in number},
            **{letter: token for letter, token in self.read_as.items() if token in number},
            **dict(zip(("<cls>", "<pad>", "<eos>", "<unk>", "<mask>"), self.special, strict=True)),
        }
        unused = set(alphabet) - {*names.values(), *RESIDUES}
        unused = [t for t in unused if not any(re.fullmatch(one, t) for one in self.left_out)]
        if unused:
            raise InputDataError(
                f"{path}: the alphabet has {len(unused)} tokens that protlm lacks, for instance "
                f"{min(unused)!r:.20}"
            )
        return [number[names.get(token, names["<unk>"])] for token in words.tokens]

    def _check_shapes(
        self, path: Path, config: ModelConfig, weights: Mapping[str, Tensor], rows: int
    ) -> None:
        if self.spare_rows:
            rows = max(rows, len(weights["embedding.weight"]))
        width = config.model_dim
        shapes: Shapes = {
            "embedding.weight": (rows, width),
            "head.weight": (rows, width),
            "head.bias": (rows,),
            "positions.table": (config.max_length + self.first_position, width),
        }
        check_shapes(path, weights, shapes)


def _pair_halves(path: Path, config: ModelConfig, weights: dict[str, Tensor]) -> None:
    for name in [name for name in weights if name.endswith((".query.weight", ".key.weight"))]:
        check_shapes(path, weights, {name: (config.model_dim, config.model_dim)})
        pairs = weights[name].unflatten(0, (config.num_heads, -1, 2))
        weights[name] = pairs.transpose(1, 2).flatten(0, 2).contiguous()


def unwrapped(source: Source, family: type[Family]) -> Source:
    """Returns a model by the names of its own class, as which an encoder may have been saved.

    What another program put before all of them is removed where only one model begins so; heads of
    other tasks are left out, which is printed.
    """
    tensors = {_INFIXES.sub("", name): value for name, value in source.tensors.items()}
    ends = [name.removesuffix(family.anchor) for name in tensors if name.endswith(family.anchor)]
    outer = [end for end in ends if not end or end.endswith(".")] if family.anchor else []
    if len(outer) == 1:
        # That of a model with a head, or of a bare encoder.
        prefix = outer[0].removesuffix(family.encoder)
        own = family.encoder if outer[0] == prefix else ""
        head = re.compile(rf"{family.other_heads}|{family.output_layer}.*")
        inside = {n: n.removeprefix(prefix) for n in tensors if n.startswith(prefix)}
        renamed = {n: x if head.fullmatch(x) else own + x for n, x in inside.items()}
        tensors = {renamed.get(n, n): value for n, value in tensors.items()}
    if len(outer) > 1 or len(tensors) < len(source.tensors):
        raise InputDataError(
            f"{source.path} has the tensors of several models, which begin with "
            f"{' and '.join(map(repr, outer[:3]))}; save one of them by save_pretrained(FOLDER)"
        )
    lost = [name for name in tensors if re.fullmatch(family.other_heads, name)]
    if lost:
        print(f"{source.path}: left out {listed(lost)}, of another task", file=sys.stderr)
    # Half precision is a format of files; sums and products of the tensors are not rounded to it.
    half, kept = (torch.float16, torch.bfloat16), (n for n in tensors if n not in lost)
    single = {n: tensors[n].float() if tensors[n].dtype in half else tensors[n] for n in kept}
    return replace(source, tensors=single)


def num_rows(source: Source, weights: Mapping[str, Tensor], name: str) -> int:
    """Returns the number of rows of a matrix."""
    if name not in weights:
        raise InputDataError(f"{source.path} has no layers")
    check_shapes(source.path, weights, {name: (None, None)})
    return len(weights[name])


def check_shapes(path: Path, weights: Mapping[str, Tensor], expected: Shapes) -> None:
    """Compares shapes with those of the alphabet and the settings; None is any size but 0."""
    for name in [name for name in expected if name in weights]:
        found, sizes = weights[name].shape, expected[name]
        pairs = zip(found, sizes, strict=False)
        fits = all(size > 0 if want is None else size == want for size, want in pairs)
        if len(found) != len(sizes) or not fits:
            wanted = ["at least 1" if size is None else str(size) for size in sizes]
            raise InputDataError(
                f"{path}: the tensor that becomes {name} has the shape {list(found)}; the alphabet "
                f"and the settings need [{', '.join(wanted)}]"
            )
