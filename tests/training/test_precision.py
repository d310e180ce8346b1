"""trainer.precision=auto: bfloat16 if the processor multiplies it, otherwise float32."""

import pytest
import torch

from protlm.training.launch import resolved_precision

PROBES = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


@pytest.mark.parametrize("has", [(True, False), (False, True), (False, False)])
def test_auto_follows_the_processor(
    has: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for probe, value in zip(PROBES, has, strict=True):
        monkeypatch.setattr(torch.cpu, probe, lambda value=value: value, raising=False)
    assert resolved_precision("auto", "cpu") == ("bf16-mixed" if any(has) else "32-true")


def test_a_torch_without_the_probes_trains_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    for probe in PROBES:
        monkeypatch.delattr(torch.cpu, probe, raising=False)
    assert resolved_precision("auto", "cpu") == "32-true"


@pytest.mark.parametrize("has", [True, False])
def test_auto_on_a_gpu(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has)
    assert resolved_precision("auto", "cuda") == ("bf16-mixed" if has else "32-true")


@pytest.mark.parametrize("name", ["32-true", "bf16-mixed"])
def test_an_explicit_precision_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for probe in PROBES:
        monkeypatch.setattr(torch.cpu, probe, lambda: True, raising=False)
    assert resolved_precision(name, "cpu") == resolved_precision(name, "cuda") == name


def test_emulated_bfloat16_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for probe in PROBES:
        monkeypatch.setattr(torch.cpu, probe, lambda: False, raising=False)
    with pytest.warns(UserWarning, match="six times slower"):
        assert resolved_precision("bf16-mixed", "cpu") == "bf16-mixed"
