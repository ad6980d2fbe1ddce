"""Random legal schedules, and the rules of a legal one written a second time, naively."""

import collections
import dataclasses

from hypothesis import strategies as st

from fiddlex.schedules.generators import GENERATORS
from fiddlex.schedules.schedule import Action, Kind, Schedule

# Schedules with two stages on each rank, which the microbatches pass in a V.
IN_A_V = ("zb_v", "v_half", "v_min", "dual_pipe_v")


def runnable(action, done, num_stages):
    """Whether the actions in the set `done` include all that `action` needs."""
    stage, kind, k = action
    backward_done = [Action(stage + 1, kind, k) in done for kind in (Kind.B, Kind.I)]
    if kind is Kind.F:
        return stage == 0 or Action(stage - 1, Kind.F, k) in done
    if kind is Kind.W:
        return Action(stage, Kind.I, k) in done
    return Action(stage, Kind.F, k) in done and (stage == num_stages - 1 or any(backward_done))


def is_legal(rows, placement, num_microbatches):
    """Whether each stage runs each microbatch once, on its rank, and the queues run to their ends."""
    counts = collections.Counter(action for row in rows for action in row)
    for rank, row in enumerate(rows):
        if any(action.stage >= len(placement) or placement[action.stage] != rank for action in row):
            return False
    for stage in range(len(placement)):
        for k in range(num_microbatches):
            f, b, i, w = (counts.pop(Action(stage, kind, k), 0) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
            if (f, b, i, w) not in ((1, 1, 0, 0), (1, 0, 1, 1)):
                return False
    if counts:
        return False
    queues, done = [list(row) for row in rows], set()
    while any(queues):
        heads = [queue[0] for queue in queues if queue and runnable(queue[0], done, len(placement))]
        if not heads:
            return False
        done.update(heads)
        queues = [queue[1:] if queue and queue[0] in heads else queue for queue in queues]
    return True


@st.composite
def user_schedules(draw):
    """A legal table that no generator gives: any placement, all B fused, all split or some, any order that can run."""
    num_ranks = draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, num_ranks - 1), max_size=4))
    placement = tuple(draw(st.permutations([*range(num_ranks), *extra])))
    stages, num_microbatches = range(len(placement)), draw(st.integers(1, 4))
    splits = draw(st.sampled_from([st.just(False), st.just(True), st.booleans()]))
    waiting = {Action(stage, Kind.F, k) for stage in stages for k in range(num_microbatches)}
    for stage in stages:
        for k in range(num_microbatches):
            kinds = (Kind.I, Kind.W) if draw(splits) else (Kind.B,)
            waiting |= {Action(stage, kind, k) for kind in kinds}
    rng = draw(st.randoms(use_true_random=False))
    rows, done = [[] for _ in range(num_ranks)], set()
    while waiting:
        action = rng.choice(sorted(a for a in waiting if runnable(a, done, len(placement))))
        rows[placement[action.stage]].append(action)
        done.add(action)
        waiting.remove(action)
    return Schedule("user", tuple(map(tuple, rows)), placement, strict=draw(st.booleans()))


@st.composite
def sizes(draw, name, max_pipe=6, max_microbatches=12):
    """Sizes for which the schedule `name` exists, as keyword arguments of its generator."""
    pipe = draw(st.integers(1, max_pipe))
    if name == "interleaved_1f1b":
        chunks, num_microbatches = draw(st.integers(1, 4)), pipe * draw(st.integers(1, 3))
    elif name == "breadth_first":
        chunks, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, max_microbatches))
    else:
        chunks, num_microbatches = 2 if name in IN_A_V else 1, draw(st.integers(1, max_microbatches))
    return {"pipe": pipe, "chunks": chunks, "num_microbatches": num_microbatches}


@st.composite
def generated_schedules(draw):
    """Any schedule by name, of any small size."""
    name = draw(st.sampled_from(sorted(GENERATORS)))
    return dataclasses.replace(GENERATORS[name](**draw(sizes(name))), strict=draw(st.booleans()))
