"""Models with other tokens around the residues, in every command: none, two, or nothing after.

The truth is the network on rows of tokens that are written out by hand.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

import protlm
from protlm.analysis.categorical_jacobian import _jacobian
from protlm.analysis.contact_regression import features
from protlm.analysis.head_statistics import residue_rows, sink_mass
from protlm.build import build_module, load_initial_weights
from protlm.checkpoints.checks import write_sums
from protlm.checkpoints.format import Checkpoint, export
from protlm.config import Frame, HeadKind, Positions, TrainConfig
from protlm.config.composition import compose
from protlm.data.vocabulary import RESIDUES, STANDARD, VOCABULARY, vocabulary_of
from protlm.interface import Model
from protlm.loading import load_model
from protlm.model.embedding import embeddings
from protlm.model.transformer import build_network
from protlm.options.generate import Sampling
from protlm.system.errors import InputDataError, UserError
from protlm.training.labels import Batches, LabeledTokens
from protlm.training.run_plan import RunPlan
from tests.fixtures.commands import Command, read_table
from tests.marks import slow_but
from tests.small_models import small_model

SEQUENCES = ["MKTAYIAKQRQISFVK", "GAVLKWCDE", "MKV"]
# Tokens around the residues, and their numbers.
TWO = Frame(("<bos>", "1"), ("2", "<eos>"), ("<bos>", "1", "2"))
FRAMES = {
    "usual": (None, [0], [2]),
    "nothing before": (Frame(prefix=()), [], [2]),
    "two": (TWO, [33, 34], [35, 2]),
    "nothing after": (Frame(suffix=()), [0], []),
    "bare": (Frame((), ()), [], []),
    "no mask": (Frame(has_mask=False), [0], [2]),
}
each_frame = pytest.mark.parametrize("kind", slow_but(FRAMES, "nothing before", "two"))
LETTERS = [VOCABULARY[letter] for letter in STANDARD]


def saved(folder: Path, kind: str, objective: str = "masked", **settings: object) -> Model:
    """Writes a model of random weights with a frame to a new folder."""
    frame, made = FRAMES[kind][0], small_model("softmax", objective).description
    config, words = replace(made.model, **settings), vocabulary_of(frame)
    made = replace(made, frame=frame, vocabulary=words.hash, model=config)
    network = build_network(config, {"name": "softmax"}, seed=1, vocabulary=words)
    generator = torch.Generator().manual_seed(0)
    for value in network.parameters():
        value.data.copy_(torch.randn(value.shape, generator=generator) * 0.4)
    export(Checkpoint(folder, made, network.state_dict()), folder)
    return protlm.load(folder)


def by_hand(
    model: Model, kind: str, sequence: str, masks: Iterable[int] = ()
) -> tuple[Tensor, Tensor, slice]:
    """The last hidden states and log-probabilities of the network on one row; its residues."""
    _, before, after = FRAMES[kind]
    tokens = [*before, *(4 + RESIDUES.index(letter) for letter in sequence), *after]
    for mask in masks:
        tokens[len(before) + mask] = 32
    row_1L, last = torch.tensor([tokens]), model.num_layers
    with torch.inference_mode():
        seen_1L = torch.ones_like(row_1L, dtype=torch.bool)
        out = model.network(row_1L, seen_1L, causal=model.causal, layers=[last])
    inner = slice(len(before), len(before) + len(sequence))
    return out.hidden[last][0], out.logits_BLV[0].log_softmax(-1), inner


@pytest.fixture
def run(tmp_path: Path, protlm_in_process: Command) -> Callable[..., str]:
    """Runs a command in a folder with proteins and a wild type; returns what it prints."""
    lines = [f">P{number}\n{one}\n" for number, one in enumerate(SEQUENCES)]
    (tmp_path / "p.fasta").write_text("".join(lines))
    (tmp_path / "w.fasta").write_text(f">W\n{SEQUENCES[1]}\n")
    (tmp_path / "v.csv").write_text("mutant\nG1W\nE9A\n")

    def run(command: str, *, code: int = 0) -> str:
        done = protlm_in_process(*command.split(), cwd=tmp_path, code=code)
        return done.stdout + done.stderr

    return run


@each_frame
def test_vectors_and_maps(kind: str, tmp_path: Path, run: Callable[..., str]) -> None:
    model = saved(tmp_path / "m", kind)
    run("embed p.fasta -m m -o e.h5 --include mean per_tok")
    run("attention p.fasta -m m -o a.h5")
    with h5py.File(tmp_path / "e.h5") as vectors, h5py.File(tmp_path / "a.h5") as maps:
        assert vectors.attrs["vocabulary_hash"] == model.vocabulary.hash
        for number, sequence in enumerate(SEQUENCES):
            hidden_LD, _, inner = by_hand(model, kind, sequence)
            own, expected_LD = vectors[f"P{number}"], hidden_LD[inner].numpy()
            np.testing.assert_allclose(own["per_tok/2"][:], expected_LD, atol=1e-5)
            np.testing.assert_allclose(own["mean/2"][:], expected_LD.mean(0), atol=1e-5)
            layer = maps[f"P{number}/layer_2"]
            assert layer.shape[1:] == (len(hidden_LD), len(hidden_LD))
            assert layer.attrs.get("first_residue", 1) == inner.start
    if inner.start:
        found_D = model.embed([SEQUENCES[-1]], pooling="cls")[0]
        np.testing.assert_allclose(found_D, hidden_LD[0].numpy(), atol=1e-5)
    else:
        assert "this model has none" in run("embed p.fasta -m m -o c.h5 --include cls", code=2)


@each_frame
def test_windows_of_a_table_of_positions(kind: str, tmp_path: Path) -> None:
    limit = 8 + sum(map(len, FRAMES[kind][1:]))
    model = saved(tmp_path / "w", kind, positions=Positions.learned, max_length=limit)
    assert model.max_residues == 8
    sequence = SEQUENCES[0][:12]
    (tmp_path / "w.fasta").write_text(f">P\n{sequence}\n")
    (found,) = model.embed_file(tmp_path / "w.fasta", pooling="per_tok", windows=True)
    windows = [by_hand(model, kind, sequence[n : n + 8]) for n in (0, 4)]
    one_LD, other_LD = (hidden_LD[inner] for hidden_LD, _, inner in windows)
    # The windows meet in the middle of their overlap.
    expected_LD = torch.cat([one_LD[:6], other_LD[2:]])
    np.testing.assert_allclose(found.vectors, expected_LD.numpy(), atol=1e-5)


@each_frame
def test_contacts_and_jacobian(kind: str, tmp_path: Path, run: Callable[..., str]) -> None:
    model = saved(tmp_path / "m", kind)
    fit = {"seed": 0, "weights": [1.0] * 4, "intercept": -1.0, "model_hash": model.hash}
    (tmp_path / "f.json").write_text(json.dumps(fit))
    run("contacts p.fasta -m m -o c.h5 --fit f.json")
    inner = by_hand(model, kind, SEQUENCES[0])[2]
    found = model.attention_maps(model.tokenize(SEQUENCES[:1])).values()
    maps_HLL = np.concatenate([x[0, :, inner, inner].numpy() for x in found])
    with h5py.File(tmp_path / "c.h5") as file:
        expected_LL = 1 / (1 + np.exp(1 - features(maps_HLL).sum(0)))
        np.testing.assert_allclose(file["P0/probabilities"][:], expected_LL, atol=1e-5)

    for _, blocks in residue_rows(model, SEQUENCES[0]):
        rows_HLM = torch.cat([*blocks], dim=1).double()
        expected_HL = 1 - rows_HLM[:, :, inner].sum(-1)
        torch.testing.assert_close(sink_mass(rows_HLM, model), expected_HL, atol=1e-6, rtol=0)

    def logits(sequence: str) -> np.ndarray:
        _, log_p_LV, inner = by_hand(model, kind, sequence)
        return log_p_LV[inner][:, LETTERS].numpy()

    changed = [["MKV"[:i] + a + "MKV"[i + 1 :] for a in STANDARD] for i in range(3)]
    expected = np.array([[logits(one) - logits("MKV") for one in some] for some in changed])
    found = _jacobian(model, "MKV", bfloat16=False)
    # Logits are the logarithms of probabilities but for a number for each residue.
    centered = (x - x.mean(3, keepdims=True) for x in (found, expected))
    np.testing.assert_allclose(*centered, atol=1e-4)


@each_frame
def test_scores(kind: str, tmp_path: Path, run: Callable[..., str]) -> None:
    masked, causal = saved(tmp_path / "m", kind), saved(tmp_path / "c", kind, "causal")
    score = "score v.csv --wild-type w.fasta -o {0}.csv -m {0}"
    if kind == "no mask":
        assert "has no <mask>" in run(score.format("m"), code=2) and not masked.predicts
        return
    run(score.format("m"))
    _, log_p_LV, inner = by_hand(masked, kind, SEQUENCES[1], [8])
    ratio = log_p_LV[inner][8, VOCABULARY["A"]] - log_p_LV[inner][8, VOCABULARY["E"]]
    found = float(read_table(tmp_path / "m.csv")[1]["masked-marginals"])
    assert found == pytest.approx(float(ratio), abs=1e-4)
    p_V = by_hand(masked, kind, "GAVL", [2])[1][inner.start + 2].exp()
    predicted = masked.predict_masked(["GA<mask>L"])[0][3]["W"]
    assert predicted == pytest.approx(float(p_V[VOCABULARY["W"]]), abs=1e-5)
    if not inner.start:
        assert "no token before the first residue" in run(score.format("c"), code=2)
        return
    run(score.format("c"))
    total = []
    for sequence in (SEQUENCES[1], "W" + SEQUENCES[1][1:]):
        log_p_LV = by_hand(causal, kind, sequence)[1][inner.start - 1 :]
        targets = [*map(VOCABULARY.__getitem__, sequence), *FRAMES[kind][2]]
        total.append(sum(float(log_p_LV[n, target]) for n, target in enumerate(targets)))
    found = float(read_table(tmp_path / "c.csv")[0]["causal-likelihood"])
    assert found == pytest.approx(total[1] - total[0], abs=1e-3)


@each_frame
def test_sequences_are_sampled(kind: str, tmp_path: Path, run: Callable[..., str]) -> None:
    masked, causal = saved(tmp_path / "m", kind), saved(tmp_path / "c", kind, "causal")
    _, before, after = FRAMES[kind]
    if kind != "no mask":
        once = "--sweeps 1 --mask-fraction 1 --temperature 0"
        run(f"generate -m m --start p.fasta {once} -o g.fasta")
        found = re.findall(r"^[A-Z]+$", (tmp_path / "g.fasta").read_text(), re.MULTILINE)
        for new, old in zip(found, SEQUENCES, strict=True):
            _, log_p_LV, inner = by_hand(masked, kind, old, range(len(old)))
            best_L = log_p_LV[inner][:, LETTERS].argmax(-1)
            assert new == "".join(STANDARD[n] for n in best_L.tolist())
    said = run("generate -m c --number 3 --max-length 9 -o h.fasta", code=0 if before else 2)
    assert before or "--prefix RESIDUES" in said
    sampled = [*causal.generate(40, prefix="MK", max_residues=9, sampling=Sampling(temperature=5))]
    assert {str(one.ended) for one in sampled} == ({"length", "eos"} if after else {"length"})
    # What was drawn, from the row as it is read at once.
    one = max(sampled, key=lambda one: len(one.sequence))
    log_p_LV = by_hand(causal, kind, one.sequence)[1][len(before) + 1 :]
    drawn = [float(log_p_LV[n, VOCABULARY[x]]) for n, x in enumerate(one.sequence[2:])]
    assert one.nats == pytest.approx(-sum(drawn), abs=1e-3)


def write_labels(path: Path) -> None:
    names = [f"{a}{b}MKVLA"[: 4 + n % 4] for n, (a, b) in enumerate(pairwise(STANDARD))]
    split = ("train", "train", "valid", "test")
    rows = [f"{n}\t{x}\t{n % 2}.5\t{split[n % 4]}\n" for n, x in enumerate(names)]
    path.write_text("id\tsequence\tlabel\tsplit\n" + "".join(rows))


@pytest.mark.slow
@each_frame
def test_labels_and_the_page(kind: str, tmp_path: Path, run: Callable[..., str]) -> None:
    model = saved(tmp_path / "m", kind)
    write_labels(tmp_path / "l.tsv")
    run("probe l.tsv -m m -o probe")
    run("finetune l.tsv -m m -o tuned --epochs 1")
    assert protlm.load(tmp_path / "tuned" / "model").vocabulary == model.vocabulary
    run("predict p.fasta -p probe -m m -o predicted.tsv")
    assert ("has no predictions" in run("inspect w.fasta -m m -o x.html")) == (kind == "no mask")
    assert model.vocabulary.hash in (tmp_path / "x.html").read_text()
    (means,) = embeddings(model, SEQUENCES, layers=[2])
    np.testing.assert_allclose(means, model.embed(SEQUENCES), atol=1e-6)
    encoded, places = [*map(VOCABULARY.encode, SEQUENCES)], [np.array([0, 2])] * 3
    batch = Batches(LabeledTokens(encoded, np.zeros(6), places, model.vocabulary), 3, seed=None)[0]
    labeled = batch.tokens_BL[batch.is_label_BL].tolist()
    assert labeled == [int(one[n]) for one in encoded for n in (0, 2)]


def test_shards_of_another_alphabet_are_refused(
    tmp_path: Path, tiny_data: Path, run: Callable[..., str]
) -> None:
    saved(tmp_path / "m", "two")
    (tmp_path / "d").symlink_to(tiny_data)
    evaluated = "evaluate checkpoint=m data.dir=d evaluation=[masked] split=test"
    assert "shards of another alphabet" in run(evaluated, code=2)
    given = f"model=tiny data.dir=d run_dir=r objective=distillation objective.teacher={tmp_path}/m"
    config = compose(TrainConfig, given.split())
    network = build_network(config.model, config.attention, seed=0)
    with pytest.raises(UserError, match="another alphabet or other tokens"):
        build_module(network, RunPlan(config))
    with pytest.raises(UserError, match="another alphabet or other tokens"):
        load_initial_weights(network, config.model, config.attention, tmp_path / "m")


def test_the_hash_is_that_of_tokens_and_frame() -> None:
    assert len({vocabulary_of(frame).hash for frame, *_ in FRAMES.values()}) == len(FRAMES)


@pytest.mark.parametrize("kind", ["two", "no mask"])
def test_encoders_predict_nothing(kind: str, tmp_path: Path, run: Callable[..., str]) -> None:
    model = saved(tmp_path / "m", kind, head=HeadKind.none)
    assert model.embed(SEQUENCES).shape == (3, 16) and not model.predicts
    for command in ("score v.csv --wild-type w.fasta", "generate --start p.fasta"):
        assert "is an encoder without an output layer" in run(f"{command} -m m -o x.csv", code=2)
    assert "has no predictions" in run("inspect w.fasta -m m -o page.html")


def test_a_frame_that_cannot_be_is_refused(tmp_path: Path) -> None:
    saved(folder := tmp_path / "m", "two")
    config = json.loads((folder / "config.json").read_text())
    for says, changes in (
        ("'L' is not a token that can be around", {"prefix": ["L"]}),
        ("'<other>' is not a token", {"suffix": ["<other>"]}),
        ("must be distinct", {"own_tokens": ["<cls>"]}),
        ("frame.own_tokens", {"own_tokens": "x"}),
        ("another vocabulary", {"own_tokens": ["<bos>", "1", "2", "<x>"]}),
    ):
        changed = {**config, "frame": {**config["frame"], **changes}}
        (folder / "config.json").write_text(json.dumps(changed))
        write_sums(folder)
        with pytest.raises(InputDataError, match=says):
            load_model(folder)
