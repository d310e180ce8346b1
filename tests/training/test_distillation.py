"""objective=distillation: what is trained, and what is learned."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import protlm
from protlm.build import build_module
from protlm.config import DistillationStage, TrainConfig
from protlm.config.composition import compose
from protlm.data.dataset import Batch
from protlm.data.masking import IGNORE
from protlm.loading import read_model
from protlm.model.block import Block
from protlm.model.transformer import build_network
from protlm.system.errors import InputDataError, UserError
from protlm.training.run_config import compose_run
from protlm.training.run_plan import RunPlan
from tests.fixtures.runs import Train, rows_of, saved

Settings = tuple[str, ...]
EITHER = ("objective=distillation", "trainer.max_steps=6")
STAGE_1 = (*EITHER, "optimizer.learning_rate=1e-2")
STAGE_2 = (*EITHER, "optimizer.learning_rate=5e-3", "objective.stage=logits")
LORA = (*STAGE_2, "objective.lora_rank=2")


@pytest.fixture(scope="module")
def pair(teacher: Path, swapped: Path) -> Settings:
    """The settings of a student and its teacher."""
    return ("attention=hedgehog", f"objective.teacher={teacher}", f"model.init_from={swapped}")


@pytest.fixture(scope="module")
def stage_1(train_tiny: Train, pair: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("runs") / "attention", *STAGE_1, *pair)


def attention_error(student: Path, teacher: Path) -> float:
    """The mean over layers and positions of |y - y'|² / |y|², on the teacher's inputs."""
    models = [protlm.load(path) for path in (student, teacher)]
    batch = models[0].tokenize(["MKTAYIAKQRQISFVKSHFSRQLEERLG", "GSHMLEDPVDAYWQ"])
    context = models[1].network._context(batch.tokens_BL, batch.mask_BL, causal=False)
    blocks = [[b for b in m.network.modules() if isinstance(b, Block)] for m in models]
    errors = []
    with torch.inference_mode():
        residual = models[1].network._enter(context)
        for own, taught in zip(*blocks, strict=True):
            hidden = taught.attention_norm(residual)
            y, estimate = (b.attention(hidden, context)[batch.mask_BL] for b in (taught, own))
            errors.append(((y - estimate).square().sum(-1) / y.square().sum(-1)).mean())
            residual = taught(residual, context)
    return float(torch.stack(errors).mean())


def weights(path: Path) -> dict[str, Tensor]:
    return read_model(path).weights


@pytest.mark.slow
def test_stage_1_trains_the_attention_alone_and_lowers_its_error(stage_1, swapped, teacher):
    before, after = weights(swapped), weights(stage_1)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("_map")}
    assert attention_error(stage_1, teacher) < 0.9 * attention_error(swapped, teacher)
    assert attention_error(teacher, teacher) == 0
    losses = [row["train_loss"] for row in rows_of(stage_1, "epoch")]
    assert losses[-1] < losses[0] < 1


def test_adapters_are_trained_alone_and_merged(train, pair, stage_1):
    given = [*pair[:2], f"model.init_from={stage_1}", "trainer.precision=32-true"]
    run = train("lora", *LORA, *given)
    before, after = weights(stage_1), weights(run)
    assert set(before) == set(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    parts = ("query", "key", "value", "output")
    assert changed == {f"blocks.{n}.attention.{part}.weight" for n in range(2) for part in parts}
    for name in changed:
        sizes = torch.linalg.svdvals((after[name] - before[name]).double())
        assert sizes[1] > 1e-4
        # The difference of rounded weights has a full rank, of the size of the rounding.
        assert sizes[2] < 1e-6 * float(before[name].norm())
    adapters = saved(run)["adapters"]
    layer = "network.blocks.1.attention.value.parametrizations.weight"
    adapter = 2 * adapters[f"{layer}.0.B"] @ adapters[f"{layer}.0.A"]
    original = adapters[f"{layer}.original"]
    name = "blocks.1.attention.value.weight"
    assert torch.equal(original, before[name])
    torch.testing.assert_close(after[name], original + adapter, rtol=1e-6, atol=1e-6)
    assert protlm.load(run).network.num_layers == 2


def batch_of(lengths: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(0)
    size = (len(lengths), max(lengths))
    mask_BL = torch.arange(size[1]) < torch.tensor(lengths)[:, None]
    tokens_BL = torch.randint(4, 24, size, generator=generator).masked_fill(~mask_BL, 1)
    targets_BL = tokens_BL.masked_fill(torch.rand(size, generator=generator) > 0.3, IGNORE)
    targets_BL = targets_BL.masked_fill(~mask_BL, IGNORE)
    return Batch(tokens_BL, targets_BL, mask_BL, torch.arange(len(lengths)), (0, 0, 0))


def module_of(pair: Settings, *overrides: str) -> Any:
    given = ["model=tiny", "data.max_length=128", "run_dir=run", "schedule.warmup_steps=0"]
    config = compose(TrainConfig, [*given, *pair, *overrides])
    return build_module(build_network(config.model, config.attention, seed=3), RunPlan(config))


def test_the_loss_of_stage_2_is_cross_entropy_and_divergence(pair, teacher):
    batch = batch_of([12, 5])
    chosen = batch.targets_BL != IGNORE
    nats = {}
    for weight in (0.0, 2.0):
        module = module_of(pair, *STAGE_2, f"objective.teacher_weight={weight}")
        loss, sums = module._losses(batch)
        assert float(sums.count) == chosen.sum()
        nats[weight] = float(loss.detach())
        own = module.network(batch.tokens_BL, batch.mask_BL, causal=False).logits_BLV
    taught = protlm.load(teacher).network(batch.tokens_BL, batch.mask_BL, causal=False).logits_BLV
    p, log_q = taught[chosen].double().softmax(-1), own[chosen].double().log_softmax(-1)
    entropy = -log_q.gather(1, batch.targets_BL[chosen][:, None]).sum()
    divergence = (p * (p.log() - log_q)).sum()
    assert nats[0.0] == pytest.approx(float(entropy.detach()), rel=1e-5)
    assert nats[2.0] - nats[0.0] == pytest.approx(float(2 * divergence.detach()), rel=1e-4)


def test_padding_and_filler_rows_have_no_loss_in_stage_1(pair):
    module = module_of(pair, *STAGE_1)
    batch = batch_of([12, 5])
    loss, sums = module._losses(batch)
    assert float(sums.count) == 2 * (12 + 5)
    assert math.isnan(float(sums.correct))
    tensors = batch.tokens_BL, batch.targets_BL, batch.mask_BL
    filler = Batch(*tensors, torch.tensor([0, -1]), (0, 0, 0))
    first = Batch(*(x[:1] for x in tensors), torch.tensor([0]), (0, 0, 0))
    totals = [module._losses(one)[0] for one in (filler, first)]
    torch.testing.assert_close(*totals, rtol=1e-4, atol=1e-4)
    assert totals[0] < loss


@pytest.mark.slow
def test_stage_2_trains_all_weights_and_keeps_their_source_and_the_hash_of_the_teacher(
    stage_1, swapped, teacher, train, pair
):
    source = read_model(swapped).description.source
    assert source is not None and read_model(stage_1).description.source == source
    # The teacher is not saved, but its hash.
    assert saved(stage_1)["teacher"] == protlm.load(teacher).hash
    assert len(saved(stage_1)["state_dict"]) == len(weights(stage_1))
    for steps in (2, 3):
        # The second command continues the run.
        run = train("run", *STAGE_2, *pair, f"trainer.max_steps={steps}")
    assert read_model(run).description.source == source
    before, after = weights(swapped), weights(run)
    same = {n for n in before if torch.equal(before[n], after[n]) and before[n].is_floating_point()}
    assert same == set()
    assert all(0 < row["train_accuracy"] < 1 for row in rows_of(run, "epoch"))


def test_a_learning_rate_of_stage_1_is_high_for_all_weights(pair):
    with pytest.warns(UserWarning, match=r"learning_rate=0.01 suits stage 1"):
        module_of(pair, *EITHER, "objective.stage=logits", "optimizer.learning_rate=1e-2")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [STAGE_1, STAGE_2], ids=["attention", "logits"])
def test_two_ranks_train_as_one(stage, run_ranks, train, pair, tmp_path):
    settings = [*stage, *pair]
    run_ranks(tmp_path, "start-apart", *settings)
    one, two = weights(train("one", *settings)), weights(tmp_path / "run")
    # Adam divides by the size of the gradient: rounding may change a step by a part of it.
    torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_another_teacher_is_refused(train, pair, teacher, tmp_path):
    run = train("run", *STAGE_2, *pair, "trainer.max_steps=2")
    moved = tmp_path / "moved"
    moved.symlink_to(teacher)
    given = [*STAGE_2, pair[0], pair[2]]
    train(run, *given, f"objective.teacher={moved}", "trainer.max_steps=3")
    stored = compose_run([f"run_dir={run}", f"objective.teacher={teacher}"]).objective
    assert (stored.stage, stored.teacher) == (DistillationStage.logits, str(teacher))
    with pytest.raises(InputDataError, match=r"objective.teacher=nothing cannot be used: nothing"):
        train(run, *given, "objective.teacher=nothing", "trainer.max_steps=4")
    other = train("other", "attention=softmax", "seed=5", "trainer.max_steps=2")
    with pytest.raises(UserError, match=r"objective.teacher has weights with the hash .* was tra"):
        train(run, *given, f"objective.teacher={other}", "trainer.max_steps=4")
    # Nor can the attention alone learn from a model that this one was not converted from.
    message = r"other weights than objective.teacher=.*other \(embedding.weight\), and .*convert"
    with pytest.raises(UserError, match=message):
        train("new", *STAGE_1, pair[0], pair[2], f"objective.teacher={other}")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "stage, settings, message",
    [
        (STAGE_1, "attention=performer_relu", "attention=performer_relu has no parameters, so"),
        (STAGE_1, "attention=performer_softmax", "stage=logits, or choose attention=hedgehog"),
        (STAGE_1, "model.init_from=null", r"model.init_from=NEW with .*protlm checkpoint convert"),
        (STAGE_1, "model.num_layers=3", "has model.num_layers=2, and this run 3"),
        (STAGE_1, "objective.name=causal", "was trained with objective=masked, and this run has"),
        (STAGE_1, "objective.teacher=null", "a trained model to imitate; type objective.teacher="),
        (STAGE_1, "trainer.compile=true", "trainer.compile=true has no effect in objective.stage"),
        (STAGE_1, "trainer.activation_checkpointing=true", "has no effect in objective.stage=atte"),
        (STAGE_1, "data.batching=relatives", "of single proteins; type data.batching=packed"),
        (LORA, "model.init_from=null", "lora_rank=2 adapts a trained model; type model.init_from="),
        (LORA, "trainer.ema_decay=0.9", "has no average of weights; type trainer.ema_decay=null"),
        (LORA, "objective.stage=attention", "lora_rank=2 is a setting of the second stage"),
        (LORA, "objective.lora_rank=0", "objective.lora_rank=0 must be at least 1"),
    ],
)
def test_what_a_stage_cannot_train_is_refused(stage, settings, message, pair):
    with pytest.raises(UserError, match=message):
        module_of(pair, *stage, settings)
