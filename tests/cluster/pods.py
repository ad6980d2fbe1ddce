"""Starts the processes of a run on this machine, each with fake devices of its own."""

import contextlib
import socket
from collections.abc import Iterator, Sequence

from tests.programs import Ended, Running, started


def free_port() -> int:
    """A TCP port that nobody listens at."""
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextlib.contextmanager
def pod(
    num_processes: int, devices: int, program: str, *arguments: object, extra: Sequence[Sequence[object]] = ()
) -> Iterator[list[Running]]:
    """The processes, by rank; leaving the context kills those that still run.

    Args:
      num_processes: how many.
      devices: fake devices of each.
      program: see `tests.programs.started`.
      *arguments: of every command line.
      extra: further arguments by rank.
    """
    address = f"localhost:{free_port()}"
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                started(
                    program,
                    *arguments,
                    f"--coordinator_address={address}",
                    f"--num_processes={num_processes}",
                    f"--process_id={rank}",
                    f"--fake_devices={devices}",
                    *(extra[rank] if extra else ()),
                )
            )
            for rank in range(num_processes)
        ]


def run_pod(num_processes: int, devices: int, program: str, *arguments: object, **options: object) -> list[Ended]:
    """How the processes ended, by rank; see `pod`."""
    with pod(num_processes, devices, program, *arguments, **options) as running:  # type: ignore[arg-type]
        return [each.wait() for each in running]
