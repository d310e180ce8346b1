"""The Python interface: vectors, scores and predictions, equal to those of the commands."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas
import pytest
import torch
from Bio.Seq import Seq
from Bio.SeqRecord import SeqRecord
from torch import Tensor

import protlm
from protlm import interface, loading
from protlm.attention import names
from protlm.checkpoints.format import Checkpoint
from protlm.commands.contacts import contacts
from protlm.data.records import Record
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.interface import Model
from protlm.model.embedding import Embedder
from protlm.model.pretrained import PretrainedModel
from protlm.options.look import ContactOptions
from protlm.options.relatives import FamilyOptions
from protlm.system.errors import InputDataError, UserError
from tests.small_models import small_model

SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "mkv", "ACDEFGHIKLMNPQRSTVWY"]


@pytest.fixture(scope="module")
def model(tiny_run: Path) -> Model:
    """The model of the tiny run."""
    return protlm.load(tiny_run)


@pytest.mark.parametrize("tokens_per_batch", [1, 4_096])
def test_vectors_are_those_of_each_sequence(model: Model, tokens_per_batch: int) -> None:
    states = [model(model.tokenize([one]), layers=[0, -1]).hidden[-1][0, 1:-1] for one in SEQUENCES]
    vectors = model.embed(SEQUENCES, tokens_per_batch=tokens_per_batch)
    np.testing.assert_allclose(vectors, [one.mean(0) for one in states], atol=1e-5)
    residues = model.embed(SEQUENCES, layers=[0, -1], pooling="per_tok", as_torch=True)
    assert set(residues) == {0, -1}
    torch.testing.assert_close(residues[-1], states, atol=1e-5, rtol=1e-5)
    assert model.embed([]).shape == (0, 64)


def test_every_record_of_a_file_is_yielded_or_skipped(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fasta = tmp_path / "x.fasta"
    fasta.write_text(">P1\nMKV\n>bad\nM?\n>long\nMKVW\n>P1\nMKV\n")
    vectors, calls = Embedder.vectors, list[str]()

    def without_the_long(self: Embedder, sequences: list[str], *rest: list) -> list:
        calls.extend(sequences)
        found = vectors(self, sequences, *rest)
        return [None if len(s) > 3 else one for s, one in zip(sequences, found, strict=True)]

    monkeypatch.setattr(Embedder, "vectors", without_the_long)
    with pytest.raises(InputDataError, match="P1 is repeated"):
        model.embed_file(fasta)
    proteins = model.embed_file(fasta, duplicates="suffix")
    # Twice: iterating again does not repeat what is skipped.
    for _ in range(2):
        calls.clear()
        assert [one.record.identifier for one in proteins] == ["P1", "P1_2"]
        assert [identifier for identifier, _ in proteins.skipped] == ["bad", "long"]
        assert sorted(calls) == ["MKV", "MKVW"]


def test_scores_are_differences_of_log_probabilities(model: Model) -> None:
    wild_type = SEQUENCES[0]
    log_p_LV = model(model.tokenize([wild_type])).logits_BLV[0].double().log_softmax(-1)
    own, new = VOCABULARY["K"], VOCABULARY["R"]
    (came,) = model.score(wild_type.lower(), ["K2R"], "wt-marginals")
    assert came == pytest.approx(float(log_p_LV[2, new] - log_p_LV[2, own]), abs=1e-4)
    assert model.score(wild_type, ["K25R"], first_residue=24).shape == (1,)
    assert np.isfinite(model.score("MKV", ["MKKV", "MRV"], "pseudo-log-likelihood")).all()
    with pytest.raises(UserError, match="estimator=x does not exist"):
        model.score("MKV", ["K2R"], "x")


def test_masked_residues_are_predicted(model: Model) -> None:
    long, short = "MK<mask>AYIAK<mask>R", "<mask>KV"
    found = model.predict_masked([long, short], tokens_per_batch=8)
    assert [list(one) for one in found] == [[3, 9], [1]]
    batch = model.tokenize(["AKV"])
    batch.tokens_BL[0, 1] = VOCABULARY.mask
    p_V = model(batch).logits_BLV[0, 1].softmax(-1)
    letters = found[1][1]
    assert set(letters) == set(STANDARD)
    assert list(letters.values()) == sorted(letters.values(), reverse=True)
    for letter, p in letters.items():
        assert p == pytest.approx(float(p_V[VOCABULARY[letter]]), abs=1e-6)


def test_perplexity_is_of_residues_that_are_hidden_one_at_a_time(
    model: Model, causal_run: Path
) -> None:
    def nats(model: Model, sequence: str, place: int, *, masked: bool) -> float:
        batch, token = model.tokenize([sequence]), VOCABULARY[sequence[place].upper()]
        if masked:
            batch.tokens_BL[0, place + 1] = VOCABULARY.mask
        return -float(model(batch).logits_BLV[0, place + masked].double().log_softmax(-1)[token])

    for one, masked in ((model, True), (protlm.load(causal_run), False)):
        truths = [
            np.exp(np.mean([nats(one, s, place, masked=masked) for place in range(len(s))]))
            for s in SEQUENCES
        ]
        for size in (1, 4_096):
            found = one.perplexity(SEQUENCES, tokens_per_batch=size)
            np.testing.assert_allclose(found, truths, rtol=1e-4)


@pytest.mark.slow
def test_contacts_are_those_of_the_command(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fasta, output, model = tmp_path / "x.fasta", tmp_path / "c.h5", protlm.load(tiny_run)
    fasta.write_text("".join(f">P{n}\n{one}\n" for n, one in enumerate(SEQUENCES)))
    contacts([fasta], tiny_run, output, ContactOptions())
    with h5py.File(output) as file:
        truths = [file[f"P{n}/probabilities"][:] for n in range(len(SEQUENCES))]
    found = [model.contacts(SEQUENCES, output.with_suffix(".fit.json")), model.contacts(SEQUENCES)]
    with pytest.raises(UserError, match="was fitted with another model"):
        model.with_random_weights(1).contacts(SEQUENCES, output.with_suffix(".fit.json"))
    # The second time nothing is fitted.
    monkeypatch.delattr(interface, "fit_contacts")
    for some in (*found, model.contacts(SEQUENCES)):
        for found_LL, truth_LL in zip(some, truths, strict=True):
            np.testing.assert_array_equal(found_LL, truth_LL)


def test_gradients_are_there_on_request(tiny_run: Path) -> None:
    """Compared with a finite difference in float64, after a pass that keeps none."""
    model = protlm.load(tiny_run)
    weight_VD = model.network.double().embedding.weight
    batch, step_VD = model.tokenize(SEQUENCES), 1e-5 * torch.randn_like(weight_VD)

    def loss(change_VD: Tensor, *, gradients: bool = False) -> tuple[Tensor, Tensor]:
        weight_VD.data.add_(change_VD)
        out = model(batch, layers=[0], gradients=gradients)
        return out.logits_BLV[batch.mask_BL].logsumexp(-1).sum(), out.hidden[0]

    difference = loss(step_VD)[0] - loss(-2 * step_VD)[0]
    total, hidden_BLD = loss(step_VD, gradients=True)
    slopes_VD, of_hidden_BLD = torch.autograd.grad(total, [weight_VD, hidden_BLD])
    torch.testing.assert_close(2 * (slopes_VD * step_VD).sum(), difference, rtol=1e-5, atol=1e-11)
    assert of_hidden_BLD[batch.mask_BL].any()


def test_a_model_says_what_it_is_and_is_on_the_device_of_the_commands(
    tiny_run: Path, causal_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()
    monkeypatch.setattr(loading, "pick_device", lambda name: asked.append(name) or "cpu")
    for kind, run in (("masked", tiny_run), ("causal", causal_run)):
        text = f"Model({kind}, 86,497 parameters, 2 layers of performer_relu, 2 heads, width 64, "
        assert repr(protlm.load(run)).startswith(text)
    assert asked == ["auto", "auto"]


NO_BATCH: Any = ["MKV"]
TOKENIZE = r"one list .* write model.tokenize\(sequences\)"


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda model: model.embed("MKV"), r"write embed\(\[sequence\]\)"),
        (lambda model: model.score("MKV", "K2R"), r"write score\(wild_type, \[mutant\]\)"),
        (lambda model: model.predict_masked("M<mask>V"), r"write predict_masked\(\[sequence\]\)"),
        (lambda model: model.embed(["MKV"], layers="all"), "'all' is not a number, nor a list of"),
        (lambda model: model(NO_BATCH), TOKENIZE),
        (lambda model: model.hidden_states(NO_BATCH, [0]), TOKENIZE),
        (lambda model: model.attention_maps(NO_BATCH), TOKENIZE),
        (lambda model: model.estimate_errors(NO_BATCH), TOKENIZE),
        (lambda model: model.embed(["MKV"], pooling="median"), "=median does not exist; there are"),
        (lambda model: model.predict_masked(["MKV"]), "MKV has no <mask>"),
        (lambda model: model.embed(["MKV"], relatives="x.a3m"), "one str is given for relatives"),
        (lambda model: model.score("MKV", ["K2R"], relatives=["MKT"]), "one list is given for rel"),
        (
            lambda model: model.relatives(["MKT"], filters={"min_identity": 0.3}, force=True),
            r"filters are a protlm\.options\.relatives\.FamilyOptions",
        ),
        (
            lambda model: model.relatives(["MKT"], filters=FamilyOptions(weights="unifrm")),
            "unifrm",
        ),
    ],
)
def test_a_mistake_is_one_sentence(model: Model, call: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        call(model)


def test_causal_models_predict_no_masks(causal_run: Path) -> None:
    with pytest.raises(UserError, match="needs a masked model"):
        protlm.load(causal_run).predict_masked(["M<mask>V"])


# What people hold in place of a list of text, and can mean only one thing by.
HELD: dict[str, Callable[[list[str]], Any]] = {
    "generator": lambda letters: (one for one in letters),
    "map": lambda letters: map(str, letters),
    "array": np.array,
    "series": pandas.Series,
    "Seq": lambda letters: [Seq(one) for one in letters],
    "SeqRecord": lambda letters: (SeqRecord(Seq(one), id="MKV") for one in letters),
    "Record": lambda letters: [Record("MKV", "MKV", one, 1) for one in letters],
    "pairs": lambda letters: zip("ABC", letters, strict=True),
    "pairs of Seq": lambda letters: [("MKV", Seq(one)) for one in letters],
}


@pytest.mark.parametrize(("kind", "given"), HELD.items(), ids=HELD)
def test_sequences_are_read_by_their_letters_everywhere(
    model: Model, kind: str, given: Any
) -> None:
    np.testing.assert_array_equal(model.embed(given(SEQUENCES)), model.embed(SEQUENCES))
    batch = model.tokenize(given(SEQUENCES))
    assert batch.tokens_BL.equal(model.tokenize(SEQUENCES).tokens_BL)
    masked = ["MK<mask>", "<mask>KV", "MKV<mask>"]
    assert model.predict_masked(given(masked)) == model.predict_masked(masked)
    variants = ["MKA", "MRV", "MKW"]
    (wild_type,) = given(["MKV"]) if kind != "pairs" else [("A", "MKV")]
    scores = model.score(wild_type, given(variants), "wt-marginals")
    np.testing.assert_array_equal(scores, model.score("MKV", variants, "wt-marginals"))


NOT_SEQUENCES: dict[str, tuple[Any, str]] = {
    "letters": ([list("MKV")], "(sequence|mutant) 1 is .* of type list; .*join letters"),
    "no array": (np.array("MKV"), "one ndarray is given"),
    "dictionary": ({"MKV": "x"}, r"one dict is given .*values\(\)"),
    "table": (pandas.DataFrame({"SEQ": ["MKV"]}), "one DataFrame is given .*one column"),
    "bytes": ([b"MKV"], r"of type bytes; .* read bytes of h5py as text: dataset.asstr\(\)"),
    "missing": (
        pandas.Series(["MKV", np.nan]),
        "(sequence|mutant) 2 is nan of type float; .*leave out",
    ),
    "numbers": (np.array([20, 15]), "of type int64"),
    "list of pairs": ([["P1", "MKV"]], "of type list"),
    "unknown letters": ([Seq(None, length=9)], "of type Seq"),
    "one Seq": (Seq("MKV"), "one Seq is given .*write .*sequence|mutant"),
    "one text": ("MKV", "one str is given .*a list of sequences"),
    "nothing": (None, "one NoneType is given"),
    "empty": (["MKV", ""], "(sequence|mutant) 2 is empty"),
    "set": ({"MKV", "MK"}, "one set is given"),
    "letters of one": (list("MKV"), "3 single letters are given; join them"),
}


@pytest.mark.parametrize(("given", "sentence"), NOT_SEQUENCES.values(), ids=NOT_SEQUENCES)
def test_what_is_not_a_sequence_is_a_sentence_everywhere(
    model: Model, given: Any, sentence: str
) -> None:
    methods = model.embed, model.tokenize, model.predict_masked, lambda s: model.score("MKV", s)
    methods = *methods, model.perplexity, model.contacts
    for method in methods:
        with pytest.raises(UserError, match=sentence):
            method(given)
    for wild_type in ([given], ""):
        with pytest.raises(UserError, match="the wild type is"):
            model.score(wild_type, ["K2R"])


def test_letters_are_read_as_in_a_file_and_a_pair_needs_a_list(model: Model) -> None:
    with pytest.warns(UserWarning, match=r"changed: 1 terminal '\*' removed, 1 J written as X"):
        assert model.embed(["mKT j\nY\n*"])[0] == pytest.approx(model.embed(["MKTXY"])[0])
    assert model.predict_masked(["M\nK<mask> V"]) == model.predict_masked(["MK<mask>V"])
    for letters, advice in (("M-K", "remove gaps"), ("M*K", "cut the"), ("M?", "write X")):
        with pytest.raises(InputDataError, match=f"sequence 2: .* at residue 2 .*{advice}"):
            model.embed(["MKV", letters])
    for pair in (("a", "MKTAY"), ["a", "MKTAY"], ["P1", "MKV"], ("INS", "M" * 9)):
        with pytest.raises(UserError, match=r"write \[\(name, sequence\)\], or for two"):
            model.embed(pair)
    assert len(model.embed(["A", "MKTAY"])) == len(model.embed(("MKTAY", "MKVLAAG"))) == 2


def test_iterators_of_layers_and_heads_are_read_once(model: Model) -> None:
    one: Any = np.int64(1)
    assert model.embed([], one, as_torch=True).shape == (0, model.width)
    batch = model.tokenize(["MKV"])
    assert set(model(batch, iter([0, -1])).hidden) == set(model.hidden_states(batch, iter([0, -1])))
    expected = model.attention_maps(batch, [1, -1], [2])
    found = model.attention_maps(batch, iter([1, -1]), np.array([2]))
    assert expected.keys() == found.keys()
    assert all(found[layer].equal(map_BHLL) for layer, map_BHLL in expected.items())


def test_no_batch_is_larger_than_asked_for(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_of, sizes = Model.batch_of, []

    def count(self: Model, sequences: list[str]) -> object:
        batch = batch_of(self, sequences)
        sizes.append(batch.tokens_BL.numel())
        return batch

    monkeypatch.setattr(Model, "batch_of", count)
    sequences = ["MKV"] * 50 + ["MKV" * 60]
    model.embed(sequences, tokens_per_batch=200)
    assert max(sizes) <= 200
    sizes.clear()
    with pytest.raises(InputDataError, match="'1' at residue 2"):
        model.embed([*sequences, "M1"])
    with pytest.raises(InputDataError, match="sequence 52 is empty"):
        model.embed([*sequences, ""])
    assert sizes == []


def test_vectors_that_are_not_finite_are_refused(tiny_run: Path, tiny_fasta: Path) -> None:
    model = protlm.load(tiny_run)
    next(model.network.parameters()).data.fill_(float("nan"))
    with pytest.raises(UserError, match=r"sequence 1 \(3 residues\) are not finite"):
        model.embed(["MKV"])
    with pytest.raises(UserError, match="weights of this model are unusable"):
        next(iter(model.embed_file(tiny_fasta)))


def test_random_weights_have_the_same_methods(model: Model) -> None:
    assert isinstance(model.with_random_weights(1), Model)
    assert model.with_random_weights(1).embed(["MKV"]).shape == (1, 64)


def doubled(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A hook that can be pickled."""
    return 2 * output


def logits_of(model: PretrainedModel) -> Tensor:
    """The logits of two sequences, also in another process."""
    return model(model.tokenize(SEQUENCES[:2])).logits_BLV


@pytest.mark.parametrize("name", names())
def test_models_can_be_pickled(name: str) -> None:
    """Also with a hook on a layer, and with what makes one with random weights."""
    small = small_model(name)
    weights = dict(small.network.float().state_dict())
    made = loading.model_of(Checkpoint(Path("small"), small.description, weights))
    made.network.final_norm.register_forward_hook(doubled)
    copy = pickle.loads(pickle.dumps(made))
    assert torch.equal(logits_of(copy), logits_of(made))
    assert copy.with_random_weights(2).hash == made.with_random_weights(2).hash != copy.hash
