"""Commands killed by SIGKILL at random moments, or at any call, resume to the same result."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def inputs(proteins, tiny_run, tiny_data, tmp_path_factory) -> dict[str, list[Path]]:
    """The arguments of each command."""
    folder = tmp_path_factory.mktemp("inputs")
    few, table, labels = (folder / name for name in ("few.fasta", "cluster.tsv", "labels.tsv"))
    few.write_text("".join(f">p{i}\n{'MKVLAW' * (i % 90 + 1)}\n" for i in range(250)))
    table.write_text("".join(f"P{i % 700}\tP{i}\np{i % 9}\tp{i}\n" for i in range(2_900)))
    splits = ("train", "train", "valid", "test")
    rows = [f"P{n}\t{'WC' * (n % 7 + 1)}MK\tc{n % 2}\t{splits[n % 4]}\n" for n in range(60)]
    labels.write_text("".join(["identifier\tsequence\tlabel\tsplit\n", *rows]))
    return {
        "prepare": [proteins],
        "prepare with clusters": [proteins, table],
        "prepare few": [few],
        "prepare few with clusters": [few, table],
        "embed": [proteins, tiny_run],
        "train": [tiny_data],
        "finetune": [labels, tiny_run],
        "save": [],
    }


@pytest.mark.parametrize(
    ("command", "kills"),
    [
        ("prepare with clusters", 5),
        *(
            pytest.param(command, kills, marks=pytest.mark.slow)
            for command, kills in (
                ("prepare with clusters", 20),
                ("prepare", 20),
                ("embed", 10),
                ("train", 16),
                ("finetune", 10),
                ("save", 30),
            )
        ),
    ],
)
def test_a_command_killed_at_random_resumes_to_the_same_result(
    command, kills, inputs, told_by, tmp_path
):
    """All its processes, one of them, or soon after a signal."""
    kept = told_by("kill.py", command.split()[0], kills, *inputs[command], cwd=tmp_path)
    assert len(kept) == kills
    # Some had finished parts when they were killed.
    assert max(kept) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "fewest"), [("prepare few", 40), ("prepare few with clusters", 40), ("save", 12)]
)
def test_a_command_killed_at_any_call_resumes_to_the_same_result(
    command, fewest, inputs, told_by, tmp_path
):
    kept = told_by("kill.py", command.split()[0], "each", *inputs[command], cwd=tmp_path)
    assert len(kept) >= fewest
