"""`protlm data export | head`, and standard input that ends early or is closed."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from protlm.paths import sample_dir

ROOT = Path(__file__).resolve().parents[2]
TINY = sample_dir() / "uniprot_tiny.fasta.gz"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a pipeline in which `protlm` is the command line."""
    return subprocess.run(
        [
            "bash",
            "-c",
            f'set -o pipefail; protlm() {{ {sys.executable} -m protlm "$@"; }}; {command}',
        ],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("reader", ["head -1", "true", "head -c 100000"])
def test_export_ends_silently_without_a_reader(tiny_data, tmp_path, reader):
    done = shell(f"protlm data export {tiny_data} | {reader}", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    if reader != "true":
        assert done.stdout.startswith(">")


@pytest.mark.parametrize("command", ["info", "export"])
def test_standard_output_on_a_full_disk_is_an_error_of_one_sentence(tiny_data, tmp_path, command):
    done = shell(f"protlm data {command} {tiny_data} > /dev/full", tmp_path)
    assert done.returncode == 4, done.stderr
    assert done.stderr.startswith("protlm: standard output: no space left")
    assert len(done.stderr.splitlines()) == 1


def test_standard_input_is_prepared(tmp_path):
    done = shell(f"zcat {TINY} | protlm prepare - --out data", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "data" / "manifest.json").exists()


@pytest.mark.parametrize(
    "command",
    [
        f"head -c 20000 {TINY} | protlm prepare - --out data",
        "true | protlm prepare - --out data",
        "protlm prepare - --out data <&-",
    ],
    ids=["cut gzip", "nothing", "closed"],
)
def test_input_that_ends_early_is_an_error_of_one_sentence(tmp_path, command):
    done = shell(command, tmp_path)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("protlm: standard input")]
    assert list(tmp_path.iterdir()) == []


def test_truncated_text_is_read_to_its_end(tmp_path):
    """Plain FASTA cut short is undetectable; its last record is shorter."""
    (tmp_path / "plain.fasta").write_bytes(gzip.decompress(TINY.read_bytes()))
    done = shell("head -c 20000 plain.fasta | protlm prepare - --out data", tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_training_and_evaluation_need_no_standard_streams(tiny_data, tmp_path, closed):
    """Cron and service managers close them."""
    settings = f"data.dir={tiny_data} model=tiny data.max_length=128 trainer.max_steps=1"
    done = shell(f"protlm train {settings} trainer.accelerator=cpu run_dir=run {closed}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()
    evaluated = f"protlm evaluate checkpoint=run data.dir={tiny_data} split=valid output=out.json"
    done = shell(f"{evaluated} {closed}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.json").exists()
