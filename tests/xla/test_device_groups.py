import itertools
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from fiddlex.xla.device_groups import axis_of, groups_of

AXES = ("data", "pipe", "tensor")


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}, to_apply=%add", [[0, 2], [1, 3]]),
        ("replica_groups={}, to_apply=%add", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=[2,4]<=[8], dimensions={0}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[2,2,2]T(2,1,0), dimensions={0}", [[0, 4], [2, 6], [1, 5], [3, 7]]),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, x", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}, x", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b:(2)2'}, x", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'b'}", [[0, 3], [1, 2]]),
        ("replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}", None),
        ("source_target_pairs={{0,1},{1,0},{2,2}}, metadata={}", [[0, 1], [1, 0]]),
        ("source_target_pairs={{0,0}}, metadata={}", [[0]]),
        ("channel_id=1", None),
    ],
)
def test_reads_all_forms(text, groups):
    assert groups_of(text, 8) == groups


@hypothesis.given(
    sizes=st.tuples(*[st.integers(1, 4)] * 3), chosen=st.sets(st.sampled_from(range(3)), min_size=1), data=st.data()
)
def test_the_forms_say_the_same(sizes, chosen, data):
    kept = [axis for axis in range(3) if axis not in chosen]
    along = data.draw(st.permutations(sorted(chosen)))
    rows = (
        np.arange(math.prod(sizes))
        .reshape(sizes)
        .transpose(*kept, *along)
        .reshape(-1, math.prod(sizes[a] for a in along))
    )
    order = ",".join(map(str, [*kept, *along]))
    listed = "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows) + "}"
    dims = ",".join(map(str, sizes))
    iota = f"[{rows.shape[0]},{rows.shape[1]}]<=[{dims}]T({order})"
    mesh = ",".join(f"'axis_{axis}'={size}" for axis, size in enumerate(sizes))
    names = ",".join(f"'axis_{axis}'" for axis in sorted(chosen))
    found = [groups_of(f"replica_groups={form}, x", rows.size) for form in (listed, iota, f"mesh[{mesh}] {{{names}}}")]
    assert found[0] == found[1] == rows.tolist()
    assert sorted(map(sorted, found[2])) == sorted(map(sorted, rows.tolist()))


@pytest.mark.parametrize("chosen", [c for n in (1, 2, 3) for c in itertools.combinations(range(3), n)])
def test_tells_the_axis(chosen):
    sizes = {"data": 2, "pipe": 3, "tensor": 4}
    ids = np.arange(24).reshape(2, 3, 4)
    groups = np.moveaxis(ids, chosen, range(-len(chosen), 0)).reshape(-1, math.prod(ids.shape[a] for a in chosen))
    assert axis_of(groups.tolist(), sizes) == (AXES[chosen[0]] if len(chosen) == 1 else "several")
