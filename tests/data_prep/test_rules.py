"""From options to rules and selections, and through `protlm prepare` to splits."""

import json
import shutil

import pytest

from protlm.data.records import Record, Tally, read_records
from protlm.data_prep.clusters import ClusterSplit
from protlm.data_prep.encode import selected
from protlm.data_prep.families import FamilySplit
from protlm.data_prep.prepare import make_rule
from protlm.data_prep.split import HashSplit, TableSplit
from protlm.options.prepare import PrepareOptions, Selection, SplitOptions
from protlm.system.errors import OutputError, UserError
from protlm.system.paths import sample_dir

TINY = sample_dir() / "uniprot_tiny.fasta.gz"


@pytest.fixture
def tables(tmp_path):
    """A split, a family and a cluster table of the tiny sample, by kind."""
    identifiers = [record.identifier for record in read_records(TINY, Tally())]
    paths = {name: tmp_path / f"{name}.tsv" for name in ("split", "family", "cluster")}
    rows = "".join(f"{one}\ttrain\n" for one in identifiers)
    paths["split"].write_text(f"accession\tsplit\n{rows}")
    families = [f"{one}\tPF{i % 20:05d};\n" for i, one in enumerate(identifiers)]
    paths["family"].write_text("Entry\tPfam\n" + "".join(families))
    clusters = [f"{identifiers[i - i % 4]}\t{one}\n" for i, one in enumerate(identifiers)]
    paths["cluster"].write_text("".join(clusters))
    return paths


def made(tmp_path, **options):
    return make_rule(SplitOptions(**options), [TINY], tmp_path / "o", PrepareOptions())[0]


def test_options_determine_the_rule(tmp_path, tables):
    kinds = {HashSplit: (), TableSplit: ("split",), ClusterSplit: ("cluster",)}
    for kind, given in kinds.items():
        rule = made(tmp_path, **{f"{name}_table": tables[name] for name in given})
        assert isinstance(rule, kind)
    options = {"family_table": tables["family"], "ood_families": ("PF00003,PF00005", "PF00007")}
    rule = made(tmp_path, **options)
    assert isinstance(rule, FamilySplit)
    assert rule.describe()["families"] == ["PF00003", "PF00005", "PF00007"]
    both = made(tmp_path, **options, cluster_table=tables["cluster"], valid_fraction=0.3)
    assert both.describe()["otherwise"]["valid_fraction"] == 0.3
    assert both.describe()["otherwise"]["table"] == "cluster.tsv"


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"split_table", "family_table"}, ["--split-table", "--family-table"]),
        ({"split_table", "cluster_table", "cluster"}, ["--cluster-table", "--cluster"]),
        ({"split_table", "valid_fraction"}, ["--split-table", "--valid-fraction"]),
        ({"split_table", "test_fraction"}, ["--split-table", "--test-fraction"]),
        ({"cluster_table", "cluster"}, ["--cluster", "--cluster-table"]),
        ({"cluster_identity"}, ["--cluster-identity", "--cluster"]),
        ({"cluster_identity", "cluster_table"}, ["--cluster-identity"]),
        ({"ood_families"}, ["--family-table", "Entry and Pfam"]),
        ({"cluster_coverage"}, ["--cluster-coverage", "--cluster"]),
        ({"no_homologs"}, ["--no-homologs", "--family-table"]),
    ],
)
def test_incompatible_options_are_rejected(tmp_path, tables, options, flags):
    values = {
        **{f"{name}_table": path for name, path in tables.items()},
        **{"valid_fraction": 0.1, "test_fraction": 0.0},
        **{"cluster": True, "cluster_identity": 0.5, "ood_families": ("PF00001",)},
        **{"cluster_coverage": 0.5, "no_homologs": True},
    }
    with pytest.raises(UserError) as caught:
        made(tmp_path, **{name: values[name] for name in options})
    for flag in flags:
        assert flag in str(caught.value)


def test_an_existing_output_is_rejected_before_tables_are_read(tmp_path):
    (tmp_path / "o").mkdir()
    with pytest.raises(OutputError, match="exists already"):
        made(tmp_path, cluster_table=tmp_path / "none.tsv")


# Finds the clusters of the table.
FAKE = """#!{python}
import shutil, sys
if sys.argv[1] == "version":
    sys.exit(print("14"))
shutil.copy({table!r}, sys.argv[3] + "_cluster.tsv")
"""
# Finds the training sequences that begin as a held-out one does.
SEARCHING = """#!{python}
import sys
from pathlib import Path
if sys.argv[1] == "version":
    sys.exit(print("14"))
Path({folder!r}, "calls").open("a").write(" ".join(sys.argv[5:]) + chr(10))
held_out, train = [Path(one).read_text().split() for one in sys.argv[2:4]]
begins = {{one[:10] for one in held_out[1::2]}}
names = [name[1:] for name, one in zip(train[::2], train[1::2]) if one[:10] in begins]
Path(sys.argv[4]).write_text(chr(10).join(names * 2))
"""


@pytest.mark.parametrize("clusters", ["of a table", "of mmseqs"])
def test_prepare_holds_out_families_and_whole_clusters(
    protlm_in_process, tmp_path, tables, clusters, install_mmseqs, in_shards
):
    arguments, version = ["--cluster-table", tables["cluster"]], None
    if clusters == "of mmseqs":
        install_mmseqs(FAKE, table=str(tables["cluster"]))
        arguments, version = ["--cluster", "--cluster-identity", "0.4"], "14"
    done = protlm_in_process(
        *("prepare", TINY, "--out", "D", "--family-table", tables["family"]),
        *("--ood-families", "PF00003", "PF00005,PF00099", "--valid-fraction", "0.2", *arguments),
        cwd=tmp_path,
    )
    found = in_shards(tmp_path / "D")
    split_of = {name: split for split, proteins in found.items() for name, _ in proteins}
    identifiers = [record.identifier for record in read_records(TINY, Tally())]
    assert set(split_of) == set(identifiers)
    for start in range(0, len(identifiers), 4):
        splits = {split_of[one] for one in identifiers[start : start + 4]}
        assert len(splits) == 1
        is_held_out = any(i % 20 in (3, 5) for i in range(start, min(start + 4, len(identifiers))))
        assert (splits == {"test_ood_family"}) == is_held_out
    assert {"train", "valid", "test_ood_family"} <= set(split_of.values())
    report = json.loads((tmp_path / "D" / "report.json").read_text())
    noted = report["counts"]["noted"]
    assert noted["of the held-out family PF00003"] == noted["of the held-out family PF00005"] == 9
    assert noted["held out because its cluster holds a member of a held-out family"] == 72 - 18
    assert report["split_rule"]["otherwise"].get("mmseqs2") == version
    assert report["families_without_records"] == ["PF00099"]
    assert report["split_rule"]["absent_from_table"] == ["PF00099"]
    assert "no record: of the held-out family PF00099" in done.stderr


def test_training_sequences_close_to_held_out_ones_are_left_out(
    protlm_in_process, tmp_path, install_mmseqs, in_shards, table
):
    install_mmseqs(SEARCHING, folder=str(tmp_path))
    begins = ["MKTAYIAKQR", "MWWWYIAKQW"]
    proteins = {f"p{n}": begins[n % 2] + "ACDEFGHIKL"[n % 10] * 9 for n in range(8)}
    # One sequence is in two splits.
    proteins["p2"] = proteins["p4"]
    splits = dict.fromkeys(proteins, "train") | {"p0": "test_ood_family", "p2": "valid"}
    del splits["p7"]
    (tmp_path / "x.fasta").write_text("".join(f">{n}\n{x}\n" for n, x in proteins.items()))
    splits = table([("accession", "split"), *splits.items()])
    words = ("prepare", "x.fasta", "--split-table", splits, "--no-homologs", "--min-length")
    for folder in ("D", "D", "E"):
        # The table of homologs is that of an earlier run, also of one that was killed later.
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
        protlm_in_process(*words, "9", "--out", folder, cwd=tmp_path)
    found = {split: [name for name, _ in own] for split, own in in_shards(tmp_path / "D").items()}
    assert found == {"train": ["p1", "p3", "p5"], "valid": ["p2"], "test_ood_family": ["p0"]}
    report = json.loads((tmp_path / "D" / "report.json").read_text())
    reason = "of train, at least 30 % identical over 80 % of a held-out sequence (MMseqs2)"
    assert report["counts"]["filtered"] == {reason: 2, "in no split": 1}
    assert report["split_rule"]["left_out"]["mmseqs2"] == "14"
    call, _ = (tmp_path / "calls").read_text().splitlines()
    for words_of in ("--min-seq-id 0.3 -c 0.8 --cov-mode 2", "--max-seqs 5"):
        assert words_of in call
    splits.write_text("accession\tsplit\np1\ttrain\n")
    done = protlm_in_process(*words, "9", "--out", "F", cwd=tmp_path, code=3)
    assert "needs sequences in train and in test_ood_family" in done.stderr


def test_an_empty_hold_out_is_an_error_and_leaves_nothing(protlm_in_process, tmp_path, tables):
    """A table with accessions of other sources is reported."""
    tables["family"].write_text("Entry\tPfam\nX1\tPF00001;\n")
    families = ["--family-table", tables["family"], "--ood-families", "PF00001"]
    for _ in range(2):
        done = protlm_in_process("prepare", TINY, "--out", "D", *families, cwd=tmp_path, code=3)
        assert "no record belongs to a held-out family" in done.stderr
        assert "family.tsv" in done.stderr
        assert not (tmp_path / "D").exists()


def test_leakage_of_a_prepared_set_by_the_command(protlm_in_process, tmp_path):
    ends = ["ACDEFGHIKL"[i % 10] * (i // 10) for i in range(200)]
    records = [f">r{i}\n{'MKTAYIAKQRQISFVKSHFSRQ'[i % 7 :]}{end}\n" for i, end in enumerate(ends)]
    (tmp_path / "x.fasta").write_text("".join(records))
    fractions = ["--valid-fraction", "0.2", "--test-fraction", "0.2"]
    protlm_in_process("prepare", "x.fasta", "--out", "D", *fractions, cwd=tmp_path)
    done = protlm_in_process("data", "leakage", "D", "--json", "l.json", cwd=tmp_path)
    fields = json.loads((tmp_path / "l.json").read_text())["splits"]
    assert set(fields) == {"valid", "test"}
    # Equal sequences have one side: a split by hash leaks relatives, and no copies.
    assert all(one["identical"] == 0 < one["near"] for one in fields.values())
    assert all(split in done.stdout for split in fields)


@pytest.mark.parametrize("families", [("",), (",",), ("", "")])
def test_an_empty_family_or_organism_is_not_the_default(tmp_path, tables, families):
    """As in the shell: --ood-families "$FORGOTTEN". Every record would match an empty organism."""
    with pytest.raises(UserError, match="--ood-families is empty"):
        made(tmp_path, family_table=tables["family"], ood_families=families)
    with pytest.raises(UserError, match="--organism"):
        Selection(organisms=("9606", " "))


COLI = "Escherichia coli (strain K12)"
LENGTHS = {"min_length": 50, "max_length": 60}
# Settings of a selection, what is known of a record, and why it is left out, or what is noted.
SELECTED: list[tuple[dict, dict, str]] = [
    ({}, {}, ""),
    (LENGTHS, {"sequence": "M" * 49}, "shorter than 50 residues"),
    (LENGTHS, {"sequence": "M" * 50}, ""),
    (LENGTHS, {"sequence": "M" * 60}, ""),
    (LENGTHS, {"sequence": "M" * 61}, "longer than 60 residues"),
    ({"no_fragments": True}, {"is_fragment": True}, "fragment"),
    ({"no_fragments": True}, {"is_fragment": False}, ""),
    ({"no_fragments": True}, {}, "noted: fragment status missing in the source"),
    ({"organisms": ("9606",)}, {"taxon": 9606}, ""),
    ({"organisms": ("9606",)}, {"taxon": 960}, "other organism"),
    ({"organisms": ("9606", "562")}, {"taxon": 562}, ""),
    ({"organisms": ("homo sapiens",)}, {"organism": "Homo sapiens"}, ""),
    ({"organisms": ("Homo sapiens",)}, {"organism": "Homo sapiens (Human)"}, ""),
    ({"organisms": ("Escherichia coli",)}, {"organism": COLI}, ""),
    ({"organisms": ("Escherichia coli",)}, {"organism": "Escherichia coli O6:H1 (x)"}, ""),
    ({"organisms": ("Escherichia coli",)}, {"organism": "Escherichia coli str. Sanji"}, ""),
    ({"organisms": ("Escherichia",)}, {"organism": COLI}, ""),
    ({"organisms": ("Escherichia",)}, {"organism": "Escherichia phage T4"}, "other organism"),
    ({"organisms": ("Escherichia",)}, {"organism": "Escherichiacola"}, "other organism"),
    ({"organisms": ("Homo",)}, {"organism": "Homo sapiens"}, ""),
    ({"organisms": ("Homo", "10090")}, {"organism": "Mus musculus", "taxon": 10090}, ""),
    ({"organisms": ("9606",)}, {}, "organism missing in the source"),
    ({"organisms": ("9606",)}, {"organism": "Homo"}, "organism missing in the source"),
    ({"organisms": ("Mus", "9606")}, {"organism": "Homo"}, "organism missing in the source"),
    ({"organisms": ("Mus", "9606")}, {"organism": "Rattus", "taxon": 1}, "other organism"),
]


@pytest.mark.parametrize(("settings", "known", "reason"), SELECTED)
def test_records_are_selected_and_the_others_counted(settings, known, reason):
    """The bounds of the length are included; an organism is a name with its strains or a taxon."""
    tally, record = Tally(), Record("P1", "P1", "MKV", 1)._replace(**known)
    taken = list(selected(iter([record]), Selection(**settings), tally))
    left_out, _, noted = reason.partition("noted: ")
    assert taken == ([] if left_out else [record])
    assert dict(tally.filtered) == ({left_out: 1} if left_out else {})
    assert dict(tally.noted) == ({noted: 1} if noted else {})


@pytest.mark.parametrize("bounds", [(0, None), (-1, 10), (11, 10), (None, 0)])
def test_impossible_lengths_are_rejected(bounds):
    flags = zip(("--min-length", "--max-length"), bounds, strict=True)
    told = " ".join(f"{flag} {bound}" for flag, bound in flags if bound is not None)
    with pytest.raises(UserError, match=f"^{told}: "):
        Selection(*bounds)
