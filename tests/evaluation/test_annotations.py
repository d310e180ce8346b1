"""Attention to amino acids and annotations, against direct sums and constructed answers."""

import gzip
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch

from protlm.analysis import head_survey
from protlm.analysis.head_survey import property_sums, sign_flip_p_values, summed
from protlm.analysis.uniprot_features import BOND, SITES, read_annotated
from protlm.data.records.swissprot import WRONG_LENGTH
from protlm.data.vocabulary import STANDARD
from protlm.evaluation.annotations import NAMES
from protlm.evaluation.similarity import blosum62, correlation_with_blosum
from protlm.model.pretrained import PretrainedModel
from protlm.system.errors import InputDataError
from tests.data.test_relatives import random_sequences
from tests.small_models import evaluated, structure_folder

SEQUENCE = "MKTAYIAKQRQISFVK"
LENGTH = len(SEQUENCE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The three shortest of the shipped test structures."""
    return structure_folder(tmp_path_factory.mktemp("structures"), "test", 3)


def test_sums_are_those_of_a_loop_over_pairs(
    model: PretrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(0)
    maps = generator.dirichlet(np.full(LENGTH, 0.3), size=(2, 2, LENGTH))

    def blocks(*_: object) -> list[tuple[int, list[torch.Tensor]]]:
        padded = torch.nn.functional.pad(torch.from_numpy(maps), (1, 1))
        return [(n, list(map_HML.split(5, dim=1))) for n, map_HML in enumerate(padded, start=1)]

    monkeypatch.setattr(head_survey, "residue_rows", blocks)
    f = generator.random((2, LENGTH, LENGTH)) < 0.3
    known = generator.random((LENGTH, LENGTH)) < 0.8
    found = property_sums(model, SEQUENCE, f, known, threshold=0.3)
    pairs = [(i, j) for i in range(LENGTH) for j in range(LENGTH) if known[i, j]]
    for head, a in enumerate(maps.reshape(4, LENGTH, LENGTH)):
        assert found.total[head] == pytest.approx(sum(a[p] for p in pairs))
        assert found.total_arcs[head] == sum(a[p] >= 0.3 for p in pairs)
        for k in range(2):
            assert found.observed[head, k] == pytest.approx(sum(a[p] * f[k][p] for p in pairs))
            assert found.observed_arcs[head, k] == sum(a[p] >= 0.3 and f[k][p] for p in pairs)
            expected = 0.0
            for d in range(LENGTH):
                at = [p for p in pairs if abs(p[0] - p[1]) == d]
                if at:
                    expected += sum(a[p] for p in at) * np.mean([f[k][p] for p in at])
            assert found.expected[head, k] == pytest.approx(expected)
    assert summed([found, found]).total == pytest.approx(2 * found.total)


def test_corrected_p_values_are_those_of_all_assignments() -> None:
    """Seven proteins have 128 assignments of signs, enumerated here."""
    differences = np.random.default_rng(3).normal(0.5, size=(7, 5, 2))
    signs = np.array(list(product([-1.0, 1.0], repeat=7)))
    t = differences.sum(axis=0) / np.sqrt((differences**2).sum(axis=0))
    for place in range(2):
        flipped = signs @ differences[:, :, place]
        flipped = np.abs(flipped / np.sqrt((differences[:, :, place] ** 2).sum(axis=0)))
        expected = (flipped.max(axis=1)[:, None] >= np.abs(t[:, place]) * (1 - 1e-9)).mean(axis=0)
        found = sign_flip_p_values(differences)[:, place]
        # Five standard deviations of a frequency in 20,000 draws.
        bound = 5 * np.sqrt(expected * (1 - expected) / 20_000) + 1e-4
        assert (np.abs(found - expected) <= bound).all()


def test_blosum62_is_in_the_order_of_the_vocabulary() -> None:
    matrix = blosum62()
    assert np.array_equal(matrix, matrix.T)
    for a, b, expected in (("W", "W", 11), ("D", "E", 2), ("F", "Y", 3), ("C", "W", -2)):
        assert matrix[STANDARD.index(a), STANDARD.index(b)] == expected


def planted(sign: float) -> np.ndarray:
    """Fractions of 40 heads whose correlations between amino acids are linear in BLOSUM62."""
    correlations = sign * 0.02 * blosum62()
    np.fill_diagonal(correlations, 1.0)
    factor = np.linalg.cholesky(correlations)
    # Orthonormal vectors over the heads, each of mean 0.
    noise = np.random.default_rng(0).normal(size=(40, 20))
    basis, _ = np.linalg.qr(noise - noise.mean(axis=0))
    return 0.05 + 0.01 * basis @ factor.T


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_constructed_similarity_has_the_known_correlation(sign: float) -> None:
    found = correlation_with_blosum(planted(sign), None)
    assert found["pearson"] == pytest.approx(sign)
    # Rounding breaks the ties of BLOSUM62 at random.
    assert sign * found["spearman"] > 0.9
    # Too few heads have no correlation.
    assert np.isnan(correlation_with_blosum(planted(sign)[:2], None)["pearson"])


def test_division_by_the_background_removes_the_profile_that_heads_share() -> None:
    """Attention in proportion to frequency, more in some heads, makes all amino acids similar."""
    background = np.random.default_rng(1).dirichlet(np.full(20, 5.0))
    shared = np.linspace(0.5, 1.5, 40)[:, None] * background
    confounded = background * (planted(1.0) - 0.05) + 0.1 * shared
    raw = correlation_with_blosum(confounded, None)["pearson"]
    assert correlation_with_blosum(confounded * 7, None)["pearson"] == pytest.approx(raw)
    divided = correlation_with_blosum(confounded, background)["pearson"]
    assert divided > 0.9
    assert raw < divided


@pytest.mark.slow
def test_similarity_is_reported_with_intervals(model: PretrainedModel, folder: str) -> None:
    values, table = evaluated("similarity", model, structures=folder)
    found = values["model"]["weights"]
    assert found["heads"] == model.num_layers * model.num_heads
    assert -1 <= found["pearson"]["low"] <= found["pearson"]["high"] <= 1
    # Maps of linear attention are flat: no pair is above the threshold.
    assert values["model"]["threshold"]["heads"] == 0
    assert len(table.rows) == 6
    assert "too few heads" in table.rows[2][2]


def test_annotations_are_reported_for_every_head(model: PretrainedModel, folder: str) -> None:
    values, table = evaluated("annotations", model, structures=folder)
    shape = (model.num_layers, model.num_heads)
    assert set(values["background"]) == set(NAMES)
    assert sum(values["background"][a] for a in STANDARD) == pytest.approx(1)
    for who in ("model", "random_weights"):
        for name in NAMES:
            found = values[who][name]
            assert np.array(found["weighted"]).shape == shape
            assert (np.array(found["p_value"]) <= 1).all()
            # An untrained or briefly trained head is not far from what distance explains.
            np.testing.assert_allclose(found["weighted"], found["expected"], atol=0.1)
        total = sum(np.array(values[who][a]["weighted"]) for a in STANDARD)
        np.testing.assert_allclose(total, 1, rtol=1e-6)
    assert len(table.rows) == 2 * len(NAMES)
    assert all(first[0] == second[0] for first, second in list(pairwise(table.rows))[::2])


def test_features_are_measured_on_the_proteins_that_have_them(
    model: PretrainedModel, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head attends to the third residue, the other to the residue 5 before."""
    path, (other,) = tmp_path / "x.dat", random_sequences(1, 20)
    sites = "BINDING         3", "DISULFID        6..11"
    path.write_text(
        entry(*sites)
        + entry("SIGNAL          1..4", "SIGNAL          2..?", accession="P00002", sequence=other)
        + entry(*sites, accession="P00003")
        + entry(*sites, accession="P00004").replace("20 AA.", "21 AA.")
    )

    def blocks(model: PretrainedModel, sequence: str) -> list[tuple[int, list[torch.Tensor]]]:
        third = torch.zeros(len(sequence), len(sequence))
        third[:, 2] = 1.0
        before = torch.eye(len(sequence)).roll(-5, dims=1)
        heads = torch.nn.functional.pad(torch.stack([third, before]), (1, 1))
        return [(layer, [heads]) for layer in (1, 2)]

    monkeypatch.setattr(head_survey, "residue_rows", blocks)
    with pytest.warns(UserWarning, match="1 of 4 records rejected: 1 length differs"):
        values, table = evaluated("annotations", model, structures=folder, uniprot=path)
    length = 20
    assert values["background"]["binding_site"] == pytest.approx(1 / length)
    assert values["background"]["signal_peptide"] == pytest.approx(4 / length)
    assert values["background"]["disulfide_bond"] == pytest.approx(2 / length**2)
    assert values["proteins_with"]["binding_site"] == 1
    assert values["proteins_with"]["contact"] == values["num_proteins"] == 3
    assert "active_site" not in values["background"]
    assert values["uniprot"] == {
        "num_proteins": 2,
        "proteins_with_features": 3,
        "drawn": 3,
        "relatives_left_out": 1,
        "features_left_out": {"unknown or uncertain position": 1},
        "records_rejected": {WRONG_LENGTH: 1},
    }
    weighted = {name: np.array(found["weighted"]) for name, found in values["model"].items()}
    assert weighted["binding_site"][0].tolist() == pytest.approx([1, 1 / length])
    assert weighted["signal_peptide"][0].tolist() == pytest.approx([1, 4 / length])
    # Of the 20 weights of the second head, that of residue 11 is on residue 6.
    assert weighted["disulfide_bond"][0].tolist() == pytest.approx([0, 1 / length])
    # A head of one distance finds no more bonds than there are at that distance.
    expected = np.array(values["model"]["disulfide_bond"]["expected"])[0]
    assert expected[1] == pytest.approx(weighted["disulfide_bond"][0, 1])
    rows = {row[0]: row for row in table.rows[::2]}
    assert rows["binding_site"][-1] == "1" and rows["helix"][-1] == "3"
    for words in (
        "features left out in the file, unknown or uncertain position: 1",
        f"records rejected in the file, {WRONG_LENGTH}: 1",
        "3 proteins with features in the file: 3 drawn, 1 of them left out as",
    ):
        assert words in table.caption


FIXTURES = Path(__file__).resolve().parents[1] / "data" / "records" / "fixtures"
ENTRY_SEQUENCE = "MKTAYCAKQRCISFVKSHFS"


def entry(*features: str, accession: str = "P00001", sequence: str = ENTRY_SEQUENCE) -> str:
    """A Swiss-Prot entry with these lines of features."""
    lines = [
        f"ID   TEST_HUMAN              Reviewed;         {len(sequence)} AA.",
        f"AC   {accession};",
        *(f"FT   {feature}" for feature in features),
        f"SQ   SEQUENCE   {len(sequence)} AA;  1 MW;  0 CRC64;",
        f"     {sequence}",
        "//",
    ]
    return "\n".join(lines) + "\n"


def test_sites_and_bonds_are_at_their_positions(tmp_path: Path) -> None:
    """Of two entries: one with features in the present format, one without."""
    path = tmp_path / "x.dat"
    path.write_text(
        entry(
            "BINDING         3..5",
            "BINDING         9",
            'FT                   /note="a note"',
            "SIGNAL          1..?",
            "TRANSMEM        ?2..7",
            "MOD_RES         <1",
            "ACT_SITE        21",
            "DISULFID        6..11",
            "DISULFID        11",
            "BINDING         P00001-2:3",
            "HELIX           1..20",
        )
        + entry("CHAIN           1..20", accession="P00002")
    )
    found = read_annotated(path, max_proteins=10, max_residues=100, seed=0)
    (protein,) = found.proteins
    sites = dict(zip(SITES, protein.is_site(), strict=True))
    assert np.flatnonzero(sites["binding_site"]).tolist() == [2, 3, 4, 8]
    assert not any(sites[name].any() for name in SITES if name != "binding_site")
    assert np.argwhere(protein.bonds()).tolist() == [[5, 10], [10, 5]]
    assert found.left_out == {
        "on another isoform": 1,
        "unknown or uncertain position": 3,
        "position outside the sequence": 1,
        "disulfide bond to another chain": 1,
    }


def test_xml_and_flat_file_have_the_same_sites() -> None:
    flat, xml = (
        read_annotated(FIXTURES / f"multi_ex.{kind}.gz", max_proteins=10, max_residues=1000, seed=0)
        for kind in ("dat", "xml")
    )
    assert len(flat.proteins) > 3 and flat == xml
    assert flat.left_out["unknown or uncertain position"] > 0
    assert {name for protein in flat.proteins for name in protein.features} >= {
        BOND,
        "binding_site",
        "active_site",
    }


def orthologs(*families: str, number: int = 4) -> list[str]:
    """Entries in blocks of equal sequences, as Swiss-Prot sorts orthologs."""
    return [
        entry("BINDING         3", accession=f"P{family:02}{place:03}", sequence=sequence)
        for family, sequence in enumerate(families)
        for place in range(number)
    ]


def test_of_each_block_of_orthologs_one_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "x.dat"
    path.write_text("".join(orthologs(*random_sequences(12))))
    found = read_annotated(path, max_proteins=8, max_residues=100, seed=0)
    assert len({protein.sequence for protein in found.proteins}) == len(found.proteins) == 8
    assert found.num_in_file == 48 and found.num_drawn > 8
    every = read_annotated(path, max_proteins=48, max_residues=100, seed=0)
    assert len(every.proteins) == 12 and every.num_drawn == 48
    assert every.proteins[:8] == found.proteins
    (first,), *_, num_drawn, _, _ = read_annotated(path, max_proteins=1, max_residues=100, seed=0)
    assert first == found.proteins[0] and num_drawn == 1


def test_the_draw_depends_on_the_seed_and_not_on_the_order_of_the_file(tmp_path: Path) -> None:
    entries = orthologs(*random_sequences(12), number=1)
    forward, backward = tmp_path / "forward.dat", tmp_path / "backward.dat"
    forward.write_text("".join(entries))
    backward.write_text("".join(entries[::-1]))
    first = []
    for seed in range(100):
        drawn, again = (
            read_annotated(path, max_proteins=3, max_residues=100, seed=seed).proteins
            for path in (forward, backward)
        )
        assert drawn == again
        first.append(drawn[0].accession)
    counts = Counter(first)
    # A uniform draw of 100 has each of the 12 between 1 and 24 times but for 1 in 400.
    assert len(counts) == 12 and max(counts.values()) <= 24


def test_files_without_features_are_refused(tmp_path: Path) -> None:
    fasta, none = tmp_path / "x.fasta", tmp_path / "none.dat.gz"
    fasta.write_text(f">x\n{ENTRY_SEQUENCE}\n")
    none.write_bytes(gzip.compress(entry("CHAIN           1..20").encode()))
    for path, message in ((fasta, "FASTA file, which has no features"), (none, "no protein of")):
        with pytest.raises(InputDataError, match=message):
            read_annotated(path, max_proteins=10, max_residues=100, seed=0)
