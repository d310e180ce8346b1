"""A step has the same size and gradient on any number of ranks and micro-batches."""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from protlm.build import build_data, open_data
from protlm.checkpoints.validations import read_metrics
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.training.module import LanguageModeling
from tests.fixtures.runs import Train, rows_of, weights_of
from tests.small_models import network_of

PROGRAM = Path(__file__).parent / "programs" / "gradients_of_ranks.py"
STEP = (
    "trainer.tokens_per_step=2048",
    "trainer.log_every=1",
    "trainer.valid_every=3",
    "trainer.max_steps=6",
    "attention=performer_softmax",
    "attention.num_features=32",
    "attention.redraw_every=2",
    "model.qk_norm=true",
)


def places(run: Path) -> list[tuple[float, float]]:
    return [(row["step"], row["samples"]) for row in rows_of(run, "samples")]


@pytest.fixture(scope="module")
def at_once(train_tiny: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "at_once"
    return train_tiny(run, *STEP, "data.tokens_per_batch=2048")


@pytest.mark.slow
def test_micro_batches_make_the_same_steps(at_once, train):
    # 700 does not divide a step: there are more micro-batches, and filler rows.
    parts = train("parts", *STEP, "data.tokens_per_batch=700")
    assert places(parts) == places(at_once)
    for name, value in weights_of(parts).items():
        assert torch.allclose(value, weights_of(at_once)[name], rtol=0, atol=2e-6), name
    logs = (read_metrics(run / "metrics.csv") for run in (parts, at_once))
    for one, other in zip(*logs, strict=True):
        for column in one.keys() & {"train_loss", "valid_loss", "gradient_norm"}:
            assert one[column] == pytest.approx(other[column], rel=1e-5), column


def test_slices_of_a_batch_draw_their_own_dropout(train, look_at):
    numbers, seeds = [], []

    def look(module: LanguageModeling, batch: Any, index: int) -> None:
        numbers.append(batch.slice)
        seeds.append(torch.initial_seed())

    look_at(LanguageModeling, "training_step", look, after=True)
    train("run", *STEP, "data.tokens_per_batch=700", "trainer.max_steps=2")
    assert numbers == [0, 1, 2, 3] * 2
    assert len(set(seeds)) == len(seeds)


def test_a_run_resumes_with_another_number_of_micro_batches(at_once, train, tmp_path):
    run = tmp_path / "run"
    train(run, *STEP, "data.tokens_per_batch=700", "trainer.max_steps=2")
    # Six micro-batches: Lightning's count of batches is not a multiple of both.
    train(run, *STEP, "data.tokens_per_batch=410", "trainer.max_steps=4")
    train(run, *STEP, "data.tokens_per_batch=2048")
    assert places(run) == places(at_once)
    steps = [row["step"] for row in rows_of(run, "valid_loss")]
    # Runs of two and of four steps also validate at their ends.
    assert {3, 6} <= set(steps)
    for name, value in weights_of(run).items():
        assert torch.allclose(value, weights_of(at_once)[name], rtol=0, atol=2e-6), name


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulated_gradients_are_those_of_all_targets_at_once(accumulate, train, tiny_data):
    given = [f"data.dir={tiny_data}", "data.max_length=128", "data.tokens_per_batch=1024"]
    config, network = compose(TrainConfig, given), network_of()
    loader = build_data(*open_data(config.data), config).train_dataloader()
    nats, count = torch.zeros(()), 0
    for _, batch in zip(range(accumulate), loader, strict=False):
        logits = network(batch.tokens_BL, batch.mask_BL, causal=False).logits_BLV
        chosen = batch.targets_BL >= 0
        nats = nats + torch.nn.functional.cross_entropy(
            logits[chosen], batch.targets_BL[chosen], reduction="sum"
        )
        count += int(chosen.sum())
    (nats / count).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in network.parameters()])
    run = train(
        "run",
        f"trainer.accumulate_grad_batches={accumulate}",
        "trainer.log_every=1",
        "trainer.max_steps=2",
    )
    first = read_metrics(run / "metrics.csv")[0]
    assert first["gradient_norm"] == pytest.approx(expected.item(), rel=1e-4)
    assert first["train_loss"] == pytest.approx(nats.item() / count, rel=1e-5)


@pytest.mark.parametrize("mode", ["sequences", "concatenated"])
@pytest.mark.parametrize("tokens", [128, 190, 300, 410, 700])
def test_a_micro_batch_of_the_longest_rows_holds_at_most_its_tokens(mode, tokens, tiny_data):
    settings = [f"data.dir={tiny_data}", "data.max_length=128", f"data.mode={mode}"]
    settings += ["trainer.tokens_per_step=1024", f"data.tokens_per_batch={tokens}"]
    config = compose(TrainConfig, settings)
    batches = build_data(*open_data(config.data), config).train_dataloader()
    shapes = [batch.mask_BL.shape for batch in islice(batches, 60)]
    sizes = [rows * length for rows, length in shapes if length == 128]
    assert sizes and max(sizes) <= tokens


FIRST_STEP = ("data.max_length=256", "schedule.warmup_steps=0", "trainer.max_steps=1")
TAUGHT = "objective=distillation attention=hedgehog objective.teacher={} model.init_from={}"
# Numbers of ranks and of micro-batches, for each thing that is learned.
DIVIDED = {
    "masks": ("attention=softmax objective.mask_fraction=0.03", [(1, 1), (1, 4), (2, 2)]),
    "attention": (f"{TAUGHT} optimizer.learning_rate=1e-2", [(1, 1), (2, 1)]),
    "logits": (f"{TAUGHT} objective.stage=logits optimizer.learning_rate=5e-3", [(1, 1), (2, 1)]),
}


@pytest.mark.slow
def test_ranks_and_micro_batches_have_the_same_gradient(
    tiny_settings, one_process, teacher, swapped, tmp_path
):
    """Few targets are masked, and very different numbers of targets per row."""
    runs = [
        (f"{name}-{ranks}-{parts}", ranks, parts, [*tiny_settings, *FIRST_STEP, *settings.split()])
        for name, (text, divided) in DIVIDED.items()
        for settings in [text.format(teacher, swapped)]
        for ranks, parts in divided
    ]
    command = [sys.executable, PROGRAM, json.dumps(runs)]
    named: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, cwd=tmp_path, env=one_process, check=False, **named)
    assert done.returncode == 0, done.stderr
    for name, (_, divided) in DIVIDED.items():
        whole, *others = (torch.load(tmp_path / f"{name}-{r}-{p}.pt") for r, p in divided)
        assert whole.norm() > 0
        for gradient in others:
            assert (gradient - whole).norm() <= 1e-7 * whole.norm(), name
