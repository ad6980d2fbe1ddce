"""Prints the bubbles of the named schedules as a markdown table: the papers' formulas beside both clocks.

    fiddlex bubbles [--pipe=4 --pipe=8 --chunks=2 --microbatches=32]
    fiddlex bubbles --found [--pipe=4]
    fiddlex bubbles --semantics=2bw [--pipe=64]

F, I and W of a stage take one unit each, and hops take none. A bubble is given as a share of the work, and memory as
the most activations that a rank holds, in microbatches of the whole rank. Sizes at which a schedule does not exist, or
at which its formula does not hold, are left out. With `--found`, each row also has the bubble of the best schedule
found (`fiddlex.synthesis`) for the lockstep clock that holds no more than the row's schedule, and the bubble that no
schedule of so many chunks can beat; that takes seconds for each row. `--semantics` prints the second table instead: the
time of a batch in the lockstep clock with and without a flush, for 1, 2 and 4 microbatches a rank and for one and two
chunks.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

from absl import flags

from fiddlex.errors import ConfigError
from fiddlex.schedules.generators import make_schedule
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.schedule import Schedule
from fiddlex.schedules.semantics import make_semantics
from fiddlex.schedules.windows import unroll
from fiddlex.simulate.clock import Costs, free_running
from fiddlex.simulate.lockstep import lockstep
from fiddlex.simulate.steady import steady
from fiddlex.synthesis.anywhere import find_anywhere

_PIPE = flags.DEFINE_multi_integer("pipe", [], "ranks; by default 2 to 16, with --semantics 2 to 64", lower_bound=1)
_CHUNKS = flags.DEFINE_multi_integer("chunks", [1, 2, 3, 4], "stages on a rank", lower_bound=1)
_FOUND = flags.DEFINE_bool("found", False, "also search for the best schedule that holds as much, in lockstep")
_SEMANTICS = flags.DEFINE_string("semantics", None, "2bw, stash, vertical_sync or delay:K, to compare with a flush")
_MICROBATCHES = flags.DEFINE_multi_integer("microbatches", [8, 32, 128], "microbatches in a batch", lower_bound=1)

# The bubble over the work, and the sizes at which that formula holds, as functions of p, v and m. GPipe: Huang et al.,
# NeurIPS 2019; 1F1B, interleaved: Narayanan et al., SC 2021, section 2.2; breadth-first: Lamy-Poirier, MLSys 2023,
# section 4; zero-bubble: Qi et al., ICLR 2024, sections 2 and 6; V-Half, V-Min: `fiddlex.schedules.v_shape`;
# DualPipeV: `fiddlex.schedules.dual_pipe_v`.
FORMULAS: dict[str, tuple[Callable[[int, int, int], float], Callable[[int, int, int], bool]]] = {
    "gpipe": (lambda p, v, m: (p - 1) / m, lambda p, v, m: v == 1),
    "1f1b": (lambda p, v, m: (p - 1) / m, lambda p, v, m: v == 1),
    "interleaved_1f1b": (lambda p, v, m: (p - 1) / (v * m), lambda p, v, m: m % p == 0),
    "breadth_first": (lambda p, v, m: (p - 1) / (v * m), lambda p, v, m: m >= p),
    "zb_h1": (lambda p, v, m: (p - 1) / (3 * m), lambda p, v, m: v == 1 and m >= p),
    "zb_h2": (lambda p, v, m: 0.0, lambda p, v, m: v == 1 and m >= 2 * p - 1),
    "zb_v": (lambda p, v, m: 0.0, lambda p, v, m: v == 2 and m >= 2 * p - 1),
    "v_half": (lambda p, v, m: (3 * p - 4) / (6 * m), lambda p, v, m: v == 2 and p > 2 and m > p // 2),
    "v_min": (lambda p, v, m: (4 * p - 5 + 2 * (p % 3 == 0)) / (6 * m), lambda p, v, m: v == 2 and p > 1 and m > 1),
    "dual_pipe_v": (lambda p, v, m: (p - 1) / (6 * m), lambda p, v, m: v == 2 and m >= 2 * p - 1),
}
_HEADER = ("schedule", "p", "v", "m", "formula", "free-running", "lockstep", "ticks", "held, free", "held, lockstep")
_FOUND_HEADER = ("found, lockstep", "lower bound")


def main(argv: list[str]) -> None:
    """Prints the table."""
    if _SEMANTICS.value and _FOUND.value:
        raise ConfigError(
            "--found searches for schedules that are flushed, and --semantics is about others: leave one out."
        )
    if _SEMANTICS.value:
        _print_semantics(_SEMANTICS.value)
        return
    header = (*_HEADER, *_FOUND_HEADER) if _FOUND.value else _HEADER
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}", flush=True)
    for row in _rows():
        cells = (f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in row)
        print(f"| {' | '.join(cells)} |", flush=True)


def _rows() -> Iterator[tuple[str | int | float, ...]]:
    sizes = itertools.product(_PIPE.value or [2, 4, 8, 16], _MICROBATCHES.value, FORMULAS.items(), _CHUNKS.value)
    for pipe, num_microbatches, (name, (formula, holds)), chunks in sizes:
        if holds(pipe, chunks, num_microbatches):
            schedule = make_schedule(name, pipe=pipe, chunks=chunks, num_microbatches=num_microbatches)
            lowered = lower(schedule)
            clocks = free_running(schedule, Costs()), lockstep(lowered, Costs())
            bubbles = (formula(pipe, chunks, num_microbatches), *(timeline.bubble_fraction for timeline in clocks))
            held = [max(timeline.peak_inflight) for timeline in clocks]
            found = _found(pipe, chunks, num_microbatches, cap=held[1]) if _FOUND.value else ()
            texts = (f"{each:g}" for each in held)
            yield name, pipe, chunks, num_microbatches, *bubbles, lowered.num_ticks, *texts, *found


def _found(pipe: int, chunks: int, num_microbatches: int, *, cap: float) -> tuple[float, float]:
    """The bubble of the best schedule found under a cap, and that which no schedule can beat, over the work."""
    found = find_anywhere(pipe, chunks, num_microbatches, Costs(), cap=cap)
    work = 3 * chunks * num_microbatches
    return found.judged.time / work - 1, found.bound / work - 1


def _print_semantics(name: str) -> None:
    """Prints the time of a batch over its work, with and without a flush, and the speedup without it."""
    header = ("schedule", "p", "v", "m", "flush", name, "faster", "first step, ticks", "ticks a batch")
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}", flush=True)
    for pipe, factor, (schedule, chunks) in itertools.product(
        _PIPE.value or [2, 4, 8, 16, 32, 64], (1, 2, 4), (("1f1b", 1), ("interleaved_1f1b", 2))
    ):
        size = factor * pipe
        make = functools.partial(_make, schedule, pipe, chunks)
        semantics = make_semantics(name, num_stages=pipe * chunks, batch_size=size)
        flush, continuous = lockstep(lower(make(size)), Costs()), steady(unroll(make(size), semantics, make), Costs())
        times = (f"{time / flush.ideal:.3f}" for time in (flush.makespan, continuous.period))
        faster = f"{flush.makespan / continuous.period:.2f}"
        cells = (schedule, pipe, chunks, size, *times, faster, continuous.fill_ticks, f"{continuous.period_ticks:g}")
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def _make(name: str, pipe: int, chunks: int, num_microbatches: int) -> Schedule:
    return make_schedule(name, pipe=pipe, chunks=chunks, num_microbatches=num_microbatches)
