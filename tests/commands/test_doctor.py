"""`protlm doctor`: facts, what would fail, exit codes, and the page's commands."""

import json
import re
import resource
from pathlib import Path

import pytest
import torch

from protlm.commands import doctor as doctor_module
from protlm.commands.doctor import doctor
from protlm.system import memory
from tests.fixtures.commands import Command, run_page
from tests.fixtures.runs import Train


def test_facts_of_a_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    doctor(None, None)
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__.partition('+')[0]}" in printed
    assert printed.endswith("no problems\n")


def test_what_would_fail_is_listed(
    workplace: Path,
    train_tiny: Train,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    learned = ("model.positions=learned", "model.max_length=128", "trainer.max_steps=2")
    run = train_tiny(workplace / "learned", *learned)
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    (workplace / "x.fasta").write_text(
        f">P1\nMKTA\n>P1\nMKTC\n>P2\nMK1A\n>P3\n{'M' * 600}\n>P4\nMKJA\n"
    )
    with pytest.raises(SystemExit) as end:
        doctor(workplace / "x.fasta", run, as_json=True)
    assert end.value.code == 3
    report = json.loads(capsys.readouterr().out)
    facts = report["facts"]["input"]
    assert (facts["records"], facts["usable"], facts["longest"]) == (5, 3, 4)
    assert facts["bytes_for_longest"] > 1000
    assert report["facts"]["model"]["max_residues"] == 126
    found = "\n".join(report["problems"])
    for words in (
        r"rejected records of .*x\.fasta: 1, ",
        "too long for the model, and skipped: 1, for instance P3: 600 residues",
        "repeated identifiers of .*: 1; type --duplicates first",
        r"the longest protein: 4 residues need about \S+ [kM]B of memory, and 1\.0 kB are free on",
    ):
        assert re.search(words, found), words


def test_damaged_models_and_files_are_problems(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        doctor(workplace / "x.fasta", workplace / "broken", device="cpu")
    assert "problem: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        doctor(workplace / "none.fasta", workplace / "run", device="mars")
    printed = capsys.readouterr().out
    assert "problem: --device mars cannot be used" in printed
    assert "none.fasta: no such file" in printed


def test_odd_disks_threads_and_encodings_are_told(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disks = iter([{"free_bytes": 10, "writable": True}, {"free_bytes": 10**12, "writable": False}])
    monkeypatch.setattr(doctor_module, "_disk", lambda _: next(disks))
    monkeypatch.setattr("torch.get_num_threads", lambda: 9_000)
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    (folder := workplace / "a_folder").mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit):
        doctor(None, None)
    printed = capsys.readouterr().out
    assert f"disks: {folder} " in printed
    assert f"problem: {folder} has 10 bytes left; free some space" in printed
    assert re.search("problem: .* is not writable", printed)
    assert "problem: file names are encoded in ascii; type: export LC_ALL=C.UTF-8" in printed
    assert re.search(r"note: torch uses 9000 threads on \d+ processors", printed)


# Files of the kernel that change, one after the other, and the memory that is free then.
LIMITS: list[tuple[dict[str, str], int]] = [
    ({"meminfo": "MemTotal: 9 kB\nMemAvailable:    2000 kB\n"}, 2_048_000),
    ({"memory.max": "max\n", "memory.current": "500\n"}, 2_048_000),
    ({"memory.max": "1500\n"}, 1000),
    # The cache of files counts as used, but the kernel drops what was not used lately.
    ({"memory.stat": "anon 90\nactive_file 10\ninactive_file 400\n"}, 1400),
    ({"memory.stat": "anon 90\n"}, 1000),
    # The group of a job has a lower limit than those that contain it.
    ({"slurm/job_7/memory.max": "900\n", "slurm/job_7/memory.current": "200\n"}, 1000),
    ({"cgroup": "1:name=x:/other\n0::/slurm/job_7/step_0\n"}, 700),
    ({"slurm/job_7/memory.max": "max\n"}, 1000),
]


def test_the_limit_of_a_container_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "_OWN_CGROUP", tmp_path / "cgroup")
    (tmp_path / "slurm" / "job_7").mkdir(parents=True)
    for files, free in LIMITS:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        assert memory.available_memory() == free, files
    # The limit of the shell counts what the process has mapped already.
    (tmp_path / "statm").write_text("3 2 1 1 0 1 0\n")
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_OWN_SIZE", tmp_path / "statm")
        patch.setattr(resource, "getrlimit", lambda _: (3 * memory._PAGE + 800, -1))
        assert memory.available_memory() == 800
    monkeypatch.setattr(memory, "_MEMORY", tmp_path / "none")
    (tmp_path / "memory.max").unlink()
    assert memory.available_memory() is None


def test_the_commands_of_the_page_run(workplace: Path, protlm_in_process: Command) -> None:
    (workplace / "proteins.fasta").symlink_to(workplace / "x.fasta")
    run_page("doctor.md", workplace, protlm_in_process, fewest=3)
