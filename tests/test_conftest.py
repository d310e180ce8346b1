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

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("name", "source", "complaint"),
    [
        ("protlm.x", "q_BHL = torch.zeros(2, 3)", "q_BHL has the shape (2, 3)"),
        ("protlm.x", "mask_B11L = torch.zeros(2, 1, 3, 4)", "mask_B11L has the shape (2, 1, 3, 4)"),
        ("protlm.x", "q_BL, k_BL = torch.zeros(2, 3), torch.zeros(2, 4)", "L is 4 in k_BL and 3"),
        ("protlm.x", "map_LL = torch.zeros(2, 3)", "L is 3 in map_LL and 2"),
        ("protlm.x", "q_BHL, layer_3, L = torch.zeros(2, 3, 4), torch.zeros(7), 0.5", ""),
        ("other.x", "q_BHL = torch.zeros(2, 3)", ""),
    ],
)
def test_a_wrong_suffix_is_seen(
    checked_shapes: list[str], name: str, source: str, complaint: str
) -> None:
    """In the functions of protlm only."""
    namespace: dict[str, Any] = {"__name__": name, "torch": torch}
    exec(f"def f():\n    {source}", namespace)
    namespace["f"]()
    assert len(checked_shapes) == bool(complaint)
    assert all(complaint in one and one.startswith("protlm.x.f: ") for one in checked_shapes)
    checked_shapes.clear()


@pytest.mark.parametrize(("family", "host"), [("AF_INET", "192.0.2.1"), ("AF_INET6", "2001:db8::")])
def test_the_network_is_out_of_reach(family: str, host: str) -> None:
    with socket.socket(getattr(socket, family)) as outward, pytest.raises(pytest.fail.Exception):
        outward.connect((host, 80))
    with pytest.raises(pytest.fail.Exception):
        socket.getaddrinfo("example.org", 80)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        assert client.getpeername() == server.getsockname()


def state_of_this_process() -> list[Any]:
    """What a command could leave behind in this process."""
    from hydra.core.global_hydra import GlobalHydra

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    streams = [sys.stdout, sys.stderr, list(sys.argv), os.execv, list(logging.root.handlers)]
    warned = [list(warnings.filters), warnings.formatwarning, warnings.showwarning]
    torch_state = [torch.get_rng_state().tolist(), torch.get_default_dtype()]
    hydra = GlobalHydra.instance().is_initialized()
    return [handlers, streams, warned, torch_state, hydra, dict(os.environ), Path.cwd()]


def test_a_command_in_this_process_leaves_no_state_behind(
    protlm_in_process: Command, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = state_of_this_process()
    for arguments, code in (
        ("train model=small data.dir=data run_dir=run", 2),
        ("evaluate checkpoint=broken data.dir=data split=test", 3),
        ("data info data", 0),
    ):
        done = protlm_in_process(*arguments.split(), cwd=workplace)
        assert done.returncode == code, done.stderr
        assert done.stdout + done.stderr
        assert state_of_this_process() == before
    assert capsys.readouterr() == ("", "")
    assert torch.get_num_threads() == 1
