"""Every benchmark runs with tiny settings and writes its figures; peers do the same work."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packaging.requirements import Requirement

from benchmarks import attention_contenders, attention_passes, embedding, linearized, overhead
from benchmarks.attention_passes import Case, Pass, standard_normal_inputs
from benchmarks.figures import exponent, styles
from benchmarks.language_models import ESM, OURS, Esm, Ours, Sizes, models
from benchmarks.synthetic_fasta import SAMPLE, Proteins
from benchmarks.training_batches import Proteins as TrainingProteins
from benchmarks.training_batches import batches
from protlm.attention import names
from protlm.build import build_module
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.data.batching.packing import Packing
from protlm.data.masking import IGNORE
from protlm.model.transformer import build_network

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.fixture
def written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Runs a benchmark with --quick and returns what it writes, and what it prints."""
    # Whether performer-pytorch is installed here or not, these runs go without.
    monkeypatch.setitem(sys.modules, "performer_pytorch", None)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    monkeypatch.chdir(tmp_path)

    def run(script: str, *options: str) -> tuple[dict[str, Any], str]:
        monkeypatch.setattr(sys, "argv", [script, "--quick", *options, "--json", "out.json"])
        importlib.import_module(f"benchmarks.{script}").main()
        return json.loads(Path("out.json").read_text())["groups"], capsys.readouterr().out

    return run


def test_embedding(written: Any) -> None:
    pytest.importorskip("transformers")
    groups, printed = written("embedding", "--proteins", "9", "--lengths", "40")
    for held in groups["embeddings"]:
        assert {embedding.IN_ORDER, embedding.SORTED, *embedding.OURS} == set(held["costs"])
        assert held["times_as_fast_as"][embedding.SORTED].keys() == held["costs"].keys()
    assert "times as fast as EsmModel, protlm's batches" in printed


def test_linearized(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linearized, "peak_bytes", lambda attention, preset, length: 10**6 * length)
    groups, printed = written("linearized", "--lengths", "20", "40")
    for held, length in zip(groups["linearized"], (20, 40), strict=True):
        assert set(held["costs"]) == set(linearized.MODELS)
        assert held["facts"]["hedgehog"] == {"peak_bytes": 10**6 * length}
    assert "times as fast as softmax" in printed
    _, printed = written("linearized", "--lengths", "20", "40", "--most-seconds", "1e-9")
    assert "left out: hedgehog from L = 40 on" in printed


@pytest.mark.slow
def test_the_peak_memory_is_that_of_the_process() -> None:
    assert 10**8 < linearized.peak_bytes("hedgehog", "tiny", 64) < 10**10


def test_linearized_models_keep_the_weights_of_the_original() -> None:
    original = linearized.model("softmax", "tiny").network.state_dict()
    converted = linearized.model("hedgehog", "tiny").network.state_dict()
    assert all(torch.equal(converted[name], value) for name, value in original.items())
    assert len(converted) > len(original)


def test_both_sides_embed_every_protein() -> None:
    """The batches do not change the peer's vectors, and ours have the same shape."""
    pytest.importorskip("transformers")
    sequences = ["MKTAYIAKQR", "MKV", "ACDEFGHIKLMNPQRSTVWY"]
    peer, sizes = embedding.esm(embedding.TINY), embedding.TINY
    by_8 = embedding.esm_means(peer, embedding.in_order, sequences)
    by_length = embedding.esm_means(peer, embedding.by_length, sequences)
    order = [1, 0, 2]
    torch.testing.assert_close(torch.stack(by_length), torch.stack(by_8)[order])
    for attention in embedding.OURS:
        means = embedding.our_means(embedding.ours(attention, sizes), sequences)
        assert [mean.shape for mean in means] == [(sizes.model_dim,)] * 3


def test_attention(written: Any) -> None:
    groups, printed = written("attention", "--lengths", "16", "--dtypes", "fp32")
    assert list(groups) == ["bidirectional, fp32", "causal, fp32"]
    for (held,) in groups.values():
        assert {"SDPA", "softmax", "performer_softmax", "performer_relu"} == set(held["costs"])
        assert held["times_as_fast_as"]["SDPA"].keys() == held["costs"].keys()
        assert "make bench-attention" in held["left_out"]["performer-pytorch"]
    assert "times as fast as SDPA" in printed
    assert Path("outputs/benchmark_attention.png").read_bytes().startswith(b"\x89PNG")


def test_mechanisms(written: Any) -> None:
    chosen = ("--mechanisms", "softmax", "performer_relu")
    groups, _ = written("mechanisms", "--lengths", "16", "32", *chosen)
    (held,) = groups.values()
    assert [each["work"] for each in held] == ["L=16", "L=32"]
    assert all("performer_relu" in each["times_as_fast_as"]["softmax"] for each in held)


@pytest.mark.slow
def test_data(written: Any) -> None:
    (held,) = written("data")[0].values()
    assert [list(each["costs"]) for each in held] == [
        ["Biopython", "1 worker", "2 workers"],
        *[["Biopython", "protlm"]] * 2,
        ["Biopython", "shards", "loader with masking"],
    ]


@pytest.mark.slow
def test_training(written: Any, tiny_fasta: Path) -> None:
    (held,) = written("training", "--lengths", "32", "--fasta", str(tiny_fasta))[0].values()
    assert [each["work"] for each in held] == ["L=32", "real lengths"]
    assert all(set(each["costs"]) == {ESM, *OURS} for each in held)


@pytest.mark.slow
def test_overhead(written: Any, tiny_fasta: Path) -> None:
    settings = ("model=tiny", "data.max_length=64", "schedule.warmup_steps=0")
    groups, printed = written("overhead", *settings, "--fasta", str(tiny_fasta))
    assert list(groups["overhead"][0]["costs"]) == ["trainer", "bare loop"]
    assert "The trainer adds" in printed


def test_the_bare_loop_takes_the_steps_of_the_trainer(tiny_data: Path, tmp_path: Path) -> None:
    settings = ["model=tiny", "data.max_length=128", "data.tokens_per_batch=512"]
    # Otherwise the sign of a gradient that is nearly 0 is a whole step of Adam.
    settings += ["schedule.warmup_steps=0", "optimizer.eps=0.01"]
    folders = [f"data.dir={tiny_data}", f"run_dir={tmp_path / 'run'}"]
    steps = [
        "trainer.accelerator=cpu",
        "trainer.precision=32-true",
        "trainer.max_steps=6",
        "trainer.valid_batches=1",
    ]
    config = compose(TrainConfig, [*settings, *folders, *steps])
    module = build_module(build_network(config.model, config.attention, seed=0), config)
    measured = overhead.measure(module, config, steps=2)
    assert [len(costs) for costs in measured.costs.values()] == [2, 2]
    parameters = (module.parameters(), measured.bare.module.parameters())
    for trained, bare in zip(*parameters, strict=True):
        torch.testing.assert_close(trained, bare, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_softmax_and_its_peer_compute_the_same(causal: bool) -> None:
    case = Case(causal, 33, "fp32", CPU)
    *vectors, _ = standard_normal_inputs(case)
    exact = attention_contenders.sdpa(case)(*vectors)
    torch.testing.assert_close(attention_contenders.ours("softmax", case)(*vectors), exact)


def test_memory_counts_every_storage_once() -> None:
    case = Case(False, 128, "fp32", CPU)
    inputs = standard_normal_inputs(case)
    vector = 128 * attention_passes.MODEL_DIM * 4
    for attend, kept in ((lambda q, k, v: v * 2.0, 0), (lambda q, k, v: q.mT.mT * v, 2)):
        assert Pass(attend, inputs).memory()["kept_bytes"] == kept * vector
        # The output or products, and then the gradients beside them.
        assert Pass(attend, inputs).memory()["peak_bytes"] >= 2 * vector


@pytest.mark.parametrize("name", ["softmax", ESM])
def test_models_are_of_one_size_and_have_the_loss_of_the_targets(
    name: str, tiny_fasta: Path
) -> None:
    sizes = Sizes(num_layers=2, model_dim=64, num_heads=2, feedforward_dim=128, max_length=1024)
    batch = next(batches(TrainingProteins(tiny_fasta), Packing(128, 64)))
    model = models(sizes)[name]().train()
    blocks = [(n, p) for n, p in model.named_parameters() if "blocks." in n or "layer." in n]
    in_blocks = sum(p.numel() for _, p in blocks if p.ndim == 2)
    assert in_blocks == 2 * (4 * 64 * 64 + 2 * 64 * 128)
    if isinstance(model, Ours):
        logits = model.network(batch.tokens_BL, batch.mask_BL, causal=False).logits_BLV
    else:
        assert isinstance(model, Esm)
        logits = model.model(input_ids=batch.tokens_BL).logits
    chosen = batch.targets_BL != IGNORE
    expected = F.cross_entropy(logits[chosen], batch.targets_BL[chosen])
    torch.testing.assert_close(model(batch), expected)


def test_figures_tell_mechanisms_apart() -> None:
    assert len(set(styles(names()).values())) == len(names())
    assert exponent({2048: 4.0, 4096: 16.0, 8192: 64.0, 16: 9.0}) == pytest.approx(2.0)
    assert exponent({2048: 1.0}) is None


def test_synthetic_proteins_are_like_real_ones() -> None:
    first, again, other = (Proteins(SAMPLE, seed=seed).draw(500) for seed in (1, 1, 2))
    assert first == again != other
    assert 350 < sum(map(len, first)) / 500 < 550


def test_peers_are_pinned_and_stay_out_of_the_lock() -> None:
    def requirements(path: Path) -> list[Requirement]:
        lines = path.read_text().splitlines()
        return [Requirement(line) for line in lines if line and not line.startswith("#")]

    peers = requirements(ROOT / "benchmarks" / "requirements.txt")
    assert {str(peer.specifier)[:2] for peer in peers} == {"=="}
    locked = {requirement.name for requirement in requirements(ROOT / "requirements.lock")}
    assert {peer.name for peer in peers} & {*locked, "torch", "triton"} == set()


@pytest.mark.parametrize("path", sorted((ROOT / "studies").glob("[!_]*.py")), ids=lambda p: p.stem)
def test_a_study_can_be_imported_and_says_how_it_is_run(path: Path) -> None:
    """A module without a `main` serves another study."""
    study = importlib.import_module(f"studies.{path.stem}")
    assert callable(getattr(study, "main", len))
    assert hasattr(study, "main") == (f"python -m studies.{path.stem}" in (study.__doc__ or ""))
