"""Figures: drawn without a screen, labeled, saved the same each time."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from protlm.analysis.structures import contact_map, read_structure
from protlm.plots import attention_grid, contact_figure, loss_curve, save_figure, scan_figure
from protlm.system.errors import OutputError
from protlm.system.paths import sample_dir

pytestmark = pytest.mark.usefixtures("checked_shapes")
PROTEIN = sample_dir() / "structures" / "test" / "1fuk_A.pdb.gz"


def rows() -> list[dict[str, float]]:
    train = [{"step": 10.0 * k, "train_loss": 3.0 - 0.01 * k + (-1) ** k} for k in range(1, 100)]
    return [*train, {"step": 500.0, "valid_loss": 2.5}, {"step": 990.0, "valid_loss": 2.1}]


def maps() -> dict[int, np.ndarray]:
    generator = np.random.default_rng(0)
    return {layer: generator.random((3, 12, 12)) * 10.0**-layer for layer in (2, 1)}


def labels(axes: Axes) -> list[str]:
    return [axes.get_xlabel(), axes.get_ylabel()]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def points(axes: Axes, label: str) -> np.ndarray:
    [collection] = [c for c in axes.collections if c.get_label() == label]
    return np.asarray(collection.get_offsets())


def test_a_loss_curve_shows_training_validation_and_baseline() -> None:
    figure = loss_curve([*rows(), {"step": 990.0, "valid_unigram_loss": 2.9}])
    [axes] = figure.axes
    assert labels(axes) == ["optimizer step", "loss (nats per residue)"]
    assert legend(figure) == ["training (running mean)", "validation", "residue frequencies"]
    light, mean, valid, baseline = axes.lines
    assert len(light.get_xdata()) == len(mean.get_xdata()) == 99
    np.testing.assert_array_equal(valid.get_xydata(), [[500.0, 2.5], [990.0, 2.1]])
    assert (set(baseline.get_ydata()), baseline.get_linestyle()) == ({2.9}, "--")
    # The mean is quieter than what it is the mean of, and no higher or lower.
    noisy, quiet = np.asarray(light.get_ydata()), np.asarray(mean.get_ydata())
    assert quiet.std() < 0.5 * noisy.std()
    assert quiet.mean() == pytest.approx(noisy.mean(), abs=0.1)


def test_an_attention_grid_has_layers_down_and_heads_across() -> None:
    given = maps()
    figure = attention_grid(given, title="P00974")
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [f"layer {layer} head {head}" for layer in (1, 2) for head in (1, 2, 3)]
    for axes, map_LL in zip(figure.axes, [*given[1], *given[2]], strict=True):
        [image] = axes.images
        np.testing.assert_array_equal(image.get_array(), map_LL)
        # Each has its own scale, so that a faint map can be seen beside a strong one.
        assert image.get_clim() == (0.0, pytest.approx(np.quantile(map_LL, 0.99)))
    assert "99th percentile" in figure.get_suptitle() and "P00974" in figure.get_suptitle()
    assert "residue number" in figure.get_supxlabel()
    assert "residue number" in figure.get_supylabel()


def test_a_contact_figure_tells_right_from_wrong() -> None:
    contacts_LL = contact_map(read_structure(PROTEIN))
    length = len(contacts_LL)
    noise_LL = np.random.default_rng(0).random((length, length))
    figure = contact_figure(noise_LL / 2 + (contacts_LL == 1) / 4, contacts_LL, title="1fuk_A")
    axes = figure.axes[0]
    assert labels(axes) == ["position in the sequence"] * 2
    assert legend(figure) == ["true contact", "top L, true", "top L, false"]
    hits, misses = points(axes, "top L, true"), points(axes, "top L, false")
    assert len(hits) + len(misses) == length and len(hits) and len(misses)
    for offsets, expected in ((hits, 1), (misses, 0)):
        # Below the diagonal, and numbered from 1.
        i, j = (offsets.T - 1).astype(int)
        assert (j - i >= 6).all()
        assert (contacts_LL[i, j] == expected).all()
    assert len(points(axes, "true contact")) == np.triu(contacts_LL == 1, 6).sum()
    assert f"P@L {len(hits) / length:.0%} (6 or more apart)" in axes.get_title()
    shown = np.ma.getmaskarray(axes.images[0].get_array())
    assert shown[np.tril_indices(length, 5)].all()
    assert not shown[np.triu_indices(length, 6)].any()


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_a_figure_saved_twice_is_the_same_file(suffix: str, tmp_path: Path) -> None:
    probabilities_LL = np.random.default_rng(0).random((30, 30))
    for name, draw in (
        ("loss", lambda: loss_curve(rows())),
        ("maps", lambda: attention_grid(maps(), title="maps")),
        ("contacts", lambda: contact_figure(probabilities_LL, None, title="contacts")),
    ):
        first, second = (tmp_path / f"{name}{k}.{suffix}" for k in (1, 2))
        save_figure(draw(), first)
        save_figure(draw(), second)
        assert first.stat().st_size > 1000
        assert first.read_bytes() == second.read_bytes()
        assert b"matplotlib.org" not in first.read_bytes()
    signature = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[suffix]
    assert first.read_bytes().startswith(signature)


def test_a_figure_is_not_written_where_it_cannot_be(tmp_path: Path) -> None:
    figure = loss_curve(rows())
    (tmp_path / "loss.png").write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        save_figure(figure, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_a_scan_is_drawn_in_rows_with_the_wild_type_marked() -> None:
    wild_type = "MKTAYIAKQRXE" * 12
    scores = np.random.default_rng(0).normal(size=(len(wild_type), 20))
    figure = scan_figure(scores, wild_type, title="x", first_residue=24)
    rows = [axes for axes in figure.axes if axes.images]
    # 144 residues in rows of 60; the last row keeps the scale of the others.
    assert [axes.get_xlim() for axes in rows] == [(s - 0.5, s + 59.5) for s in (24, 84, 144)]
    assert [len(axes.get_xticks()) for axes in rows] == [6, 6, 2]
    [first] = rows[0].images
    letters = [label.get_text() for label in rows[0].get_yticklabels()]
    assert sorted(letters) == sorted("ACDEFGHIKLMNPQRSTVWY")
    drawn = np.asarray(first.get_array())
    np.testing.assert_array_equal(drawn[letters.index("A")], scores[:60, 0])
    assert first.get_clim()[0] == -first.get_clim()[1]
    dots = np.asarray(rows[0].collections[0].get_offsets())
    # X is none of the twenty.
    marked = {int(x): letters[int(y)] for x, y in dots}
    assert marked == {24 + i: a for i, a in enumerate(wild_type[:60]) if a != "X"}
