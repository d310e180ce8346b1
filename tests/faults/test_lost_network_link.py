"""Two network namespaces as two nodes, and the link between them cut during a step.

Needs root and `ip` (iproute2), as in a container of CI; elsewhere it fails with a message.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.faults.processes import ranks_below, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.netns]

NODES = ("10.213.7.1", "10.213.7.2")


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (
        f"ip {' '.join(arguments)}: {done.stderr.strip()}; this test needs root and network "
        "namespaces; leave it out with -m 'not netns'"
    )


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two namespaces, each with an interface `node` to the other."""
    names = [f"protlm-{os.getpid()}-{number}" for number in (0, 1)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ends = ["name", "node", "netns", names[0], "type", "veth", "peer", "name", "node"]
        ip("link", "add", *ends, "netns", names[1])
        for name, address in zip(names, NODES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "node")
            ip("-n", name, "link", "set", "node", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def node_command(name: str, number: int) -> list[str]:
    """Returns the command that starts torchrun on a node, with one rank."""
    command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes=2", f"--node-rank={number}", "--nproc-per-node=1"]
    command += ["--rdzv-backend=static", f"--master-addr={NODES[0]}", "--master-port=29551"]
    command += [f"--local-addr={NODES[number]}", "-m", "protlm.train", "trainer.num_nodes=2"]
    return [*command, "trainer.timeout_minutes=0.25"]


def test_a_cut_link_ends_both_nodes_and_a_restart_resumes_the_run(
    namespaces, start, pair_settings, tmp_path, assert_gone, assert_same_as_pair
):
    def start_both() -> list["subprocess.Popen[str]"]:
        commands = [node_command(name, number) for number, name in enumerate(namespaces)]
        return [
            start(*command, *pair_settings, log=f"node-{number}.log", GLOO_SOCKET_IFNAME="node")
            for number, command in enumerate(commands)
        ]

    nodes = start_both()
    wait_for_step(tmp_path / "run", 12, *nodes)
    ranks = [pid for node in nodes for pid in ranks_below(node.pid).values()]
    assert len(ranks) == 2
    ip("-n", namespaces[1], "link", "set", "node", "down")
    # The time-out of 15 seconds, and torchrun's own.
    assert all(node.wait(timeout=100) != 0 for node in nodes)
    for pid in ranks:
        assert_gone(pid)
    said = [(tmp_path / f"node-{number}.log").read_text() for number in (0, 1)]
    assert any("has lost another rank" in text for text in said)
    ip("-n", namespaces[1], "link", "set", "node", "up")
    nodes = start_both()
    assert [node.wait(timeout=250) for node in nodes] == [0, 0], said
    assert_same_as_pair(tmp_path / "run")
