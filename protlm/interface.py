"""The models of the Python interface: `protlm.load(...)` returns one."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from protlm.analysis.contact_regression import BYTES_PER_PAIR, SavedFit, fit_contacts
from protlm.analysis.features.autoencoder import read_features
from protlm.attention.hybrid import Hybrid
from protlm.attention.layers import attention_label
from protlm.attention.linearized.variance import SquareNorms, pair_sums, relative_error
from protlm.attention.performer_softmax import PerformerSoftmax
from protlm.config.data import EMBED_TOKENS, TOKENS_PER_BATCH
from protlm.data.records.in_memory import (
    SequenceLike,
    letters_of,
    name_of,
    named_sequences,
    residues_of,
    sequences_of,
)
from protlm.data.records.proteins import Proteins
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.downstream.estimators import averaged, default_estimator, perplexity, score
from protlm.downstream.variants import is_mutant, parse_mutant, parse_sequence
from protlm.model.embedding import EmbeddedFile, Embedder, Vectors, batches, embed_all
from protlm.model.memory import Room
from protlm.model.pretrained import PretrainedModel, TokenBatch, begun, numbers_of
from protlm.model.relatives import InContexts, grouped
from protlm.model.transformer import num_parameters
from protlm.options.embed import Pooling
from protlm.options.relatives import FamilyOptions, Weights
from protlm.options.score import Estimator
from protlm.options.shared import Duplicates
from protlm.system.errors import InputDataError, UserError, refuse_unknown

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_MASK = "<mask>"


class Model(PretrainedModel):
    """A model for notebooks and programs.

    >>> import protlm
    >>> model = protlm.load("hybrid-6m")
    >>> model.embed(["MKTAYIAKQR", "MKV"]).shape
    (2, 256)
    """

    @classmethod
    def of(cls, model: PretrainedModel) -> Self:
        """Returns the model with the methods of this class."""
        return cls(model.network, model.description, rebuild=model._rebuild)

    def __repr__(self) -> str:
        kind, size = "causal" if self.causal else "masked", num_parameters(self.network)
        layers = f"{self.num_layers} layers of {attention_label(self.description.attention_config)}"
        limit = "any length" if self.max_residues is None else f"up to {self.max_residues} residues"
        widths = f"{self.num_heads} heads, width {self.width}, proteins of {limit}"
        return f"Model({kind}, {size:,} parameters, {layers}, {widths}, on {self.device})"

    def embed(
        self,
        sequences: Iterable[SequenceLike],
        layers: int | Iterable[int] = -1,
        pooling: str = "mean",
        *,
        tokens_per_batch: int = EMBED_TOKENS,
        as_torch: bool = False,
        relatives: InContexts | None = None,
    ) -> Any:
        """Returns the vectors of sequences, in their order.

        Args:
            sequences: as for `tokenize`.
            layers: 0 the embedding, n the output of block n, -1 the last; of several layers the
                result is a dictionary.
            pooling: mean, max, std or cls; per_tok returns a list of the vectors of residues.
            tokens_per_batch: rows times length of a batch, at most.
            as_torch: returns tensors on the CPU in place of NumPy arrays.
            relatives: those of the sequences, from `relatives`; vectors are averaged over contexts.

        Returns:
            An array (sequences, D), or a list of arrays (L, D), in float32; of several layers one
            for each.

        Raises:
            UserError: a layer or a pooling that does not exist, something that is not a sequence,
                one that does not fit into the memory or the table of positions, or its vectors are
                not finite.

        >>> import protlm
        >>> model = protlm.load("hybrid-6m")
        >>> residues = model.embed(["MKTAYIAKQR", "MKV"], pooling="per_tok")
        >>> [one.shape for one in residues]
        [(10, 256), (3, 256)]
        >>> sorted(model.embed(["MKV"], layers=[0, 2]))
        [0, 2]
        """
        texts, names = named_sequences(sequences, "embed([sequence]), or embed_file(path)")
        kind, numbers = _pooling(pooling), numbers_of(layers, self.num_layers)
        number_of = {layer: self.layer_number(layer, first=0) for layer in numbers}
        embedder = Embedder(
            self,
            (kind,),
            tuple(dict.fromkeys(number_of.values())),
            contexts=relatives and begun(relatives, self, names),
            context_tokens=tokens_per_batch,
        )
        # Before the first of many batches; all in one batch would have the length of the longest.
        residues = residues_of(texts, longest=self.max_residues)
        vectors: list[Vectors] = [{}] * len(residues)
        for index, embedded in embed_all(embedder, residues, tokens_per_batch, names=names):
            name = f"sequence {index + 1} ({len(residues[index]):,} residues)"
            vectors[index] = embedder.checked(embedded, name)
        result = {}
        for layer, number in number_of.items():
            tensors = [of_sequence[kind, number] for of_sequence in vectors]
            if kind.is_matrix:
                result[layer] = tensors if as_torch else [tensor.numpy() for tensor in tensors]
            else:
                stacked = torch.stack(tensors) if tensors else torch.zeros(0, self.width)
                result[layer] = stacked if as_torch else stacked.numpy()
        return result if isinstance(layers, Iterable) else result[layers]

    @property
    def width(self) -> int:
        """The number of components of a vector, D."""
        return self.description.model.model_dim

    def embed_file(
        self,
        path: str | Path,
        layer: int = -1,
        pooling: str = "mean",
        *,
        duplicates: str = "error",
        windows: bool = False,
        tokens_per_batch: int = EMBED_TOKENS,
    ) -> EmbeddedFile:
        """Returns the proteins of a file with their vectors, computed while they are iterated.

        Args:
            path: FASTA, Swiss-Prot flat file or UniProt XML, plain or gzip.
            layer: as for `embed`.
            pooling: as for `embed`.
            duplicates: repeated identifiers: error, first, suffix, or header, which names every
                protein by its whole header.
            windows: computes proteins that are too long for the model in overlapping windows.
            tokens_per_batch: rows times length of a batch, at most.

        Raises:
            UserError: an option that does not exist.
            InputDataError: the file is damaged or has no usable protein, or an identifier is
                repeated.
        """
        refuse_unknown("duplicates", duplicates, Duplicates)
        embedder = Embedder(self, (_pooling(pooling),), (self.layer_number(layer, first=0),))
        longest = None if windows else self.max_residues
        return EmbeddedFile(
            embedder, Proteins(Path(path), longest, Duplicates(duplicates)), tokens_per_batch
        )

    def features(self, sequences: Iterable[SequenceLike], sae: str | Path) -> "list[csr_array]":
        """Returns the sparse features of residues; see `protlm features`.

        Args:
            sequences: as for `tokenize`.
            sae: the folder that `protlm features train` wrote for this model.

        Returns:
            For each sequence a matrix of SciPy, (L, features), in compressed rows: the features of
            residue i, from 0, are `one.indices[one.indptr[i] : one.indptr[i + 1]]`, and their
            activities, in float32, the same range of `one.data`.

        Raises:
            UserError: the features are those of another model, or as for `embed`.
            InputDataError: the folder is damaged.
        """
        found = read_features(Path(sae))
        found.settings.check(self)
        states = self.embed(sequences, found.settings.layer, "per_tok", as_torch=True)
        return [found.features_of(one) for one in states]

    def score(
        self,
        wild_type: SequenceLike,
        mutants: Iterable[SequenceLike],
        estimator: str | None = None,
        *,
        first_residue: int = 1,
        tokens_per_batch: int = TOKENS_PER_BATCH,
        relatives: InContexts | None = None,
    ) -> np.ndarray:
        """Returns the scores of variants, float64, in nats; see `protlm score`.

        Args:
            wild_type: residues.
            mutants: substitutions such as A1P, several joined by colons; or whole sequences with
                insertions and deletions, for estimators of whole sequences.
            estimator: its name; None takes the default of the model, and with relatives that all
                see all, which are read for every prediction, wt-marginals.
            first_residue: the number of the wild type's first residue.
            tokens_per_batch: rows times length of a batch, at most.
            relatives: those of the wild type, from `relatives`; log-probabilities are averaged over
                contexts.

        Raises:
            UserError: the estimator does not exist, or the model or a variant does not allow it.
            InputDataError: a mutant does not fit the wild type.

        >>> import protlm
        >>> model = protlm.load("hybrid-6m")
        >>> model.score("MKTAYIAKQR", ["K2R", "K2R:Y5W"], "wt-marginals").shape
        (2,)
        """
        texts = sequences_of(mutants, "score(wild_type, [mutant])", "mutant")
        (letters,) = residues_of([letters_of(wild_type, "the wild type")], "the wild type")
        ((models, _),) = grouped(self, relatives, [name_of(wild_type)], [letters], tokens_per_batch)
        predictor = averaged(models, tokens_per_batch)
        chosen = default_estimator(predictor)
        if estimator is not None:
            refuse_unknown("estimator", estimator, Estimator)
            chosen = Estimator(estimator)
        variants = [
            parse_mutant(text, letters, first_residue=first_residue)
            if is_mutant(text)
            else parse_sequence(residues_of([text], f"mutant {number}")[0], letters)
            for number, text in enumerate(texts, start=1)
        ]
        return score(chosen, predictor, letters, variants).values

    def perplexity(
        self,
        sequences: Iterable[SequenceLike],
        *,
        tokens_per_batch: int = TOKENS_PER_BATCH,
        relatives: InContexts | None = None,
    ) -> np.ndarray:
        """Returns the perplexity of each sequence, float64: exp of the mean -log p of its residues.

        A masked model predicts one masked residue in each pass (the pseudo-perplexity of Salazar
        et al. 2020, doi:10.18653/v1/2020.acl-main.240), a causal one all in one pass. With
        relatives that all see all, every pass reads their contexts, and the time is printed before.

        Args:
            sequences: as for `tokenize`.
            tokens_per_batch: rows times length of a batch, at most.
            relatives: those of the sequences, from `relatives`; log-probabilities are averaged over
                contexts.

        Raises:
            UserError: an encoder, which predicts no residues, or something that is not a sequence.
            InputDataError: a letter is not a residue.

        >>> import protlm
        >>> model = protlm.load("hybrid-6m")
        >>> model.perplexity(["MKTAYIAKQR", "MKV"]).shape
        (2,)
        """
        letters, names = named_sequences(sequences, "perplexity([sequence])")
        texts, found = residues_of(letters), list[float]()
        for models, places in grouped(self, relatives, names, texts, tokens_per_batch):
            found += perplexity(averaged(models, tokens_per_batch), [texts[n] for n in places])
        return np.array(found)

    def contacts(
        self,
        sequences: Iterable[SequenceLike],
        fit: str | Path | None = None,
        *,
        relatives: InContexts | None = None,
    ) -> list[np.ndarray]:
        """Returns the contact probabilities of each sequence, (L, L), float32.

        They are those of `protlm contacts`, from a regression over the maps of all heads.

        Args:
            sequences: as for `tokenize`.
            fit: a folder of structures to fit to, or a saved NAME.fit.json; None fits to the
                shipped structures, once for a model.
            relatives: those of the sequences, from `relatives`; probabilities are averaged over
                contexts. The fit is to proteins without relatives.

        Raises:
            UserError: a sequence does not fit into the memory or the table of positions, or the
                fit is of another model.
            InputDataError: a letter is not a residue, or there are no structures to fit to.
        """
        letters, names = named_sequences(sequences, "contacts([sequence])")
        texts = residues_of(letters, longest=self.max_residues)
        room = Room(self, per_pair=4 * self.num_heads + BYTES_PER_PAIR)
        for number, one in enumerate(texts, start=1):
            if reason := room.refusal(len(one)):
                raise UserError(f"sequence {number}: {reason}; leave it out")
        saved = self._shipped_fit if fit is None else fit_contacts(self, Path(fit))
        if not saved.regression.num_heads_used:
            warnings.warn("no head carries contacts: all pairs are equally probable", stacklevel=2)
        return [
            saved.regression.predict_averaged(models, texts[place]).astype(np.float32)
            for models, places in grouped(self, relatives, names, texts, TOKENS_PER_BATCH)
            for place in places
        ]

    @cached_property
    def _shipped_fit(self) -> SavedFit:
        return fit_contacts(self, None)

    def predict_masked(
        self,
        sequences: Iterable[SequenceLike],
        *,
        tokens_per_batch: int = EMBED_TOKENS,
        relatives: InContexts | None = None,
    ) -> list[dict[int, dict[str, float]]]:
        """Predicts the residues that are written `<mask>`.

        Args:
            sequences: residues, with one or more `<mask>`.
            tokens_per_batch: rows times length of a batch, at most.
            relatives: those of the sequences, from `relatives` with the query; log-probabilities
                are averaged over contexts.

        Returns:
            For each sequence, by the position of a mask, counted from 1, the probabilities of the
            20 amino acids, the most probable first. Those of other tokens are left out.

        Raises:
            UserError: a causal model, or a sequence longer than the model accepts.
            InputDataError: a letter is not a residue.

        >>> import protlm
        >>> model = protlm.load("hybrid-6m")
        >>> found = model.predict_masked(["MK<mask>AYIAK<mask>R"])
        >>> [(position, len(letters)) for position, letters in found[0].items()]
        [(3, 20), (9, 20)]
        """
        texts, names = named_sequences(sequences, "predict_masked([sequence])")
        if relatives is not None and relatives.query is None:
            raise UserError(
                "a sequence with <mask> does not show which of its relatives is itself; write "
                "model.relatives(source, query=SEQUENCE), with the residues of the whole protein"
            )
        if self.causal:
            raise UserError("this model is causal, and predict_masked needs a masked model")
        masked_texts = ["".join(text.split()) for text in texts]
        places = [_masks(text) for text in masked_texts]
        # Any residue keeps the place of a mask.
        filled = residues_of(
            [text.replace(_MASK, "A") for text in masked_texts], longest=self.max_residues
        )
        predicted: list[dict[int, dict[str, float]]] = [{} for _ in filled]
        for models, own in grouped(self, relatives, names, filled, tokens_per_batch):
            for some in batches([len(filled[index]) for index in own], tokens_per_batch):
                indices = [own[number] for number in some]
                p_BLV = self._unmasked(models, [(filled[n], places[n]) for n in indices])
                for p_LV, index in zip(p_BLV, indices, strict=True):
                    predicted[index] = {n: _letters(p_LV[n - 1]) for n in places[index]}
        return predicted

    def _unmasked(
        self, models: Sequence[PretrainedModel], asked: Sequence[tuple[str, Sequence[int]]]
    ) -> Tensor:
        """Returns probabilities of all tokens at residues, BLV, some of which are masked."""
        batch = self.batch_of([text for text, _ in asked])
        for tokens_L, (_, places) in zip(batch.tokens_BL, asked, strict=True):
            tokens_L[np.array(places) - 1 + self.vocabulary.start] = self.vocabulary.mask
        # The mean of log-probabilities, up to a number for each position.
        logits = [model(batch).logits_BLV[:, self.vocabulary.start :].float() for model in models]
        return torch.stack(logits).mean(0).softmax(-1).cpu()

    def relatives(
        self,
        source: str | Path | Iterable[SequenceLike],
        query: SequenceLike | None = None,
        *,
        contexts: int = 4,
        tokens: int | None = None,
        seed: int = 0,
        filters: FamilyOptions | None = None,
        force: bool = False,
    ) -> InContexts:
        """Returns the relatives of sequences, for the `relatives=` of other methods.

        Args:
            source: an alignment or a sequence file, a folder with one for each name, a table of
                names and members, or sequences, aligned or not (docs/relatives.md).
            query: the protein that all sequences are variants of; None: each sequence is a query,
                found by the name of a pair or of a record.
            contexts: how many are drawn for a query, and averaged.
            tokens: most tokens of a context; None: those of a family in training.
            seed: of the draw.
            filters: which relatives are taken, and their weights.
            force: also if the model was trained without relatives.

        Raises:
            UserError: the model was trained without relatives, or an option is out of range.
            InputDataError: the source is damaged.

        >>> import protlm
        >>> model = protlm.load("hybrid-6m")
        >>> relatives = model.relatives(["MKTAYLAKQK", "MRTAYVAKNR"], contexts=2)
        >>> model.embed(["MKTAYIAKQR"], relatives=relatives).shape
        (1, 256)
        """
        given, usual = filters or FamilyOptions(), FamilyOptions()
        own = "contexts", "relatives_tokens", "relatives_seed"
        if not isinstance(given, FamilyOptions):
            raise UserError("filters are a protlm.options.relatives.FamilyOptions(...)")
        refuse_unknown("weights", given.weights or Weights.uniform, Weights)
        if any(getattr(given, name) != getattr(usual, name) for name in own):
            raise UserError("filters have no contexts, tokens or seed; give these as arguments")
        options = replace(
            given,
            contexts=contexts,
            relatives_tokens=tokens,
            relatives_seed=seed,
            whole_relatives=given.whole_relatives and Path(given.whole_relatives),
        )
        source = Path(source) if isinstance(source, str) else source
        whole = None
        if query is not None:
            (letters,) = residues_of([letters_of(query, "the query")], "the query")
            whole = name_of(query), letters
        return InContexts(self, source, options, query=whole, force=force)

    @torch.inference_mode()
    def estimate_errors(self, batch: TokenBatch) -> dict[int, tuple[Tensor, Tensor]]:
        """Measures how well FAVOR+ estimates softmax attention, by layer.

        Returns:
            For each layer of `performer_softmax`, also as a part of `hybrid`, per head of it: the
            mean `|q̂ + k̂|²` over pairs of positions, and the relative standard deviation of a
            weight, computed from it.
        """
        errors = {}
        for number, x in self.attention_inputs(batch):
            mechanism, heads = self.network.mechanism(number), slice(None)
            if isinstance(mechanism, Hybrid):
                mechanism, heads = mechanism.linear, slice(mechanism.local_heads, None)
            if isinstance(mechanism, PerformerSoftmax):
                q_BHLK, k_BHLK = x.q_BHLK[:, heads], x.k_BHLK[:, heads]
                norms = SquareNorms.of(pair_sums(q_BHLK, k_BHLK, batch.mask_BL, causal=self.causal))
                errors[number] = norms.sum_H, relative_error(mechanism, norms)
        return errors


def _pooling(name: str) -> Pooling:
    allowed = [kind for kind in Pooling if kind not in (Pooling.ranges, Pooling.features)]
    refuse_unknown("pooling", name, allowed)
    return Pooling(name)


def _masks(sequence: str) -> list[int]:
    """Returns the positions of the masks, from 1."""
    if _MASK not in sequence:
        raise InputDataError(f"{sequence[:50]} has no {_MASK}; write it in place of a residue")
    return np.cumsum([len(part) + 1 for part in sequence.split(_MASK)[:-1]]).tolist()


def _letters(p_V: Tensor) -> dict[str, float]:
    found = {letter: float(p_V[VOCABULARY[letter]]) for letter in STANDARD}
    return dict(sorted(found.items(), key=lambda one: -one[1]))
