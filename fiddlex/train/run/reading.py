"""Lets orbax end every read of a checkpoint that it has begun, also when one of them fails.

Left to itself orbax gives up at the first array that cannot be read and closes its event loop under the reads that are
still running. Each of those then prints a traceback of its own, when Python drops it or when tensorstore finds the loop
closed. Invariant: when a read of arrays returns or raises, nothing of it is running any more.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import jax
import orbax.checkpoint as ocp


@functools.cache
def finish_reads() -> None:
    """Has orbax wait for all reads of `jax.Array`s, in every checkpoint of this process."""
    handler = ocp.type_handlers.get_type_handler(jax.Array)
    handler.deserialize = _patient(handler.deserialize)  # type: ignore[method-assign]


def _patient(read: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """The coroutine function `read`, raising only when the tasks that it made have ended."""

    @functools.wraps(read)
    async def patient(*args: Any, **kwargs: Any) -> Any:
        others = asyncio.all_tasks()
        try:
            return await read(*args, **kwargs)
        except Exception:
            while begun := asyncio.all_tasks() - others:  # what ends may have made more
                await asyncio.gather(*begun, return_exceptions=True)
            raise

    return patient
