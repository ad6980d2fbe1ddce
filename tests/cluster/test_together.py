"""A program runs only once all processes have compiled it, and is compiled once."""

import jax
import jax.numpy as jnp
import pytest

from fiddlex.cluster import processes
from fiddlex.cluster.together import compiled_by_all


def test_the_first_call_waits_after_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(processes, "num_processes", lambda: 2)
    monkeypatch.setattr(processes, "barrier", events.append)

    def run(value: jax.Array) -> jax.Array:
        events.append("traced")
        jax.debug.callback(lambda: events.append("ran"))
        return value + 1

    function = compiled_by_all(jax.jit(run), "the run")
    for _ in range(2):
        jax.block_until_ready(function(jnp.zeros(3)))
        jax.effects_barrier()
    assert events == ["traced", "the run", "ran", "ran"]
