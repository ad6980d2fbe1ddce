"""The addresses by which the hosts of a run reach each other.

gloo, which connects CPUs, would take the address of the host's own name, which may be 127.0.1.1, as Debian writes it,
or missing. So gloo gets the address by which this process and the coordinator have reached each other.
"""

import ipaddress
import socket
from typing import Any

from fiddlex.errors import DeviceError

_REACH_S = 10.0  # in which a host answers


def own_address(connection: socket.socket, first: str) -> str:
    """The address by which other processes reach this one; on the host of the coordinator that is `first`."""
    if connection.family == socket.AF_UNIX:  # of rank 0
        return first
    address: str = connection.getsockname()[0]
    return first if ipaddress.ip_address(address).is_loopback else address


def connect_cpus_at(address: str, client: Any) -> None:
    """Lets gloo listen at an address of this host; to be called before jax makes its devices.

    `client` is that of jax's coordination service, which tells the address to the other processes.
    """
    import jax
    from jax._src import xla_bridge  # jax has no public way to choose the address
    from jaxlib import _jax

    by_gloo = jax.config.jax_cpu_collectives_implementation == "gloo"  # type: ignore[attr-defined]
    if not by_gloo or address.startswith("fe80:"):  # of which gloo would have to know the interface
        return

    def make_client() -> Any:
        return xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(client, hostname=address))

    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def check_reachable(service: str) -> None:
    """Checks that jax can reach its service at HOST:PORT, since jaxlib aborts the process where it cannot."""
    host, _, port = service.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise DeviceError(
            f"jax's service at {service}, on the host of rank 0, cannot be reached: {error.strerror or error}. Check "
            "--coordinator_address, and that no firewall stands between the hosts: they must reach each other at any "
            "port."
        ) from error
