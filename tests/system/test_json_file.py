"""JSON of any depth and size is refused in one sentence."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from protlm.commands.contact_fit import read_fit
from protlm.composition import read_run_config
from protlm.interop.alphabet import read_folder_alphabet
from protlm.system.errors import InputDataError
from protlm.system.json_file import read_json

DEEP = {
    "arrays": '{"a": ' + "[" * 30_000 + "]" * 30_000 + "}",
    "objects": '{"a": ' * 30_000 + "1" + "}" * 30_000,
    "a parser's limit": '{"a": ' + "[" * 60 + "]" * 60 + "}",
    "without an end": '{"a": ' + "[" * 30_000,
}
READERS: dict[str, Callable[[Path], object]] = {
    "x.json": lambda path: read_json(path, "a file"),
    "x.fit.json": read_fit,
    "tokenizer.json": lambda path: read_folder_alphabet(path.parent),
    "config.yaml": read_run_config,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_deep_nesting_is_one_sentence(text: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputDataError, match=name) as caught:
        READERS[name](path)
    assert "\n" not in str(caught.value)


def test_what_is_not_an_object_of_a_moderate_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": [{"b": 1}]}')
    assert read_json(path, "a file") == {"a": [{"b": 1}]}
    with pytest.raises(InputDataError, match="is not JSON: it has more than 16 bytes"):
        read_json(path, "a file", most=16)
    for text in ("[1]", "null", "", "{", "9" * 5_000):
        path.write_text(text)
        with pytest.raises(InputDataError, match=r"is not (JSON|a file): "):
            read_json(path, "a file")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InputDataError, match="is a pipe or a device, not a file"):
        read_json(path, "a file")
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(InputDataError, match="is a pipe or a device"):
        read_run_config(tmp_path / "config.yaml")
