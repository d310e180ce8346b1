"""`protlm generate`: the file, its headers, reproducibility by seed, and the refusals."""

import gzip
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import protlm
from protlm.commands.generate import generate
from protlm.commands.train import cannot_generate
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.data.records import Record, Tally, read_records
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.model.pretrained import PretrainedModel
from protlm.model.transformer import ProteinLM, build_network
from protlm.options.generate import GenerateOptions, Sampling, Sweeps
from protlm.system.errors import InputDataError, UserError
from tests.fixtures.commands import Command
from tests.fixtures.runs import CAUSAL, RUN, Train

HEADER = re.compile(
    r"generated_(?P<number>\d+) length=(?P<length>\d+) sampled=(?P<sampled>\d+) "
    r"ended=(?P<ended>eos|length)"
    r"( log_probability=(?P<log_probability>-[\d.]+) perplexity=(?P<perplexity>[\d.]+))?"
)
FILE = Path("g.fasta")
pytestmark = pytest.mark.usefixtures("own_folder")
OPTIONS = GenerateOptions(number=7, prefix="MKT", max_length=70)


@pytest.fixture(scope="module")
def model(causal_run: Path) -> PretrainedModel:
    return protlm.load(causal_run)


def records(path: Path) -> list[Record]:
    """Reads a FASTA file, of which every record must be valid."""
    tally = Tally()
    found = list(read_records(path, tally))
    assert tally.records == len(found)
    return found


def test_the_file_contains_the_requested_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    output = Path("new/g.fasta")
    generate(CAUSAL, output, OPTIONS)
    assert capsys.readouterr().out == f"{output}\n"
    assert [path.name for path in output.parent.iterdir()] == ["g.fasta"]
    assert all(len(line) <= 60 for line in output.read_text().splitlines() if line[0] != ">")
    found = records(output)
    assert [record.identifier for record in found] == [f"generated_{n}" for n in range(1, 8)]
    for record in found:
        header = HEADER.fullmatch(record.header)
        assert set(record.sequence) <= set(STANDARD)
        assert record.sequence.startswith("MKT")
        assert int(header["length"]) == len(record.sequence) == int(header["sampled"]) + 3
        assert (header["ended"] == "length") == (len(record.sequence) == 70)


def test_printed_and_compressed_output_equal_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    printed = {}
    for name in ("g.fasta", "g.fasta.gz", "-"):
        generate(CAUSAL, Path(name), OPTIONS)
        printed[name] = capsys.readouterr().out
    assert sorted(path.name for path in Path().iterdir()) == ["g.fasta", "g.fasta.gz"]
    assert printed["-"] == Path("g.fasta").read_text()
    assert gzip.decompress(Path("g.fasta.gz").read_bytes()) == Path("g.fasta").read_bytes()
    assert printed["g.fasta.gz"] == "g.fasta.gz\n"


def test_the_header_has_the_perplexity_of_the_forward_pass(model: PretrainedModel) -> None:
    generate(CAUSAL, FILE, replace(OPTIONS, sampling=Sampling(0.7, top_k=9)))
    for record in records(FILE):
        header = HEADER.fullmatch(record.header)
        logits_LV = model(model.tokenize([record.sequence])).logits_BLV[0]
        targets = torch.tensor(VOCABULARY.encode(record.sequence).tolist())
        nats = torch.nn.functional.cross_entropy(logits_LV[3:-2], targets[3:]).item()
        assert float(header["log_probability"]) == pytest.approx(-nats, abs=2e-4)
        assert float(header["perplexity"]) == pytest.approx(math.exp(nats), abs=0.02)


def test_the_prefix_is_read_like_a_fasta_file(model: PretrainedModel) -> None:
    for name, prefix in (("a", "MKTXU"), ("b", " mkt Xu\n")):
        generate(CAUSAL, Path(name), replace(OPTIONS, prefix=prefix))
    assert Path("a").read_bytes() == Path("b").read_bytes()
    assert next(model.generate(1, prefix="mk\nt")).sequence.startswith("MKT")


def never_ending(path: Path) -> PretrainedModel:
    """A model that does not draw `<eos>`."""
    model = protlm.load(path)
    model.network.head.bias.data[VOCABULARY.eos] = -1e3
    return model


def test_the_default_length_is_that_of_the_training() -> None:
    model = never_ending(CAUSAL)
    lengths = {len(protein.sequence) for protein in model.generate(3)}
    assert lengths == {126}, "data.max_length is 128, specials included"
    (longer,) = model.generate(1, max_residues=200)
    assert len(longer.sequence) == 200


def test_learned_positions_bound_the_length(train_tiny: Train) -> None:
    settings = ("objective=causal", "model.positions=learned", "model.max_length=128")
    bounded = never_ending(train_tiny(Path("learned"), *settings, "trainer.max_steps=2"))
    (longest,) = bounded.generate(1, max_residues=126)
    bounded(bounded.tokenize([longest.sequence]))
    with pytest.raises(UserError, match="127 exceeds the 126 residues that this model accepts"):
        bounded.generate(1, max_residues=127)


START = ">P1 first\nMKTAYIAKQRQISFVKSHFSRQ\n>P2\nGSHMXB\n"


def test_a_masked_model_samples_from_given_sequences(protlm_in_process: Command) -> None:
    """And the new sequences can be prepared for training."""
    Path("start.fasta").write_text(START)
    flags = "--start start.fasta --number 5 --sweeps 2 --mask-fraction 0.2 --seed 4 --batch-size 2"
    arguments = ("generate", "-m", RUN, "-o", "g.fasta", *flags.split())
    assert "2 records: 2 starts, 0 skipped" in protlm_in_process(*arguments, cwd=Path()).stderr
    found = records(FILE)
    assert [record.identifier for record in found] == [f"generated_{n}" for n in range(1, 6)]
    for index, record in enumerate(found):
        start = ("MKTAYIAKQRQISFVKSHFSRQ", "GSHMXB")[index % 2]
        changed = sum(one != other for one, other in zip(start, record.sequence, strict=True))
        name, length = f"start=P{index % 2 + 1}", f"length={len(start)}"
        assert record.header == f"generated_{index + 1} {length} {name} changed={changed}"
        assert set(record.sequence) <= set(STANDARD)
    options = GenerateOptions(seed=4, start=Path("start.fasta"), sweeps=Sweeps(2, 0.2))
    generate(RUN, Path("default.fasta"), options)
    assert records(Path("default.fasta")) == found[:2]
    protlm_in_process("prepare", "g.fasta", "--out", "new", cwd=Path())
    assert '"sequences": 5' in Path("new/manifest.json").read_text()


def test_starts_that_are_too_long_are_reported(
    train_tiny: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("model.positions=learned", "model.max_length=128", "trainer.max_steps=2")
    run = train_tiny(Path("learned"), *settings)
    Path("start.fasta").write_text(f">long\n{'M' * 127}\n>P1\n{'M' * 126}\n")
    options = GenerateOptions(start=Path("start.fasta"), sweeps=Sweeps(1, 1.0))
    generate(run, FILE, options)
    assert "skipped long: 127 residues; this model takes 126" in capsys.readouterr().err
    assert len(records(FILE)) == 1
    Path("start.fasta").write_text(f">long\n{'M' * 127}\n")
    with pytest.raises(InputDataError, match=r"none of the 1 records .* long"):
        generate(run, Path("h.fasta"), options)
    assert not Path("h.fasta").exists()


def test_a_mechanism_that_cannot_decode_step_by_step_is_refused(model: PretrainedModel) -> None:
    config = compose(TrainConfig, ["model=tiny", "attention=reformer", "objective=causal"])

    def build(seed: int = 0) -> ProteinLM:
        return build_network(config.model, config.attention, seed=seed)

    description = replace(model.description, attention="reformer")
    other = PretrainedModel(build(), description, rebuild=build)
    with pytest.raises(UserError, match=r"attention=reformer cannot generate .*softmax"):
        other.generate(1)


WRONG = {
    "none": ({"number": 0}, "number of sequences 0 must be"),
    "no batch": ({"number": 1, "batch_size": 0}, "batch size 0 must be"),
    "no seed": ({"number": 1, "seed": -1}, "seed -1 must be"),
    "no room": ({"number": 1, "prefix": "MKT", "max_residues": 3}, "3 residues leaves nothing"),
    "no residue": ({"number": 1, "prefix": "m1"}, "the prefix: '1' at residue 2"),
    "no length": ({"number": 1, "max_residues": 0}, "0 residues leaves nothing"),
}


@pytest.mark.parametrize(("settings", "words"), WRONG.values(), ids=WRONG)
def test_impossible_settings_are_user_errors(
    settings: dict[str, Any], words: str, model: PretrainedModel
) -> None:
    with pytest.raises(UserError, match=words):
        model.generate(**settings)


@pytest.mark.slow
def test_the_command_takes_every_flag(protlm_command: Command, protlm_in_process: Command) -> None:
    flags = "--prefix mkt --number 5 --max-length 30 --temperature 0.8 --top-k 10 --top-p 0.9"
    more = "--seed 3 --batch-size 2 --device cpu"
    arguments = ["-m", CAUSAL, "-o", "g.fasta", *flags.split(), *more.split()]
    done = protlm_command("generate", *arguments, cwd=Path())
    assert done.stdout == "g.fasta\n"
    assert "generating 5/5" in done.stderr
    sampling = Sampling(0.8, top_k=10, top_p=0.9)
    options = GenerateOptions("MKT", 5, max_length=30, sampling=sampling, seed=3)
    generate(CAUSAL, Path("again.fasta"), options)
    assert Path("again.fasta").read_bytes() == FILE.read_bytes()
    arguments = ["-m", CAUSAL, "-o", "-", *flags.split(), *more.split()]
    assert protlm_in_process("generate", *arguments, cwd=Path()).stdout == FILE.read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["attention=reformer", "objective=causal"], "attention=reformer cannot generate"),
        (["attention=reformer"], ""),
        (["attention=performer_relu", "objective=causal"], ""),
    ],
)
def test_training_reports_that_a_model_cannot_generate(settings: list[str], message: str) -> None:
    config = compose(TrainConfig, ["model=tiny", *settings])
    assert cannot_generate(config).partition(";")[0] == message
