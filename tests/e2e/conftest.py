"""Servers for the end-to-end tests: one shared by tests that leave it unharmed, makers of others and of gateways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Server, alive, until
from tests.e2e.smg import Smg

MakeServer = Callable[..., Server]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The shared server; whoever uses it must leave it serving."""
    server = Server(tmp_path_factory.mktemp("server") / "serve.log", "--vllm-grpc-port=0")
    yield server
    assert server.stop() == 0, server.logged()


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    """Starts servers of a test's own; all their processes are gone afterwards, whatever the test did."""
    servers: list[Server] = []
    seen: set[int] = set()

    def make(*flags: str, model: Path | None = None) -> Server:
        log = tmp_path / f"serve-{len(servers)}.log"
        servers.append(Server(log, *flags) if model is None else Server(log, *flags, model=model))
        return servers[-1]

    yield make
    for server in servers:
        seen |= server.tree().keys()
        server.stop()
    until(lambda: not alive(sorted(seen)), "all processes of the test's servers are gone")


MakeSmg = Callable[..., Smg]


@pytest.fixture
def make_smg(tmp_path: Path) -> Iterator[MakeSmg]:
    """Starts gateways of a test's own; they end with it."""
    gateways: list[Smg] = []

    def make(*servers: Server, policy: str = "round_robin") -> Smg:
        gateways.append(Smg(tmp_path / f"smg-{len(gateways)}.log", *servers, flags=[f"--policy={policy}"]))
        return gateways[-1]

    yield make
    for gateway in gateways:
        gateway.stop()
