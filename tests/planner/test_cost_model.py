"""Times of a step's parts, each against the formula of the paper it comes from."""

import dataclasses

import pytest

from fiddlex.config import Config, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig
from fiddlex.errors import ConfigError
from fiddlex.hardware import pieces
from fiddlex.hardware.chips import Chip, HostMemory
from fiddlex.hardware.links import Link
from fiddlex.hardware.topology import Topology
from fiddlex.planner import cost_model
from fiddlex.planner.communication import all_reduce_s
from fiddlex.planner.cost_model import EFFICIENCY, CostModel, System
from fiddlex.planner.links import MeshLinks
from fiddlex.schedules.placement import place_layers

FAST, SLOW = Link("fast", 4, 1e9, 0.0, "s"), Link("slow", 0, 1e8, 0.0, "s")
# Computing and memory take no time, so that what is left is communication.
TOPOLOGY = Topology("t", "", Chip("c", 1.0, 1e30, {"float32": 1e30}, "s"), (FAST, SLOW))
RESIDUAL = 2 * 16 * 64 * 4  # examples, positions, hidden, bytes


def model(*, system=None, zero1=True, topology=TOPOLOGY, **changes):
    config = Config(model=ModelConfig(num_layers=8, hidden_size=64, num_heads=8, seq_len=16))
    config.data.global_batch_size = 16
    config.optimizer.zero1 = zero1
    return CostModel(dataclasses.replace(config, **changes), topology, system=system)


def microbatch(mesh, *, recompute="none", **kwargs):
    return model(**kwargs).microbatch(mesh, num_microbatches=8 // mesh.data, recompute=recompute)


def test_a_layer_has_two_reductions_over_tensor_each_way_and_two_more_when_it_is_recomputed():
    """Narayanan et al., SC 2021, section 3.2: 8bsh(t − 1)/t elements, four all-reduces of bsh."""
    one = all_reduce_s(RESIDUAL, TOPOLOGY.rings(1, 4))
    times = microbatch(MeshConfig(tensor=4))
    assert one == pytest.approx(2 * 3 / 4 * RESIDUAL / 1e9)
    assert (times.forward, times.backward_input, times.exchange) == pytest.approx((2 * one, 2 * one, 4 * one))
    assert times.backward_weight == pytest.approx(0, abs=1e-15)
    again = microbatch(MeshConfig(tensor=4), recompute="full")
    assert (again.forward, again.backward_input) == pytest.approx((2 * one, 4 * one))
    parallel = microbatch(MeshConfig(tensor=4, sequence_parallel=True))
    assert parallel.exchange == pytest.approx(times.exchange)  # as many bytes (Korthikanti et al., section 3.2)


def test_norms_that_are_made_again_are_gathered_again():
    """Two inputs of a layer of GPT, for the gradients of kernels, and one of a layer of BERT in post-LN."""
    once, whole = 3 / 4 * RESIDUAL / 1e9, MeshConfig(tensor=4)
    parallel = dataclasses.replace(whole, sequence_parallel=True)
    assert microbatch(whole, recompute="norms").exchange == microbatch(whole).exchange
    plain, again = (microbatch(parallel, recompute=recompute) for recompute in ("none", "gelu,norms"))
    assert again.exchange - plain.exchange == pytest.approx(2 * once)
    assert again.backward_weight == pytest.approx(2 * once)
    bert = ModelConfig(family="bert", num_layers=8, hidden_size=64, num_heads=8, seq_len=16, post_norm=True)
    assert microbatch(parallel, recompute="norms", model=bert).backward_weight == pytest.approx(once)
    in_pieces = dataclasses.replace(parallel, collective_matmul=True)
    assert microbatch(in_pieces, recompute="norms").exchange == microbatch(in_pieces).exchange


def test_hops_take_the_link_that_they_cross():
    times = microbatch(MeshConfig(pipe=8))
    within, across = RESIDUAL / 1e9, RESIDUAL / 1e8
    assert times.hops == pytest.approx([within] * 3 + [across] + [within] * 3 + [across])
    costs = times.costs(place_layers(tuple(range(8)), 8))
    assert costs.hop == pytest.approx((within, within, within, across, across, within, within, within))


def test_one_link_for_any_number_of_devices_is_all_that_there_need_be():
    flat = dataclasses.replace(TOPOLOGY, links=(SLOW,)).validate()
    times = model(topology=flat).microbatch(MeshConfig(data=2, pipe=4), num_microbatches=4, recompute="none")
    assert times.hops == pytest.approx([RESIDUAL / 1e8] * 4)


def test_hops_of_a_v_stay_on_the_rank_where_it_turns():
    times = microbatch(MeshConfig(pipe=4))
    costs = times.costs(place_layers((0, 1, 2, 3, 3, 2, 1, 0), 8))
    assert costs.hop == pytest.approx([RESIDUAL / 1e9] * 8)  # the other side of each stage's two
    flat = times.costs(place_layers((0, 0, 0, 0), 8))
    assert flat.hop == (0, 0, 0, 0)


def test_sequence_parallelism_and_scattering_send_a_part():
    whole = microbatch(MeshConfig(pipe=2, tensor=2)).hops[0]
    assert microbatch(MeshConfig(pipe=2, tensor=2, sequence_parallel=True)).hops[0] == pytest.approx(whole / 2)
    scattered = microbatch(MeshConfig(pipe=2, tensor=2), system=System(scatters_hops=True)).hops[0]
    assert scattered == pytest.approx(whole / 2 + RESIDUAL / 2 / 1e9)  # and gathers where it arrives


def test_replicas_reduce_gradients_and_gather_weights_in_proportion_to_the_latter():
    mesh = MeshConfig(data=2, pipe=4)
    step = model().step(mesh, num_parameters=1000)
    assert (step.reduce, step.gather) == pytest.approx((1000 * 4 / 2 / 1e8, 1000 * 4 / 2 / 1e8))
    whole = model(zero1=False).step(mesh, num_parameters=1000)
    assert (whole.reduce, whole.gather) == pytest.approx((2 * 1000 * 4 / 2 / 1e8, 0))
    assert model().step(MeshConfig(), num_parameters=1000)[:2] == (0, 0)
    inside = model().step(dataclasses.replace(mesh, outermost="pipe"), num_parameters=1000)
    assert inside.reduce == pytest.approx(1000 * 4 / 2 / 1e9)


def test_all_ranks_score_together_unless_the_last_stage_does():
    over_pipe = all_reduce_s(RESIDUAL, TOPOLOGY.rings(1, 4))
    here, elsewhere = (
        microbatch(MeshConfig(pipe=4), system=System(vocabulary_over_pipe=over)) for over in (True, False)
    )
    assert here.edge_exchange == pytest.approx(4 * over_pipe)
    assert elsewhere.edge_exchange == 0
    assert elsewhere.head == pytest.approx(0, abs=1e-15)


def test_a_chip_without_a_peak_for_the_dtype_and_links_that_do_not_reach_are_refused():
    with pytest.raises(ConfigError, match=r"c has no peak_flops for model\.dtype=bfloat16"):
        model(model=ModelConfig(dtype="bfloat16"))
    short = dataclasses.replace(TOPOLOGY, links=(FAST,))
    with pytest.raises(ConfigError, match="no link joins 8 devices"):
        CostModel(Config(), short).microbatch(MeshConfig(data=8), num_microbatches=1, recompute="none")


def test_prediction_by_momentum_repeats_the_optimizers_reads():
    """AdamW moves eight numbers for each weight: gradient (twice), weight and moments in, weight and moments out."""
    chip = dataclasses.replace(TOPOLOGY.chip, memory_bandwidth=1e9)
    topology = dataclasses.replace(TOPOLOGY, chip=chip)
    none, momentum, extrapolate = (
        model(topology=topology, pipeline=PipelineConfig(semantics="2bw", prediction=kind, prediction_order=order))
        .step(MeshConfig(data=2), num_parameters=1000)
        .update
        for kind, order in (("none", 1), ("momentum", 2), ("extrapolate", 2))
    )
    assert none == pytest.approx(500 * 4 * 8 / 1e9)
    assert momentum == pytest.approx(500 * 4 * (8 + 4) / 1e9)
    assert extrapolate == pytest.approx(500 * 4 * (8 + 2) / 1e9)  # reads and writes the last update


WITH_HOST = dataclasses.replace(TOPOLOGY, host=HostMemory(64.0, 4, 1e6, "s"))
STREAMED = PipelineConfig(stash_memory="host", weights_memory="host")
OFFLOADED = OptimizerConfig(name="adamw", offload=True)
MATRICES = 12 * 64 * 64  # weights of a layer's matrices


def test_a_layers_copies_take_what_the_link_of_the_host_does():
    streamed = {"topology": WITH_HOST, "pipeline": STREAMED, "optimizer": OFFLOADED}
    times = microbatch(MeshConfig(data=2, tensor=4), recompute="full", **streamed)
    assert times.load == MATRICES / 4 * 4 / 1e6  # float32, of a tensor rank
    assert times.store == MATRICES / 4 / 2 * 4 / 1e6  # with ZeRO-1, of one of two replicas
    assert times.spill == RESIDUAL / 1e6  # full recomputation saves the layer's input alone
    costs = times.costs(place_layers((0, 1, 0, 1, 0, 1), 8))
    assert (costs.load, costs.store, costs.spill) == (times.load, times.store, 2 * times.spill)
    whole = dataclasses.replace(OFFLOADED, zero1=False)
    assert microbatch(MeshConfig(data=2, tensor=4), **(streamed | {"optimizer": whole})).store == times.load
    half = ModelConfig(num_layers=8, hidden_size=64, num_heads=8, seq_len=16, dtype="bfloat16")
    chip = dataclasses.replace(TOPOLOGY.chip, peak_flops={"bfloat16": 1e30})
    rounded = streamed | {"model": half, "topology": dataclasses.replace(WITH_HOST, chip=chip)}
    by_half = microbatch(MeshConfig(data=2, tensor=4), **rounded)
    assert (by_half.load, by_half.store) == (times.load / 2, times.store)
    here = microbatch(MeshConfig(data=2, tensor=4), topology=WITH_HOST, optimizer=OFFLOADED)
    assert (here.load, here.store, here.spill) == (0, 0, 0)


def test_an_update_from_the_host_moves_its_state_and_what_is_streamed():
    """Weight, moments and the weight once more come; of two rows of layers, gradients twice more."""
    mesh, streamed = MeshConfig(data=2), {"topology": WITH_HOST, "pipeline": STREAMED, "optimizer": OFFLOADED}
    update = lambda rows: model(**streamed).step(mesh, num_parameters=1000, streamed_rows=rows).update  # noqa: E731
    assert update(0) == pytest.approx(500 * 4 * 4 / 1e6)
    assert update(2) == pytest.approx((500 * 4 * 4 + 2 * 2 * MATRICES / 2 * 4) / 1e6)
    replicas = model(**(streamed | {"optimizer": dataclasses.replace(OFFLOADED, name="sgd", momentum=0.0)}))
    wide = replicas.step(MeshConfig(data=8), num_parameters=0, streamed_rows=2).update
    assert wide == pytest.approx(2 * MATRICES * 4 / 1e6)  # whole compute weights go, while two eighths come


IN_PIECES = MeshConfig(tensor=4, sequence_parallel=True, collective_matmul=True)


@pytest.fixture
def in_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on TPUs; a topology without a compiler has GPUs."""
    monkeypatch.setattr(cost_model, "runs_in_blocks", lambda platform: False)


def test_rings_expose_what_no_piece_hides(in_rings: None):
    """Where products take no time, four gathers or sums in F and I each, and two more gathers in I."""
    times, once = microbatch(IN_PIECES), 3 / 4 * RESIDUAL / 1e9
    found = times.forward, times.backward_input, times.backward_weight, times.exchange
    assert found == pytest.approx((4 * once, 6 * once, 0.0, 10 * once), abs=1e-15)
    again = microbatch(IN_PIECES, recompute="full")
    assert (again.backward_input, again.exchange) == pytest.approx((10 * once, 14 * once))
    outside = microbatch(dataclasses.replace(IN_PIECES, collective_matmul=False)).edge_exchange
    assert times.edge_exchange == outside > 0


def test_pieces_hide_hops_for_as_long_as_they_take(in_rings: None):
    """Pieces of the MLP take one hop, those of queries, keys and values 3/4, those of attention's output 1/4."""
    hop = RESIDUAL / 4 / 1e9
    chip = dataclasses.replace(TOPOLOGY.chip, peak_flops={"float32": 2 * 8 * 64 * 64 / hop / EFFICIENCY})
    exchange = microbatch(IN_PIECES, topology=dataclasses.replace(TOPOLOGY, chip=chip)).exchange
    in_forward, beside_two_rings = 1 / 4 + 3 / 4, (2 - 3 / 4) + (2 - 1) + 3 / 4
    assert exchange == pytest.approx(3 * hop * (in_forward + beside_two_rings))


def test_blocks_expose_the_first_or_the_last(monkeypatch: pytest.MonkeyPatch):
    """Where products take long, one of four blocks of each gather or sum."""
    monkeypatch.setattr(pieces, "LEAST_ROWS", 1)
    monkeypatch.setattr(pieces, "MOST_BLOCKS", 4)
    chip = dataclasses.replace(TOPOLOGY.chip, peak_flops={"float32": 1.0})
    times, once = microbatch(IN_PIECES, topology=dataclasses.replace(TOPOLOGY, chip=chip)), 3 / 4 * RESIDUAL / 1e9
    assert times.exchange == pytest.approx(8 * once / 4)
    instant = microbatch(IN_PIECES)  # nothing hides, and two inputs are gathered again
    assert instant.exchange == pytest.approx((8 + 2) * once)


def test_pieces_read_their_kernels_again(in_rings: None):
    chip = dataclasses.replace(TOPOLOGY.chip, memory_bandwidth=1e9)
    instant = dataclasses.replace(FAST, bandwidth=1e30)
    topology = dataclasses.replace(TOPOLOGY, chip=chip, links=(instant, SLOW))
    whole, pieces = (
        microbatch(dataclasses.replace(IN_PIECES, collective_matmul=rings), topology=topology)
        for rings in (False, True)
    )
    kernels = 12 * 64 * 64 / 4 * 4 / 1e9
    assert pieces.forward - whole.forward == pytest.approx(3 * kernels)
    assert pieces.backward_input - whole.backward_input == pytest.approx(3 * kernels)
    assert pieces.backward_weight == pytest.approx(whole.backward_weight)


@pytest.mark.parametrize("zero1", [True, False])
@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(2, 4, 1),
        MeshConfig(4, 2, 2),
        MeshConfig(4, 2, 2, outermost="pipe"),
        MeshConfig(4, 2, 2, sequence_parallel=True),
        MeshConfig(4, 2, 2, sequence_parallel=True, collective_matmul=True),
        MeshConfig(4, 1, 4, sequence_parallel=True, collective_matmul=True),
    ],
)
@pytest.mark.parametrize(("in_blocks", "recompute"), [(True, "full"), (False, "full"), (False, "norms")])
def test_traffic_takes_the_seconds_of_the_step(mesh, zero1, in_blocks, recompute, monkeypatch):
    monkeypatch.setattr(pieces, "LEAST_ROWS", 1)
    monkeypatch.setattr(cost_model, "runs_in_blocks", lambda platform: in_blocks)
    links = tuple(dataclasses.replace(link, latency_s=RESIDUAL / 1e9 / 8) for link in TOPOLOGY.links)
    topology = dataclasses.replace(TOPOLOGY, links=links)
    costs, m = model(zero1=zero1, topology=topology), 16 // mesh.data // 2
    placement = place_layers(tuple(range(mesh.pipe)), 8)
    times = costs.microbatch(mesh, num_microbatches=m, recompute=recompute)
    found = costs.traffic(mesh, placement=placement, num_microbatches=m, recompute=recompute, num_parameters=1000)
    seconds = {axis: sum(each.seconds for each in found if each.axis == axis) for axis in ("data", "pipe", "tensor")}
    step = costs.step(mesh, num_parameters=1000)
    assert seconds["data"] == pytest.approx(step.reduce + step.gather)
    part = RESIDUAL / (mesh.tensor if mesh.sequence_parallel else 1)
    over_pipe = 4 * all_reduce_s(part, MeshLinks.of(topology, mesh).rings["pipe"])
    layers = 8 / mesh.pipe * times.exchange
    assert seconds["tensor"] == pytest.approx(m * (layers + times.edge_exchange - over_pipe))
    hops = 2 * times.hops[0] if mesh.pipe == 4 else times.hops[0]
    assert seconds["pipe"] == pytest.approx(m * (over_pipe + hops))


def test_traffic_counts_the_bytes_that_the_busiest_device_sends():
    """An inner rank of an interleaved pipeline sends on and back in each of its stages, the last stage's only back."""
    placement = place_layers((0, 1, 2, 3) * 2, 8)
    sizes = {"num_microbatches": 8, "recompute": "none", "num_parameters": 1000}
    inside = model().traffic(MeshConfig(pipe=4), placement=placement, **sizes)
    assert [(each.axis, each.link, each.bytes) for each in inside] == [
        ("pipe", FAST, 8 * (4 * RESIDUAL + 4 * 2 * 3 / 4 * RESIDUAL))
    ]
    mesh = MeshConfig(data=2, pipe=4, outermost="pipe")  # two ranks of two replicas on each fast link
    data, fast, slow = model().traffic(mesh, placement=placement, **(sizes | {"num_microbatches": 4}))
    assert (data.axis, data.link, data.bytes) == ("data", FAST, 1000 * 8 / 2)
    # Between the ranks 1 and 2 two messages each way, and from 3 to 0 one on and one back; over the ring of two servers
    # half of what a rank has left, a half.
    assert (slow.link, slow.bytes) == (SLOW, 4 * (2 * RESIDUAL + 4 * 2 / 2 * RESIDUAL / 2))
    assert (fast.link, fast.bytes) == (FAST, 4 * (2 * RESIDUAL + 4 * 2 / 2 * RESIDUAL))
