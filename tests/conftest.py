"""For all tests: no network, one thread, true shape suffixes, and the fixtures of `fixtures/`."""

import gc
import os
import socket
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

pytest_plugins = [
    "tests.fixtures.browser",
    "tests.fixtures.calls",
    "tests.fixtures.commands",
    "tests.fixtures.data_sets",
    "tests.fixtures.ranks",
    "tests.fixtures.runs",
    "tests.fixtures.shapes",
]

# Programs that tests run in other processes: importing one, as for its doctests, may start it.
collect_ignore_glob = ["*/programs/*"]

# Tests run in parallel: a second thread in each would only slow the others down. OMP_NUM_THREADS of
# the shell is ignored: results that are compared to the bit have one thread on both sides. Only
# `make test-portable` asks for more.
torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))


def pytest_collection_finish() -> None:
    """Keeps the garbage collector from looking through thousands of tests again and again."""
    gc.collect()
    gc.freeze()


def _is_local(address: Any) -> bool:
    host = address[0] if isinstance(address, tuple) else address
    if isinstance(host, bytes):
        host = host.decode()
    if host in {None, "", "localhost", socket.gethostname()}:
        return True
    try:
        return ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Fails a test that connects to another machine."""
    getaddrinfo = socket.getaddrinfo

    def refuse_foreign(family: int, address: Any) -> None:
        if family in {socket.AF_INET, socket.AF_INET6} and not _is_local(address):
            # Not an OSError, which a library that tolerates a missing network would handle.
            pytest.fail(f"a test connects to the network: {address}")

    def local(call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(self: socket.socket, *arguments: Any) -> Any:
            # The address comes last.
            refuse_foreign(self.family, arguments[-1])
            return call(self, *arguments)

        return guarded

    def local_getaddrinfo(host: Any, *rest: Any, **named: Any) -> Any:
        refuse_foreign(socket.AF_INET, (host,))
        return getaddrinfo(host, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex", "sendto"):
            patch.setattr(socket.socket, name, local(getattr(socket.socket, name)))
        patch.setattr(socket, "getaddrinfo", local_getaddrinfo)
        yield


@pytest.fixture(autouse=True)
def _shapes_of_the_mathematics(request: pytest.FixtureRequest) -> None:
    """Checks the suffixes in all tests of the attention and of the model."""
    if {"attention", "model"} & set(request.path.relative_to(ROOT).parts[:-1]):
        request.getfixturevalue("checked_shapes")
