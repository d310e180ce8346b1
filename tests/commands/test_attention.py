"""`protlm attention`: exact maps in blocks of rows, for every mechanism."""

from pathlib import Path

import h5py
import numpy as np
import pytest

import protlm
import protlm.commands.attention as command
from protlm.attention import names
from protlm.commands.attention import attention_maps
from protlm.options.look import MapOptions
from tests.fixtures.runs import RUN, Train
from tests.marks import slow_but

ROWS_DO_NOT_SUM_TO_ONE = {"linformer", "nystromformer"}
FASTA = Path("x.fasta")
SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"


@pytest.fixture(autouse=True)
def fasta(own_folder: None) -> None:
    FASTA.write_text(f">P1 one\n{SEQUENCE}\n>P2 two\n{SEQUENCE[:7]}\n")


@pytest.mark.parametrize(
    "attention", slow_but(names(), "performer_relu", "performer_softmax", "longformer")
)
def test_maps_equal_those_of_the_model(
    attention: str, train_tiny: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (f"attention={attention}", "model.qk_norm=true", "trainer.max_steps=2")
    run = train_tiny(Path("run"), *settings)
    # So few entries at a time that every map is written in several blocks.
    monkeypatch.setattr(command, "_BLOCK_ENTRIES", 500)
    attention_maps(FASTA, run, Path("maps.h5"), MapOptions())
    model = protlm.load(run)
    with h5py.File(Path("maps.h5")) as file:
        for name, sequence in (("P1", SEQUENCE), ("P2", SEQUENCE[:7])):
            expected = model.attention_maps(model.tokenize([sequence]))
            assert set(file[name]) == {"layer_1", "layer_2"}
            for layer in (1, 2):
                written = file[f"{name}/layer_{layer}"][:]
                np.testing.assert_allclose(written, expected[layer][0].numpy(), atol=1e-6)
                if attention not in ROWS_DO_NOT_SUM_TO_ONE:
                    np.testing.assert_allclose(written.sum(-1), 1, atol=1e-5)


def test_layers_and_heads_are_chosen() -> None:
    attention_maps(FASTA, RUN, Path("all.h5"), MapOptions())
    chosen = MapOptions(layers=(-1,), heads=(2,), dtype="float16")
    attention_maps(FASTA, RUN, Path("one.h5"), chosen)
    with h5py.File(Path("all.h5")) as whole, h5py.File(Path("one.h5")) as part:
        assert set(part["P1"]) == {"layer_2"}
        assert part["P1/layer_2"].attrs["heads"].tolist() == [2]
        np.testing.assert_allclose(
            part["P1/layer_2"][0], whole["P1/layer_2"][1], rtol=2e-3, atol=1e-4
        )


def test_a_figure_shows_one_protein(capsys: pytest.CaptureFixture[str]) -> None:
    FASTA.write_text(f">P1\n{SEQUENCE}\n")
    attention_maps(FASTA, RUN, Path("maps.h5"), MapOptions(figure=Path("maps.png")))
    assert capsys.readouterr().out == "maps.h5\nmaps.png\n"
    assert Path("maps.png").read_bytes().startswith(b"\x89PNG")
