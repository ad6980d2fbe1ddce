"""Random costs."""

from hypothesis import strategies as st

from fiddlex.simulate.clock import Costs


@st.composite
def stage_costs(draw, num_stages):
    """Costs of `num_stages` stages, alike or not, in quarters so that sums are exact in any order."""
    times = st.integers(0, 12).map(lambda quarters: quarters / 4)
    field = st.one_of(times, st.tuples(*[times] * num_stages))
    return Costs(*(draw(field) for _ in range(4)), *(draw(times) for _ in range(7)))


@st.composite
def sharing(draw, num_ranks):
    """Factors for so many ranks, of which more are slower, in quarters; or none."""
    factors = st.lists(st.integers(4, 16), min_size=num_ranks, max_size=num_ranks)
    return draw(st.one_of(st.just(()), factors.map(lambda quarters: tuple(each / 4 for each in sorted(quarters)))))
