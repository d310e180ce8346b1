"""For all tests: no network, one thread, true shape suffixes, and the fixtures of `fixtures/`."""

import gc
import os
import socket
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

pytest_plugins = [
    "tests.fixtures.browser",
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
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex
    sendto, getaddrinfo = socket.socket.sendto, socket.getaddrinfo

    def refuse_foreign(family: int, address: Any) -> None:
        if family in {socket.AF_INET, socket.AF_INET6} and not _is_local(address):
            # Not an OSError, which a library that tolerates a missing network would handle.
            pytest.fail(f"a test connects to the network: {address}")

    def local_connect(self: socket.socket, address: Any) -> None:
        refuse_foreign(self.family, address)
        connect(self, address)

    def local_connect_ex(self: socket.socket, address: Any) -> int:
        refuse_foreign(self.family, address)
        return connect_ex(self, address)

    def local_sendto(self: socket.socket, data: Any, *rest: Any) -> int:
        refuse_foreign(self.family, rest[-1])
        return sendto(self, data, *rest)

    def local_getaddrinfo(host: Any, *rest: Any, **named: Any) -> Any:
        refuse_foreign(socket.AF_INET, (host,))
        return getaddrinfo(host, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", local_connect)
        patch.setattr(socket.socket, "connect_ex", local_connect_ex)
        patch.setattr(socket.socket, "sendto", local_sendto)
        patch.setattr(socket, "getaddrinfo", local_getaddrinfo)
        yield


@pytest.fixture(autouse=True)
def _shapes_of_the_mathematics(request: pytest.FixtureRequest) -> None:
    """Checks the suffixes in all tests of the attention and of the model."""
    if {"attention", "model"} & set(request.path.relative_to(ROOT).parts[:-1]):
        request.getfixturevalue("checked_shapes")
