"""How processes use orbax so that the failure of one of them does not let the others wait.

By default orbax waits for all processes after each read, a point to which a process whose read fails never comes. So
each one reads by itself, and `Checkpoints` lets them compare what they found. After a write that failed, orbax by
default lets the process wait for the others, which wait for the rest of its write.

By default orbax also stops at the first array that it cannot read, and closes its event loop while other reads still
run. Each of those then prints a traceback of its own, when Python drops it or when tensorstore finds the loop closed.
Invariant: when a read of arrays returns or raises, none of its tasks is still running.
"""

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import jax
import orbax.checkpoint as ocp


def make_reader(handler: Callable[..., Any] = ocp.CompositeCheckpointHandler) -> ocp.Checkpointer:
    """A reader of checkpoints, by a class of orbax, that does not wait for other processes."""
    _finish_reads()
    rank = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=rank, active_processes={rank})
    return ocp.Checkpointer(handler(), multiprocessing_options=alone)


def barrier_of_writers(written: Callable[[], None]) -> Callable[..., None]:
    """What the threads that write a checkpoint wait by: for all processes, unless this one's write has failed.

    Such a thread must end, so that the main thread gets the error and ends all processes. `written` is called before
    each wait; at the first one, this process has written its part of the checkpoint.
    """
    wait = ocp.multihost.get_barrier_sync_fn()

    def barrier(*, key: str, timeout_ms: int) -> None:
        if sys.exception() is None:
            written()
            wait(key=key, timeout_ms=timeout_ms)

    return barrier


@functools.cache
def _finish_reads() -> None:
    """Makes orbax wait for all reads of `jax.Array`s, in every checkpoint of this process."""
    handler = ocp.type_handlers.get_type_handler(jax.Array)
    handler.deserialize = _patient(handler.deserialize)  # type: ignore[method-assign]


def _patient(read: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wraps the coroutine function `read` so that it raises only after the tasks that it started have ended."""

    @functools.wraps(read)
    async def patient(*args: Any, **kwargs: Any) -> Any:
        others = asyncio.all_tasks()
        try:
            return await read(*args, **kwargs)
        except Exception:
            while begun := asyncio.all_tasks() - others:  # an ending task may have started others
                await asyncio.gather(*begun, return_exceptions=True)
            raise

    return patient


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or of that of its cause; long ones are shortened in the middle."""
    while error.__cause__:  # orbax's error names what it was reading; the cause says why it failed
        error = error.__cause__
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if len(line) <= 300 else f"{line[:140]} … {line[-140:]}"  # the cause is often at the end
