"""Commands with `--relatives`, beside what the Python interface computes of the same relatives."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import protlm
from protlm.commands import contacts
from protlm.commands.embed import embed
from protlm.commands.probe import predict
from protlm.downstream.probe_results import read_probe
from protlm.interface import Model
from protlm.model.relatives import InContexts
from protlm.options.embed import EmbedOptions, Pooling
from protlm.options.jobs import Share
from protlm.options.relatives import FamilyOptions, RelativesOptions
from protlm.system.errors import UserError
from tests.commands.test_embed_shares import at_block, die
from tests.commands.test_score import WILD_TYPE
from tests.fixtures.commands import Command, read_table
from tests.fixtures.runs import Killed
from tests.test_in_contexts import FASTA, QUERY

Protlm = Callable[..., str]
DRAWN = ".relatives.jsonl"


@pytest.fixture(autouse=True)
def place(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with queries, their alignments and a table of variants."""
    monkeypatch.chdir(workplace)
    assert QUERY == WILD_TYPE
    Path("families").mkdir()
    names = [f"P{n}" for n in range(1, 13)]
    for name in names:
        Path("families", f"{name}.a3m").write_text(FASTA)
    Path("many.fasta").write_text("".join(f">{name}\n{QUERY}\n" for name in names))
    Path("v.csv").write_text("mutant\nK2R\nY5W\n")


@pytest.fixture
def run(protlm_in_process: Command) -> Protlm:
    """Runs a command with the relatives of P1, or of all; returns what it prints."""

    def typed(*words: str, relatives: str = "families/P1.a3m", code: int = 0) -> str:
        given = ["--relatives", relatives, "--force-relatives", "--relatives-tokens", "60"]
        done = protlm_in_process(*words, *given, cwd=Path(), code=code)
        return done.stdout + done.stderr

    return typed


@pytest.fixture
def model() -> Model:
    return protlm.load("run")


def relatives_of(model: Model, source: str = "families/P1.a3m") -> InContexts:
    return model.relatives(source, tokens=60, force=True)


def drawn(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"{output}{DRAWN}").read_text().splitlines()]


def test_scores_in_contexts(run: Protlm, model: Model) -> None:
    expected = model.score(("P1", QUERY), ["K2R", "Y5W"], relatives=relatives_of(model))
    told = run("score", "v.csv", "--wild-type", "x.fasta", "-m", "run", "-o", "s.csv")
    assert "wt-marginals" in told
    assert f"s.csv{DRAWN}: relatives of each context: 2; contexts: 2" in told
    found = [float(row["wt-marginals"]) for row in read_table("s.csv")]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    (line,) = drawn("s.csv")
    assert line == json.loads(json.dumps(relatives_of(model).to_plain("P1", QUERY)))
    assert (line["query"], line["seed"], line["relatives_tokens"]) == ("P1", 0, 60)
    assert line["relatives"].startswith("families/P1.a3m: an align")
    for one, own in zip(line["contexts"], relatives_of(model).draws("P1", QUERY), strict=True):
        assert (one["names"], one["digest"]) == (own.names, own.digest)
        assert one["residues"] == [relative.residues for relative in own.relatives]
    run("score", "x.fasta", "--scan", "-m", "run", "-o", "scan.csv")
    assert float(read_table("scan.csv")[1]["R"]) == pytest.approx(expected[0], abs=1e-6)
    masked = ["--wild-type", "x.fasta", "--estimator", "masked-marginals"]
    Path("w.csv").write_text("mutant\nK2R\n")
    told = run("score", "v.csv", "w.csv", "-m", "run", "-o", "two", *masked)
    assert f"each of 2 predictions reads all contexts ({len(line['contexts'])})" in told
    # Beside each table, what was drawn for it.
    assert [drawn(f"two/{name}.csv") for name in "vw"] == [[line]] * 2
    assert not Path(f"two{DRAWN}").exists()
    # Of a reference, the name of an assay is that of its query.
    Path("r.csv").write_text(f"DMS_id,target_seq\nv,{QUERY}\n")
    told = run(
        *("score", "v.csv", "--reference", "r.csv", "-m", "run", "-o", "r-out.csv"),
        relatives="families",
        code=3,
    )
    assert "for 1 of 1 queries, the first of them v" in told
    assert not Path(f"r-out.csv{DRAWN}").exists()


def test_maps_contacts_and_pages_in_contexts(run: Protlm, model: Model) -> None:
    relatives = relatives_of(model)
    run("contacts", "x.fasta", "-m", "run", "-o", "c.h5")
    (expected,) = model.contacts([("P1", QUERY)], relatives=relatives)
    with h5py.File("c.h5") as file:
        np.testing.assert_allclose(file["P1/probabilities"][()], expected, atol=1e-6)
    run("attention", "many.fasta", "-m", "run", "-o", "a.h5", relatives="families")
    first = relatives_of(model, "families").first("P7", QUERY)
    maps = first.attention_maps(first.tokenize([QUERY]))
    with h5py.File("a.h5") as file:
        np.testing.assert_allclose(file["P7/layer_1"][()], maps[1][0], atol=1e-6)
    run("inspect", "x.fasta", "-m", "run", "-o", "page.html")
    # Contacts are means over contexts; a page reads the first alone.
    assert drawn("page.html")[0]["contexts"] == drawn("c.h5")[0]["contexts"][:1]
    for name, output in (("inspect", "p.html"), ("attention", "p.h5")):
        words = name, "x.fasta", "-m", "run", "-o", output, "--contexts"
        assert "one context alone is read here; leave --contexts out" in run(*words, "2", code=2)
        run(*words, "1")
        assert drawn(output) == drawn("page.html")
    assert [line["query"] for line in drawn("a.h5")] == [f"P{n}" for n in range(1, 13)]


def test_what_cannot_be_used_is_refused_early(run: Protlm, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("others.fasta").write_text(f">A\n{QUERY}\n>B\n{QUERY}\n")
    words = "attention", "others.fasta", "-m", "run", "-o", "o.h5", "--allow-none"
    assert "name each file as its query" in run(*words, relatives="families", code=3)
    monkeypatch.setattr(contacts, "fit_contacts", None)
    words = "contacts", "x.fasta", "-m", "run", "-o", "c.h5"
    assert "No relative is left" in run(*words, relatives="x.fasta", code=3)


def test_new_members_of_a_family(run: Protlm, causal_run: Path) -> None:
    words = "generate", "-m", str(causal_run), "--number", "2", "--max-length", "12"
    run(*words, "-o", "g.fasta")
    model = protlm.load(causal_run)
    found = model.generate(2, max_residues=12, relatives=relatives_of(model))
    sequences = {one.sequence for one in found}
    assert {line for line in Path("g.fasta").read_text().split() if line.isupper()} == sequences
    assert len(drawn("g.fasta")) == 1
    started = "generate", "-m", "run", "--start", "x.fasta", "-o", "h.fasta"
    assert "--relatives are those of new sequences" in run(*started, code=2)


def embedded(output: str, fasta: str = "many.fasta", tokens: int = 60, **options: Any) -> Path:
    family = FamilyOptions(relatives_tokens=tokens)
    given = RelativesOptions(Path("families"), family, force_relatives=True)
    settings = EmbedOptions(include=(Pooling.mean,), relatives=given)
    embed(Path(fasta), Path("run"), Path(output), replace(settings, **options))
    return Path(output)


def test_vectors_in_contexts_are_the_same_in_any_way(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = embedded("whole.h5")
    with h5py.File(whole) as file:
        vectors = {name: file[name][()] for name in ("P1", "P7")}
        assert json.loads(file.attrs["relatives"])["--relatives-tokens"] == 60
    expected = model.embed([("P7", QUERY)], relatives=relatives_of(model, "families"))[0]
    np.testing.assert_array_equal(vectors["P7"], expected)
    assert not np.allclose(vectors["P1"], vectors["P7"])
    # Alone, in another order, in shares, and after a kill.
    names = [f"P{n}" for n in range(12, 0, -1)]
    Path("turned.fasta").write_text("".join(f">{name}\n{QUERY}\n" for name in names))
    with h5py.File(embedded("turned.h5", "turned.fasta")) as file:
        np.testing.assert_array_equal(file["P7"][()], expected)
    for number in (1, 2):
        embedded("shares.h5", share=Share(number, 2))
    assert embedded("shares.h5", merge=True).read_bytes() == whole.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_block(patch, 2, die)
        embedded("killed.h5")
    for refused in ({"tokens": 50}, {"relatives": RelativesOptions()}):
        with pytest.raises(UserError, match=r"--relatives(-tokens)?\b"):
            embedded("killed.h5", **refused)
    assert embedded("killed.h5").read_bytes() == whole.read_bytes()
    texts = {Path(f"{x}.h5{DRAWN}").read_text() for x in ("whole", "shares", "killed")}
    assert len(texts) == 1
    assert {one["query"]: one for one in drawn("turned.h5")}["P7"] == drawn("whole.h5")[6]


def test_relatives_of_other_contents_are_refused_by_a_resumed_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    embedded("x.h5", share=Share(1, 2))
    Path("families/P3.a3m").write_text(FASTA + ">R9\nMKTAYIAWWWQISFVKSHFSRQ\n")
    with pytest.raises(UserError, match=r"--relatives\b"):
        embedded("x.h5", share=Share(2, 2))
    with pytest.raises(UserError, match="--dry-run measures proteins alone"):
        embedded("y.h5", dry_run=True)
    with pytest.raises(UserError, match="features are of proteins alone; leave out --features"):
        embedded("y.h5", include=(Pooling.features,), features=Path("features"))


def test_a_probe_in_contexts_predicts_in_as_many(run: Protlm, model: Model) -> None:
    rng = np.random.default_rng(0)
    rows = ["identifier\tsequence\tlabel\tset"]
    for number in range(1, 13):
        split = "train" if number < 6 else "valid" if number < 9 else "test"
        rows.append(f"P{number}\t{QUERY}\t{rng.normal():.3f}\t{split}")
    Path("labels.tsv").write_text("\n".join(rows) + "\n")
    words = "-m", "run", "--layers", "1", "--contexts", "2"
    run("probe", "labels.tsv", "-o", "probe", *words, relatives="families")
    assert [line["query"] for line in drawn("probe")] == [f"P{n}" for n in range(1, 13)]
    typed = "predict", "x.fasta", "-p", "probe", "-o", "x.tsv"
    assert "fitted to means over 2 contexts, not to 4; type --relatives PATH" in run(*typed, code=2)
    run(*typed, "--contexts", "2")
    probe = read_probe(Path("probe"))
    assert probe.contexts == 2
    relatives = model.relatives("families/P1.a3m", contexts=2, tokens=60, force=True)
    states = model.embed([("P1", QUERY)], layers=1, relatives=relatives)
    expected = probe.outputs(states, [len(QUERY)])[0, 0]
    assert float(read_table("x.tsv")[0]["predicted"]) == pytest.approx(expected, abs=1e-4)
    with pytest.raises(UserError, match="means over 2 contexts, not to 0"):
        predict(Path("x.fasta"), Path("probe"), None, Path("alone.tsv"))
