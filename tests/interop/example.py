"""A tiny model of another program with random weights, and the files in which it is stored."""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from protlm.data.vocabulary import VOCABULARY

LAYERS, WIDTH, HEADS, INNER, POSITIONS = 2, 32, 4, 48, 64
SPECIAL = ("<cls>", "<pad>", "<eos>", "<unk>", "<mask>")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Example:
    """A model in one layout.

    Attributes:
        settings: its description.
        names: those of its tensors, by the names of the reference (`published.py`); `{}` is the
            number of a layer, and `*` stands for `weight` and `bias`.
        write: writes settings and tensors to an empty folder; returns the path of the model.
        alphabet: its tokens.
        special: its names of `SPECIAL`.
        read_as: residues that are read as another of its tokens.
        spelled: patterns in `names`, and what replaces them.
        stacks: tensors that consist of several.
        copies: tensors that are stored twice.
        further: shapes of tensors that are not used.
        traits: what the reference computes in another way for this family.
        width: of its hidden states.
        heads: their number.
        first: the row of the first token in the table of positions.
    """

    settings: Mapping[str, Any]
    names: Mapping[str, str]
    write: Callable[[Path, Mapping[str, Any], Tensors], Path]
    alphabet: Sequence[str] = VOCABULARY.tokens
    special: Sequence[str] = SPECIAL
    read_as: Mapping[str, str] = field(default_factory=dict)
    spelled: Sequence[tuple[str, str]] = ()
    stacks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    further: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()
    width: int = WIDTH
    heads: int = HEADS
    first: int = 0

    def numbers(self) -> list[int]:
        """The number in the alphabet of each token of protlm; others are read as unknown."""
        if tuple(self.alphabet[: len(VOCABULARY)]) == VOCABULARY.tokens:
            return list(range(len(VOCABULARY)))
        names = {token: token for token in self.alphabet if token.isalpha()} | dict(self.read_as)
        names |= zip(SPECIAL, self.special, strict=True)
        return [self.alphabet.index(names.get(t, names["<unk>"])) for t in VOCABULARY.tokens]

    def weights(self) -> Tensors:
        """Float64 weights of the reference, which keep hidden states at a norm of about 1."""
        width, rows = self.width, len(self.alphabet)
        shapes = {
            **dict.fromkeys(("q", "k", "v", "o", "dense"), (width, width)),
            **dict.fromkeys(("embed", "head"), (rows, width)),
            **dict.fromkeys(("up", "gate"), (INNER, width)),
            "down": (width, INNER),
            "types": (2, width),
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
            found[name] = value / size[-1] ** 0.5
        if "rotary.frequency" in found:
            # Released models have them rounded.
            pair = torch.arange(0, width // self.heads, 2, dtype=torch.float64)
            found["rotary.frequency"] = (10_000.0 ** (-pair * self.heads / width)).half().float()
        return found

    def tensors(self, weights: Tensors | None = None) -> Tensors:
        """The tensors of a file, of these weights if given."""
        weights = weights or self.weights()
        found = {theirs: weights[ours].clone() for ours, theirs in _all_names(self.names).items()}
        for number in range(LAYERS):
            for stack, parts in self.stacks.items():
                matrices = [found.pop(part.format(number)) for part in parts]
                found[stack.format(number)] = torch.cat(matrices)
        found |= {copy: found[first].clone() for copy, first in self.copies.items()}
        found |= {name: torch.zeros(shape) for name, shape in self.further.items()}
        return {self._spelling(name): value for name, value in found.items()}

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
    return {
        ours.format(number).replace("*", part): theirs.format(number).replace("*", part)
        for number in range(LAYERS)
        for ours, theirs in names.items()
        for part in ("weight", "bias")
    }


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
