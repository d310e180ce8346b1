"""A trained model for use: from sequences to logits, hidden states and attention maps."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from protlm import attention
from protlm.attention.base import Recurrent
from protlm.attention.layers import cannot_decode
from protlm.checkpoints.description import ModelDescription
from protlm.checkpoints.format import weights_hash
from protlm.config import Objective
from protlm.data.dataset import collate
from protlm.data.records.in_memory import SequenceLike, letters_of, residues_of, sequences_of
from protlm.data.vocabulary import Vocabulary
from protlm.model.decoding import GeneratedSequence, generate
from protlm.model.selfattention import AttentionInputs
from protlm.model.transformer import ModelOutput, ProteinLM
from protlm.options.generate import Sampling
from protlm.system.errors import UserError, one_of

if TYPE_CHECKING:
    from protlm.model.relatives import InContexts


@dataclass(frozen=True)
class TokenBatch:
    """Tokenized sequences: residues in the frame of the model, padded to the longest."""

    tokens_BL: Tensor
    mask_BL: Tensor
    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.lengths)


class PretrainedModel:
    """A model in evaluation mode, on one device.

    Layer 0 is the embedding, and layer n is the output of block n (or, for maps, the attention of
    block n). Negative layers count from the end. Heads are numbered from 1.
    """

    def __init__(
        self,
        network: ProteinLM,
        description: ModelDescription,
        *,
        rebuild: Callable[[int], ProteinLM],
    ) -> None:
        self.network = network.eval()
        self.description = description
        self._rebuild = rebuild

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return self.network.num_layers

    @property
    def num_heads(self) -> int:
        """Heads per block."""
        return self.description.model.num_heads

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens of the model, and the frame in which it reads residues."""
        return self.network.vocabulary

    @property
    def predicts(self) -> bool:
        """Whether the model predicts residues: an encoder does not."""
        can_ask = self.vocabulary.start > 0 if self.causal else self.vocabulary.frame.has_mask
        return self.network.head is not None and can_ask

    @property
    def causal(self) -> bool:
        """Whether the model predicts the next residue."""
        return self.description.objective is Objective.causal

    @property
    def max_length(self) -> int | None:
        """The maximum number of positions, including special tokens, or None without a limit."""
        return self.network.max_length

    @property
    def max_residues(self) -> int | None:
        """The maximum number of residues of a sequence, or None without a limit."""
        return None if self.max_length is None else self.max_length - self.vocabulary.num_around

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.network.parameters()).device

    @property
    def hash(self) -> str:
        """The SHA-256 of the weights."""
        return weights_hash(self.network.state_dict())

    @property
    def identity(self) -> str:
        """The SHA-256 of the weights and of what is computed with them."""
        plain = {k: x for k, x in self.description.to_plain().items() if k != "source"}
        text = f"{self.hash} {json.dumps(plain, sort_keys=True)}"
        return hashlib.sha256(text.encode()).hexdigest()

    def to(self, device: str | torch.device) -> Self:
        """Moves the weights to a device."""
        self.network.to(device)
        return self

    def tokenize(self, sequences: Iterable[SequenceLike]) -> TokenBatch:
        """Tokenizes sequences of residues, in upper or lower case.

        Args:
            sequences: text, Seq or SeqRecord of Biopython, or pairs of a name, which is ignored,
                and one of these.

        Raises:
            InputDataError: a letter is not a residue, or a sequence is empty.
            UserError: something else, or more positions than the model has.
        """
        texts = sequences_of(sequences, "tokenize([sequence])")
        return self.batch_of(residues_of(texts, longest=self.max_residues))

    def batch_of(self, sequences: Iterable[str]) -> TokenBatch:
        """Returns the tokens of residues that were checked before."""
        encoded = [*map(self.vocabulary.encode, sequences)]
        tokens_BL, mask_BL = collate(encoded, vocabulary=self.vocabulary)
        return TokenBatch(
            tokens_BL.to(self.device), mask_BL.to(self.device), tuple(map(len, encoded))
        )

    def __call__(
        self,
        batch: TokenBatch,
        layers: Iterable[int] = (),
        *,
        causal: bool | None = None,
        gradients: bool = False,
    ) -> ModelOutput:
        """Runs the model; `causal` defaults to how it was trained.

        With `gradients`, `backward` and `torch.autograd.grad` reach the weights and the hidden
        states of `layers`.

        Raises:
            UserError: sequences in place of their tokens, or a layer that does not exist.
        """
        _check_tokens(batch)
        numbers = {layer: self.layer_number(layer, first=0) for layer in layers}
        causal = self.causal if causal is None else causal
        with torch.inference_mode(not gradients):
            out = self.network(
                batch.tokens_BL, batch.mask_BL, causal=causal, layers=[*numbers.values()]
            )
        return ModelOutput(
            out.logits, {layer: out.hidden[number] for layer, number in numbers.items()}
        )

    @torch.inference_mode()
    def hidden_states(self, batch: TokenBatch, layers: Iterable[int]) -> dict[int, Tensor]:
        """Returns the hidden states of layers, BLD, without the logits and later blocks."""
        _check_tokens(batch)
        numbers = {layer: self.layer_number(layer, first=0) for layer in layers}
        hidden = self.network.hidden_states(
            batch.tokens_BL, batch.mask_BL, causal=self.causal, layers=numbers.values()
        )
        return {layer: hidden[number] for layer, number in numbers.items()}

    def attention_inputs(self, batch: TokenBatch) -> Iterator[tuple[int, AttentionInputs]]:
        """Yields the number of each layer, from 1, and what its mechanism is given."""
        _check_tokens(batch)
        return self.network.attention_inputs(batch.tokens_BL, batch.mask_BL, causal=self.causal)

    @torch.inference_mode()
    def attention_maps(
        self,
        batch: TokenBatch,
        layers: int | Iterable[int] | None = None,
        heads: int | Iterable[int] | None = None,
        *,
        relatives: "InContexts | None" = None,
    ) -> dict[int, Tensor]:
        """Returns exact maps, BHLL on the CPU, by layer as asked; by default all layers and heads.

        Args:
            relatives: those of a batch of one protein, from `relatives`; maps are of the first
                context, without the columns of relatives.

        Raises:
            UserError: a layer or a head that does not exist, or several proteins with relatives.
        """
        if relatives is not None:
            one = begun(relatives, self, [""]).first("", self._only(batch))
            return one.attention_maps(batch, layers, heads)
        asked = numbers_of(layers, self.num_layers)
        numbers = {layer: self.layer_number(layer, first=1) for layer in asked}
        blocks: dict[int, list[Tensor]] = {number: [] for number in numbers.values()}
        for number, _, map_BHML in self.attention_row_blocks(batch, asked, heads):
            blocks[number].append(map_BHML.cpu())
        maps = {number: torch.cat(parts, dim=2) for number, parts in blocks.items()}
        return {layer: maps[number] for layer, number in numbers.items()}

    @torch.inference_mode()
    def attention_row_blocks(
        self,
        batch: TokenBatch,
        layers: int | Iterable[int] | None = None,
        heads: int | Iterable[int] | None = None,
        *,
        block: int = 256,
    ) -> Iterator[tuple[int, slice, Tensor]]:
        """Yields (layer, rows, map_BHML): exact maps in blocks of rows, never L×L at once.

        Layers are numbered from 1 here, also where they were asked for from the end.
        """
        wanted, heads = self.layers_and_heads(layers, heads)
        chosen = [head - 1 for head in heads]
        for number, x in self.attention_inputs(batch):
            if number in wanted:
                length = batch.tokens_BL.shape[1]
                for start in range(0, length, block):
                    rows = slice(start, min(start + block, length))
                    map_BHML = x.map_rows(rows)
                    # Of relatives, no columns.
                    yield number, rows, map_BHML[:, chosen, :, x.own :]
            if number == max(wanted, default=number):
                return

    def _only(self, batch: TokenBatch) -> str:
        """Returns the residues of a batch of one protein, with X for tokens that are none."""
        if len(batch) != 1:
            raise UserError(f"maps with relatives are of one protein; the batch has {len(batch)}")
        tokens = batch.tokens_BL[0, self.vocabulary.inner].cpu().numpy()
        is_residue = self.vocabulary.is_residue[tokens]
        return self.vocabulary.decode(np.where(is_residue, tokens, self.vocabulary["X"]))

    def generate(
        self,
        number: int,
        *,
        prefix: SequenceLike = "",
        max_residues: int | None = None,
        sampling: Sampling | None = None,
        seed: int = 0,
        batch_size: int = 32,
        relatives: "InContexts | None" = None,
    ) -> Iterator[GeneratedSequence]:
        """Samples sequences from a causal model, and yields them as they end.

        Args:
            prefix: residues that all sequences begin with.
            sampling: temperature, top-k and top-p; None samples from the model's distribution.
            seed: random seed; a sequence depends only on the seed and its own number.
            relatives: those of a family, from `relatives`, whose first context the sequences follow
                as new members.

        Raises:
            UserError: the model cannot generate, or a setting is out of range.
            InputDataError: a letter of the prefix is not a residue.
        """
        self._check_generates()
        for name, value, least in (
            ("number of sequences", number, 1),
            ("batch size", batch_size, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise UserError(f"{name} {value} must be at least {least}")
        texts = [*filter(None, [letters_of(prefix, "the prefix")])]
        tokens = self.vocabulary.encode("".join(residues_of(texts, "the prefix")))
        if not (self.vocabulary.start or len(tokens)):
            raise UserError(
                "this model has no token before the first residue, which it cannot sample; give "
                "the first residues as prefix",
                {"prefix": "RESIDUES"},
            )
        longest = self._longest_generated(max_residues)
        if len(tokens) >= longest:
            raise UserError(
                f"a prefix of {len(tokens)} residues leaves nothing to sample: a sequence has at "
                f"most {longest} residues; allow a greater length"
            )
        model = self if relatives is None else begun(relatives, self, [""]).first("", "")
        return generate(
            model.network,
            tokens,
            sampling or Sampling(),
            number=number,
            max_residues=longest,
            seed=seed,
            batch_size=batch_size,
        )

    def _check_generates(self) -> None:
        if not self.causal:
            raise UserError(
                "this model predicts masked residues, and only a causal model generates sequences; "
                "train one: protlm train objective=causal run_dir=RUN; or sample from this one by "
                "protlm generate with sequences to start from",
                {"start": "SEQUENCES.fasta"},
            )
        if found := cannot_decode(self.description.attention_config, self.num_layers):
            known = [n for n in attention.names() if issubclass(attention.mechanism(n), Recurrent)]
            raise UserError(
                f"{found} cannot generate one residue at a time; "
                f"train a causal model with one of: {one_of(known)}"
            )

    def _longest_generated(self, max_residues: int | None) -> int:
        if max_residues is None:
            return self.description.max_length - self.vocabulary.num_around
        if self.max_residues is not None and max_residues > self.max_residues:
            raise UserError(
                f"a length of {max_residues} exceeds the {self.max_residues} residues that this "
                "model accepts; request less, or train a model with model.positions=rotary"
            )
        return max_residues

    def with_random_weights(self, seed: int) -> Self:
        """Returns an untrained model of the same architecture, the baseline of any result."""
        return type(self)(
            self._rebuild(seed).to(self.device), self.description, rebuild=self._rebuild
        )

    def layer_number(self, layer: int, *, first: int) -> int:
        """Converts a layer number, which may be negative, to a number from `first` to N."""
        number = layer + self.num_layers + 1 if layer < 0 else layer
        if not first <= number <= self.num_layers:
            raise UserError(
                f"layer {layer} does not exist; this model has {first} to {self.num_layers}"
            )
        return number

    def layers_and_heads(
        self, layers: int | Iterable[int] | None = None, heads: int | Iterable[int] | None = None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the numbers of layers and heads, from 1, each once; None is all."""
        asked = numbers_of(layers, self.num_layers)
        numbers = dict.fromkeys(self.layer_number(layer, first=1) for layer in asked)
        chosen = tuple(dict.fromkeys(numbers_of(heads, self.num_heads)))
        for head in chosen:
            if not 1 <= head <= self.num_heads:
                raise UserError(f"head {head} does not exist; this model has 1 to {self.num_heads}")
        return tuple(numbers), chosen


def numbers_of(given: int | Iterable[int] | None, last: int) -> list[int]:
    """Returns the numbers that are given, of one as of several; None is all, from 1 to `last`."""
    given = range(1, last + 1) if given is None else given
    # A whole array has an index by its type, but only one of a single number has it.
    with suppress(TypeError):
        return [index(given)]  # type: ignore[arg-type]
    try:
        return [*map(index, given)]  # type: ignore[arg-type]
    except TypeError:
        raise UserError(f"{given!r} is not a number, nor a list of numbers") from None


def begun(relatives: "InContexts", model: PretrainedModel, names: Iterable[str]) -> "InContexts":
    """Returns the relatives that a program gives, begun; refuses bare files and sequences."""
    if not hasattr(relatives, "begun"):
        raise UserError(
            f"one {type(relatives).__name__} is given for relatives; write "
            "relatives=model.relatives(FILE_OR_SEQUENCES) there"
        )
    return relatives.begun(model, [*names])


def _check_tokens(batch: TokenBatch) -> None:
    if not isinstance(batch, TokenBatch):
        raise UserError(
            f"one {type(batch).__name__} is given for tokens; write model.tokenize(sequences) there"
        )
