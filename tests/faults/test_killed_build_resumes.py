"""A build killed by SIGKILL at random moments resumes to the same bytes."""

import json
from pathlib import Path

import pytest

from tests.marks import slow_but

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def cluster_table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "cluster.tsv"
    path.write_text("".join(f"P{i % 700}\tP{i}\np{i % 9}\tp{i}\n" for i in range(2_900)))
    return path


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", slow_but(["plain", "clusters"], "clusters"))
def test_a_killed_build_resumes_to_the_same_bytes(
    run_builder, proteins, tmp_path, kills, kind, cluster_table
):
    program, tables = PROGRAMS / "kill_builds.py", [cluster_table] if kind == "clusters" else []
    done = run_builder(program, proteins, tmp_path, kills, kills, *tables, timeout=240)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["killed"] == kills
    # Some builds had finished segments when they were killed; those segments are not repeated.
    assert max(told["kept"]) > 0
    assert "resuming" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "clusters"])
def test_a_build_killed_at_any_call_resumes(run_builder, tmp_path, kind, cluster_table):
    source = tmp_path / "few.fasta"
    source.write_text("".join(f">p{i}\n{'MKVLAW' * (i % 90 + 1)}\n" for i in range(250)))
    (tmp_path / "builds").mkdir()
    program = PROGRAMS / "kill_builds_at_each_call.py"
    tables = [cluster_table] if kind == "clusters" else []
    done = run_builder(program, source, tmp_path / "builds", *tables, timeout=240)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 40


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["reader", "encoder"])
def test_a_build_resumes_after_one_of_its_processes_is_killed(
    run_builder, proteins, tmp_path, victim
):
    done = run_builder(PROGRAMS / "kill_one_process.py", proteins, tmp_path, victim, timeout=120)
    assert done.returncode == 0, done.stderr
