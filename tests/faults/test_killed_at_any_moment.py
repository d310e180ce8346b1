"""Commands killed by SIGKILL at random moments, or at any call, resume to the same bytes."""

import json
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def run(run_builder):
    """Runs a program; returns the JSON of its last line, and what it said."""

    def start(program, *arguments):
        done = run_builder(PROGRAMS / program, *arguments, timeout=290)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    return start


@pytest.fixture
def cluster_table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "cluster.tsv"
    path.write_text("".join(f"P{i % 700}\tP{i}\np{i % 9}\tp{i}\n" for i in range(2_900)))
    return path


@pytest.mark.parametrize(
    ("command", "kills", "with_table"),
    [
        ("build", 5, True),
        pytest.param("build", 5, False, marks=pytest.mark.slow),
        pytest.param("build", 20, True, marks=pytest.mark.slow),
        pytest.param("build", 20, False, marks=pytest.mark.slow),
        pytest.param("embed", 10, False, marks=pytest.mark.slow),
    ],
)
def test_a_killed_command_resumes_to_the_same_bytes(
    run, command, kills, with_table, proteins, cluster_table, tiny_run, tmp_path
):
    more = [cluster_table] if with_table else [tiny_run] if command == "embed" else []
    kept, said = run("kill_at_random.py", command, kills, tmp_path, proteins, *more)
    assert len(kept) == kills
    # Some had finished parts when they were killed, which are not made again.
    assert max(kept) > 0
    assert ("resuming" if command == "build" else "batches are finished") in said


@pytest.mark.slow
@pytest.mark.parametrize("with_table", [False, True])
def test_a_build_killed_at_any_call_resumes(run, tmp_path, with_table, cluster_table):
    source = tmp_path / "few.fasta"
    source.write_text("".join(f">p{i}\n{'MKVLAW' * (i % 90 + 1)}\n" for i in range(250)))
    (tmp_path / "builds").mkdir()
    tables = [cluster_table] if with_table else []
    calls, _ = run("kill_builds_at_each_call.py", source, tmp_path / "builds", *tables)
    assert calls > 40


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["reader", "encoder"])
def test_a_build_resumes_after_one_of_its_processes_is_killed(
    run_builder, proteins, tmp_path, victim
):
    done = run_builder(PROGRAMS / "kill_one_process.py", proteins, tmp_path, victim, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["random", "each"])
def test_the_latest_checkpoint_is_intact_when_saving_is_killed(run, tmp_path, moments):
    steps, _ = run("kill_saving.py", tmp_path / "run", moments)
    assert len(steps) >= (30 if moments == "random" else 12)
    assert moments == "random" or set(steps) == {1, 2}
