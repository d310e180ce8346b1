"""A protein that is far longer than the others of its file."""

import shutil
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from protlm.analysis import contact_regression
from protlm.analysis.contact_regression import BYTES_PER_PAIR, ContactRegression, head_features
from protlm.cli.main import run
from protlm.data.batching.plan import SPECIALS
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.model import gibbs, memory
from protlm.options.generate import Sampling
from protlm.options.labels import FinetuneSettings, Task
from protlm.system.errors import InputDataError
from protlm.training.labels import Batches, LabeledData, LabeledTokens, LabelLearning, Metric
from tests.small_models import small_model


@pytest.fixture
def folder(tmp_path, few_structures, monkeypatch) -> Path:
    """Short proteins and a long one, with labels, and structures to fit to in `fit`."""
    letters = np.random.default_rng(0).choice(list("ACDEFGHIKLMNPQRSTVWY"), (20, 30))
    rows = {f"P{number}": "".join(row) for number, row in enumerate(letters)}
    rows["long"] = "MKTAYIAKQR" * 210
    (tmp_path / "x.fasta").write_text("".join(f">{k}\n{s}\n" for k, s in rows.items()))
    splits = ("train", "train", "valid", "test")
    labels = [f"{k},{s},{s.count('A')},{splits[n % 4]}" for n, (k, s) in enumerate(rows.items())]
    (tmp_path / "x.csv").write_text("\n".join(["identifier,sequence,label,split", *labels]))
    (tmp_path / "fit").symlink_to(few_structures)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "attention x.fasta -o out.h5 --layers 1",
        "contacts x.fasta -o out.h5 --fit fit",
        "embed x.fasta -o out.h5",
        "generate --start x.fasta --sweeps 1 --mask-fraction 1 -o out.fasta",
        "probe x.csv -o out",
        "finetune x.csv -o out --epochs 1",
    ],
)
def test_what_has_no_room_is_skipped_with_both_figures(
    command, folder, tiny_run, monkeypatch, capfd
):
    monkeypatch.setattr(memory, "free_memory", lambda device: 1_000_000)
    run([*command.split(), "-m", str(tiny_run), "--device", "cpu"])
    said = capfd.readouterr().err.splitlines()
    (skipped,) = [line for line in said if line.startswith("skipped ")]
    assert skipped.startswith("skipped long: 2,100 residues need about ")
    assert skipped.endswith(" of memory, and 1.0 MB are free on cpu")
    if "out.h5" in command:
        with h5py.File("out.h5") as file:
            assert set(file) == {f"P{number}" for number in range(20)}
            assert np.asarray(file.attrs["skipped"])["reason"][0].decode() in skipped


def test_contacts_of_nothing_that_fits_are_no_result(folder, tiny_run, monkeypatch):
    shutil.copy(next((folder / "fit").glob("*")), "x.pdb.gz")
    monkeypatch.setattr(memory, "_LONGEST", 16)
    monkeypatch.setattr(memory.Room, "refusal", lambda self, length: f"{length} need more")
    command = "contacts x.pdb.gz -o out.h5 --fit fit --device cpu -m"
    with pytest.raises(InputDataError, match=r"no protein can be used: x: .* need more"):
        run([*command.split(), str(tiny_run)])
    assert list(folder.glob("out*")) == []


def test_contacts_need_the_maps_of_one_layer(monkeypatch):
    monkeypatch.setattr(contact_regression, "_ROWS", 20)
    model, sequence, regression = small_model("softmax"), "MKTAYIAKQR" * 45, ContactRegression()
    regression.weights_H = np.array([0.5, 0.0, -2.0, 3.0])
    expected_LL = regression.predict(head_features(model, sequence))
    tracemalloc.start()
    found_LL = regression.predict_protein(model, sequence)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_allclose(found_LL, expected_LL, atol=1e-12)
    assert peak < (4 * model.num_heads + BYTES_PER_PAIR) * len(sequence) ** 2


def test_starts_are_sampled_in_batches_of_tokens(monkeypatch):
    starts = [STANDARD[: 3 + number % 5] for number in range(12)] + [STANDARD * 3]
    network, seen, found = small_model("softmax").network, list[int](), []
    network.register_forward_pre_hook(lambda _, given: seen.append(given[0].numel()))
    for limit in (10_000, 40):
        monkeypatch.setattr(gibbs, "TOKENS_PER_BATCH", limit)
        how, sweeps = Sampling(), gibbs.Sweeps(1, 1.0)
        new = gibbs.resample(network, starts, how, sweeps=sweeps, seed=0, batch_size=32)
        found.append(dict(new))
    assert found[0] == found[1]
    assert max(seen[1:]) == len(starts[-1]) + SPECIALS and sorted(seen[1:])[-2] <= 40


@pytest.mark.parametrize("of_residues", [False, True])
def test_a_step_in_several_passes_has_the_gradient_of_one(of_residues):
    sequences = ["MKTAY", STANDARD * 4, "ACDEF", STANDARD, "MK", "GSHMTTA"]
    places = [np.arange(len(one))[:: 1 + n] for n, one in enumerate(sequences)]
    values = np.arange(float(sum(map(len, places)) if of_residues else len(sequences)))
    encoded = [VOCABULARY.encode(one) for one in sequences]
    data = LabeledTokens(encoded, values, places if of_residues else None)
    found, tokens, head = [], list[int](), nn.Linear(16, 1).double()
    for limit in (10_000, 36):
        network = small_model("softmax").network
        network.register_forward_pre_hook(lambda _, given: tokens.append(given[0].numel()))
        module = LabelLearning(
            network,
            head,
            task=Task.number,
            metric=Metric("x", lambda *_: 0.0),
            data=LabeledData(data, data, batch_size=6, seed=1),
            causal=False,
            settings=FinetuneSettings(tokens_per_batch=limit),
        )
        batch = Batches(data, 6, seed=1)[0]
        outputs = module(batch)
        module._loss(outputs, batch.values).backward()
        found.append([outputs.detach(), *(p.grad for p in network.parameters())])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    # The four shortest fill a pass; each of the three is computed again for the gradient.
    assert len(tokens) == 1 + 2 * 3 and max(tokens[1:]) == len(sequences[1]) + SPECIALS
