"""The history of a run: a start has the hash of the weights saved at its step."""

import csv
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from protlm.checkpoints.format import weights_hash
from protlm.training.callbacks.save_checkpoints import COLUMNS, HISTORY, WriteHistory


def rows(path: Path) -> list[dict[str, str]]:
    with (path / HISTORY).open() as file:
        return list(csv.DictReader(file, delimiter="\t"))


def trainer(step: int, is_first: bool = True) -> Any:
    return SimpleNamespace(global_step=step, is_global_zero=is_first)


def module(network: nn.Module) -> Any:
    return nn.ModuleDict({"network": network})


def test_a_row_for_each_start_and_checkpoint(tmp_path: Path) -> None:
    network = module(nn.Linear(3, 2))
    history = WriteHistory(tmp_path)
    history.on_train_start(trainer(0), network)
    with torch.no_grad():
        network["network"].weight += 1
    history.on_save_checkpoint(trainer(7), network, {})
    WriteHistory(tmp_path).on_train_start(trainer(7), network)
    history.on_save_checkpoint(trainer(7, is_first=False), network, {})
    first, saved, again = rows(tmp_path)
    assert tuple(first) == COLUMNS
    assert [row["event"] for row in (first, saved, again)] == ["start", "save", "start"]
    assert [row["step"] for row in (first, saved, again)] == ["0", "7", "7"]
    assert first["weights_sha256"] != saved["weights_sha256"] == again["weights_sha256"]


def test_the_hash_is_of_names_and_every_bit() -> None:
    network = nn.Linear(3, 2)
    before = weights_hash(network.state_dict())
    with torch.no_grad():
        network.bias[1] = torch.nextafter(network.bias[1], torch.tensor(9.0))
    assert weights_hash(network.state_dict()) != before
    named = [nn.ModuleDict({name: nn.Linear(2, 2)}) for name in "ab"]
    named[1]["b"].load_state_dict(named[0]["a"].state_dict())
    first, second = (weights_hash(one.state_dict()) for one in named)
    assert first != second


def test_a_truncated_row_does_not_affect_the_next(tmp_path: Path) -> None:
    network = module(nn.Linear(3, 2))
    history = WriteHistory(tmp_path)
    history.on_train_start(trainer(0), network)
    with (tmp_path / HISTORY).open("a") as file:
        file.write("2026-01-01\tsa")
    history.on_train_start(trainer(3), network)
    assert rows(tmp_path)[-1]["step"] == "3"


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_history_that_cannot_be_written_causes_a_warning(tmp_path: Path) -> None:
    (tmp_path / HISTORY).symlink_to("/dev/full")
    with pytest.warns(UserWarning, match="cannot be written"):
        WriteHistory(tmp_path).on_train_start(trainer(0), module(nn.Linear(1, 1)))
