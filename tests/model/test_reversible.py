"""Reversible residuals: the paper's equations, their inversion, and the memory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import protlm
from protlm.checkpoints import format as checkpoints
from protlm.checkpoints.checksums import write_sums
from protlm.composition import compose
from protlm.config import ModelConfig, TrainConfig
from protlm.errors import UserError
from protlm.model.block import Block
from protlm.model.network import build_network
from protlm.model.selfattention import Context
from protlm.model.transformer import ProteinLM
from protlm.paths import conf_dir
from tests.marks import slow_but

ROOT = Path(__file__).resolve().parent.parent.parent
RECURRENT = ["softmax", "performer_relu", "performer_softmax"]
ATTENTIONS = [*RECURRENT, "reformer", "bigbird", "long_short"]


def network(attention: str = "softmax", **changes: Any) -> ProteinLM:
    """The `tiny` model, reversible, with 3 blocks and dropout."""
    settings = {"reversible": True, "num_layers": 3, "dropout": 0.2, **changes}
    preset = OmegaConf.load(conf_dir() / "model" / "tiny.yaml")
    built = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(ModelConfig), preset, settings)
    )
    assert isinstance(built, ModelConfig)
    return build_network(built, {"name": attention}, seed=0).train()


def example(batch: int = 2, length: int = 37) -> tuple[Tensor, Tensor]:
    """Tokens and mask; the second sample is padded at the end."""
    generator = torch.Generator().manual_seed(0)
    tokens_BL = torch.randint(4, 24, (batch, length), generator=generator)
    mask_BL = torch.ones(batch, length, dtype=torch.bool)
    mask_BL[1:, -9:] = False
    return tokens_BL.masked_fill(~mask_BL, 1), mask_BL


def blocks_of(model: ProteinLM) -> list[Block]:
    return [block for block in model.blocks if isinstance(block, Block)]


def by_the_paper(
    model: ProteinLM, tokens_BL: Tensor, mask_BL: Tensor, *, causal: bool
) -> tuple[list[Tensor], Tensor]:
    """Hidden states and logits by equation 9, as autograd keeps and differentiates them."""
    embedded_BLD = model.dropout(model.embedding(tokens_BL))
    dtype = embedded_BLD.dtype
    x1_BLD = x2_BLD = embedded_BLD.double()
    assert model.rotary is not None
    rotation = model.rotary.angles(0, tokens_BL.shape[1])
    context = Context(tokens_BL, mask_BL, rotation, causal)
    hidden = [embedded_BLD]
    for block in blocks_of(model):
        attended_BLD = block.attention(block.attention_norm(x2_BLD.to(dtype)), context)
        y1_BLD = x1_BLD + block.dropout(attended_BLD)
        fed_BLD = block.feedforward(block.feedforward_norm(y1_BLD.to(dtype)))
        y2_BLD = x2_BLD + block.dropout(fed_BLD)
        x1_BLD, x2_BLD = y1_BLD, y2_BLD
        hidden.append(((y1_BLD + y2_BLD) / 2).to(dtype))
    hidden[-1] = model.final_norm(hidden[-1])
    return hidden, model.head(hidden[-1])


def reversed_pass(model: ProteinLM, inputs: tuple[Tensor, Tensor], *, causal: bool) -> Tensor:
    return model(*inputs, causal=causal).logits_BLV


def paper_s_pass(model: ProteinLM, inputs: tuple[Tensor, Tensor], *, causal: bool) -> Tensor:
    return by_the_paper(model, *inputs, causal=causal)[1]


def loss(logits_BLV: Tensor) -> Tensor:
    weights_BLV = torch.linspace(-1, 1, logits_BLV.numel(), dtype=logits_BLV.dtype)
    return (logits_BLV.log_softmax(-1) * weights_BLV.view_as(logits_BLV)).sum()


def gradients(model: ProteinLM) -> dict[str, Tensor]:
    """Returns and clears the gradients of a model."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_all_close(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> None:
    """Compares tensors, relative to the scale of each."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        atol = rtol * value.abs().max().item()
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=atol, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_output_and_gradients_are_those_of_the_paper_s_equations(
    attention: str, causal: bool
) -> None:
    model = network(attention).double()
    results = []
    for run in (reversed_pass, paper_s_pass):
        torch.manual_seed(1)
        logits_BLV = run(model, example(), causal=causal)
        # Random numbers drawn between and after the passes are not changed by the recomputation.
        torch.manual_seed(2)
        loss(logits_BLV).backward()
        results.append({"logits": logits_BLV, "drawn": torch.rand(3), **gradients(model)})
    reversible, expected = results
    assert len(expected) == 2 + len(list(model.parameters()))
    assert torch.equal(reversible["drawn"], expected["drawn"])
    assert_all_close(reversible, expected, rtol=1e-10)


def test_gradients_of_a_chunked_feedforward_are_the_same() -> None:
    model = network(feedforward_chunk=8).double()
    results = []
    for run in (reversed_pass, paper_s_pass):
        torch.manual_seed(1)
        loss(run(model, example(), causal=False)).backward()
        results.append(gradients(model))
    assert_all_close(*results, rtol=1e-10)


def sublayer_inputs(model: ProteinLM, seen: list[Tensor]) -> None:
    """Records every stream that a sublayer reads."""
    for block in blocks_of(model):
        for norm in (block.attention_norm, block.feedforward_norm):
            norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attention", slow_but(ATTENTIONS, "reformer"))
@pytest.mark.parametrize(
    "dtype, mixed, tolerance",
    [(torch.float32, False, 1e-8), (torch.float32, True, 1e-8), (torch.float64, False, 1e-12)],
    ids=["float32", "bf16-mixed", "float64"],
)
def test_twelve_blocks_are_inverted_to_the_last_digit(
    attention: str, causal: bool, dtype: torch.dtype, mixed: bool, tolerance: float
) -> None:
    model = network(attention, num_layers=12).to(dtype)
    seen: list[Tensor] = []
    sublayer_inputs(model, seen)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        logits_BLV = model(*example(length=129), causal=causal).logits_BLV
    loss(logits_BLV.to(dtype)).backward()
    forward, again = seen[:24], seen[:23:-1]
    assert len(again) == 24
    for x_BLD, y_BLD in zip(forward, again, strict=True):
        assert x_BLD.dtype is dtype
        assert (x_BLD - y_BLD).norm() <= tolerance * x_BLD.norm()


def kept_and_peak(make_memory: Callable[[], Any], **changes: Any) -> tuple[int, int]:
    model = network("performer_relu", model_dim=32, feedforward_dim=64, **changes)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inputs = example(length=512)
    with make_memory() as memory:
        logits_BLV = model(*inputs, causal=False).logits_BLV
        kept = memory.alive
        logits_BLV.square().sum().backward()
    return kept, memory.peak


def test_memory_does_not_grow_with_the_blocks(make_memory: Callable[[], Any]) -> None:
    stream = 2 * 512 * 32 * 4
    shallow, deep = (kept_and_peak(make_memory, num_layers=n) for n in (2, 8))
    assert deep == shallow
    plain = [kept_and_peak(make_memory, num_layers=n, reversible=False) for n in (2, 8)]
    assert plain[1][0] - plain[0][0] > 6 * 10 * stream


def test_nothing_is_kept_after_the_backward_pass(make_memory: Callable[[], Any]) -> None:
    model = network(num_layers=2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with make_memory() as memory:
        total = loss(model(*example(), causal=False).logits_BLV)
        total.backward()
        # The loss and its graph are alive, including the angles of the positions.
        assert memory.alive < example()[0].numel() * 64 * total.itemsize


@pytest.mark.parametrize("within", [False, True])
def test_autocast_is_repeated(within: bool) -> None:
    model = network("performer_relu")
    results, dtypes = [], []
    handles = [
        block.feedforward.register_forward_hook(lambda m, args, out: dtypes.append(out.dtype))
        for block in blocks_of(model)
    ]
    for run in (reversed_pass, paper_s_pass):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total = loss(run(model, example(), causal=False).float())
            if within:
                total.backward()
        if not within:
            total.backward()
        results.append(gradients(model))
    assert set(dtypes) == {torch.bfloat16} and len(dtypes) == 3 * len(handles)
    reversible, expected = results
    assert reversible.keys() == expected.keys()
    for name, value in expected.items():
        assert (reversible[name] - value).norm() <= 1e-5 * value.norm(), name


def test_autocast_that_is_off_stays_off_within_another() -> None:
    model = network()
    dtypes = []
    blocks_of(model)[0].feedforward.register_forward_hook(
        lambda m, args, out: dtypes.append(out.dtype)
    )
    total = loss(model(*example(), causal=False).logits_BLV)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total.backward()
    assert dtypes == [torch.float32] * 2


def test_backward_passes_add_up() -> None:
    model = network().double()
    for _ in range(2):
        torch.manual_seed(1)
        loss(model(*example(), causal=False).logits_BLV).backward()
    twice = gradients(model)
    torch.manual_seed(1)
    total = loss(model(*example(), causal=False).logits_BLV)
    total.backward(retain_graph=True)
    once = {name: value.clone() for name, value in gradients(model).items()}
    total.backward()
    assert_all_close(gradients(model), once, rtol=1e-12)
    assert_all_close(twice, {name: 2 * value for name, value in once.items()}, rtol=1e-12)


def test_two_passes_can_be_interleaved() -> None:
    model = network().double().eval()
    tokens_BL, mask_BL = example()
    both = [(tokens_BL, mask_BL), (tokens_BL.flip(0), mask_BL.flip(0))]
    losses = [loss(reversed_pass(model, inputs, causal=True)) for inputs in both]
    (losses[0] * losses[1]).backward()
    found = gradients(model)
    losses = [loss(paper_s_pass(model, inputs, causal=True)) for inputs in both]
    (losses[0] * losses[1]).backward()
    assert_all_close(found, gradients(model), rtol=1e-10)


def test_parameters_may_be_frozen_shared_borrowed_and_unused() -> None:
    model = network().double()
    first, second, third = blocks_of(model)
    first.requires_grad_(False)
    model.embedding.requires_grad_(False)
    third.attention.query.requires_grad_(False)
    second.feedforward = first.feedforward.requires_grad_()
    # A layer may use parameters that its module does not list.
    third.feedforward.forward = lambda x_BLD: second.attention.output(x_BLD).tanh()
    results = []
    for run in (reversed_pass, paper_s_pass):
        torch.manual_seed(1)
        loss(run(model, example(), causal=False)).backward()
        results.append(gradients(model))
    assert_all_close(*results, rtol=1e-10)
    frozen_or_unused = {"blocks.0.attention.query.weight", "blocks.2.feedforward.up.weight"}
    assert frozen_or_unused.isdisjoint(results[0])
    assert {"blocks.0.feedforward.up.weight", "blocks.1.attention.output.weight"} <= set(results[0])


def test_gradients_of_chosen_parameters_are_those_of_all() -> None:
    model = network().double().eval()
    total = loss(model(*example(), causal=False).logits_BLV)
    weight = blocks_of(model)[1].attention.value.weight
    (chosen,) = torch.autograd.grad(total, weight, retain_graph=True)
    total.backward()
    assert weight.grad is not None
    torch.testing.assert_close(chosen, weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layers", [[0], [1], [1, 2], [0, 1, 2, 3], [3]])
def test_hidden_states_are_the_means_and_have_gradients(layers: Sequence[int]) -> None:
    model = network().double()
    torch.manual_seed(1)
    hidden = model(*example(), causal=False, layers=layers).hidden
    torch.manual_seed(1)
    expected = by_the_paper(model, *example(), causal=False)[0]
    assert set(hidden) == set(layers)
    for number in layers:
        torch.testing.assert_close(hidden[number], expected[number], rtol=1e-12, atol=1e-12)
    # The loss does not use the logits: the backward pass begins in the middle of the blocks.
    torch.stack([hidden[number].pow(3).sum() for number in layers]).sum().backward()
    found = gradients(model)
    torch.stack([expected[number].pow(3).sum() for number in layers]).sum().backward()
    assert_all_close(found, gradients(model), rtol=1e-10)


def test_without_gradients_nothing_is_kept(make_memory: Callable[[], Any]) -> None:
    model = network().double().eval()
    for context in (torch.no_grad, torch.inference_mode):
        with make_memory() as memory, context():
            out = model(*example(), causal=False)
            assert memory.alive == out.logits_BLV.nbytes
        expected_BLV = paper_s_pass(model, example(), causal=False)
        torch.testing.assert_close(out.logits_BLV, expected_BLV, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attention", RECURRENT)
@pytest.mark.parametrize("context", [torch.enable_grad, torch.inference_mode])
def test_steps_are_the_causal_forward_pass(attention: str, context: Callable[[], Any]) -> None:
    model = network(attention).double().eval()
    tokens_BL, mask_BL = example(batch=1)
    with context():
        state, logits = model.initial_state(), []
        for tokens_B in tokens_BL.unbind(dim=1):
            state, logits_BV = model.step(state, tokens_B)
            logits.append(logits_BV)
        expected_BLV = model(tokens_BL, mask_BL, causal=True).logits_BLV
    torch.testing.assert_close(torch.stack(logits, dim=1), expected_BLV, rtol=1e-10, atol=1e-10)


def test_attention_inputs_are_those_of_the_forward_pass() -> None:
    model = network("performer_relu").eval()
    seen: list[Tensor] = []
    for number in (1, 2, 3):
        model.mechanism(number).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(*example(), causal=False)
        forward = seen.copy()
        asked = [x.q_BHLK for _, x in model.attention_inputs(*example(), causal=False)]
    assert len(forward) == 3
    for q_BHLK, expected_BHLK in zip(asked, forward, strict=True):
        torch.testing.assert_close(q_BHLK, expected_BHLK)
    _, last = list(model.attention_inputs(*example(), causal=False))[-1]
    last.q_BHLK.square().sum().backward()
    assert blocks_of(model)[0].attention.value.weight.grad is not None


def test_gradients_are_sent_while_others_are_computed(tmp_path: Path) -> None:
    model = network(dropout=0.0).double()
    seen: list[Tensor] = []
    done_when_sent = []

    def double(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        done_when_sent.append(len(seen) - 6)
        future = torch.futures.Future()
        future.set_result(2 * bucket.buffer())
        return future

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/r", rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(model, bucket_cap_mb=0.1)
        parallel.register_comm_hook(None, double)
        sublayer_inputs(model, seen)
        # In a first pass the buckets adopt the order of the gradients.
        for _ in range(2):
            seen.clear()
            done_when_sent.clear()
            model.zero_grad()
            loss(parallel(*example(), causal=False).logits_BLV).backward()
    finally:
        dist.destroy_process_group()
    doubled = gradients(model)
    loss(paper_s_pass(model, example(), causal=False)).backward()
    expected = {name: 2 * value for name, value in gradients(model).items()}
    # Each gradient was sent, and once.
    assert_all_close(doubled, expected, rtol=1e-10)
    # The six sublayers are processed one after another.
    assert set(range(1, 7)) <= set(done_when_sent)


@pytest.mark.slow
def test_two_ranks_have_the_gradients_of_one(tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    program = Path(__file__).parent / "programs" / "gradient_of_rank.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(rank), meeting, tmp_path],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=120)
        assert rank.returncode == 0, said
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    model = network(dropout=0.0).double()
    tokens_BL, mask_BL = example(batch=8)
    for rows in range(0, 8, 2):
        both = tokens_BL[rows : rows + 2], mask_BL[rows : rows + 2]
        loss(paper_s_pass(model, both, causal=False)).backward()
    expected = gradients(model)
    assert_all_close(one, two, rtol=0)
    assert_all_close({name: 2 * value for name, value in one.items()}, expected, rtol=1e-10)


# Without bfloat16 products a processor emulates them.
@pytest.mark.filterwarnings("ignore:trainer.precision=bf16-mixed")
def test_a_run_is_trained_continued_and_loaded(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    settings = ("model.reversible=true", "model.dropout=0.1", "model.feedforward_chunk=32")
    precision = "trainer.precision=bf16-mixed"
    run = train_tiny(tmp_path / "run", *settings, precision, "trainer.accumulate_grad_batches=2")
    model = protlm.load(run)
    assert model.network.reversible
    batch = model.tokenize(["MKTAYIAKQR", "MKV"])
    assert model(batch, layers=[1]).hidden[1].isfinite().all()
    assert set(model.attention_maps(batch)) == {1, 2}
    settings = compose(TrainConfig, ["model=tiny"])
    plain = build_network(settings.model, settings.attention, seed=0)
    assert model.network.state_dict().keys() == plain.state_dict().keys()


def test_models_from_before_the_options_load(tiny_run: Path, tmp_path: Path) -> None:
    checkpoints.export(checkpoints.read(tiny_run), tmp_path / "old")
    config = tmp_path / "old" / "config.json"
    description = json.loads(config.read_text())
    del description["model"]["reversible"], description["model"]["feedforward_chunk"]
    config.write_text(json.dumps(description))
    write_sums(tmp_path / "old")
    loaded, now = protlm.load(tmp_path / "old"), protlm.load(tiny_run)
    assert loaded.hash == now.hash and not loaded.network.reversible
    batch = now.tokenize(["MKTAYIAKQR"])
    assert loaded(batch).logits_BLV.equal(now(batch).logits_BLV)


def test_a_norm_after_the_sum_is_rejected() -> None:
    with pytest.raises(UserError, match=r"model\.norm_order=post.*type model\.norm_order=pre"):
        compose(TrainConfig, ["model=tiny", "model.reversible=true", "model.norm_order=post"])


def test_checkpointed_activations_are_rejected(
    train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"type trainer\.activation_checkpointing=false"):
        train_tiny(
            tmp_path / "run", "model.reversible=true", "trainer.activation_checkpointing=true"
        )
    assert not (tmp_path / "run").exists()
    plain = network(reversible=False)
    plain.activation_checkpointing = True
    assert plain.activation_checkpointing


def test_the_gradient_cannot_be_differentiated_again() -> None:
    model = network()
    total = loss(model(*example(), causal=False).logits_BLV)
    weight = blocks_of(model)[0].attention.value.weight
    (gradient,) = torch.autograd.grad(total, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        nn.functional.mse_loss(gradient, weight).backward()
