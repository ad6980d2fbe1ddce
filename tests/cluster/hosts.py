"""Hosts on this machine: network namespaces, each with a name and an address of its own, joined by a bridge.

No host reaches the loopback interface of another, so what works here does not depend on sharing one. All see the same
files, as hosts with a shared file system do. It needs root.
"""

import contextlib
import os
import pathlib
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

# ip, unshare, mount and hostname are of Debian's iproute2, util-linux, mount and hostname.
MISSING = (
    os.geteuid() != 0
    or not all(map(shutil.which, ("ip", "unshare", "mount", "hostname")))
    or subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True).returncode != 0
)
_BY_NAME = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


class Network(contextlib.AbstractContextManager["Network"]):
    """Hosts host0, host1, …, each of which takes its own name for 127.0.1.1, as Debian's installer writes it.

    Leaving the context removes them.

    Args:
      number: how many hosts.

    Attributes:
      addresses: of the hosts, by their names.
    """

    def __init__(self, number: int):
        self.addresses = {f"host{index}": f"10.77.0.{index + 1}" for index in range(number)}
        self._id = f"fiddlex-{secrets.token_hex(4)}"
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Network":
        with contextlib.ExitStack() as stack:
            self._folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self._switch = self._add("switch", stack)
            _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "bridge", "up")
            for host, address in self.addresses.items():
                space = self._add(host, stack)
                _ip("-n", self._switch, "link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", space)
                _ip("-n", self._switch, "link", "set", host, "master", "bridge", "up")
                _ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
                for device in ("eth0", "lo"):
                    _ip("-n", space, "link", "set", device, "up")
                names = self.addresses | {"localhost": "127.0.0.1", host: "127.0.1.1"}
                (self._folder / host).write_text("".join(f"{each} {name}\n" for name, each in names.items()))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _add(self, name: str, stack: contextlib.ExitStack) -> str:
        space = f"{self._id}-{name}"
        _ip("netns", "add", space)
        stack.callback(_ip, "netns", "delete", space)  # with its devices, once its processes have ended
        return space

    @contextlib.contextmanager
    def started(self, host: str, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Starts `fiddlex` with these words on a host; leaving the context kills that process."""
        on_host = ["ip", "netns", "exec", f"{self._id}-{host}", "unshare", "--uts"]
        by_name = ["sh", "-c", _BY_NAME, host, str(self._folder / host)]
        command = [*on_host, *by_name, sys.executable, "-P", "-m", "fiddlex", *words]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def cut(self, host: str) -> None:
        """Takes the host's cable out of the switch."""
        _ip("-n", self._switch, "link", "set", host, "down")

    def mend(self, host: str) -> None:
        """Puts the cable back."""
        _ip("-n", self._switch, "link", "set", host, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
