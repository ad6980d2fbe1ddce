"""Random costs, and problems to search."""

import dataclasses

from hypothesis import strategies as st

from fiddlex.simulate.clock import Costs
from fiddlex.synthesis.anywhere import placements
from fiddlex.synthesis.problem import CLOCKS, Problem


@st.composite
def positive_costs(draw, num_stages):
    """Costs of `num_stages` stages in quarters, those of F, I and W above 0, on ranks that may share cores."""
    above, any_time = (st.integers(least, 12).map(lambda quarters: quarters / 4) for least in (1, 0))
    of_stages = st.one_of(above, st.tuples(*[above] * num_stages))
    sharing = draw(st.one_of(st.just(()), st.tuples(*[above] * num_stages)))
    times = [*(draw(of_stages) for _ in range(3)), draw(any_time), *(draw(any_time) for _ in range(4))]
    return Costs(*times, sharing=sharing)


@st.composite
def with_weight_gradients(draw, problem):
    """The problem with something that each I leaves for its W, and with no more room than before."""
    left = st.sampled_from([0.0, 0.25, 1.0])
    return dataclasses.replace(problem, weight_gradient=tuple(draw(left) for _ in problem.placement))


@st.composite
def problems(draw, max_pipe=4, max_microbatches=8):
    """Problems with any cap that can be, in both clocks."""
    pipe, chunks = draw(st.integers(1, max_pipe)), draw(st.integers(1, 3))
    placement = draw(st.sampled_from(placements(pipe, chunks)))
    m = draw(st.integers(1, max_microbatches))
    cap = draw(st.one_of(st.just(float("inf")), st.integers(chunks, chunks * (m + 1)).map(lambda n: n / chunks)))
    costs = draw(positive_costs(pipe * chunks))
    return Problem.in_microbatches(placement, m, costs, cap, draw(st.sampled_from(CLOCKS)))
