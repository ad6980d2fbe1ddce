"""Searches over the placements of stages too."""

import itertools
import math
from collections.abc import Sequence

from fiddlex.simulate.clock import Costs
from fiddlex.synthesis.cache import find_once
from fiddlex.synthesis.problem import Problem, check_size
from fiddlex.synthesis.search import EFFORT, Found
from fiddlex.terminal.progress import phase
from fiddlex.terminal.readable import counted


def placements(pipe: int, chunks: int) -> list[tuple[int, ...]]:
    """The placements that a search tries: stages in a loop over the ranks, and to and fro (a V for two chunks)."""
    loop = tuple(range(pipe)) * chunks
    to_and_fro = tuple(itertools.chain(*(range(pipe) if c % 2 == 0 else reversed(range(pipe)) for c in range(chunks))))
    return list(dict.fromkeys([loop, to_and_fro]))


def find_anywhere(
    pipe: int,
    chunks: int,
    num_microbatches: int,
    costs: Costs,
    *,
    cap: float = math.inf,
    clock: str = "lockstep",
    effort: int = EFFORT,
    seed: int = 0,
    with_bound: bool = True,
) -> Found:
    """Searches over all `placements`, with a cap in microbatches of the whole rank; the bound holds for all of them."""
    check_size(pipe * chunks, num_microbatches)
    problems = [
        Problem.in_microbatches(placement, num_microbatches, costs, cap, clock)
        for placement in placements(pipe, chunks)
    ]
    return find_among(problems, effort=effort, seed=seed, with_bound=with_bound)


def find_among(problems: Sequence[Problem], *, effort: int = EFFORT, seed: int = 0, with_bound: bool = True) -> Found:
    """Searches for the best schedule of any of several problems of one size, with as much effort for each."""
    first, share = problems[0], effort // len(problems)
    sizes = ", ".join(
        [
            counted(first.num_ranks, "rank"),
            counted(first.num_stages, "stage"),
            counted(first.num_microbatches, "microbatch", "microbatches"),
        ]
    )
    with phase(f"Searching schedules: {sizes}"):
        found = [find_once(problem, effort=share, seed=seed, with_bound=with_bound) for problem in problems]
    best = min(found, key=lambda each: (each.judged.time, each.judged.makespan))
    return best._replace(bound=min(each.bound for each in found), tried=sum(each.tried for each in found))
