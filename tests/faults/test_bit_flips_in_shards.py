"""A flipped bit in a shard or the manifest is found by verification and rejected by training."""

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from protlm.build import open_data
from protlm.commands.data import verify
from protlm.config import DataConfig
from protlm.data.shards.data_set import open_split
from protlm.system.errors import InputDataError, UserError


def files_of(directory: Path) -> list[Path]:
    return sorted([*directory.rglob("*.h5"), *directory.glob("manifest.json*")])


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(content)


def assert_found(directory: Path, path: Path, bit: int) -> None:
    """Flips a bit, asserts that verification and training find it, and flips it back."""
    before = path.stat().st_size
    flip(path, bit)
    named = str(path) if path.suffix == ".h5" else "manifest.json"
    for look in (verify, lambda directory: open_data(DataConfig(dir=str(directory)))):
        with pytest.raises(UserError) as raised:
            look(directory)
        assert named in str(raised.value), (path, bit)
    flip(path, bit)
    assert path.stat().st_size == before


@pytest.mark.parametrize("num_flips", [48, pytest.param(1_000, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_found(data_set: Path, num_flips: int) -> None:
    rng = np.random.default_rng(0)
    files = files_of(data_set)
    assert len(files) == 6
    for number in range(num_flips):
        # As many in each file, the small ones too.
        path = files[number % len(files)]
        assert_found(data_set, path, int(rng.integers(8 * path.stat().st_size)))
    # Flipped back, all is well.
    verify(data_set)
    open_data(DataConfig(dir=str(data_set)))


@pytest.mark.slow
def test_every_bit_of_the_manifest_s_checksum_counts(data_set: Path) -> None:
    path = data_set / "manifest.json.sha256"
    for bit in range(8 * path.stat().st_size):
        assert_found(data_set, path, bit)


@pytest.mark.parametrize("bit", [5, 6, 7])
def test_a_flipped_token_is_found_when_it_is_read(data_set: Path, bit: int) -> None:
    """With `data.verify=sizes`, which reads no tokens at the start; residues are below 32."""
    path = data_set / "train" / "shard-00000.h5"
    with h5py.File(path) as file:
        first, number = file["tokens"].id.get_offset(), file["tokens"].size // 2
    flip(path, 8 * (first + number) + bit)
    split = open_split(data_set, "train", verify="sizes")
    with pytest.raises(InputDataError, match=f"the shard {path} .*protlm data verify {data_set}"):
        for index in range(len(split)):
            _ = split[index]


def test_rejected_training_writes_no_files(
    data_set: Path, train_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path = data_set / "train" / "shard-00001.h5"
    flip(path, 8 * 1_000)
    with pytest.raises(InputDataError, match=f"{path}.*protlm data verify"):
        train_tiny(tmp_path / "run", f"data.dir={data_set}")
    assert not (tmp_path / "run").exists()
