"""The manifest: a round trip, and rejection of invalid content."""

import json
import re
import subprocess

import pytest

from protlm.data.shards.manifest import MANIFEST, MANIFEST_SHA256, is_split_name, read_manifest
from protlm.system.errors import InputDataError, UserError


@pytest.fixture
def change(write_manifest):
    def change(directory, edit):
        fields = json.loads((directory / MANIFEST).read_text())
        edit(fields)
        write_manifest(directory, json.dumps(fields))

    return change


def test_a_round_trip_changes_nothing(data_set, tmp_path):
    manifest = read_manifest(data_set)
    manifest.write(tmp_path)
    assert (tmp_path / MANIFEST).read_bytes() == (data_set / MANIFEST).read_bytes()
    assert read_manifest(tmp_path) == manifest


def test_the_error_for_a_missing_manifest_says_what_to_type(tmp_path):
    for directory in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match=r"protlm prepare SOURCE.*--out"):
            read_manifest(directory)


@pytest.mark.parametrize("key", ["format", "format_version", "vocabulary"])
def test_another_version_or_vocabulary_is_rejected(data_set, change, key):
    change(data_set, lambda fields: fields.update({key: "other"}))
    with pytest.raises(UserError, match="make it again with protlm prepare"):
        read_manifest(data_set)


@pytest.mark.parametrize(
    "file",
    [
        "../train/shard-00000.h5",
        "/etc/passwd",
        "train/../../shard-00000.h5",
        "train//shard-00000.h5",
        "train/shard-00000.h5\n",
        "valid/shard-00000.h5",
        "train/evil.h5",
        "",
        None,
        ["train/shard-00000.h5"],
    ],
)
def test_paths_outside_the_data_set_are_rejected(data_set, change, file):
    change(data_set, lambda fields: fields["splits"]["train"][0].update(file=file))
    with pytest.raises(InputDataError, match=re.escape(str(data_set / MANIFEST))):
        read_manifest(data_set)


@pytest.mark.parametrize("name", ["..", "a/b", "", "Train", "a b"])
def test_invalid_split_names_are_rejected(data_set, change, name):
    def rename(fields):
        shards = fields["splits"].pop("train")
        shards[0]["file"] = f"{name}/shard-00000.h5"
        fields["splits"][name] = shards

    change(data_set, rename)
    with pytest.raises(InputDataError):
        read_manifest(data_set)
    assert not is_split_name(name)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", '"x"', "{}", "[" * 100_000, "\x00", '{"format": []}']
)
def test_text_that_is_not_a_manifest_is_a_user_error(data_set, write_manifest, text):
    write_manifest(data_set, text)
    with pytest.raises(UserError, match=re.escape(str(data_set / MANIFEST))):
        read_manifest(data_set)


def test_the_manifest_has_a_checksum_that_others_can_check(data_set):
    done = subprocess.run(
        ["sha256sum", "--strict", "--check", MANIFEST_SHA256], cwd=data_set, check=False
    )
    assert done.returncode == 0


def test_a_manifest_without_its_checksum_is_rejected(data_set):
    (data_set / MANIFEST_SHA256).unlink()
    with pytest.raises(InputDataError, match=r"no manifest\.json\.sha256 next to it"):
        read_manifest(data_set)


@pytest.mark.parametrize("file", [MANIFEST, MANIFEST_SHA256])
def test_an_unreadable_manifest_is_a_user_error(data_set, file):
    (data_set / file).unlink()
    (data_set / file).mkdir()
    with pytest.raises(InputDataError, match=re.escape(file)):
        read_manifest(data_set)


def leaves(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from leaves(inner, (*path, key))


@pytest.mark.parametrize("junk", [None, -1, "junk", [], {}, [[]], 1.5])
def test_junk_in_any_field_is_a_user_error_or_harmless(data_set, change, write_manifest, junk):
    original = json.loads((data_set / MANIFEST).read_text())
    for path in leaves(original):

        def spoil(fields, path=path):
            for key in path[:-1]:
                fields = fields[key]
            fields[path[-1]] = junk

        write_manifest(data_set, json.dumps(original))
        change(data_set, spoil)
        try:
            read_manifest(data_set)
        except UserError:
            continue
        harmless = {"split_rule", "tool_version", "counts", "sources", "splits", "file"}
        assert harmless & {str(key) for key in path}, path
