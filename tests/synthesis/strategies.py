"""Random costs, and problems to search."""

from hypothesis import strategies as st

from fiddlex.simulate.clock import Costs
from fiddlex.synthesis.anywhere import placements
from fiddlex.synthesis.problem import CLOCKS, Problem


@st.composite
def positive_costs(draw, num_stages):
    """Costs of `num_stages` stages in quarters, those of F, I and W above 0."""
    above, any_time = (st.integers(least, 12).map(lambda quarters: quarters / 4) for least in (1, 0))
    of_stages = st.one_of(above, st.tuples(*[above] * num_stages))
    return Costs(*(draw(of_stages) for _ in range(3)), draw(any_time), *(draw(any_time) for _ in range(3)))


@st.composite
def problems(draw, max_pipe=4, max_microbatches=8):
    """Problems with any cap that can be, in both clocks."""
    pipe, chunks = draw(st.integers(1, max_pipe)), draw(st.integers(1, 3))
    placement = draw(st.sampled_from(placements(pipe, chunks)))
    m = draw(st.integers(1, max_microbatches))
    cap = draw(st.one_of(st.just(float("inf")), st.integers(chunks, chunks * (m + 1)).map(lambda n: n / chunks)))
    costs = draw(positive_costs(pipe * chunks))
    return Problem.in_microbatches(placement, m, costs, cap, draw(st.sampled_from(CLOCKS)))
