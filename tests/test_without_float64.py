"""What runs on a GPU without float64, that of a Mac, for which `apple_gpu` stands in."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import protlm
from protlm.analysis.features.autoencoder import SparseAutoencoder, SparseSettings
from protlm.analysis.features.training import learn
from protlm.analysis.head_statistics import layer_statistics
from protlm.analysis.head_survey import pool as pooled_cells
from protlm.analysis.masked_residues import masked_scores
from protlm.attention import names
from protlm.attention.linearized.gates import decays
from protlm.interface import Model
from protlm.model.gibbs import resample
from protlm.model.pooling import pool
from protlm.model.positions import Rotary
from protlm.model.transformer import ProteinLM
from protlm.options.embed import Pooling
from protlm.options.generate import Sampling, Sweeps
from protlm.options.labels import FinetuneSettings
from protlm.report.protein import predicted_distributions
from protlm.system.errors import UserError
from protlm.system.paths import shipped
from protlm.training.finetuning import check_devices
from tests.attention.cases import shipped_options
from tests.fixtures.apple import apple_gpu
from tests.rounding import condition_of, error_bound
from tests.small_models import network_of, random_tokens, small_model

LENGTH, LAYERS = 24, 3
YAMLS = sorted(path.stem for path in (shipped("conf") / "attention").glob("*.yaml"))
CASES: list[tuple[list[str], dict[str, Any]]] = [([f"attention={name}"], {}) for name in YAMLS]
CASES += [
    ([f"attention={name}", f"attention.decay={decay}"], {})
    for name in names()
    for decay in ("learned", "selective")
    if "decay" in shipped_options(name)
]
# Heads, positions and parts around the mechanism.
CASES += [
    (["attention=softmax"], settings)
    for settings in (
        {"head": "none", "global_every": 2, "stored_frequencies": True},
        {"head": "dense_norm", "token_dropout": True, "qk_norm": True},
        {"head": "dense_layer_norm", "tied_head": True, "positions": "relative"},
        {"positions": "learned", "convolution": 3, "output_gate": True, "unet_skips": True},
    )
]
SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "MKV"]


def computed(network: ProteinLM, causal: bool) -> list[Tensor]:
    """The output, all gradients, and the map of the last layer; on the CPU, without padding."""
    tokens_BL, mask_BL = random_tokens(LENGTH)
    tokens_BL[:, 5:9], mask_BL[1, 17:] = network.vocabulary.mask, False
    parameters = [*network.parameters()]
    device = parameters[0].device
    given = tokens_BL.to(device), mask_BL.to(device)
    out = network(*given, causal=causal, layers=[LAYERS])
    out_BLX = out.hidden[LAYERS] if out.logits is None else out.logits
    chosen = out_BLX.cpu()[mask_BL]
    gradients = torch.autograd.grad(chosen.square().sum(), parameters, allow_unused=True)
    with torch.no_grad():
        _, x = [*network.attention_inputs(*given, causal=causal)][-1]
        mechanism = network.mechanism(LAYERS)
        map_BHML = mechanism.attention_map(x.q_BHLK, x.k_BHLK, x.context, slice(3, 20))
    assert map_BHML.device == out_BLX.device == device
    flat = torch.cat([x.cpu().flatten() for x in gradients if x is not None])
    return [chosen.detach(), flat, map_BHML.cpu()]


@pytest.mark.parametrize(("settings", "changes"), CASES)
def test_outputs_gradients_and_maps_are_those_of_float64(settings, changes):
    sizes = {"positions": "rotary", "num_layers": LAYERS, "max_length": 64}
    network = network_of(*settings, **{**sizes, **changes})
    exact, mechanism = copy.deepcopy(network).double(), network.mechanism(1)
    weights = [p.detach().clone() for p in exact.parameters()]
    # Eight sums after each other in a layer, whose rounding goes either way.
    depth = (8 * LAYERS) ** 0.5
    modes = {False: mechanism.supports_bidirectional, True: mechanism.supports_causal}
    for causal in (mode for mode, is_supported in modes.items() if is_supported):

        def of(*parameters: Tensor, causal: bool = causal) -> list[Tensor]:
            for own, value in zip(exact.parameters(), parameters, strict=True):
                own.data.copy_(value)
            return computed(exact, causal)

        with apple_gpu() as device:
            found = computed(copy.deepcopy(network).to(device), causal)
        conditions, expected = condition_of(of, weights), of(*weights)
        for one, wanted, condition in zip(found, expected, conditions, strict=True):
            error = float((one.double() - wanted).norm() / wanted.norm())
            assert error <= error_bound(torch.float32, condition, depth)


@pytest.mark.parametrize("stored", [False, True])
def test_angles_decays_and_means_far_along_a_protein_are_those_of_a_cpu(stored):
    """In float32, an angle there is off by 1e-3, and a sum of closed gates by 1e-2."""
    rotary, place_L = Rotary(head_dim=8, stored=stored), torch.arange(35_000, 35_100)
    log_gate_BHL1 = -15 * torch.rand(1, 2, 3000, 1).round()
    hidden_BLD, spans = torch.randn(1, 3000, 4) + 9, [[(1, 2998), (7, 7)]]

    def computed_on(device: str) -> list[Tensor]:
        return [
            *rotary.to(device).angles(place_L.to(device)),
            decays(log_gate_BHL1.to(device), slice(2500, 2600)).float(),
            pool(hidden_BLD.to(device), [2998], Pooling.ranges, spans),
        ]

    expected = computed_on("cpu")
    with apple_gpu() as device:
        found = computed_on(device)
    assert all(x.device == torch.device(device) for x in found)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(found, expected, strict=True))
    # Another dtype of the network would change all angles.
    for cast in (rotary.half(), rotary.float(), rotary.bfloat16(), rotary.double()):
        assert torch.equal(cast.angles(place_L)[0], expected[0])


def test_a_model_on_it_embeds_scores_and_samples(tiny_run: Path, causal_run: Path) -> None:
    def computed_on(device: str) -> list[Any]:
        masked, causal = (protlm.load(run, device=device) for run in (tiny_run, causal_run))
        favor = Model.of(small_model("performer_softmax"))
        favor.network.float().to(device)
        _, map_HLL, statistics = next(layer_statistics(masked, SEQUENCES[0]))
        sweeps = {"sweeps": Sweeps(2), "seed": 1, "batch_size": 2}
        return [
            *(masked.embed(SEQUENCES, pooling=kind) for kind in ("mean", "std", "max", "cls")),
            masked.embed(SEQUENCES, pooling="per_tok")[0],
            masked.score(SEQUENCES[0], ["M1A"]),
            causal.perplexity(SEQUENCES),
            predicted_distributions(causal, SEQUENCES[0]),
            *statistics.values(),
            pooled_cells(map_HLL),
            *favor.estimate_errors(favor.tokenize(SEQUENCES))[1],
            masked_scores(masked, SEQUENCES).nats,
            # In float64 on either side: the same residues.
            [x.sequence for x in causal.generate(3, max_residues=9)],
            [*resample(masked.network, SEQUENCES, Sampling(), **sweeps)],
        ]

    with apple_gpu() as device:
        *found, samples, resampled = computed_on(device)
    *expected, wanted, again = computed_on("cpu")
    assert (samples, resampled) == (wanted, again)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_features_are_learned_on_it_and_fine_tuning_is_refused():
    settings = SparseSettings(
        model="0" * 64, vocabulary="0" * 64, layer=1, latents=8, k=2, residues=2_048
    )
    states_BD = torch.randn(20, 4)

    def learned(device: str) -> dict[str, Tensor]:
        model = SparseAutoencoder(4, settings).to(device)
        learn(model, torch.optim.Adam(model.parameters()), states_BD.to(device))
        return {name: x.cpu() for name, x in model.state_dict().items()}

    with apple_gpu() as device:
        found = learned(device)
    torch.testing.assert_close(found, learned("cpu"))
    assert found["progress"].tolist() == [20, 0]
    with pytest.raises(UserError, match=r"the device mps:0: .* needs float64") as caught:
        check_devices(FinetuneSettings(device="mps:0"))
    assert caught.value.options == {"device": "cpu"}
