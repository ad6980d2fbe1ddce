"""PipeDream's profiles: what is read, and what is refused."""

import contextlib
import itertools
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fiddlex.errors import ConfigError
from fiddlex.tools.unequal_stages import profile_graph
from fiddlex.tools.unequal_stages.profile_graph import ProfiledLayer, read_profile


def line(name, *, forward=1.0, backward=2.0, activation="8.0", parameters=4.0, text="Linear(2, 2)"):
    sizes = f"activation_size={activation}, parameter_size={parameters}"
    return f"{name} -- {text} -- forward_compute_time={forward}, backward_compute_time={backward}, {sizes}"


def read(tmp_path, *lines):
    path = tmp_path / "graph.txt"
    path.write_text("\n".join(lines))
    return read_profile(str(path))


def test_a_chain_has_a_layer_for_each_operation_that_costs_something(tmp_path):
    found = read(
        tmp_path,
        line("node3", text="Size(0)", forward=0.0, backward=0.0, activation="4.0", parameters=0.0),
        line("node2"),
        line("node1", text="Input0", activation="100.0"),
        line("node4", forward=3.0, backward=0.0, activation="[16.0; 2.0]", parameters=0.0) + " -- stage_id=3",
        "\tnode1 -- node2",
        "\tnode2 -- node3",
        "\tnode3 -- node4",
    )
    assert found == (
        ProfiledLayer(("node1", "node2", "node3"), 0.003, 12.0, 4.0, 4.0),
        ProfiledLayer(("node4",), 0.003, 18.0, 0.0, 0.0),
    )


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    assert read(tmp_path, f"\ufeff{line('a')}", line("b"), "\ta -- b")[0].names == ("a",)


def test_behind_a_cut_goes_all_that_is_read_later(tmp_path):
    """A residual branch: behind `b` goes also the result of `a`, once, though two operations read it."""
    edges = ("a", "b"), ("a", "sum"), ("a", "late"), ("b", "sum"), ("sum", "late")
    found = read(
        tmp_path,
        *(
            line(name, activation=size)
            for name, size in (("a", "1.0"), ("b", "10.0"), ("sum", "100.0"), ("late", "0.0"))
        ),
        *(f"\t{source} -- {target}" for source, target in edges),
    )
    assert [(layer.names, layer.sent_bytes) for layer in found] == [
        (("a",), 1.0),
        (("b",), 11.0),
        (("sum",), 101.0),
        (("late",), 0.0),
    ]


@st.composite
def graphs(draw):
    """Numbers of nodes in a hidden order, edges from earlier to later nodes, and bytes of their results."""
    count = draw(st.integers(1, 9))
    order = draw(st.permutations(range(count)))
    pairs = list(itertools.combinations(order, 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    joined = {node for edge in edges for node in edge}
    edges += [pair for pair in itertools.pairwise(order) if not joined.issuperset(pair)]
    return edges, draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))


@settings(deadline=None)
@given(graphs())
def test_layers_follow_what_they_read_and_send_what_is_read_later(tmp_path_factory, graph):
    edges, sizes = graph
    lines = [line(f"n{node}", activation=size) for node, size in enumerate(sizes)]
    found = read(tmp_path_factory.mktemp("graph"), *lines, *(f"\tn{first} -- n{second}" for first, second in edges))
    place = {int(name[1:]): number for number, layer in enumerate(found) for name in layer.names}
    assert sorted(place) == list(range(len(sizes)))
    assert all(place[first] < place[second] for first, second in edges)
    for cut in range(len(found)):
        read_later = {first for first, second in edges if place[first] <= cut < place[second]}
        assert found[cut].sent_bytes == sum(sizes[node] for node in read_later)


def test_long_chains_are_shortened_where_that_hurts_least(tmp_path, monkeypatch):
    monkeypatch.setattr(profile_graph, "MOST_LAYERS", 3)
    times = [5.0, 1.0, 1.5, 4.0, 9.0]
    found = read(
        tmp_path,
        *(line(f"n{number}", forward=time, backward=0.0) for number, time in enumerate(times)),
        *(f"\tn{number} -- n{number + 1}" for number in range(4)),
    )
    assert [layer.names for layer in found] == [("n0",), ("n1", "n2", "n3"), ("n4",)]
    assert sum(layer.weight_bytes for layer in found) == 20.0


CHAIN = line("a"), line("b"), line("c")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], " has no operations. Its lines must be NAME -- OPERATION -- forward_compute_time=NUMBER, "),
        ([*CHAIN, "\ta -- b", "\tb -- c", "\tc -- b"], " has a cycle: c -> b -> c. A profile's edges must go from "),
        ([*CHAIN, "\ta -- a"], " has a cycle: a -> a. "),
        ([*CHAIN, "\ta -- d"], ", line 4: an edge has node 'd', which has no line of its own. Known: a, b, c."),
        ([*CHAIN, "\ta -- "], ", line 4: 'a --' is no edge. It must be NAME -- NAME after a tab."),
        ([line("a"), line("a", forward=2.0)], ", line 2: node 'a' is there twice."),
        ([line("a", forward=-1.0)], ", line 1: forward_compute_time=-1.0 must be at least 0 and at most 1e+100."),
        ([line("a", backward="nan")], ", line 1: backward_compute_time=nan must be at least 0 and at most 1e+100."),
        ([line("a", activation="inf")], ", line 1: activation_size=inf must be at least 0 and at most 1e+100."),
        ([line("a", activation="[1.0; -2.0]")], ", line 1: activation_size=[1.0; -2.0] must be at least 0 and at most"),
        ([line("a", parameters="1e308")], ", line 1: parameter_size=1e308 must be at least 0 and at most 1e+100."),
        (CHAIN, ": node 'a' has no edge: it reads no result, and none reads its own. Is the file cut short?"),
        ([*CHAIN, "\ta -- b"], ": node 'c' has no edge: "),
        ([line("a", activation="[1.0; 2")], ", line 1: activation_size='[1.0; 2' is no number; is the file cut short?"),
        (
            [line("a")[:-20]],
            ", line 1: 'a -- Linear(2, 2) -- forward_compute_time=1.0, backward_compute_time=2.0, activ",
        ),
        ([line("a", forward=0.0, backward=0.0)], ": no operation takes any time"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path, lines, message):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, *lines)
    assert str(error.value).startswith(f"--profile_graph={tmp_path}/graph.txt{message}")


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_profile(f"{tmp_path}/none.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    os.mkfifo(tmp_path / "pipe.txt")
    for name, reason in (
        ("binary.txt", "is no text"),
        ("pipe.txt", "cannot be read: it is a folder, a pipe or a device"),
        (".", "cannot be read: it is a folder, a pipe or a device"),
    ):
        with pytest.raises(ConfigError, match=reason):
            read_profile(f"{tmp_path}/{name}")


@settings(deadline=None)
@given(st.data())
def test_a_damaged_profile_is_read_or_refused(tmp_path_factory, data):
    """Lines in any order, repeated, left out or cut short."""
    whole = [*CHAIN, "\ta -- b", "\tb -- c", "\ta -- c"]
    lines = data.draw(st.lists(st.sampled_from(whole), max_size=8))
    text = "\n".join(lines)[: data.draw(st.integers(0, 500))]
    folder = tmp_path_factory.mktemp("graph")
    with contextlib.suppress(ConfigError):
        assert 1 <= len(read(folder, text)) <= 3
