"""Compiled programs that no process of a run starts before all processes have compiled them.

The first exchange of a program connects the devices of all processes. On CPUs, gloo gives that up when a process comes
to it 30 s later than another, and compilation can take so much longer on one host than on another.
"""

import functools
from collections.abc import Callable
from typing import Any

from fiddlex.cluster import processes


def compiled_by_all(function: Any, name: str) -> Callable[..., Any]:
    """What `jax.jit` returned, but its first call waits until all processes have compiled it for their arguments."""
    if processes.num_processes() == 1:
        return function  # type: ignore[no-any-return]
    waited = False

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        nonlocal waited
        if not waited:
            function.lower(*args, **options).compile()  # the call below takes this program from jax's cache
            processes.barrier(name)
            waited = True
        return function(*args, **options)

    return call
