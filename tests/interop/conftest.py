"""Foreign models in float64, and an ESM-2 that many tests use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from protlm import interop
from protlm.model.transformer import ProteinLM, build_network
from tests.interop.families import ESM


@pytest.fixture
def write_esm(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny ESM-2: `write_esm("name", changed_setting=..., tensors=...)`."""

    def write(
        name: str = "esm", *, tensors: dict[str, Tensor] | None = None, **changes: Any
    ) -> Path:
        return ESM.save(tmp_path / name, tensors, **changes)

    return write


@pytest.fixture
def esm2_8m(tmp_path: Path) -> Path:
    """An ESM-2 of 8M with random weights, as transformers writes it."""
    from transformers import EsmConfig, EsmForMaskedLM

    sizes = {
        "hidden_size": 320,
        "num_hidden_layers": 6,
        "num_attention_heads": 20,
        "intermediate_size": 1280,
    }
    config = EsmConfig(**{**ESM.settings, **sizes})
    EsmForMaskedLM(config).save_pretrained(tmp_path / "esm2_t6_8M_UR50D")
    return tmp_path / "esm2_t6_8M_UR50D"


@pytest.fixture
def in_double(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], ProteinLM]:
    """Builds the network of a foreign model in float64; `x.float()` is float64 from then on.

    Both programs round the angles of positions to float32.
    """

    def build(path: Path) -> ProteinLM:
        found = interop.read(path)
        described = found.description
        network = build_network(described.model, described.attention_config, seed=0).double()
        network.load_state_dict(found.weights)
        monkeypatch.setattr(Tensor, "float", Tensor.double)
        return network.eval()

    return build
