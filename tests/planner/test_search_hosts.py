"""What the planner keeps on hosts, when it does, what that takes, and what it says of it."""

import dataclasses

import pytest

from fiddlex.config import MeshConfig
from fiddlex.costs.backend import backend_of
from fiddlex.costs.layer_memory import LayerMemory
from fiddlex.costs.memory import Memory
from fiddlex.costs.sizes import num_parameters
from fiddlex.errors import ConfigError
from fiddlex.hardware.topology import load_topology
from fiddlex.planner.cost_model import CostModel
from fiddlex.planner.layouts import Layout, layouts
from fiddlex.planner.no_plan import why_none
from fiddlex.planner.predict import needed_memory, predict
from fiddlex.planner.report import as_text, further_text, plan_facts
from fiddlex.planner.search import Found, evaluate, further_problems, search, search_further
from fiddlex.schedules.generators import make_schedule
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.placement import place_layers
from fiddlex.schedules.resolve import resolve
from fiddlex.simulate.lockstep import lockstep
from fiddlex.terminal.readable import gib, readable_time
from tests.planner.problems import a_problem, all_on_hosts, offloading, streaming


def test_the_optimizer_goes_to_the_host_only_where_no_layout_fits_otherwise():
    problem = a_problem(num_devices=4)
    least = search(dataclasses.replace(problem, objective="memory"), keep=1).plans[0].memory.peak
    fits, too_small = (dataclasses.replace(problem, memory_bytes=int(least * share)) for share in (1.1, 0.7))
    solved, found = search_further(fits)
    assert found.plans
    assert not solved.config.optimizer.offload
    assert not search(too_small).plans
    solved, found = search_further(too_small)
    assert all(plan.config.optimizer.offload and plan.config.pipeline.semantics == "sync" for plan in found.plans)
    best = found.plans[0]
    best.config.validate()
    assert best.memory.peak <= too_small.limit
    assert "host GiB" in as_text(solved, found)
    assert f"optimizer.offload=True keeps {gib(best.memory.of_host)} GiB" in as_text(solved, found)
    assert plan_facts(best)["host_bytes"] == best.memory.of_host > 0
    assert not search_further(dataclasses.replace(too_small, semantics=("2bw",)))[1].plans
    without = dataclasses.replace(problem.topology, host=None)
    assert not search_further(dataclasses.replace(too_small, topology=without))[1].plans


def fake_memory(monkeypatch, *, here, offloaded, streamed, spilled):
    """Every layout takes one of four peaks, in GiB, by what the config keeps on the host."""

    def device_memory(config, *args, **kwargs):
        streams, offloads, spills = config.pipeline.streams, config.optimizer.offload, config.pipeline.spills
        peak = spilled if spills else streamed if streams else offloaded if offloads else here
        on_host = {"host_state": 2**30 * offloads, "host_stash": 2**30 * spills, "host_weights": 2**30 * streams}
        return Memory(peak * 2**30, *[0] * 10, **on_host)

    monkeypatch.setattr("fiddlex.planner.search.device_memory", device_memory)


@pytest.mark.parametrize(
    ("peaks", "told"),
    [
        ((3, 3, 3, 3), None),
        ((5, 3, 3, 3), "No layout fits 4.00 GiB a device without optimizer.offload. These plans set it."),
        (
            (5, 5, 3, 3),
            "No layout fits 4.00 GiB a device, not even with optimizer.offload. These plans set it and also "
            "pipeline.weights_memory=host (docs/offload.md).",
        ),
        (
            (5, 5, 5, 3),
            "No layout fits 4.00 GiB a device, not even with optimizer.offload. These plans set it and also "
            "pipeline.stash_memory=host and pipeline.weights_memory=host (docs/offload.md).",
        ),
    ],
)
def test_as_much_goes_to_the_host_as_it_takes(monkeypatch, peaks, told):
    here, offloaded, streamed, spilled = peaks
    fake_memory(monkeypatch, here=here, offloaded=offloaded, streamed=streamed, spilled=spilled)
    problem = a_problem(num_devices=2, layers=6, memory_bytes=4 * 2**30)
    solved, found = search_further(problem)
    assert len(found.plans) == 5
    assert (solved is problem) == (told is None)
    if told:
        assert further_text(problem, solved) == told
    text = as_text(solved, found)
    keeps = "pipeline.weights_memory=host keeps 1.0 GiB of the layers' weights and gradients in the memory of its host"
    assert (keeps in text) == (offloaded == 5)
    for plan in found.plans:
        assert plan.config.validate().pipeline.streams == (offloaded == 5)
        assert plan.config.optimizer.offload == (here == 5)
        assert plan.config.pipeline.spills == (streamed == 5)


@pytest.mark.parametrize(
    ("hidden", "zero1", "replicas"),
    [(96, True, {1}), (64, True, {1, 2}), (128, True, {1, 2, 4}), (96, False, {1, 2, 4})],
)
def test_plans_with_weights_on_hosts_have_several_replicas_only_where_the_compiler_takes_them(hidden, zero1, replicas):
    problem = a_problem(num_devices=4, layers=12, topology=load_topology("tpu_v5e"))
    problem.config.model.hidden_size, problem.config.optimizer.zero1 = hidden, zero1
    assert any(each.config.pipeline.streams for each in further_problems(problem))
    assert {layout.mesh.data for layout in layouts(streaming(problem))} == replicas
    assert {layout.mesh.data for layout in layouts(problem)} == {1, 2, 4}
    assert all(plan.layout.mesh.data in replicas for plan in search(streaming(problem)).plans)


def test_where_the_compiler_takes_none_of_the_layouts_with_weights_on_hosts_its_rule_is_told():
    problem = a_problem(num_devices=4, layers=3, heads=1, topology=load_topology("tpu_v5e"))
    problem.config.model.hidden_size = 96
    with pytest.raises(ConfigError, match=r"libtpu takes multiples of 128 as model\.hidden_size, and 96 is none"):
        search(streaming(problem))


def test_a_model_fits_with_its_layers_on_the_host_alone():
    problem = a_problem(num_devices=1, layers=12)
    here, offloaded, streamed = (
        search(dataclasses.replace(each, objective="memory"), keep=1).plans[0].memory
        for each in (problem, offloading(problem), streaming(problem))
    )
    assert here.peak > 2 * offloaded.peak > 4 * streamed.peak
    small = dataclasses.replace(problem, memory_bytes=2 * streamed.peak)
    solved, found = search_further(small)
    assert solved == streaming(small)
    best = found.plans[0]
    assert best.memory.peak <= 2 * streamed.peak
    assert best.memory.of_host > offloaded.of_host
    needed = needed_memory(best.config.validate(), backend_of(problem.topology.compiler))
    assert needed == best.memory


def test_a_config_with_something_on_the_host_keeps_it_there(monkeypatch):
    fake_memory(monkeypatch, here=5, offloaded=5, streamed=5, spilled=3)
    problem = a_problem(num_devices=2, layers=6, memory_bytes=4 * 2**30)
    assert search(all_on_hosts(problem)).plans == search_further(all_on_hosts(problem))[1].plans != []
    solved, found = search_further(offloading(problem))
    assert found.plans == search(all_on_hosts(problem)).plans
    both = "pipeline.stash_memory=host and pipeline.weights_memory=host"
    told = f"No layout fits 4.00 GiB a device without {both}. These plans set both."
    assert further_text(offloading(problem), solved) == told
    alone = dataclasses.replace(problem, config=dataclasses.replace(problem.config, pipeline=solved.config.pipeline))
    with pytest.raises(ConfigError, match=r"pipeline\.weights_memory=host with optimizer\.offload=False"):
        search_further(alone)


@pytest.mark.long
def test_weights_go_to_the_host_only_where_they_can(monkeypatch):
    fake_memory(monkeypatch, here=5, offloaded=5, streamed=5, spilled=3)
    monkeypatch.setattr("fiddlex.planner.no_plan.DOUBLINGS", 1)  # no bound shortens a search with such a memory
    problem = a_problem(num_devices=2, layers=6, batch=4, memory_bytes=4 * 2**30)
    few = a_problem(num_devices=2, layers=2, batch=4, memory_bytes=4 * 2**30)
    half, sampling = (a_problem(num_devices=2, layers=6, batch=4, memory_bytes=4 * 2**30) for _ in range(2))
    half.config.model.dtype, sampling.config.train.sample_tokens = "float16", 8
    lagging = dataclasses.replace(problem, semantics=("2bw",))
    hostless = dataclasses.replace(problem, topology=dataclasses.replace(problem.topology, host=None))
    for other in (few, half, sampling, lagging, hostless):
        solved, found = search_further(other)
        assert (solved, found.plans) == (other, [])
        assert "pipeline.weights_memory=host" not in why_none(other, found.least)
    assert search_further(problem)[1].plans
    both = "pipeline.weights_memory=host and pipeline.stash_memory=host"
    assert f"optimizer.offload=True with {both} saves 2.0" in why_none(problem, search(problem).least)
    told = why_none(lagging, search(lagging).least)
    assert (
        "What would help: none of up to 2 times the devices is enough; sync among --semantics, which is enough" in told
    )
    with pytest.raises(ConfigError, match="no mesh has 3 stages or more"):
        search(streaming(few))


def test_layers_on_the_host_are_searched_in_all_their_numbers_of_chunks():
    space = list(layouts(streaming(a_problem(num_devices=4, layers=12))))
    assert {(layout.mesh.pipe, layout.chunks) for layout in space} == {
        *[(1, chunks) for chunks in (3, 4, 5, 6, 8, 10, 12)],
        *[(2, chunks) for chunks in (3, 4, 5, 6)],
        (4, 3),
    }
    assert {layout.semantics for layout in space} == {"sync"}
    assert {layout.recompute for layout in space} == {"none", "gelu", "norms", "gelu,norms", "full"}


@pytest.mark.parametrize("bandwidth", [1e8, 1e10, 1e13])
def test_a_plan_counts_the_copies_that_nothing_hides(bandwidth):
    problem = a_problem(num_devices=4, layers=13, batch=32)
    host = dataclasses.replace(problem.topology.host, bandwidth=bandwidth)
    problem = all_on_hosts(dataclasses.replace(problem, topology=dataclasses.replace(problem.topology, host=host)))
    layout = Layout(MeshConfig(2, 2), "breadth_first", 4, 8, "sync", "norms")
    plan = evaluate(problem, layout)
    pipeline, costs = resolve(plan.config.validate()), plan.times.costs(place_layers((0, 1) * 4, 13))
    whole, kept = (
        lockstep(pipeline.lowered, each, pipeline.stream).makespan
        for each in (costs, dataclasses.replace(costs, load=0.0, store=0.0, spill=0.0))
    )
    predicted = predict(plan.config, CostModel(plan.config, problem.topology))
    assert predicted.pipeline == pytest.approx(whole)
    assert predicted.step == plan.step
    assert plan.step_time_s == pytest.approx(predicted.seconds)
    assert plan.exposed_s["host"] == pytest.approx(whole - kept)
    weights = 12 * problem.config.model.hidden_size**2  # of a layer's matrices
    assert plan.exposed_s["host"] >= 2 * (2 + 2) * weights / bandwidth  # the first weights and the last gradients
    assert sum(plan.exposed_s.values()) + plan.waiting_s < plan.step_time_s
    assert (kept < 0.01 * whole) == (bandwidth == 1e8)
    assert (kept > 0.9 * whole) == (bandwidth == 1e13)


def test_text_tells_how_long_a_copy_of_the_stash_takes():
    problem = a_problem()
    layout = Layout(MeshConfig(2, 4), "1f1b", 1, 8, "sync", "none")
    without = evaluate(problem, layout)
    problem.config.pipeline.stash_memory = "host"
    plan = evaluate(problem, layout)
    assert plan.config.pipeline.stash_memory == "host"
    assert plan.memory.stash == without.memory.stash * 3 // 7  # two slots and a copy, in place of 2p − 1
    assert plan.memory.host_stash == without.memory.stash * 6 // 7  # 2p − 3, and the trash
    costs = plan.times.costs(place_layers(range(4), 4))
    saved = LayerMemory.of(plan.config, backend_of(problem.topology.compiler)).stash()
    assert costs.spill == saved / problem.topology.host.bandwidth
    schedule = make_schedule("1f1b", pipe=4, num_microbatches=8)
    spilled, kept = (lockstep(lower(schedule, spills=spills), costs).makespan for spills in (True, False))
    copies = plan.exposed_s["host"]
    assert copies == pytest.approx(spilled - kept)
    assert plan.step_time_s == pytest.approx(without.step_time_s + copies)
    assert (plan.waiting_s, plan.bubble) == pytest.approx((without.waiting_s, without.bubble))
    text = as_text(problem, Found([plan], 1, 1, None))
    assert "What a layer saves, " in text
    assert "there beside a forward pass of" in text
    assert f"The passes of a step wait {readable_time(copies)} for copies to and from the host." in text
    assert "pipeline.stash_memory" not in as_text(problem, Found([without], 1, 1, None))


def test_the_update_from_the_host_takes_what_its_link_takes():
    problem = a_problem(num_devices=1)
    layout = next(layouts(offloading(problem)))
    here, there = (evaluate(each, layout) for each in (problem, offloading(problem)))
    weights = num_parameters(problem.config)
    assert here.memory.of_host == 0
    assert there.memory.peak < here.memory.peak
    # Weight, two moments and the weight once more come, 4 bytes each; norms and biases, which stay, are counted too.
    assert there.step.update == pytest.approx(4 * 4 * weights / problem.topology.host.bandwidth, rel=0.2)
    assert there.step.update > 10 * here.step.update


def test_a_host_that_is_too_small_is_told():
    problem = offloading(a_problem(num_devices=1))
    needed = evaluate(problem, next(layouts(problem))).memory.of_host
    half = 0.5 * needed / 2**30
    for changes, told in (
        ({"memory_gib": 8 * half}, "where a device has"),
        ({"memory_gib": 1e-9}, "none of up to 128 times the devices is enough"),
        ({"pinned_gib": half}, "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"),
    ):
        host = dataclasses.replace(problem.topology.host, **changes)
        small = dataclasses.replace(problem, topology=dataclasses.replace(problem.topology, host=host))
        found = search(small)
        assert not found.plans
        message = why_none(small, found.least)
        assert f"needs {gib(needed)} GiB of its host's memory" in message
        assert told in message
    with pytest.raises(ConfigError, match=r"has no \[host\]"):
        search(dataclasses.replace(problem, topology=dataclasses.replace(problem.topology, host=None)))


def test_where_a_host_is_too_small_the_layout_told_is_one_that_the_device_could_hold():
    problem = offloading(a_problem(num_devices=4))
    least = search(dataclasses.replace(problem, objective="memory"), keep=1).plans[0]
    host = dataclasses.replace(problem.topology.host, memory_gib=2**-20)
    topology = dataclasses.replace(problem.topology, host=host)
    found = search(dataclasses.replace(problem, topology=topology, memory_bytes=least.memory.peak))
    assert not found.plans
    assert found.least.memory.peak == least.memory.peak


def test_delayed_weights_alone_have_no_plan_with_the_optimizer_on_the_host():
    problem = dataclasses.replace(offloading(a_problem(num_devices=4)), semantics=("2bw",))
    with pytest.raises(ConfigError, match=r"optimizer\.offload=true with semantics 2bw alone"):
        search(problem)


@pytest.mark.parametrize("offload", [False, True])
def test_a_host_too_small_for_any_number_of_devices_is_no_remedy(offload: bool):
    problem = a_problem(num_devices=1, memory_bytes=2**20)
    host = dataclasses.replace(problem.topology.host, memory_gib=2**-20)
    problem = dataclasses.replace(problem, topology=dataclasses.replace(problem.topology, host=host))
    problem = offloading(problem) if offload else problem
    message = why_none(problem, search(problem).least)
    assert "none of up to 128 times the devices is enough" in message
    assert "optimizer.offload=True saves" not in message
    assert ("of its host's memory" in message) == offload
