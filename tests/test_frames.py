"""Models with other tokens around the residues, in every command: none, two, or nothing after.

The truth is the network on rows of tokens that are written out by hand.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import protlm
from protlm.analysis.categorical_jacobian import _Rows
from protlm.analysis.contact_regression import features
from protlm.build import build_module, load_initial_weights
from protlm.checkpoints.checks import write_sums
from protlm.checkpoints.format import Checkpoint, export
from protlm.config import Frame, HeadKind, Positions, TrainConfig
from protlm.config.composition import compose
from protlm.data.vocabulary import RESIDUES, STANDARD, VOCABULARY, Vocabulary, vocabulary_of
from protlm.interface import Model
from protlm.loading import load_model
from protlm.model.embedding import embeddings
from protlm.model.transformer import ModelOutput, build_network
from protlm.system.errors import InputDataError, UserError
from protlm.training.labels import Batches, LabeledTokens
from tests.fixtures.commands import Command, read_table
from tests.marks import slow_but
from tests.small_models import small_model

SEQUENCES = ["MKTAYIAKQRQISFVK", "GAVLKWCDE", "MKV"]
FRAMES = {
    "usual": Frame(),
    "nothing before": Frame(prefix=()),
    "two": Frame(("<bos>", "1"), ("2", "<eos>"), ("<bos>", "1", "2")),
    "nothing after": Frame(suffix=()),
    "bare": Frame((), ()),
}
AROUND = {
    "usual": ([0], [2]),
    "nothing before": ([], [2]),
    "two": ([33, 34], [35, 2]),
    "nothing after": ([0], []),
    "bare": ([], []),
}
each_frame = pytest.mark.parametrize("kind", slow_but(FRAMES, "nothing before", "two"))


def saved(folder: Path, kind: str, *, objective: str = "masked", **settings: object) -> Path:
    """Writes a model of random weights with a frame to a new folder."""
    made = small_model("softmax", objective)
    frame = None if kind == "usual" else FRAMES[kind]
    config = replace(made.description.model, **settings)
    words = vocabulary_of(frame)
    description = replace(made.description, frame=frame, vocabulary=words.hash, model=config)
    network = build_network(config, {"name": "softmax"}, seed=1, vocabulary=words)
    with torch.no_grad():
        for value in network.parameters():
            value.copy_(torch.randn_like(value) * 0.4)
    export(Checkpoint(folder, description, network.state_dict()), folder)
    return folder


def by_hand(model: Model, kind: str, sequence: str, mask: int | None = None) -> ModelOutput:
    """The network on one row, with hidden states of the last layer."""
    before, after = AROUND[kind]
    tokens = [*before, *(4 + RESIDUES.index(letter) for letter in sequence), *after]
    if mask is not None:
        tokens[len(before) + mask] = 32
    tokens_1L = torch.tensor([tokens])
    with torch.inference_mode():
        seen_1L = torch.ones_like(tokens_1L, dtype=torch.bool)
        return model.network(tokens_1L, seen_1L, causal=model.causal, layers=[model.num_layers])


def residues_of(kind: str, sequence: str) -> slice:
    start = len(AROUND[kind][0])
    return slice(start, start + len(sequence))


@pytest.fixture
def run(tmp_path: Path, protlm_in_process: Command) -> Callable[..., str]:
    """Runs a command in a folder with p.fasta; returns what it prints, of a refusal the error."""
    lines = [f">P{number}\n{one}\n" for number, one in enumerate(SEQUENCES)]
    (tmp_path / "p.fasta").write_text("".join(lines))

    def run(command: str, *, code: int = 0) -> str:
        done = protlm_in_process(*command.split(), cwd=tmp_path)
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout + done.stderr

    return run


@each_frame
def test_vectors_and_maps_are_those_of_the_residues(
    kind: str, tmp_path: Path, run: Callable[..., str]
) -> None:
    model = protlm.load(saved(tmp_path / "m", kind))
    run("embed p.fasta -m m -o e.h5 --include mean per_tok")
    run("attention p.fasta -m m -o a.h5")
    with h5py.File(tmp_path / "e.h5") as vectors, h5py.File(tmp_path / "a.h5") as maps:
        assert vectors.attrs["vocabulary_hash"] == model.vocabulary.hash
        for number, sequence in enumerate(SEQUENCES):
            out, inner = by_hand(model, kind, sequence), residues_of(kind, sequence)
            expected_LD = out.hidden[2][0, inner].numpy()
            own = vectors[f"P{number}"]
            np.testing.assert_allclose(own["per_tok/2"][:], expected_LD, atol=1e-5)
            np.testing.assert_allclose(own["mean/2"][:], expected_LD.mean(0), atol=1e-5)
            layer = maps[f"P{number}/layer_2"]
            assert layer.shape[1:] == (out.logits_BLV.shape[1],) * 2
            assert layer.attrs.get("first_residue", 1) == inner.start
    if AROUND[kind][0]:
        first_D = by_hand(model, kind, SEQUENCES[0]).hidden[2][0, 0].numpy()
        np.testing.assert_allclose(model.embed(SEQUENCES[:1], pooling="cls")[0], first_D, atol=1e-5)
    else:
        error = run("embed p.fasta -m m -o c.h5 --include cls", code=2)
        assert "this model has none" in error and not (tmp_path / "c.h5").exists()


@each_frame
def test_windows_of_a_table_of_positions(kind: str, tmp_path: Path) -> None:
    around = sum(map(len, AROUND[kind]))
    settings = {"positions": Positions.learned, "max_length": 8 + around}
    folder = saved(tmp_path / "m", kind)
    config = json.loads((folder / "config.json").read_text())
    assert ("frame" in config) == (kind != "usual")
    model = protlm.load(saved(tmp_path / "w", kind, **settings))
    assert model.max_residues == 8
    sequence = SEQUENCES[0][:12]
    (tmp_path / "w.fasta").write_text(f">P\n{sequence}\n")
    (found,) = model.embed_file(tmp_path / "w.fasta", pooling="per_tok", windows=True)
    inner = residues_of(kind, "M" * 8)
    parts_LD = [by_hand(model, kind, sequence[n : n + 8]).hidden[2][0, inner] for n in (0, 4)]
    # The windows meet in the middle of their overlap.
    expected_LD = torch.cat([parts_LD[0][:6], parts_LD[1][2:]]).numpy()
    np.testing.assert_allclose(found.vectors, expected_LD, atol=1e-5)


@each_frame
def test_contacts_and_jacobian(kind: str, tmp_path: Path, run: Callable[..., str]) -> None:
    model = protlm.load(saved(tmp_path / "m", kind))
    heads = model.num_layers * model.num_heads
    fit = {"seed": 0, "weights": [1.0] * heads, "intercept": -1.0, "model_hash": model.hash}
    (tmp_path / "f.json").write_text(json.dumps(fit))
    run("contacts p.fasta -m m -o c.h5 --fit f.json")
    batch, inner = model.tokenize(SEQUENCES[:1]), residues_of(kind, SEQUENCES[0])
    maps = [x[0, :, inner, inner].numpy() for x in model.attention_maps(batch).values()]
    logits_LL = features(np.concatenate(maps)).sum(0) - 1
    with h5py.File(tmp_path / "c.h5") as file:
        found_LL = file["P0/probabilities"][:]
    np.testing.assert_allclose(found_LL, 1 / (1 + np.exp(-logits_LL)), atol=1e-5)
    letters, inner = [VOCABULARY[letter] for letter in STANDARD], residues_of(kind, "MKV")

    def logits(sequence: str) -> np.ndarray:
        return by_hand(model, kind, sequence).logits_BLV[0, inner][:, letters].numpy()

    changed = [["MKV"[:i] + a + "MKV"[i + 1 :] for a in STANDARD] for i in range(3)]
    expected = np.array([[logits(one) - logits("MKV") for one in some] for some in changed])
    for axis in (1, 2, 3):
        expected -= expected.mean(axis, keepdims=True)
    rows = _Rows(model, "MKV", 99, bfloat16=False).centered(range(3))
    np.testing.assert_allclose(rows, expected, atol=1e-4)


@each_frame
def test_scores(kind: str, tmp_path: Path, run: Callable[..., str]) -> None:
    wild_type = SEQUENCES[1]
    (tmp_path / "w.fasta").write_text(f">W\n{wild_type}\n")
    (tmp_path / "v.csv").write_text("mutant\nG1W\nE9A\n")
    masked = protlm.load(saved(tmp_path / "m", kind))
    run("score v.csv --wild-type w.fasta -m m -o s.csv")
    start = len(AROUND[kind][0])
    rows = read_table(tmp_path / "s.csv")
    for row, (own, place, new) in zip(rows, (("G", 0, "W"), ("E", 8, "A")), strict=True):
        logits_LV = by_hand(masked, kind, wild_type, place).logits_BLV[0]
        log_p_V = logits_LV[start + place].log_softmax(0)
        expected = float(log_p_V[VOCABULARY[new]] - log_p_V[VOCABULARY[own]])
        assert float(row["masked-marginals"]) == pytest.approx(expected, abs=1e-4)
    (place,) = masked.predict_masked(["GA<mask>L"])[0]
    p_V = by_hand(masked, kind, "GAVL", 2).logits_BLV[0, start + 2].softmax(0)
    assert masked.predict_masked(["GA<mask>L"])[0][place]["W"] == pytest.approx(
        float(p_V[VOCABULARY["W"]]), abs=1e-5
    )
    causal = protlm.load(saved(tmp_path / "c", kind, objective="causal"))
    if not start:
        error = run("score v.csv --wild-type w.fasta -m c -o t.csv", code=2)
        assert "no token before the first residue" in error
        return
    run("score v.csv --wild-type w.fasta -m c -o t.csv")
    total = []
    for sequence in (wild_type, "W" + wild_type[1:]):
        log_p_LV = by_hand(causal, kind, sequence).logits_BLV[0].log_softmax(-1)
        targets = [*map(VOCABULARY.__getitem__, sequence), *AROUND[kind][1]]
        total.append(sum(float(log_p_LV[start - 1 + n, t]) for n, t in enumerate(targets)))
    found = float(read_table(tmp_path / "t.csv")[0]["causal-likelihood"])
    assert found == pytest.approx(total[1] - total[0], abs=1e-3)


@each_frame
def test_sequences_are_sampled(kind: str, tmp_path: Path, run: Callable[..., str]) -> None:
    saved(tmp_path / "m", kind)
    run("generate -m m --start p.fasta --sweeps 1 -o g.fasta")
    found = re.findall(r"^[A-Z]+$", (tmp_path / "g.fasta").read_text(), re.M)
    assert [*map(len, found)] == [*map(len, SEQUENCES)] and found != SEQUENCES
    causal = protlm.load(saved(tmp_path / "c", kind, objective="causal"))
    if AROUND[kind][0]:
        run("generate -m c --number 3 --max-length 9 -o h.fasta")
    else:
        assert "--prefix RESIDUES" in run(
            "generate -m c --number 3 --max-length 9 -o h.fasta", code=2
        )
    run("generate -m c --number 20 --max-length 9 --prefix MK -o i.fasta")
    sampled = [*causal.generate(20, prefix="MK", max_residues=9)]
    assert {len(one.sequence) for one in sampled if one.ended == "length"} <= {9}
    ends = {str(one.ended) for one in sampled}
    assert ends == ({"length", "eos"} if AROUND[kind][1] else {"length"})
    # What was drawn, from the row as it is read at once.
    one = max(sampled, key=lambda one: len(one.sequence))
    log_p_LV = by_hand(causal, kind, one.sequence).logits_BLV[0].log_softmax(-1)
    start = len(AROUND[kind][0])
    drawn = [(start + n - 1, VOCABULARY[x]) for n, x in enumerate(one.sequence)][2:]
    assert one.nats == pytest.approx(-sum(float(log_p_LV[at]) for at in drawn), abs=1e-3)


@each_frame
def test_labels_and_the_page(kind: str, tmp_path: Path, run: Callable[..., str]) -> None:
    model = protlm.load(saved(tmp_path / "m", kind))
    names = [f"{a}{b}MKVLA"[: 4 + n % 4] for n, (a, b) in enumerate(pairwise(STANDARD))]
    split = ("train", "train", "valid", "test")
    rows = [f"{n}\t{x}\t{n % 2}.5\t{split[n % 4]}\n" for n, x in enumerate(names)]
    (tmp_path / "l.tsv").write_text("id\tsequence\tlabel\tsplit\n" + "".join(rows))
    run("probe l.tsv -m m -o probe")
    run("finetune l.tsv -m m -o tuned --epochs 1")
    tuned = load_model(tmp_path / "tuned" / "model")
    assert tuned.vocabulary == model.vocabulary
    run("predict p.fasta -p probe -m m -o predicted.tsv")
    (tmp_path / "w.fasta").write_text(f">W\n{SEQUENCES[0]}\n")
    run("inspect w.fasta -m m -o page.html")
    assert model.vocabulary.hash in (tmp_path / "page.html").read_text()


def test_shards_of_another_alphabet_are_refused(
    tmp_path: Path, tiny_data: Path, run: Callable[..., str]
) -> None:
    saved(tmp_path / "m", "two")
    (tmp_path / "d").symlink_to(tiny_data)
    evaluated = "evaluate checkpoint=m data.dir=d evaluation=[masked] split=test"
    assert "shards of another alphabet" in run(evaluated, code=2)
    for given in ("model.init_from", "objective=distillation objective.teacher"):
        trained = f"model=tiny data.dir=d run_dir=r {given}={tmp_path}/m".split()
        config = compose(TrainConfig, trained)
        network = build_network(config.model, config.attention, seed=0)
        with pytest.raises(UserError, match="another alphabet or other tokens"):
            if config.model.init_from:
                load_initial_weights(network, config.model, config.attention, tmp_path / "m")
            else:
                build_module(network, config)


def test_the_mean_that_finetuning_takes_is_that_of_embed(tmp_path: Path) -> None:
    for kind in ("nothing before", "two"):
        model = protlm.load(saved(tmp_path / kind, kind))
        (means,) = embeddings(model, SEQUENCES, layers=[2])
        np.testing.assert_allclose(means, model.embed(SEQUENCES), atol=1e-6)
        places = [np.array([0, len(one) - 1]) for one in SEQUENCES]
        encoded = [VOCABULARY.encode(one) for one in SEQUENCES]
        data = LabeledTokens(encoded, np.zeros(6), places, model.vocabulary)
        batch = Batches(data, 3, seed=None)[0]
        labeled = batch.tokens_BL[batch.is_label_BL].tolist()
        assert labeled == [int(one[n]) for one in encoded for n in (0, -1)]


def test_encoders_and_models_without_a_mask_predict_nothing(
    tmp_path: Path, run: Callable[..., str]
) -> None:
    encoder = protlm.load(saved(tmp_path / "m", "two", head=HeadKind.none))
    assert encoder.embed(SEQUENCES).shape == (3, 16) and not encoder.predicts
    (tmp_path / "v.csv").write_text("mutant\nG1W\n")
    (tmp_path / "w.fasta").write_text(f">W\n{SEQUENCES[1]}\n")
    for command in (
        "score v.csv --wild-type w.fasta -m m -o s.csv",
        "generate -m m --start p.fasta -o g.fasta",
    ):
        assert "is an encoder without an output layer" in run(command, code=2)
    assert "has no predictions" in run("inspect w.fasta -m m -o page.html")
    FRAMES["no mask"], AROUND["no mask"] = Frame(has_mask=False), AROUND["usual"]
    assert not protlm.load(saved(tmp_path / "n", "no mask")).predicts
    assert "has no <mask>" in run("score v.csv --wild-type w.fasta -m n -o s.csv", code=2)


@pytest.mark.parametrize(
    "frame, says",
    [
        ({"prefix": ["L"]}, "'L' is not a token that can be around"),
        ({"suffix": ["<other>"]}, "'<other>' is not a token"),
        ({"own_tokens": ["<cls>"]}, "must be distinct"),
        ({"own_tokens": "x"}, "frame.own_tokens"),
        ({"own_tokens": ["<bos>", "1", "2", "<x>"]}, "another vocabulary"),
    ],
)
def test_a_frame_that_cannot_be_is_refused(
    frame: dict[str, object], says: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "m", "two")
    config = json.loads((folder / "config.json").read_text())
    config["frame"] |= frame
    (folder / "config.json").write_text(json.dumps(config))
    write_sums(folder)
    with pytest.raises(InputDataError, match=says):
        load_model(folder)


def test_hashes_differ_by_frame() -> None:
    hashes = {vocabulary_of(frame).hash for frame in FRAMES.values()}
    assert len(hashes) == len(FRAMES) and VOCABULARY.hash in hashes
    with pytest.raises(UserError, match="no token before"):
        print(Vocabulary(VOCABULARY.tokens, Frame(prefix=())).before)
