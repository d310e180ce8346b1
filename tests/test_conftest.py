"""The guards of the suite are themselves tested: one that never bites guards nothing."""

import logging
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


def protlm_function(source: str) -> Callable[..., Any]:
    """Compiles a function `f` as if it stood in a module of protlm."""
    namespace: dict[str, Any] = {"__name__": "protlm.made_up", "torch": torch}
    exec(source, namespace)
    return namespace["f"]


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("def f():\n    q_BHL = torch.zeros(2, 3)", "q_BHL has the shape (2, 3)"),
        (
            "def f():\n    mask_B11L = torch.zeros(2, 1, 3, 4)",
            "mask_B11L has the shape (2, 1, 3, 4)",
        ),
        ("def f():\n    q_BL, k_BL = torch.zeros(2, 3), torch.zeros(2, 4)", "L is 4 in k_BL and 3"),
        ("def f():\n    map_LL = torch.zeros(2, 3)", "L is 3 in map_LL and 2"),
        ("def f(q_BL=torch.zeros(2)):\n    return q_BL", "q_BL has the shape (2,)"),
    ],
)
def test_a_wrong_suffix_is_seen(checked_shapes: list[str], source: str, complaint: str) -> None:
    protlm_function(source)()
    assert len(checked_shapes) == 1
    assert complaint in checked_shapes[0]
    assert checked_shapes[0].startswith("protlm.made_up.f: ")
    checked_shapes.clear()


def test_true_suffixes_and_other_names_pass(checked_shapes: list[str]) -> None:
    protlm_function(
        "def f():\n"
        "    q_BHLK, mask_B11L = torch.zeros(2, 3, 4, 5), torch.zeros(2, 1, 1, 4)\n"
        "    layer_3, MAX_LENGTH, rate = torch.zeros(7), torch.zeros(1, 1), 0.5\n"
        "    return q_BHLK * rate"
    )()
    assert checked_shapes == []


def test_functions_outside_protlm_are_left_alone(checked_shapes: list[str]) -> None:
    def f() -> torch.Tensor:
        q_BL = torch.zeros(1)
        return q_BL + 1

    f()
    assert checked_shapes == []


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_network_is_out_of_reach(family: socket.AddressFamily) -> None:
    address = ("192.0.2.1", 80) if family == socket.AF_INET else ("2001:db8::1", 80)
    with socket.socket(family) as outward, pytest.raises(pytest.fail.Exception):
        outward.connect(address)
    with pytest.raises(pytest.fail.Exception):
        socket.getaddrinfo("example.org", 80)


def test_this_machine_is_in_reach() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        assert client.getpeername() == server.getsockname()


def test_one_thread() -> None:
    assert torch.get_num_threads() == 1


def test_the_command_runs_in_its_own_process(
    protlm_command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = protlm_command("--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Usage: protlm" in done.stdout


def state_of_this_process() -> list[Any]:
    """What a command could leave behind in this process."""
    from hydra.core.global_hydra import GlobalHydra

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    streams = [sys.stdout, sys.stderr, list(sys.argv), os.execv, list(logging.root.handlers)]
    warned = [list(warnings.filters), warnings.formatwarning, warnings.showwarning]
    torch_state = [
        torch.get_rng_state().tolist(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
    ]
    hydra = GlobalHydra.instance().is_initialized()
    return [handlers, streams, warned, torch_state, hydra, dict(os.environ), Path.cwd()]


def test_a_command_in_this_process_leaves_no_state_behind(
    protlm_in_process: Callable[..., subprocess.CompletedProcess[str]],
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = state_of_this_process()
    for arguments, code in (
        (["train", "model=small", "data.dir=data", "run_dir=run"], 2),
        (["train", "--hydra-help"], 2),
        (["evaluate", "checkpoint=broken", "data.dir=data", "split=test"], 3),
        (["data", "info", "data"], 0),
    ):
        done = protlm_in_process(*arguments, cwd=workplace)
        assert done.returncode == code, done.stderr
        assert done.stdout + done.stderr
        assert state_of_this_process() == before
    assert capsys.readouterr() == ("", "")


def test_a_command_in_this_process_ends_as_one_of_its_own(
    protlm_in_process: Callable[..., subprocess.CompletedProcess[str]],
    protlm_command: Callable[..., subprocess.CompletedProcess[str]],
    workplace: Path,
) -> None:
    for arguments in (["data", "info", "data"], ["prepare", "none.fasta", "--out", "o"]):
        here, apart = (
            run(*arguments, cwd=workplace) for run in (protlm_in_process, protlm_command)
        )
        assert here.returncode == apart.returncode
        assert here.stdout == apart.stdout
        assert here.stderr == apart.stderr


def test_the_sample_is_there(tiny_fasta: Path) -> None:
    assert tiny_fasta.is_file()
