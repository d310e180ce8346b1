"""A tiny model of another program with random weights, its files, and its network as published."""

import argparse
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from protlm.config import Frame
from protlm.data.vocabulary import VOCABULARY, vocabulary_of
from protlm.interop.layout import each

LAYERS, WIDTH, HEADS, INNER, POSITIONS = 2, 32, 4, 48, 64
SPECIAL = ("<cls>", "<pad>", "<eos>", "<unk>", "<mask>")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Example:
    """A model in one layout.

    Attributes:
        settings: its description.
        names: patterns of those of its tensors, by the names of `published`; `{}` is the number of
            a layer. Tensors of one name are stacked.
        write: writes settings and tensors to an empty folder; returns the path of the model.
        alphabet: its tokens.
        special: its names of `SPECIAL`.
        read_as: residues that are read as another of its tokens.
        spelled: patterns in `names`, and what replaces them.
        copies: tensors that are stored twice.
        further: shapes of tensors that are not used.
        original: the same model in another layout, which transformers has.
        convert: returns the weights of the file for those of the reference.
        by_head: whether stacks of three have the rows of a head of each, then those of the next.
        traits: what the reference computes in another way for this family.
        width: of its hidden states.
        heads: their number.
        first: the row of the first token in the table of positions.
        frame: the tokens around the residues, by protlm's names.
        clip: the bound of queries, keys and values.
        bases: those of the rotary positions of layers, from 0; otherwise 10,000.
    """

    settings: Mapping[str, Any]
    names: Mapping[str, str]
    write: Callable[[Path, Mapping[str, Any], Tensors], Path]
    alphabet: Sequence[str] = VOCABULARY.tokens
    special: Sequence[str] = SPECIAL
    read_as: Mapping[str, str] = field(default_factory=dict)
    spelled: Sequence[tuple[str, str]] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    further: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    original: "Example | None" = None
    convert: Callable[[Tensors], Tensors] = dict
    by_head: bool = False
    traits: frozenset[str] = frozenset()
    width: int = WIDTH
    heads: int = HEADS
    first: int = 0
    frame: Frame | None = None
    clip: float | None = None
    bases: Mapping[int, float] = field(default_factory=dict)

    def numbers(self) -> list[int]:
        """The number in the alphabet of each token of protlm; others are read as unknown."""
        if tuple(self.alphabet[: len(VOCABULARY)]) == VOCABULARY.tokens:
            return list(range(len(VOCABULARY)))
        names = {token: token for token in self.alphabet if token.isalnum()} | dict(self.read_as)
        names |= zip(SPECIAL, self.special, strict=True)
        tokens = vocabulary_of(self.frame).tokens
        return [self.alphabet.index(names.get(t, names["<unk>"])) for t in tokens]

    def weights(self) -> Tensors:
        """Float64 weights of the reference, which keep hidden states at a norm of about 1."""
        if self.original is not None:
            return self.original.weights()
        width, rows = self.width, len(self.alphabet)
        shapes = {
            **dict.fromkeys(("q", "k", "v", "o", "dense"), (width, width)),
            **dict.fromkeys(("embed", "head"), (rows, width)),
            **dict.fromkeys(("up", "gate"), (INNER, width)),
            "down": (width, INNER),
            # Rows of the numbers of proteins, where layers see relatives, or of types of tokens.
            "types": (4 if self.bases else 2, width),
            "positions": (POSITIONS + self.first, width),
            "contacts": (1, LAYERS * self.heads),
        }
        generator = torch.Generator().manual_seed(0)
        found: Tensors = {}
        for name in _all_names(self.names):
            *_, module, part = name.split(".")
            shape = shapes.get(module, (width,))
            size = shape[:1] if part == "bias" else shape
            value = torch.randn(size, generator=generator, dtype=torch.float64)
            # A bound of queries, keys and values is exceeded.
            found[name] = value / size[-1] ** 0.5 * (8 if self.clip and module in "qkv" else 1)
        if "rotary.frequency" in found:
            # Released models have them rounded.
            pair = torch.arange(0, width // self.heads, 2, dtype=torch.float64)
            found["rotary.frequency"] = (10_000.0 ** (-pair * self.heads / width)).half().float()
        return found

    def tensors(self, weights: Tensors | None = None) -> Tensors:
        """The tensors of a file, of these weights if given."""
        weights = self.convert(weights or self.weights())
        parts: dict[str, list[Tensor]] = {}
        for ours, theirs in _all_names(self.names).items():
            parts.setdefault(theirs, []).extend([weights[ours]] if ours in weights else [])
        found = {theirs: self._stacked(matrices) for theirs, matrices in parts.items() if matrices}
        found |= {copy: found[first].clone() for copy, first in self.copies.items()}
        found |= {name: torch.zeros(shape) for name, shape in self.further.items()}
        return {self._spelling(name): value for name, value in found.items()}

    def _stacked(self, matrices: list[Tensor]) -> Tensor:
        heads = self.heads if self.by_head and len(matrices) == len("qkv") else 1
        rows = zip(*(matrix.chunk(heads) for matrix in matrices), strict=True)
        return torch.cat([*chain.from_iterable(rows)])

    def _spelling(self, name: str) -> str:
        for pattern, replacement in self.spelled:
            name = re.sub(pattern, replacement, name)
        return name

    def save(self, folder: Path, tensors: Tensors | None = None, **settings: Any) -> Path:
        """Writes the model to a new folder, with other settings or tensors if given."""
        folder.mkdir()
        return self.write(folder, {**self.settings, **settings}, tensors or self.tensors())


def _all_names(names: Mapping[str, str]) -> dict[str, str]:
    """Returns the names of the tensors of all layers."""
    found: dict[str, str] = {}
    for number, pair in itertools.product(map(str, range(LAYERS)), names.items()):
        found |= zip(*(each(name.replace("{}", number)) for name in pair), strict=True)
    return found


def in_layers(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    """Returns the names in a layer with the number of the layer before them."""
    return {f"{{}}.{ours}": f"{prefix}{{}}.{theirs}" for ours, theirs in names.items()}


def hugging_face(
    folder: Path, settings: Mapping[str, Any], tensors: Tensors, *, alphabet: Sequence[str] = ()
) -> Path:
    """Writes a folder, with `vocab.txt` if an alphabet is given."""
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if alphabet:
        (folder / "vocab.txt").write_text("\n".join(alphabet))
    return folder


def fair_esm(folder: Path, settings: Mapping[str, Any], tensors: Tensors) -> Path:
    """Writes a `.pt` file, of ESM-1b if the settings have an `arch`."""
    values = argparse.Namespace(**settings, other=argparse.Namespace(arch="x"))
    group = {"args": values} if "arch" in settings else {"cfg": {"model": values}}
    torch.save({**group, "model": tensors}, folder / "model.pt")
    return folder / "model.pt"


def ablang(
    folder: Path, settings: Mapping[str, Any], tensors: Tensors, *, alphabet: Sequence[str]
) -> Path:
    """Writes the folder of the library AbLang."""
    (folder / "hparams.json").write_text(json.dumps(settings))
    numbers = {token: number for number, token in enumerate(alphabet)}
    (folder / "vocab.json").write_text(json.dumps(numbers))
    torch.save(tensors, folder / "amodel.pt")
    return folder


def sapiens(folder: Path, settings: Mapping[str, Any], tensors: Tensors) -> Path:
    """Writes weights and their description beside them."""
    (folder / "model.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def esmc_library(folder: Path, settings: Mapping[str, Any], tensors: Tensors) -> Path:
    """Writes the file of the library `esm`."""
    torch.save(tensors, folder / "model.pth")
    return folder / "model.pth"


def published(
    example: Example,
    weights: dict[str, Tensor],
    tokens: list[int],
    lengths: Sequence[int] | None = None,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Computes a protein, whose tokens are numbered as in its alphabet.

    Or proteins of some lengths, end to end, as E1 does: each has its number in a table, and layers
    with another base see the proteins before, with positions that run on.

    Returns:
        The hidden states before and after each block, the maps, and the logits.
    """
    number_L = torch.arange(len(lengths or [0])).repeat_interleave(
        torch.tensor(lengths or [len(tokens)])
    )
    x_LD = _embedded(example, weights, tokens, number_L)
    states, maps = [x_LD], []
    # A norm after the last block means that blocks have theirs before their sublayers.
    is_post = "final_norm.weight" not in weights
    divisor = (LAYERS / 36) ** 0.5 if "scaled" in example.traits else 1
    for number in range(LAYERS):
        part = {
            name.removeprefix(f"{number}."): value
            for name, value in weights.items()
            if name.startswith(f"{number}.")
        }
        y_LD = x_LD if is_post else _norm(example, x_LD, part, "norm1")
        y_LD, map_HLL = _attention(example, y_LD, part, weights, number, number_L)
        x_LD = x_LD + y_LD / divisor
        x_LD = _norm(example, x_LD, part, "norm1") if is_post else x_LD
        y_LD = x_LD if is_post else _norm(example, x_LD, part, "norm2")
        up_LF = _linear(y_LD, part, "up")
        is_gated = "gate.weight" in part
        inner_LF = _silu(_linear(y_LD, part, "gate")) * up_LF if is_gated else _gelu(up_LF)
        x_LD = x_LD + _linear(inner_LF, part, "down") / divisor
        x_LD = _norm(example, x_LD, part, "norm2") if is_post else x_LD
        states.append(x_LD)
        maps.append(map_HLL)
    if not is_post:
        x_LD = states[-1] = _norm(example, x_LD, weights, "final_norm")
    if "dense.weight" in weights:
        x_LD = _norm(example, _gelu(_linear(x_LD, weights, "dense")), weights, "head_norm")
    head = {"head.weight": weights["embed.weight"], **weights}
    return states, maps, _linear(x_LD, head, "head")


def _embedded(
    example: Example, weights: dict[str, Tensor], tokens: list[int], number_L: Tensor
) -> Tensor:
    x_LD = weights["embed.weight"][tokens]
    if "token_dropout" in example.traits:
        mask = example.alphabet.index(example.special[-1])
        is_mask_L1 = torch.tensor(tokens)[:, None] == mask
        x_LD = x_LD.masked_fill(is_mask_L1, 0) * (1 - 0.15 * 0.8)
        x_LD = x_LD / (1 - is_mask_L1.double().mean())
    if "types.weight" in weights:
        x_LD = x_LD + weights["types.weight"][number_L]
    if "positions.weight" in weights:
        x_LD = x_LD + weights["positions.weight"][example.first :][: len(tokens)]
    return _norm(example, x_LD, weights, "embed_norm") if "embed_norm.weight" in weights else x_LD


def _attention(
    example: Example,
    y_LD: Tensor,
    part: Tensors,
    weights: Tensors,
    number: int,
    number_L: Tensor,
) -> tuple[Tensor, Tensor]:
    place_L, sees_LL = torch.arange(len(number_L)), number_L[None] <= number_L[:, None]
    if number not in example.bases:
        place_L = place_L - torch.searchsorted(number_L, number_L)
        sees_LL = number_L[None] == number_L[:, None]
    projected = []
    for name in "qkv":
        z_LD = _linear(y_LD, part, name)
        if example.clip is not None:
            assert bool((z_LD.abs() > example.clip).any())
            z_LD = z_LD.clamp(-example.clip, example.clip)
        if f"{name}_norm.weight" in part:
            z_LD = _norm(example, z_LD, part, f"{name}_norm")
        projected.append(z_LD.unflatten(-1, (example.heads, -1)).transpose(0, 1))
    q_HLK, k_HLK, v_HLK = projected
    if "positions.weight" not in weights:
        frequency, interleaved = weights.get("rotary.frequency"), "interleaved" in example.traits
        if frequency is None:
            exponent = torch.arange(0, q_HLK.shape[-1], 2).double() / q_HLK.shape[-1]
            frequency = example.bases.get(number, 10_000.0) ** -exponent
        q_HLK, k_HLK = (
            _rotated(z, frequency, place_L, interleaved=interleaved) for z in (q_HLK, k_HLK)
        )
    logits_HLL = q_HLK @ k_HLK.mT / q_HLK.shape[-1] ** 0.5
    map_HLL = logits_HLL.masked_fill(~sees_LL, -torch.inf).softmax(-1)
    return _linear((map_HLL @ v_HLK).transpose(0, 1).flatten(1), part, "o"), map_HLL


def _rotated(x_HLK: Tensor, frequency: Tensor, place_L: Tensor, *, interleaved: bool) -> Tensor:
    """Every pair of coordinates is a complex number, multiplied by exp(i p θ^(-2j/K))."""
    width = x_HLK.shape[-1]
    angle = torch.outer(place_L.double(), frequency.double())
    if interleaved:
        real, imaginary = x_HLK[..., ::2], x_HLK[..., 1::2]
    else:
        real, imaginary = x_HLK[..., : width // 2], x_HLK[..., width // 2 :]
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle)
    pair = [turned.real, turned.imag]
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


def _norm(example: Example, x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    if "rms" not in example.traits or name == "head_norm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]
    return x + weights[f"{name}.bias"] if f"{name}.bias" in weights else x


def _linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _gelu(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.erf(x / 2**0.5))


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))
