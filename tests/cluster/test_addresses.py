"""The addresses by which the hosts of a run reach each other; `test_hosts.py` has runs of several hosts."""

import socket
from typing import Any, cast

import jax
import pytest
from jax._src import xla_bridge
from jaxlib import _jax

from fiddlex.cluster import coordinator
from fiddlex.cluster.addresses import connect_cpus_at, own_address


class Connection:
    """Stands for a connection that has an address at its own end; None for that of rank 0."""

    def __init__(self, address: str | None):
        self.family = socket.AF_INET if address else socket.AF_UNIX
        self.getsockname = lambda: (address, 7)
        self.setblocking = lambda blocking: None


def connection(address: str | None) -> socket.socket:
    return cast(socket.socket, Connection(address))


@pytest.mark.parametrize(
    ("ends", "address"),
    [
        ([], "127.0.0.1"),
        (["127.0.0.1", "::1"], "127.0.0.1"),
        (["::ffff:127.0.1.1", "::ffff:10.0.0.1"], "10.0.0.1"),
        (["fd00::1", "127.0.0.1"], "fd00::1"),
    ],
)
def test_the_host_of_rank_0_has_the_address_that_others_reached(ends: list[str], address: str) -> None:
    members = [coordinator.Process(connection(end), rank, "") for rank, end in enumerate([None, *ends])]
    assert coordinator._address(members) == address


@pytest.mark.parametrize(
    ("end", "address"),
    [(None, "10.0.0.1"), ("127.0.1.1", "10.0.0.1"), ("10.0.0.2", "10.0.0.2"), ("fd00::2", "fd00::2")],
)
def test_a_process_has_the_address_from_which_it_reached_the_coordinator(end: str | None, address: str) -> None:
    assert own_address(connection(end), "10.0.0.1") == address


@pytest.mark.parametrize(
    ("address", "implementation", "chosen"),
    [("10.0.0.2", "gloo", True), ("fe80::2", "gloo", False), ("10.0.0.2", "mpi", False)],
)
def test_gloo_listens_at_the_address(
    address: str, implementation: str, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(xla_bridge, "register_backend_factory", lambda name, make, **_: made.update({name: make}))
    monkeypatch.setattr(_jax, "make_gloo_tcp_collectives", lambda client, hostname: (client, hostname))
    monkeypatch.setattr(xla_bridge, "make_cpu_client", lambda collectives: collectives)
    before = jax.config.jax_cpu_collectives_implementation
    try:
        jax.config.update("jax_cpu_collectives_implementation", implementation)
        connect_cpus_at(address, "client")
    finally:
        jax.config.update("jax_cpu_collectives_implementation", before)
    assert [make() for make in made.values()] == [("client", address)] * chosen
