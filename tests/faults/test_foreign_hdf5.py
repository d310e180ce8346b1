"""An HDF5 file that is not a shard is rejected before data are read, even if its hash matches.

The manifest agrees with every file here, so that only the structure reveals it.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from protlm.data.shards import mapped_shard
from protlm.data.shards.data_set import open_split, verify
from protlm.data.shards.manifest import MANIFEST
from protlm.system.errors import InputDataError

SHARD = "train/shard-00001.h5"
Trust = Callable[[Path, str], None]


def external(file: h5py.File, tokens: np.ndarray) -> None:
    secret = Path(f"{file.filename}.secret")
    secret.write_bytes(bytes(len(tokens)))
    file.create_dataset("tokens", tokens.shape, "u1", external=[(str(secret), 0, len(tokens))])


def virtual(file: h5py.File, tokens: np.ndarray) -> None:
    layout = h5py.VirtualLayout(tokens.shape, "u1")
    layout[:] = h5py.VirtualSource("/etc/passwd", "data", tokens.shape)
    file.create_virtual_dataset("tokens", layout)


def soft_link(file: h5py.File, tokens: np.ndarray) -> None:
    file["elsewhere"] = tokens
    file["tokens"] = h5py.SoftLink("/elsewhere")


def dangling_link(file: h5py.File, tokens: np.ndarray) -> None:
    file["tokens"] = h5py.SoftLink("/nowhere")


def circular_link(file: h5py.File, tokens: np.ndarray) -> None:
    file["tokens"] = h5py.SoftLink("/tokens")


def external_link(file: h5py.File, tokens: np.ndarray) -> None:
    file["tokens"] = h5py.ExternalLink("other.h5", "/tokens")


def hard_link_to_the_root(file: h5py.File, tokens: np.ndarray) -> None:
    file["tokens"] = file["/"]


def hard_link_to_another_array(file: h5py.File, tokens: np.ndarray) -> None:
    file["tokens"] = file["ids"]


def chunked(file: h5py.File, tokens: np.ndarray) -> None:
    file.create_dataset("tokens", data=tokens, chunks=(10,))


def compressed(file: h5py.File, tokens: np.ndarray) -> None:
    file.create_dataset("tokens", data=tokens, compression="gzip")


def scaled(file: h5py.File, tokens: np.ndarray) -> None:
    file.create_dataset("tokens", data=tokens, scaleoffset=8)


def compact(file: h5py.File, tokens: np.ndarray) -> None:
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple(tokens.shape)
    h5py.h5d.create(file.id, b"tokens", h5py.h5t.STD_U8LE, space, layout)


def group(file: h5py.File, tokens: np.ndarray) -> None:
    file.create_group("tokens")


def strings(file: h5py.File, tokens: np.ndarray) -> None:
    file.create_dataset("tokens", data=["M"] * len(tokens), dtype=h5py.string_dtype())


def vlen(file: h5py.File, tokens: np.ndarray) -> None:
    file.create_dataset("tokens", tokens.shape, h5py.vlen_dtype(np.uint8))[0] = tokens


def compound(file: h5py.File, tokens: np.ndarray) -> None:
    file["tokens"] = tokens.view([("token", "u1")])


def references(file: h5py.File, tokens: np.ndarray) -> None:
    file.create_dataset("tokens", tokens.shape, h5py.ref_dtype)


def enumeration(file: h5py.File, tokens: np.ndarray) -> None:
    file.create_dataset("tokens", tokens.shape, h5py.enum_dtype({"M": 1}, "u1"))[:] = tokens


def wide(file: h5py.File, tokens: np.ndarray) -> None:
    file["tokens"] = tokens.astype("u2")


def signed(file: h5py.File, tokens: np.ndarray) -> None:
    file["tokens"] = tokens.astype("i1")


def matrix(file: h5py.File, tokens: np.ndarray) -> None:
    file["tokens"] = tokens[None]


def scalar(file: h5py.File, tokens: np.ndarray) -> None:
    file["tokens"] = tokens[0]


def null(file: h5py.File, tokens: np.ndarray) -> None:
    file["tokens"] = h5py.Empty("u1")


def nothing(file: h5py.File, tokens: np.ndarray) -> None:
    pass


def claims_64_gib(file: h5py.File, tokens: np.ndarray) -> None:
    file.create_dataset("tokens", (1 << 36,), "u1", fillvalue=0)


def never_written(file: h5py.File, tokens: np.ndarray) -> None:
    file.create_dataset("tokens", tokens.shape, "u1")


def shorter(file: h5py.File, tokens: np.ndarray) -> None:
    file["tokens"] = tokens[:-1]


FOREIGN = [
    external, virtual, soft_link, dangling_link, circular_link, external_link,
    hard_link_to_the_root, hard_link_to_another_array, chunked, compressed, scaled, compact, group,
    strings, vlen, compound, references, enumeration, wide, signed, matrix, scalar, null, nothing,
    claims_64_gib, never_written, shorter,
]  # fmt: skip


def assert_refused(directory: Path) -> None:
    """By `data verify`, by `data.verify=full` at opening, and by `sizes` before the first use."""
    path = re.escape(str(directory / SHARD))
    assert any(re.search(path, fault) for fault in verify(directory))
    with pytest.raises(InputDataError, match=path):
        open_split(directory, "train", verify="full")
    reader = open_split(directory, "train", verify="sizes")
    for use in (
        lambda: reader[20],
        lambda: reader.identifier(20),
        lambda: reader.lengths_of(np.array([20])),
    ):
        with pytest.raises(InputDataError, match=path):
            use()


@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda foreign: foreign.__name__)
def test_a_foreign_array_is_refused(
    data_set: Path, trust: Trust, monkeypatch: pytest.MonkeyPatch, foreign: Callable
) -> None:
    with h5py.File(data_set / SHARD, "r+") as file:
        tokens = file["tokens"][:]
        del file["tokens"]
        foreign(file, tokens)
    trust(data_set, SHARD)

    def refuse(*_: object) -> None:
        raise AssertionError("data were read")

    monkeypatch.setattr(h5py.Dataset, "__getitem__", refuse)
    monkeypatch.setattr(h5py.Dataset, "read_direct", refuse)
    assert_refused(data_set)


def test_an_array_that_extends_beyond_the_file_is_refused(data_set: Path, trust: Trust) -> None:
    path = data_set / SHARD
    with h5py.File(path) as file:
        arrays = {name: file[name][:] for name in file}
    # The oldest headers have no checksum.
    with h5py.File(path, "w", libver=("earliest", "v108")) as file:
        for name, values in arrays.items():
            file[name] = values
    true, claimed = (n.to_bytes(8, "little") for n in (len(arrays["tokens"]), 1 << 36))
    path.write_bytes(path.read_bytes().replace(true, claimed))
    trust(data_set, SHARD)
    assert_refused(data_set)


def test_another_number_of_residues_than_the_manifest_s_is_refused(
    data_set: Path, write_manifest: Callable[[Path, str], None]
) -> None:
    fields = json.loads((data_set / MANIFEST).read_text())
    fields["splits"]["train"][1]["residues"] += 1
    write_manifest(data_set, json.dumps(fields))
    assert_refused(data_set)


@pytest.mark.parametrize("name", ["offsets", "id_offsets"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda offsets: offsets[:-1],
        lambda offsets: np.append(offsets, offsets[-1]),
        lambda offsets: offsets[:0],
        lambda offsets: offsets + np.uint64(1),
        lambda offsets: offsets.astype(np.int64),
        lambda offsets: offsets.astype(">u8"),
        lambda offsets: offsets.astype(np.float64),
    ],
    ids=["fewer", "more", "none", "beyond", "signed", "big-endian", "float"],
)
def test_invalid_offsets_are_refused(
    data_set: Path, trust: Trust, name: str, spoil: Callable
) -> None:
    with h5py.File(data_set / SHARD, "r+") as file:
        offsets = file[name][:]
        del file[name]
        file[name] = spoil(offsets)
    trust(data_set, SHARD)
    assert_refused(data_set)


@pytest.mark.parametrize(
    "content", [b"", b"\x89HDF\r\n\x1a\n", b"\x89HDF\r\n\x1a\n" + bytes(4096), b"MKV" * 99]
)
def test_a_file_that_is_not_hdf5_is_refused(data_set: Path, trust: Trust, content: bytes) -> None:
    (data_set / SHARD).write_bytes(content)
    trust(data_set, SHARD)
    assert_refused(data_set)


def test_hdf5_sees_no_file_that_is_not_the_manifest_s(
    data_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = data_set / SHARD
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    opened = []
    true = mapped_shard.h5py.File

    def watch(path: Path, *rest: object, **named: object) -> h5py.File:
        opened.append(path)
        return true(path, *rest, **named)

    monkeypatch.setattr(mapped_shard.h5py, "File", watch)
    assert len(verify(data_set)) == 1
    with pytest.raises(InputDataError, match="SHA-256 differs"):
        open_split(data_set, "train", verify="full")
    path.write_bytes(content[:-1])
    reader = open_split(data_set, "valid", verify="sizes")
    assert len(reader[0]) == 3
    assert opened != []
    assert path not in opened
