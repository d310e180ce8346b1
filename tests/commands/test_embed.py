"""`protlm embed`: every record is embedded or reported, and vectors do not depend on the batch."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import protlm
from protlm.analysis import pace
from protlm.commands.embed import embed
from protlm.commands.embedding.plan import Plan, first_equal
from protlm.data.records import Tally, read_records
from protlm.data.vocabulary import VOCABULARY
from protlm.loading import pick_device
from protlm.model.embedding import Embedder, batches
from protlm.model.pretrained import PretrainedModel
from protlm.options.embed import Dtype, EmbedOptions, Pooling
from protlm.options.jobs import Share
from protlm.options.shared import Duplicates
from protlm.system.errors import InputDataError, UserError, is_full_memory
from protlm.system.paths import sample_dir
from tests.fixtures.commands import ROOT, Command
from tests.fixtures.runs import RUN, Train

FASTA, OUTPUT = Path("x.fasta"), Path("out.h5")
pytestmark = pytest.mark.usefixtures("own_folder")
PAGE = (ROOT / "docs" / "embed.md").read_text()


@pytest.fixture
def proteins(tiny_fasta: Path) -> Path:
    """Twelve proteins of very different lengths."""
    records = sorted(read_records(tiny_fasta, Tally()), key=lambda record: len(record.sequence))
    path = Path("proteins.fasta")
    path.write_text("".join(f">{r.header}\n{r.sequence}\n" for r in records[::15]))
    return path


@pytest.mark.parametrize("tokens_per_batch", [1, 500, 100_000])
def test_every_protein_has_the_vector_of_it_alone(tokens_per_batch: int, proteins: Path) -> None:
    """Kinds and layers that are named twice are written once."""
    options = EmbedOptions((Pooling.mean, Pooling.mean), (2, -1), tokens_per_batch)
    embed(proteins, RUN, OUTPUT, options)
    records = list(read_records(proteins, Tally()))
    model = protlm.load(RUN)
    with h5py.File(OUTPUT) as file:
        assert set(file) == {record.identifier for record in records}
        assert file.attrs["model_hash"] == model.hash
        assert file.attrs["vocabulary_hash"] == VOCABULARY.hash
        for record in records:
            dataset = file[record.identifier]
            hidden = model(model.tokenize([record.sequence]), layers=[-1]).hidden[-1][0]
            np.testing.assert_allclose(dataset[:], hidden[1:-1].mean(0).numpy(), atol=1e-5)
            assert dataset.attrs["header"] == record.header


def test_batches_respect_the_budget_and_contain_every_record() -> None:
    lengths = np.random.default_rng(0).integers(1, 900, 500).tolist()
    made = list(batches(lengths, 1_000))
    assert sorted(index for batch in made for index in batch) == list(range(500))
    for batch in made:
        padded = len(batch) * (max(lengths[index] for index in batch) + 2)
        assert padded <= 1_000 or len(batch) == 1


def test_numbers_too_large_for_float16_are_refused(
    proteins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = PretrainedModel.hidden_states

    def overflow(self: PretrainedModel, *arguments: Any) -> dict[int, torch.Tensor]:
        is_narrow = torch.is_autocast_enabled("cpu")
        # The mechanism of the tiny run refuses float16 by itself.
        with torch.autocast("cpu", enabled=False):
            found = states(self, *arguments)
        return {layer: (1e6 * x).half() if is_narrow else 1e6 * x for layer, x in found.items()}

    monkeypatch.setattr(PretrainedModel, "hidden_states", overflow)
    for compute, stored, says in (
        (Dtype.float16, Dtype.float32, "too large for float16; compute in float32"),
        (Dtype.float16, Dtype.float16, "too large for float16; compute in float32"),
        (Dtype.float32, Dtype.float16, "too large for float16; type --dtype float32"),
    ):
        with pytest.raises(UserError, match=says):
            embed(proteins, RUN, OUTPUT, EmbedOptions(compute_dtype=compute, dtype=stored))
        assert [*Path().iterdir()] == [proteins]
    embed(proteins, RUN, OUTPUT, EmbedOptions())


def write(*identifiers: str) -> None:
    FASTA.write_text("".join(f">{name} text\nMKTAYIAKQR\n" for name in identifiers))


def test_repeated_identifiers() -> None:
    write("P1", "P2", "P1")
    with pytest.raises(InputDataError, match=r"line 5: the identifier P1 is repeated"):
        embed(FASTA, RUN, OUTPUT, EmbedOptions())
    assert not OUTPUT.exists()
    write("P1", "P2", "P1", "P1_2")
    three, four = {"P1", "P2", "P1_2"}, {"P1", "P2", "P1_2", "P1_2_2"}
    FASTA.write_text(FASTA.read_text().replace("text", "{}").format(*"abcd"))
    headers = {"P1 a", "P2 b", "P1 c", "P1_2 d"}
    for how, expected in (("first", three), ("suffix", four), ("header", headers)):
        output = Path(f"{how}.h5")
        embed(FASTA, RUN, output, EmbedOptions(duplicates=Duplicates(how)))
        with h5py.File(output) as file:
            assert set(file) == expected
            assert {file[name].attrs["original_id"] for name in expected} == three
    write("P1", "P1")
    for how, others in (("header", "suffix"), ("error", "suffix, first or header")):
        with pytest.raises(InputDataError, match="is repeated") as caught:
            embed(FASTA, RUN, OUTPUT, EmbedOptions(duplicates=Duplicates(how)))
        assert caught.value.options == {"duplicates": others}


def test_several_files_are_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [f">P{n} text\nMKTAYIAK{'QR' * n}\n" for n in range(5)] + [">bad\nMK1\n", ">P9\nMK\n"]
    FASTA.write_text("".join(parts))
    files = [Path("a.fasta"), Path("b.fasta")]
    files[0].write_text("".join(parts[:3]))
    files[1].write_text("".join(parts[3:]))
    embed(FASTA, RUN, OUTPUT, EmbedOptions())
    for name, options in (("two.h5", EmbedOptions()), ("shares.h5", EmbedOptions(merge=True))):
        for share in (Share(1, 2), Share(2, 2)) if options.merge else ():
            embed(files, RUN, Path(name), EmbedOptions(share=share))
        capsys.readouterr()
        embed(files, RUN, Path(name), options)
        said = capsys.readouterr().err
        assert "7 records of 2 files: 6 embedded, 1 skipped" in said
        assert "skipped bad: digit, b.fasta, line 5" in said
        with h5py.File(OUTPUT) as one, h5py.File(name) as two:
            assert list(one) == list(two)
            assert all((one[key][:] == two[key][:]).all() for key in one)
    files[1].write_text(parts[0])
    said = r"b\.fasta, line 1: the identifier P0 is repeated \(it is in a\.fasta, line 1\)"
    with pytest.raises(InputDataError, match=said):
        embed(files, RUN, Path("repeated.h5"), EmbedOptions())


def test_all_layers_are_asked_for_in_one_word(protlm_in_process: Command) -> None:
    write("P1")
    for typed in ("--repr-layers all", "--repr-layers=0,1 2"):
        name = f"{len(typed)}.h5"
        protlm_in_process("embed", FASTA, "-m", RUN, "--out", name, *typed.split(), cwd=".")
        with h5py.File(name) as file:
            assert set(file["P1"]["mean"]) == {"0", "1", "2"}


def test_a_protein_without_a_range_fits_into_any_memory(look_at: Callable[..., None]) -> None:
    write("P1")
    FASTA.write_text(f">P2\n{'MKTAYIAKQR' * 9}\n" + FASTA.read_text())
    Path("r.tsv").write_text("Entry\tfirst\tlast\nP1\t1\t5\n")
    computed: list[int] = []
    look_at(Embedder, "vectors", lambda _, some, *rest: computed.extend(map(len, some)))
    embed(FASTA, RUN, OUTPUT, EmbedOptions((Pooling.ranges,), ranges=Path("r.tsv")))
    assert computed == [10]
    with h5py.File(OUTPUT) as file:
        assert [file[name].shape[0] for name in ("P2", "P1")] == [0, 1]


def test_a_long_list_of_skipped_records_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    write(*["P1"] * 1_024)
    embed(FASTA, RUN, OUTPUT, EmbedOptions(duplicates=Duplicates.first))
    printed = capsys.readouterr().err
    assert "1,024 records: 1 embedded, 1,023 skipped" in printed
    assert printed.count("skipped P1") == 20 and "and 1,003 more" in printed
    assert "records with the identifier of an earlier one: 1,023" in printed
    assert "with duplicates=header the whole header" in printed


def test_long_records_are_reported_and_the_counts_add_up(
    train_tiny: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("model.positions=learned", "model.max_length=128", "trainer.max_steps=2")
    run = train_tiny(Path("run"), *settings)
    FASTA.write_text(f">long\n{'W' * 127}\n>fits\n{'W' * 126}\n>blank\n\n")
    capsys.readouterr()
    embed(FASTA, run, OUTPUT, EmbedOptions())
    printed = capsys.readouterr().err
    for said in (
        "3 records: 1 embedded, 2 skipped",
        "skipped long: 127 residues; this model takes 126",
        "skipped blank: blank sequence, line 5",
    ):
        assert said in printed
    with h5py.File(OUTPUT) as file:
        assert set(file) == {"fits"}


@pytest.mark.slow
def test_processes_make_the_bytes_of_one_process(tiny_fasta: Path) -> None:
    options = EmbedOptions((Pooling.mean, Pooling.per_tok), tokens_per_batch=250)
    embed(tiny_fasta, RUN, Path("whole.h5"), options)
    embed(tiny_fasta, RUN, OUTPUT, replace(options, processes=2))
    assert OUTPUT.read_bytes() == Path("whole.h5").read_bytes()
    assert {path.name for path in Path().iterdir()} == {"whole.h5", "out.h5"}


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    write("P1", "P2")
    with FASTA.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        embed(Path("-"), RUN, OUTPUT, EmbedOptions())
    with h5py.File(OUTPUT) as file:
        assert set(file) == {"P1", "P2"}


def test_gpu_is_another_name_of_cuda() -> None:
    if torch.cuda.is_available():
        assert pick_device("gpu").type == "cuda"
    else:
        for name in ("gpu", "gpu:1"):
            with pytest.raises(UserError, match=rf"{name} cannot be used .*use auto, cpu or a GPU"):
                pick_device(name)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def place(workplace: Path, tiny_fasta: Path) -> Path:
    """A folder with the files that the page names."""
    shutil.copy(tiny_fasta, workplace / "proteins.fasta.gz")
    shutil.copy(workplace / "x.fasta", workplace / "p.fasta")
    (workplace / "runs").mkdir()
    (workplace / "runs" / "mine").symlink_to(workplace / "run")
    first = next(read_records(tiny_fasta, Tally())).identifier
    (workplace / "domains.tsv").write_text(f"accession\tfirst\tlast\n{first}\t2\t9\n")
    return workplace


@pytest.mark.slow
def test_the_commands_of_the_page_run(place: Path, protlm_in_process: Command) -> None:
    lines = [line.split("#")[0].strip() for line in "".join(blocks("bash")).splitlines()]
    wrapped = [re.sub(r".*--wrap='(.*)'", r"\1", line) for line in lines]
    # Jobs are tested elsewhere.
    commands = [line for line in wrapped if re.match("protlm embed(?!.*--executor)", line)]
    assert len(commands) >= 9
    for command in commands:
        # Several processes are tested elsewhere: they take long to start.
        line = command.replace("$SLURM_ARRAY_TASK_ID/8", "1/1").replace("--processes 2", "")
        typed = line.split()
        protlm_in_process(*typed[1:], cwd=place)
        writes = not {"--dry-run", "--shard"} & set(typed)
        assert (place / typed[typed.index("-o") + 1]).exists() == writes


def test_the_examples_of_the_page_run(
    place: Path, protlm_in_process: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    Path("table.csv").write_text('Sequence,x\nMKV,"a, b"\n')
    Path("structures").symlink_to(sample_dir() / "structures" / "fit")
    (place / "p.fasta").rename(place / "proteins.fasta")
    done = protlm_in_process("embed", "proteins.fasta", "-o", "embeddings.h5", cwd=place)
    assert done.stdout == "embeddings.h5\n"
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block.replace("proteins.fasta.gz", "proteins.fasta"), "page", "exec"), names)
    with h5py.File("embeddings.h5") as file:
        assert list(file) == ["P1"]


def test_the_places_in_the_plan_do_not_overlap() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 500, 300)
    first = first_equal(rng.integers(0, 250, (300, 1)).astype(np.uint8).repeat(16, 1))
    made, again = (Plan(lengths, first, lengths * 4, 2_000, around=2) for _ in range(2))
    places = [[one.place(record) for record in range(300)] for one in (made, again)]
    assert places[0] == places[1]
    spans = sorted({(block, place.start, place.stop) for block, place in places[0]})
    for (block, _, end), (next_block, start, _) in pairwise(spans):
        assert block < next_block or end == start
    assert len(spans) == len(set(first.tolist()))


@pytest.mark.parametrize(("number", "groups"), [(100, 1), (1_000, 3), (10_000, 16), (100_000, 49)])
def test_a_small_file_has_a_block_for_several_processes(number: int, groups: int) -> None:
    """And a large one groups as large as before."""
    lengths = np.full(number, 10)
    made = Plan(lengths, np.arange(number), lengths, 4_096, around=2)
    assert len(made.groups) == groups
    assert sum(len(batch) for block in made.blocks for batch in block.batches) == number


def test_the_estimates_grow_linearly_or_not_at_all() -> None:
    sizes = [128, 512, 2_048]
    assert np.polyval(pace._line(sizes, [3.0, 3.1, 3.2]), 10**6) == pytest.approx(3.1)
    assert np.polyval(pace._line(sizes, [1.128, 1.512, 3.048]), 10_000) == pytest.approx(11)


def test_other_errors_are_not_taken_for_a_full_memory() -> None:
    assert is_full_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert not is_full_memory(RuntimeError("shapes cannot be multiplied"))
    model = protlm.load(RUN)
    with pytest.raises(UserError, match="layer 9 does not exist"):
        Embedder(model, (Pooling.mean,), (9,)).vectors(["MKV"])
