"""The formats of `protlm embed`: what others read from them, and that all have the same vectors."""

import csv
import hashlib
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

import protlm
from protlm.analysis.features.autoencoder import SparseAutoencoder
from protlm.commands.embed import embed
from protlm.commands.embedding.formats import parquet
from protlm.data.vocabulary import VOCABULARY
from protlm.model.embedding import windows
from protlm.model.pretrained import PretrainedModel
from protlm.options.embed import Dtype, EmbedOptions, Format, Key, Pooling
from protlm.options.shared import Duplicates
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import sha256_of
from tests.analysis.test_features import settings_of
from tests.fixtures.runs import RUN, Train

SEQUENCES = {"a/b": "MKTAYIAKQRQISFVKSHFSRQ", "P2": "MKV", "P3": "ACDEFGHIKLMNPQRSTVWY"}
FASTA = Path("x.fasta")
BOTH = (Pooling.mean, Pooling.per_tok)


@pytest.fixture(autouse=True)
def fasta(own_folder: None) -> None:
    """Three proteins, one of them with a slash in its identifier, and an invalid record."""
    records = [f">{name} text\n{sequence}\n" for name, sequence in SEQUENCES.items()]
    FASTA.write_text("".join([*records, ">bad\nMK?\n"]))


def written(name: str, **options: Any) -> Path:
    """Embeds the proteins: `written("out.h5", format=Format.ragged)`."""
    embed(FASTA, RUN, Path(name), EmbedOptions(**options))
    return Path(name)


@pytest.fixture(scope="module")
def truth(model: PretrainedModel) -> dict[str, np.ndarray]:
    """The last hidden states of the residues of each protein, computed alone."""
    return {
        name: model(model.tokenize([one]), layers=[-1]).hidden[-1][0, 1:-1].numpy()
        for name, one in SEQUENCES.items()
    }


def close(one: np.ndarray, other: np.ndarray, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.float16])
def test_uniprot_readers_read_the_default(dtype: Dtype, truth: dict[str, np.ndarray]) -> None:
    """The lines that readers of per-protein.h5 and per-residue.h5 have."""
    tolerance = 1e-5 if dtype is Dtype.float32 else 2e-3
    with h5py.File(written("protein.h5", dtype=dtype)) as file:
        vectors = {accession: np.array(vector) for accession, vector in file.items()}
    assert list(vectors) == ["a%2Fb", "P2", "P3"]
    for name, residues in truth.items():
        vector = vectors[name.replace("/", "%2F")]
        assert vector.dtype == dtype.value
        close(vector, residues.mean(0), tolerance)
    with h5py.File(written("residue.h5", include=(Pooling.per_tok,), dtype=dtype)) as file:
        for accession, dataset in file.items():
            name = dataset.attrs["original_id"]
            assert accession == name.replace("/", "%2F")
            assert dataset.attrs["length"] == len(SEQUENCES[name]) == len(dataset)
            close(dataset[:], truth[name], tolerance)


def test_the_file_says_what_it_is(model: PretrainedModel) -> None:
    said = {
        "model_name": "run",
        "model_hash": model.hash,
        "layer": 2,
        "pooling": "mean",
        "dtype": "float16",
        "compute_dtype": "float32",
        "vocabulary_hash": VOCABULARY.hash,
        "protlm_version": protlm.__version__,
    }
    half: dict[str, Any] = {"dtype": Dtype.float16}
    for form in (Format.hdf5, Format.ragged):
        # This model reads every protein in one pass.
        with h5py.File(written(f"{form}.h5", **half, format=form, windows=True)) as file:
            assert {name: file.attrs[name] for name in said} == said
            (row,) = file.attrs["skipped"]
            assert row["identifier"] == b"bad"
    with np.load(written("x.npz", **half, format=Format.npz)) as file:
        assert {**json.loads(str(file["metadata"])), **said} == json.loads(str(file["metadata"]))


def test_ragged_and_npz_are_end_to_end(truth: dict[str, np.ndarray]) -> None:
    found = []
    with h5py.File(written("x.h5", format=Format.ragged, include=BOTH, layers=(0, -1))) as file:
        names: list[str] = []
        file.visit(names.append)  # type: ignore[func-returns-value]
        arrays = {name: file[name] for name in names if isinstance(file[name], h5py.Dataset)}
        found.append({name: array[:] for name, array in arrays.items()})
    with np.load(written("x.npz", format=Format.npz, include=BOTH, layers=(0, -1))) as file:
        found.append({name: file[name] for name in file.files if name != "metadata"})
    assert found[0].keys() == found[1].keys()
    for name, values in found[0].items():
        is_text = values.dtype == object
        assert (values.astype(str) if is_text else values).tolist() == found[1][name].tolist()
    archive = found[1]
    assert archive["ids"].tolist() == list(SEQUENCES)
    offsets = archive["per_tok/2/offsets"]
    for number, (name, residues) in enumerate(truth.items()):
        rows = slice(offsets[number], offsets[number + 1])
        assert archive["lengths"][number] == len(SEQUENCES[name])
        close(archive["per_tok/2/embeddings"][rows], residues)
        close(archive["mean/2/embeddings"][number], residues.mean(0))


def test_torch_loads_a_file_for_each_protein(truth: dict[str, np.ndarray]) -> None:
    include = (Pooling.mean, Pooling.per_tok, Pooling.bos)
    folder = written("out", format=Format.pt, include=include, dtype=Dtype.bfloat16)
    about = json.loads((folder / "manifest.json").read_text())
    assert about["dtype"] == "bfloat16" and about["skipped"][0][0] == "bad"
    for name, residues in truth.items():
        one = torch.load(folder / about["files"][name], weights_only=True)
        assert one["label"] == f"{name} text"
        assert one["representations"][2].dtype == torch.bfloat16
        # A number of bfloat16 is within 2^-8 of what it was rounded from.
        expected = torch.from_numpy(residues)
        torch.testing.assert_close(
            one["representations"][2].float(), expected, rtol=2**-8, atol=1e-5
        )
        torch.testing.assert_close(
            one["mean_representations"][2].float(), expected.mean(0), rtol=2**-8, atol=1e-5
        )
        assert one["bos_representations"][2].shape == (64,)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*about["files"].values(), "manifest.json"]
    )


def test_pandas_reads_parquet(truth: dict[str, np.ndarray], model: PretrainedModel) -> None:
    pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    path = written("x.parquet", format=Format.parquet, dtype=Dtype.float16)
    frame = pandas.read_parquet(path)
    assert frame["id"].tolist() == list(SEQUENCES)
    assert frame["length"].tolist() == list(map(len, SEQUENCES.values()))
    matrix = np.stack(frame["embedding"])
    assert matrix.dtype == "float16"
    close(matrix, np.stack([residues.mean(0) for residues in truth.values()]), 2e-3)
    import pyarrow.parquet

    assert pyarrow.parquet.read_schema(path).metadata[b"model_hash"].decode() == model.hash
    frame = pandas.read_parquet(written("y.parquet", format=Format.parquet, layers=(0, -1)))
    assert list(frame) == ["id", "original_id", "length", "mean_0", "mean_2"]
    close(frame["mean_2"][1], truth["P2"].mean(0))


def test_entries_are_named_as_biotrainer_names_them(
    truth: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    FASTA.write_text(FASTA.read_text() + f">again\n{SEQUENCES['P2']}\n")
    path = written("x.h5", key=Key.sequence_hash, include=(Pooling.per_tok,))
    assert "records with the entry of an equal sequence: 1" in capsys.readouterr().err
    with h5py.File(path) as file:
        assert len(file) == 3
        for name, sequence in SEQUENCES.items():
            key = hashlib.sha256(f"{sequence}_{len(sequence)}".encode()).hexdigest()
            assert file[key].attrs["original_id"] == name
            close(file[key][:], truth[name])
    with pytest.raises(UserError, match="--key and --ranges exclude each other"):
        written("x.h5", key=Key.sequence_hash, include=(Pooling.ranges,), ranges=Path("x.tsv"))
    with pytest.raises(UserError, match="--key sequence-hash needs --format hdf5"):
        written("x.npz", key=Key.sequence_hash, format=Format.npz)


def test_csv_is_that_of_probe(truth: dict[str, np.ndarray]) -> None:
    with written("x.csv", format=Format.csv).open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["Entry", *map(str, range(64))]
    assert [row[0] for row in rows] == list(SEQUENCES)
    with h5py.File(written("x.h5")) as file:
        for row in rows:
            expected = file[row[0].replace("/", "%2F")][:]
            assert np.array(row[1:], np.float32).tolist() == expected.tolist()
    for refused in ({"layers": (0, 1)}, {"include": (Pooling.per_tok,)}):
        with pytest.raises(UserError, match="--format csv has one vector for a protein"):
            written("y.csv", format=Format.csv, **refused)


def test_anndata_has_the_layout_of_its_specification(
    truth: dict[str, np.ndarray], model: PretrainedModel
) -> None:
    """https://anndata.readthedocs.io/en/stable/fileformat-prose.html, as anndata 0.12 reads it."""

    def encoding(element: h5py.HLObject) -> tuple[str, str]:
        return element.attrs["encoding-type"], element.attrs["encoding-version"]

    with h5py.File(written("x.h5ad", format=Format.anndata)) as file:
        empty = ["layers", "obsm", "obsp", "varm", "varp"]
        assert set(file) == {"X", "obs", "var", "uns", *empty}
        assert encoding(file) == ("anndata", "0.1.0")
        assert {encoding(file[name]) for name in (*empty, "uns")} == {("dict", "0.1.0")}
        assert encoding(file["X"]) == ("array", "0.2.0")
        close(file["X"][:], np.stack([residues.mean(0) for residues in truth.values()]))
        for name, columns in (("obs", ["original_id", "length"]), ("var", [])):
            assert encoding(file[name]) == ("dataframe", "0.2.0")
            assert file[name].attrs["_index"] == "_index"
            assert file[name].attrs["column-order"].tolist() == columns
            assert encoding(file[name]["_index"]) == ("string-array", "0.2.0")
        assert file["obs/_index"].asstr()[:].tolist() == list(SEQUENCES)
        assert file["obs/original_id"].asstr()[:].tolist() == list(SEQUENCES)
        assert file["obs/length"][:].tolist() == list(map(len, SEQUENCES.values()))
        assert len(file["var/_index"]) == file["X"].shape[1]
        assert encoding(file["uns/protlm"]) == ("string", "0.2.0")
        about = json.loads(file["uns/protlm"].asstr()[()])
        assert about["model_hash"] == model.hash and about["skipped"][0][0] == "bad"
    with h5py.File(written("y.h5ad", format=Format.anndata, layers=(0, -1))) as file:
        assert "X" not in file and len(file["var/_index"]) == 0
        assert set(file["obsm"]) == {"mean_0", "mean_2"}
        close(file["obsm/mean_2"][1], truth["P2"].mean(0))


def test_parquet_without_pyarrow_is_one_sentence(fail_at) -> None:
    fail_at(parquet, "import_module", ImportError("pyarrow"))
    with pytest.raises(UserError, match=r"needs pyarrow.*pip install 'protlm\[parquet\]'"):
        written("x.parquet", format=Format.parquet)


def test_poolings_are_statistics_of_the_residues(truth: dict[str, np.ndarray]) -> None:
    table = Path("ranges.tsv")
    # Spreadsheets put a byte order mark before the header.
    rows = "accession\tfirst\tlast\nP3\t1\t4\nP3\t20\t20\na/b\t2\t22\n"
    table.write_text(rows, encoding="utf-8-sig")
    kinds = tuple(kind for kind in Pooling if kind is not Pooling.features)
    spans = {"P3": [(0, 4), (19, 20)], "a/b": [(1, 22)], "P2": []}
    with h5py.File(written("x.h5", include=kinds, layers=(0, -1), ranges=table)) as file:
        for name, residues in truth.items():
            entry = file[name.replace("/", "%2F")]
            assert set(entry) == set(kinds)
            assert all(set(layers) == {"0", "2"} for layers in entry.values())
            close(entry["mean/2"][:], residues.mean(0))
            close(entry["max/2"][:], residues.max(0))
            close(entry["std/2"][:], residues.std(0))
            close(entry["per_tok/2"][:], residues)
            close(entry["cls/2"][:], entry["bos/2"][:])
            means = [residues[first:end].mean(0) for first, end in spans[name]]
            close(entry["ranges/2"][:], np.array(means).reshape(-1, 64))
            close(entry["mean/0"][:], entry["per_tok/0"][:].mean(0))
        assert file["P3/ranges/2"].attrs["ranges"].tolist() == [[1, 4], [20, 20]]


@pytest.mark.parametrize("name", ["P3", "sp|P3|NAME", "tr|P3|X"])
@pytest.mark.parametrize("header", ["P3", "sp|P3|NAME of it"])
def test_ranges_are_found_by_accession(name: str, header: str) -> None:
    Path("x.fasta").write_text(f">{header}\nMKTAYIAK\n>P2\nMKV\n")
    Path("x.tsv").write_text(f"accession\tfirst\tlast\n{name}\t1\t4\n{name}\t2\t2\n")
    options = EmbedOptions((Pooling.ranges,), ranges=Path("x.tsv"), duplicates=Duplicates.header)
    embed(Path("x.fasta"), RUN, Path("x.h5"), options)
    with h5py.File("x.h5") as file:
        assert [len(file[one]) for one in (header, "P2")] == [2, 0]
    Path("x.fasta").write_text(Path("x.fasta").read_text() + ">sp|P3|OTHER\nMKW\n")
    for rows, says in (
        ("P3\t1\t2\n", r"may be .*P3.* or sp\|P3\|OTHER; write the whole"),
        ("sp|P3|A\t1\t2\ntr|P3|B\t1\t2\n", "x.tsv: sp.P3.A and tr.P3.B have the accession of"),
    ):
        Path("x.tsv").write_text(f"accession\tfirst\tlast\n{rows}")
        with pytest.raises(InputDataError, match=says):
            embed(Path("x.fasta"), RUN, Path("y.h5"), options)


@pytest.mark.slow
def test_rows_with_gaps_are_said_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.a3m").write_text(">q\nMKTAYIAK\n" + ">h\nMKT-YIAK\n" * 3)
    with pytest.warns(UserWarning, match=r"x.a3m: 3 of 4 records have gaps .*: gzip .*FILE . sed"):
        embed(Path("x.a3m"), RUN, Path("x.h5"), EmbedOptions(processes=2))
    assert "have gaps" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("accession\tfirst\tlast\nP9\t1\t2\n", "P9 is not among the embedded proteins"),
        ("accession\tfirst\tlast\nP2\t1\t4\n", "a range of P2 ends at residue 4, and it has 3"),
        ("accession\tfirst\tlast\nP2\t0\t2\n", "line 2: 0 to 2 is not a range"),
        ("accession\tfirst\tlast\nP2\t3\t2\n", "line 2: 3 to 2 is not a range"),
        ("accession\tfirst\tlast\nP2\tx\t2\n", "line 2: x to 2 is not a range"),
        ("accession\tfirst\tlast\nP2\t1\n", "line 2: 2 fields, not the 3 of the header"),
        ("accession\tfirst\tlast\nP2\n", "line 2: 1 fields, not the 3 of the header"),
        ("name\tfrom\tto\n", "has no column accession"),
    ],
)
def test_impossible_ranges_are_refused(text: str, says: str) -> None:
    table = Path("ranges.tsv")
    table.write_text(text)
    with pytest.raises(InputDataError, match=says):
        written("x.h5", include=(Pooling.ranges,), ranges=table)
    table.write_text("accession\tfirst\tlast\n")
    with h5py.File(written("none.h5", include=(Pooling.ranges,), ranges=table)) as file:
        assert file["P2"].shape == (0, 64)


@pytest.mark.parametrize("include", [(Pooling.features,), (Pooling.mean, Pooling.features)])
def test_sparse_features_are_rows_of_scipy(include: tuple[Pooling, ...]) -> None:
    model = protlm.load(RUN)
    Path("sae").mkdir()
    SparseAutoencoder(64, settings_of(model)).write(Path("sae"))
    known = dict(zip(SEQUENCES, model.features(SEQUENCES.values(), "sae"), strict=True))
    with h5py.File(written("x.h5", include=include, features=Path("sae"))) as file:
        assert file.attrs["features_hash"] == sha256_of(Path("sae/features.safetensors"))
        assert np.atleast_1d(file.attrs["layer"]).tolist() == [2, 1][-len(include) :]
        for name, one in known.items():
            entry = file[name.replace("/", "%2F")]
            entry = entry if len(include) == 1 else entry["features/1"]
            arrays = tuple(entry[part][:] for part in ("data", "indices", "indptr"))
            close(csr_array(arrays, shape=entry["data"].attrs["shape"]).toarray(), one.toarray())
    with pytest.raises(UserError, match="type: --include features --features SAE"):
        written("y.h5", features=Path("sae"))
    with pytest.raises(UserError, match=r"--features .* needs --format hdf5"):
        written("y.npz", include=include, features=Path("sae"), format=Format.npz)


def test_the_compute_dtype_changes_the_products(truth: dict[str, np.ndarray]) -> None:
    with h5py.File(written("x.h5", compute_dtype=Dtype.bfloat16)) as file:
        assert file.attrs["compute_dtype"] == "bfloat16"
        vectors = file["P3"][:]
    assert 0 < np.abs(vectors - truth["P3"].mean(0)).max() < 0.1


def test_long_proteins_are_embedded_in_windows(
    train_tiny: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("model.positions=learned", "model.max_length=34", "trainer.max_steps=2")
    run = train_tiny(Path("bounded"), *settings, "data.max_length=34")
    rng = np.random.default_rng(0)
    sequences = ["".join(rng.choice(list("ACDEFGHIKL"), n)) for n in (32, 33, 100, 7)]
    FASTA.write_text("".join(f">P{i}\n{s}\n" for i, s in enumerate(sequences)))
    embed(FASTA, run, Path("out.h5"), EmbedOptions(include=(Pooling.per_tok,), windows=True))
    assert "4 records: 4 embedded, 0 skipped" in capsys.readouterr().err
    model = protlm.load(run)
    with h5py.File("out.h5") as file:
        assert file.attrs["window_residues"] == 32
        assert [file[f"P{i}"].attrs["windows"] for i in range(4)] == [1, 2, 6, 1]
        for number, sequence in enumerate(sequences):
            vectors = file[f"P{number}"][:]
            assert len(vectors) == len(sequence)
            for place in range(0, len(sequence), 9):
                starts = range(0, max(1, len(sequence) - 31))
                used = [s for s in starts if s % 16 == 0 or s == starts[-1]]
                nearest = min(used, key=lambda start: abs(start + 15.5 - place))
                window = model.tokenize([sequence[nearest : nearest + 32]])
                hidden = model(window, layers=[-1]).hidden[-1][0]
                close(vectors[place], hidden[place - nearest + 1].numpy())


@pytest.mark.parametrize(("length", "width"), [(33, 32), (64, 32), (1000, 7), (5, 2), (3, 1)])
def test_windows_cover_every_residue_once(length: int, width: int) -> None:
    made = windows(length, width)
    assert [place for _, first, end in made for place in range(first, end)] == [*range(length)]
    for start, first, end in made:
        assert start <= first < end <= start + width <= length
