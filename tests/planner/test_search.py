"""The search against looking at every layout, and what it says where there is none."""

import collections
import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fiddlex.config import MeshConfig, OptimizerConfig
from fiddlex.errors import ConfigError
from fiddlex.hardware.pieces import LEAST_ROWS
from fiddlex.hardware.topology import catalogue, load_topology
from fiddlex.planner import no_plan
from fiddlex.planner.layouts import OBJECTIVES, Layout, layouts
from fiddlex.planner.no_plan import least_bytes, too_little, why_none
from fiddlex.planner.plans import score
from fiddlex.planner.report import as_json, as_python, as_text, layout_text
from fiddlex.planner.search import Found, _Space, evaluate, search
from fiddlex.schedules.resolve import resolve
from fiddlex.simulate.lockstep import lockstep
from fiddlex.simulate.timeline import BUBBLE
from tests.planner.problems import a_problem, servers_of, streaming


@settings(max_examples=settings.default.max_examples // 3)
@given(
    st.sampled_from([1, 2, 4, 6, 8]),
    st.sampled_from([2, 3, 4, 6]),
    st.sampled_from([2, 3, 4]),
    st.sampled_from([4, 8, 12, 24]),
    st.sampled_from(OBJECTIVES),
    st.sampled_from([("sync",), ("2bw", "sync")]),
    st.sampled_from([2, 8]),
    st.sampled_from(["a100_80", "tpu_v5e"]),
    st.sampled_from([1e9, 1e11]),
    st.sampled_from(["", "streaming"]),
    st.floats(0, 1),
)
@example(1, 3, 2, 12, "time", ("sync",), 2, "a100_80", 1e9, "streaming", 1.0)  # where a slow link makes ties
@example(1, 3, 4, 4, "memory", ("sync",), 8, "tpu_v5e", 1e9, "streaming", 0.0)  # where weights are most of all
@example(4, 2, 3, 4, "time", ("sync",), 2, "tpu_v5e", 1e9, "streaming", 0.0)  # where libtpu refuses a width too
def test_it_finds_what_looking_at_every_layout_finds(
    num_devices, layers, heads, batch, objective, semantics, per_server, name, bandwidth, kind, share
):
    topology = servers_of(per_server, name)
    topology = dataclasses.replace(topology, host=dataclasses.replace(topology.host, bandwidth=bandwidth))
    problem = a_problem(
        num_devices=num_devices,
        layers=layers,
        heads=heads,
        batch=batch,
        objective=objective,
        semantics=semantics,
        topology=topology,
    )
    problem = streaming(problem) if kind else problem
    every = [evaluate(problem, layout) for layout in layouts(problem)]
    if not every:
        with pytest.raises(
            ConfigError, match="no mesh has 3 stages|libtpu takes multiples of" if kind else "cannot be a mesh"
        ):
            search(problem)
        return
    assert {plan.layout.schedule == "breadth_first" for plan in every} == {bool(kind)}
    peaks = sorted(plan.memory.peak for plan in every)
    assert 0 < least_bytes(problem) <= peaks[0]
    problem = dataclasses.replace(problem, memory_bytes=peaks[int(share * (len(peaks) - 1))])
    fitting = [plan for plan in every if plan.memory.peak <= problem.limit]
    found = search(problem, keep=3)
    best = sorted(score(objective, plan) for plan in fitting)[:3]
    assert [score(objective, plan) for plan in found.plans] == [pytest.approx(each) for each in best]
    assert found.space == len(every)


@pytest.mark.parametrize(
    ("layers", "per_server", "name", "kind"),
    [
        (4, 8, "a100_80", ""),
        pytest.param(5, 8, "a100_80", "", marks=pytest.mark.long),
        pytest.param(4, 2, "a100_80", "", marks=pytest.mark.long),
        pytest.param(4, 2, "tpu_v5e", "", marks=pytest.mark.long),
        (8, 8, "a100_80", "streaming"),
        pytest.param(13, 2, "tpu_v5e", "streaming", marks=pytest.mark.long),
    ],
)
def test_no_layout_takes_less_than_its_bound(layers, per_server, name, kind):
    problem = a_problem(layers=layers, topology=servers_of(per_server, name))
    problem = streaming(problem) if kind else problem
    entries = list(_Space(problem).entries())
    assert entries == sorted(entries, key=lambda entry: entry.least)
    assert collections.Counter(entry.layout for entry in entries) == collections.Counter(layouts(problem))
    for (least, _), layout in entries:
        assert least <= evaluate(problem, layout).step_time_s * (1 + 1e-12), layout


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["sync", "2bw"]),
    st.sampled_from([4, 8]),
    st.sampled_from([8, 24]),
    st.sampled_from(["a100_80", "tpu_v5e"]),
    st.booleans(),
)
def test_every_layout_is_a_config_that_validates(semantics, num_devices, batch, name, streams):
    topology = load_topology(name)
    problem = a_problem(num_devices=num_devices, layers=13, batch=batch, semantics=(semantics,), topology=topology)
    problem = streaming(problem) if streams and semantics == "sync" else problem
    seen = set()
    for layout in layouts(problem):
        assert layout.applied(problem.config).validate().mesh.num_devices == num_devices
        seen.add(layout)
    assert len(seen) == sum(1 for _ in layouts(problem))


def test_the_whole_space_is_there():
    space = list(layouts(a_problem()))
    assert {layout.schedule for layout in space} == {
        "1f1b",
        "interleaved_1f1b",
        "dual_pipe_v",
        "zb_h1",
        "zb_h2",
        "zb_v",
        "v_half",
        "v_min",
    }
    elementwise = {"none", "gelu", "norms", "gelu,norms", "full"}  # the flash kernel recomputes attention by itself
    assert {layout.recompute for layout in space} == elementwise
    without_flash = a_problem(topology=load_topology("v100_16"))
    more = {"attention", "attention,gelu", "attention,norms", "attention,gelu,norms"}
    assert {layout.recompute for layout in layouts(without_flash)} == elementwise | more
    without_flash.config.model.dropout = 0.1
    assert len({layout.recompute for layout in layouts(without_flash)}) == 2**4 + 1  # with `masks` or without
    assert {layout.semantics for layout in space} == {"sync", "2bw"}
    assert {(layout.mesh.data, layout.mesh.pipe, layout.mesh.tensor) for layout in space} == {
        (data, pipe, tensor)
        for data in (1, 2, 4, 8)
        for pipe in (1, 2, 4)
        for tensor in (1, 2, 4)
        if data * pipe * tensor == 8
    }


def test_plans_keep_the_type_of_the_stash_and_count_what_it_saves_and_takes():
    same, encoded = a_problem(), a_problem()
    encoded.config.pipeline.stash_dtype = "int8"
    space = list(layouts(same))
    assert space == list(layouts(encoded))
    for layout in space:
        stash_dtype = layout.applied(encoded.config).validate().pipeline.stash_dtype
        assert stash_dtype == ("same" if layout.recompute == "full" else "int8")
        assert layout.applied(same.config).pipeline.stash_dtype == "same"
    layout = next(each for each in space if each.recompute == "norms" and each.mesh.pipe > 1)
    plans = [evaluate(problem, layout) for problem in (same, encoded)]
    assert plans[0].memory.stash > 1.5 * plans[1].memory.stash
    assert plans[0].memory.weight_stash == plans[1].memory.weight_stash
    assert plans[0].step_time_s < plans[1].step_time_s
    full = layout._replace(recompute="full")
    assert len({evaluate(problem, full).step_time_s for problem in (same, encoded)}) == 1


def test_collective_matmul_is_searched_where_it_cuts_products():
    for name, least in (("tpu_v5e", 0), ("a100_80", 2 * LEAST_ROWS)):
        problem = a_problem(topology=load_topology(name))
        space = set(layouts(problem))
        batch, seq_len = problem.config.data.global_batch_size, problem.config.model.seq_len
        rows = {layout: batch // layout.mesh.data // layout.num_microbatches * seq_len for layout in space}
        with_it = {layout for layout in space if layout.mesh.collective_matmul}
        without = ((layout, dataclasses.replace(layout.mesh, collective_matmul=False)) for layout in with_it)
        assert {layout._replace(mesh=mesh) for layout, mesh in without} == {
            layout
            for layout in space
            if layout.mesh.sequence_parallel and not layout.mesh.collective_matmul and rows[layout] >= least
        }
        assert with_it


def test_a_plan_with_rings_says_so_and_counts_what_they_hide():
    topology = load_topology("tpu_v5e")
    problem = a_problem(topology=topology)
    problem.config.model.hidden_size, problem.config.model.seq_len = 2048, 2048
    mesh = MeshConfig(2, 1, 4, sequence_parallel=True)
    whole_products = Layout(mesh, "1f1b", 1, 2, "sync", "none")
    rings = whole_products._replace(mesh=dataclasses.replace(mesh, collective_matmul=True))
    with_rings, without = (evaluate(problem, layout) for layout in (rings, whole_products))
    assert with_rings.config.mesh.collective_matmul
    assert with_rings.exposed_s["tensor"] < without.exposed_s["tensor"] / 2
    assert with_rings.exposed_s["vocabulary"] == without.exposed_s["vocabulary"]
    assert with_rings.step_time_s < without.step_time_s
    assert with_rings.memory.stash < without.memory.stash
    sent, whole = (sum(each.bytes for each in plan.traffic if each.axis == "tensor") for plan in (with_rings, without))
    assert sent > whole
    text = as_text(problem, Found([with_rings, without], 2, 2, None))
    assert "4+sp+cm " in text
    assert "It was timed on no chip yet" in text
    assert "timed" not in as_text(problem, Found([without], 2, 2, None))
    facts = as_json(problem, Found([with_rings], 2, 2, None))["plans"][0]
    assert facts["mesh"]["collective_matmul"] is True
    assert ", sequence_parallel=True, collective_matmul=True, 1f1b" in layout_text(rings)
    assert "            collective_matmul=True,\n" in as_python(with_rings.config, "A title.")


def test_both_placements_are_searched_where_they_differ():
    space = list(layouts(a_problem(topology=servers_of(4))))
    meshes = {layout.mesh for layout in space}
    assert {layout.mesh.outermost for layout in layouts(a_problem())} == {"data"}  # one server joins all eight
    assert {mesh.outermost for mesh in meshes if mesh.data > 1 and mesh.pipe > 1} == {"data", "pipe"}
    assert {mesh.outermost for mesh in meshes if mesh.data == 1 or mesh.pipe == 1} == {"data"}
    assert len(set(space)) == len(space)


def test_a_slow_link_is_crossed_by_the_axis_that_sends_less():
    """Few weights and long sequences cross it best along data; many weights and a small batch, along pipe."""
    for hidden, seq_len, batch, outermost in ((256, 2048, 64, "data"), (4096, 128, 8, "pipe")):
        problem = a_problem(num_devices=8, batch=batch, topology=servers_of(4), semantics=("sync",))
        problem.config.model.hidden_size, problem.config.model.seq_len = hidden, seq_len
        plans = [
            evaluate(problem, Layout(MeshConfig(2, 2, 2, outermost=axis), "1f1b", 1, 4, "sync", "none"))
            for axis in ("data", "pipe")
        ]
        best = min(plans, key=lambda plan: plan.step_time_s)
        assert best.layout.mesh.outermost == outermost
        slow = {
            plan.layout.mesh.outermost: {each.axis for each in plan.traffic if each.link.name == "InfiniBand HDR"}
            for plan in plans
        }
        assert slow == {"data": {"data"}, "pipe": {"pipe"}}
        text = as_text(problem, Found([best], 2, 2, None))
        other = "pipe" if outermost == "data" else "data"
        assert f"{outermost} crosses InfiniBand HDR: " in text
        assert f"{other} stays in NVLink 3: " in text
        (line,) = [line for line in text.splitlines() if line.startswith(f"With mesh.outermost={other} it would take")]
        assert f"): {'data' if other == 'pipe' else 'data crosses'}" in line


@pytest.mark.parametrize("topology", [name for name in catalogue() if name != "v100_16"])
def test_every_topology_of_the_catalogue_can_be_planned_for(topology):
    problem = a_problem(num_devices=16, topology=load_topology(topology))
    best = search(problem, keep=1).plans[0]
    assert 0 < best.step_time_s < 1
    assert 0 < best.utilisation < 1
    assert best.usd_per_step > 0 if problem.topology.price else best.usd_per_step is None


def test_cost_takes_fewer_devices_where_more_do_not_pay():
    problem = a_problem(num_devices=16, batch=16)
    by_time, by_cost = (
        search(dataclasses.replace(problem, objective=each), keep=1).plans[0] for each in ("time", "cost")
    )
    assert by_cost.layout.mesh.num_devices < by_time.layout.mesh.num_devices == 16
    assert by_cost.usd_per_step < by_time.usd_per_step


def test_why_there_is_no_plan_and_what_would_help():
    problem = a_problem(num_devices=2, memory_bytes=0)
    problem = dataclasses.replace(
        problem, config=dataclasses.replace(problem.config, optimizer=OptimizerConfig(zero1=False))
    )
    least = search(dataclasses.replace(problem, memory_bytes=2**40, objective="memory"), keep=1).plans[0]
    problem = dataclasses.replace(problem, memory_bytes=int(least.memory.peak * 0.9))
    found = search(problem)
    assert found.plans == []
    assert found.least.memory.peak == least.memory.peak
    message = why_none(problem, found.least)
    assert message.startswith("No layout on 2 A100-SXM4-80GB fits ")
    assert f"need is {least.memory.peak / 2**30:.2g} GiB" in message
    assert "What would help: 4 devices" in message


def test_what_would_help_is_told_where_more_devices_cannot_be_had():
    """The model cannot be cut for more, or no link joins them."""
    whole = a_problem(num_devices=8, layers=1, heads=1, batch=8, memory_bytes=2**20)
    eight = dataclasses.replace(whole.topology, links=whole.topology.links[:1])
    joined = a_problem(num_devices=8, topology=eight, memory_bytes=2**20)
    for problem in (whole, joined):
        message = why_none(problem, search(problem).least)
        assert message.startswith("No layout on 8 A100-SXM4-80GB fits ")
        assert "What would help: none of up to 128 times the devices is enough" in message


def test_no_search_tells_what_a_bound_of_memory_rules_out(monkeypatch):
    searched = []
    monkeypatch.setattr(no_plan, "search", lambda problem, **_: searched.append(problem) or search(problem, **_))
    problem = a_problem(num_devices=2, memory_bytes=2**10)
    assert too_little(problem).startswith("No layout on 2 A100-SXM4-80GB fits 9.5e-07 GiB a device: gradients, ")
    assert not too_little(dataclasses.replace(problem, memory_bytes=2**30))
    assert not searched
    assert "none of up to 128 times the devices is enough" in why_none(problem, search(problem).least)
    assert {each.num_devices for each in searched} == {2}  # what each remedy saves; no number of devices is enough


def test_a_prime_batch_gets_devices_that_its_heads_fill():
    problem = a_problem(num_devices=1, heads=4, batch=7, memory_bytes=0)
    least = search(dataclasses.replace(problem, memory_bytes=2**40, objective="memory"), keep=1).plans[0]
    problem = dataclasses.replace(problem, memory_bytes=int(least.memory.peak * 0.9))
    assert "What would help: 2 devices" in why_none(problem, search(problem).least)


def test_delayed_weights_alone_need_a_pipeline():
    with pytest.raises(ConfigError, match=r"1 device and data\.global_batch_size=16 have no layout .* Allow sync too"):
        search(a_problem(num_devices=1, semantics=("2bw",)))


def test_large_primes_take_no_longer():
    prime = 2**31 - 1
    with pytest.raises(ConfigError, match=f"{prime} devices cannot be a mesh"):
        search(a_problem(num_devices=prime))
    found = search(a_problem(num_devices=1, batch=prime, memory_bytes=2**62), keep=9)
    assert {plan.layout.num_microbatches for plan in found.plans} == {1, prime}


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ConfigError, match=r"7 devices cannot be a mesh for model\.num_heads=4, model\.num_layers=4"):
        search(a_problem(num_devices=7, batch=16))


@pytest.mark.parametrize("title", ["A title.", 'an A"""100 of C:\\Users\\New\\n.toml\\', 'ends in "'])
def test_a_written_config_is_the_plans(title):
    problem = a_problem()
    best = search(problem, keep=1).plans[0]
    scope: dict[str, object] = {}
    exec(as_python(best.config, title), scope)
    assert scope["get_config"]() == best.config
    assert scope["__doc__"] == title


def test_text_and_json_have_the_plans_numbers():
    problem = a_problem(semantics=("2bw",))
    found = search(problem)
    facts = as_json(problem, found)
    assert [plan["step_time_s"] for plan in facts["plans"]] == sorted(plan.step_time_s for plan in found.plans)
    first = facts["plans"][0]
    assert first["mesh"].keys() >= {"data", "pipe", "tensor"}
    assert first["pipeline"]["schedule"] == found.plans[0].layout.schedule
    assert sum(first["memory_bytes"].values()) >= first["peak_bytes"] > 0
    text = as_text(problem, found).splitlines()
    assert text[0].startswith("3,") or "parameters in bfloat16" in text[0]
    assert (first["pipeline"]["semantics"], first["pipeline"]["prediction_order"]) == ("2bw", 2)
    assert len(text) == 4 + len(found.plans) + 9
    told = f"Bubble, without such communication: {found.plans[0].bubble:.1%} ({BUBBLE})."
    assert told in text
    assert "In all plans attention runs in the flash kernel cudnn." in text
    assert "pipe stays in NVLink 3: " in text[-3]


REVERSED = """
from fiddlex.schedules.schedule import Action, Kind, Schedule


def gpipe(*, pipe, chunks=1, num_microbatches):
    rows = [
        [Action(pipe - 1 - rank, kind, k) for kind in (Kind.F, Kind.B) for k in range(num_microbatches)]
        for rank in range(pipe)
    ]
    return Schedule("gpipe", rows, placement=list(range(pipe - 1, -1, -1)))
"""


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_best_layout_with_a_function_is_what_looking_at_every_layout_finds(objective, tmp_path):
    """The last rank has the first stage, so that a bound which takes ranks for stages would be wrong."""
    (tmp_path / "mine.py").write_text(REVERSED)
    schedules = (f"{tmp_path}/mine.py:gpipe", "zb_h1")
    problem = a_problem(layers=6, batch=8, objective=objective, schedules=schedules)
    every = [evaluate(problem, layout) for layout in layouts(problem)]
    assert {plan.layout.schedule for plan in every} == set(schedules)
    scores = {plan.layout: score(objective, plan)[0] for plan in every}
    for entry in _Space(problem).entries():
        assert entry.least[0] <= scores[entry.layout]
    best = min(score(objective, plan) for plan in every)
    assert score(objective, search(problem, keep=1).plans[0])[0] == pytest.approx(best[0], rel=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_bubble_of_a_plan_is_that_of_the_lockstep_clock_without_hops(schedule):
    plans = search(a_problem(num_devices=8, semantics=("sync",), schedules=(schedule,)), keep=3).plans
    for plan in plans:
        pipeline = resolve(plan.config.validate())
        costs = dataclasses.replace(plan.times.costs(pipeline.placement), hop=0.0)
        timeline = lockstep(pipeline.lowered, costs)
        assert plan.bubble == pytest.approx(timeline.bubble_fraction, rel=1e-9)
        assert plan.bubble > 0
        assert plan.waiting_s == pytest.approx(timeline.bubble, rel=1e-9)


@pytest.mark.parametrize(
    ("optimizer", "own", "allowed", "told"),
    [
        ("adamw", "sync", ("2bw",), "predicted weights: pipeline.prediction=extrapolate and prediction_order=2"),
        ("adafactor", "sync", ("2bw",), "not predicted, since optimizer.name=adafactor has no momentum"),
        ("adamw", "2bw", ("sync", "2bw"), "a flush, in place of the config's pipeline.semantics=2bw"),
        ("adamw", "2bw", ("sync",), None),
        ("adamw", "sync", ("sync", "2bw"), None),
    ],
)
def test_text_tells_what_the_semantics_mean_for_training(optimizer, own, allowed, told):
    problem = a_problem(num_devices=2, batch=2, layers=2, semantics=allowed)  # too few microbatches to lag is best
    problem.config.optimizer.name = optimizer
    problem.config.pipeline.semantics = own
    found = search(problem)
    text = as_text(problem, found)
    for words in ("predicted weights:", "not predicted, since", "in place of the config's"):
        assert (words in text) == (told is not None and words in told)
    assert told is None or told in text
