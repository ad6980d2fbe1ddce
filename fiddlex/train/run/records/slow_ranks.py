"""Names processes that slow a run of several down, from figures that each measures for itself.

All processes take a step together, so their step times are alike even when one of them is slow. What tells them apart
is the time that a host is busy (`host_time_s`) or waits for its next batch (`data_wait_s`): the others spend it waiting
for the devices. Slow devices show when each process times the same small product on a device of its own
(`device_probe_s`).
"""

import collections
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fiddlex.cluster import processes
from fiddlex.terminal.readable import readable_time
from fiddlex.train.record import Record

logger = logging.getLogger(__name__)

FIGURES = ("step_time_s", "host_time_s", "data_wait_s", "device_probe_s")
TOLERANCE = 0.25  # share by which a figure may be above the median
NOISE_S = 0.005  # seconds by which it may be above the median besides
_POSTED = "figures"
_TURNS = 5  # of the probe, the fastest of which counts

Figures = Mapping[str, float]


class Slow(NamedTuple):
    """A process that is slower than the others in one respect."""

    rank: int
    respect: str  # what is slow: `host`, `devices` or `steps`
    text: str  # the same as a sentence with the figures


class SlowRanks:
    """Compares the processes of a run at its log points; `device` is one of this process."""

    def __init__(self, device: jax.Device):
        self._probe = _make_probe(device) if processes.num_processes() > 1 else None
        self._probes_s: collections.deque[float] = collections.deque(maxlen=2)
        self._seen: set[tuple[int, str]] = set()  # who was slow at the last log point, and in which respect
        self._named: set[tuple[int, str]] = set()  # who of them has been named
        self._compared_step = 0
        self._shown: list[list[Any]] = []  # step and figures of the last two log points
        self.probe()

    def probe(self) -> None:
        """Times this process's idle devices. The shorter of the last two times counts, whatever disturbed the other."""
        if self._probe:
            self._probes_s.append(min(self._probe() for _ in range(_TURNS)))

    def compare(self, record: Record) -> Record:
        """Shows the figures of this process in `record` to the others; the first process compares those it knows of.

        It does not wait for the others: the figures are those of the newest log point that all processes have shown,
        since other figures could not be compared. It logs a warning for each process that was slow at two log points in
        a row, once while it stays slow.

        Returns:
          Fields for the record of the first process: each figure as a list by rank. Empty in a run of one process, and
          while there is no log point that all processes have shown.
        """
        if self._probe is None:
            return {}
        values = {**record, "device_probe_s": min(self._probes_s)}
        self._shown = [*self._shown[-1:], [record["step"], {name: values[name] for name in FIGURES}]]
        processes.post(_POSTED, self._shown)
        if not processes.is_first():
            return {}
        by_step = [dict(shown) for _, shown in sorted(processes.posted(_POSTED).items())]
        steps = set.intersection(*map(set, by_step))
        if len(by_step) < processes.num_processes() or not steps:
            return {}
        figures: dict[int, Figures] = {rank: each[max(steps)] for rank, each in enumerate(by_step)}
        if max(steps) != self._compared_step:
            self._compared_step = max(steps)
            self._warn(find_slow(figures))
        return {f"{name}_by_process": [each[name] for each in figures.values()] for name in FIGURES}

    def _warn(self, slow: list[Slow]) -> None:
        """Names who is slow for the second time in a row: the first steps of a run, and chance, make any rank slow."""
        found = {(each.rank, each.respect): each.text for each in slow}
        for place, text in found.items():
            if place in self._seen and place not in self._named:
                logger.warning("%s", text)
        self._named = {place for place in found if place in self._seen}
        self._seen = set(found)


def find_slow(figures: Mapping[int, Figures]) -> list[Slow]:
    """The processes that are slow, by the `FIGURES` of each.

    A host is slow when it is busy or waits for data for longer than the median of the hosts, by more than `TOLERANCE`
    of the step time. Devices, and steps as a whole, are slow when they take longer than the median by more than
    `TOLERANCE` of it. Differences up to `NOISE_S` count nowhere. The median of an even number of processes is the lower
    of the two in the middle, so that one of two can be slow.
    """
    found = []
    step_s = statistics.median_low(each["step_time_s"] for each in figures.values())
    held = {rank: each["host_time_s"] + each["data_wait_s"] for rank, each in figures.items()}
    usual_held_s = statistics.median_low(held.values())
    probe_s = statistics.median_low(each["device_probe_s"] for each in figures.values())
    for rank, each in sorted(figures.items()):
        told = {name: readable_time(seconds) for name, seconds in each.items()}
        if held[rank] - usual_held_s > max(TOLERANCE * step_s, NOISE_S):
            text = (
                f"Rank {rank} is slow: in each step its host is busy for {told['host_time_s']} and waits "
                f"{told['data_wait_s']} for data; the median of the sum is {readable_time(usual_held_s)}, and a step "
                f"takes {readable_time(step_s)}."
            )
            found.append(Slow(rank, "host", text))
        if each["device_probe_s"] - probe_s > max(TOLERANCE * probe_s, NOISE_S):
            text = (
                f"Rank {rank} has slow devices: a product that takes {told['device_probe_s']} there has a median "
                f"of {readable_time(probe_s)}."
            )
            found.append(Slow(rank, "devices", text))
        if each["step_time_s"] - step_s > max(TOLERANCE * step_s, NOISE_S):
            usual = readable_time(step_s)
            text = f"Rank {rank} has slow steps: they take {told['step_time_s']}; the median is {usual}."
            found.append(Slow(rank, "steps", text))
    return found


def _make_probe(device: jax.Device) -> Callable[[], float]:
    """A function that multiplies matrices on `device` and returns the seconds that this took."""
    is_cpu = device.platform == "cpu"
    size, turns = (256, 32) if is_cpu else (4096, 64)  # about 20 ms on a core of a CPU, and on a GPU or TPU
    matrix = jax.device_put(jnp.full((size, size), 1 / size, jnp.float32 if is_cpu else jnp.bfloat16), device)
    product = jax.jit(lambda x: jax.lax.fori_loop(0, turns, lambda _, y: x @ y, x))

    def probe() -> float:
        start_s = time.perf_counter()
        jax.block_until_ready(product(matrix))
        return time.perf_counter() - start_s

    probe()  # compiles
    return probe
