"""The flags that connect the processes of a run, for programs that compute on devices."""

from collections.abc import Callable, Sequence

from absl import flags

from fiddlex.cluster import processes
from fiddlex.cluster.coordinator import MOST_SECONDS
from fiddlex.terminal import library_log

flags.disclaim_key_flags()  # --help lists them under the program that defines them


def define_processes() -> Callable[..., int]:
    """Defines the flags; returns a function that connects the processes, for `main` to call first of all.

    The function takes the `sizes` of `fiddlex.cluster.processes.join`, and returns what `join` returns.
    """
    address = flags.DEFINE_string(
        "coordinator_address", None, "HOST:PORT on the host of rank 0, where the processes of a run meet"
    )
    number = flags.DEFINE_integer(
        "num_processes",
        None,
        "number of processes of the run; jax finds it itself under Slurm, Open MPI 4, GKE and on TPU pods",
    )
    rank = flags.DEFINE_integer("process_id", None, "rank of this process, from 0; found like --num_processes")
    seconds = flags.DEFINE_integer(
        "join_timeout_s", processes.JOIN_S, "seconds in which all processes have to join", 1, MOST_SECONDS
    )
    fake = flags.DEFINE_integer(
        "fake_devices", None, "number of CPU devices to make in this process, in place of accelerators", lower_bound=1
    )

    def join(*, sizes: Callable[[int], Sequence[int]] | None = None) -> int:
        wanted = processes.join(address.value, number.value, rank.value, timeout_s=seconds.value, sizes=sizes)
        if processes.num_processes() == 1:  # of several, one may be told of another's end by these messages alone
            library_log.divert()
        if fake.value is not None:
            from fiddlex.cluster.mesh import request_devices  # imports jax, which `join` does only where it must

            request_devices(fake.value)
        return wanted

    return join
