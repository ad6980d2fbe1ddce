"""Collectives of small programs in the words of XLA's backends; `tests/xla/test_ahead_of_time.py` has truly compiled
ones."""

import pytest

from fiddlex.xla.compiled_collectives import Collective, collectives, crossings
from fiddlex.xla.device_groups import Places

MESH = Places({"data": 2, "pipe": 2, "tensor": 1}, granules=(0, 0, 1, 1), ids=(0, 1, 2, 3))
PAIRS = "source_target_pairs={{0,1},{1,0},{2,3},{3,2}}"
COMPUTATIONS = """\
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%products (c: f32[8,8]) -> f32[8,8] {
  %c = f32[8,8]{1,0} parameter(0)
  ROOT %once = f32[8,8]{1,0} dot(%c, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%elementwise (d: f32[8,8]) -> f32[8,8] {
  %d = f32[8,8]{1,0} parameter(0)
  ROOT %more = f32[8,8]{1,0} multiply(%d, %d)
}

%small (e: f32[8,8]) -> f32[4,8] {
  %e = f32[8,8]{1,0} parameter(0)
  %part = f32[4,8]{1,0} slice(%e), slice={[0:4], [0:8]}
  ROOT %less = f32[4,8]{1,0} multiply(%part, %part)
}

%put (f: f32[2,8,8], g: f32[8,8]) -> f32[2,8,8] {
  %f = f32[2,8,8]{2,1,0} parameter(0)
  %g = f32[8,8]{1,0} parameter(1)
  ROOT %placed = f32[2,8,8]{2,1,0} dynamic-update-slice(%f, %g)
}

%wrapped (h: f32[8,8]) -> f32[4,8] {
  %h = f32[8,8]{1,0} parameter(0)
  ROOT %scattered = f32[4,8]{1,0} reduce-scatter(%h), replica_groups={{0,2},{1,3}}, dimensions={0}, to_apply=%add
}

"""


def entry(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in ("%x = f32[8,8]{1,0} parameter(0)", *lines))
    return f"HloModule jit_step\n\n{COMPUTATIONS}ENTRY %main (x: f32[8,8]) -> f32[8,8] {{\n{body}\n}}\n"


def only(text: str, **runs: float) -> Collective:
    (found,) = collectives(text, MESH, runs)
    return found


@pytest.mark.parametrize(
    ("line", "kind", "axis", "size"),
    [
        ("f32[8,8] all-reduce(%x), replica_groups={{0,2},{1,3}}, to_apply=%add", "all-reduce", "data", 256),
        (
            "(f32[8,8], f32[8,8]) all-reduce(%x, %x), replica_groups=[2,2]<=[4], to_apply=%add",
            "all-reduce",
            "pipe",
            512,
        ),
        ("f32[16,8] all-gather(%x), replica_groups=[2,2]<=[4], dimensions={0}", "all-gather", "pipe", 512),
        (
            "f32[2,8] reduce-scatter(%x), replica_groups={}, dimensions={0}, to_apply=%add",
            "reduce-scatter",
            "several",
            256,
        ),
        ("f32[8,8] all-to-all(%x), replica_groups={{0,1},{2,3}}, dimensions={0}", "all-to-all", "pipe", 256),
        (f"f32[8,8] collective-permute(%x), {PAIRS}", "collective-permute", "pipe", 256),
    ],
)
def test_synchronous_collectives(line, kind, axis, size):
    found = only(entry(f"%moved = {line}", "ROOT %y = f32[8,8] fusion(%x), kind=kLoop, calls=%products"))
    assert (found.kind, found.axis, found.bytes, found.count) == (kind, axis, size, 1)
    assert found.group_size == (4 if axis == "several" else 2)
    assert (found.overlapped, found.products) == (False, 0)


BESIDE = {
    "nothing": ("", False, 0),
    "products": ("%y = f32[8,8] fusion(%x), kind=kOutput, calls=%products", True, 1),
    "a conditional": ("%y = f32[8,8] conditional(%x, %x, %x), branch_computations={%elementwise, %products}", True, 1),
    "arithmetic": ("%y = f32[8,8] fusion(%x), kind=kLoop, calls=%elementwise", True, 0),
    "arithmetic on less": ("%y = f32[4,8] fusion(%x), kind=kLoop, calls=%small", False, 0),
    "another's memory": ("%y = f32[2,8,8] fusion(%x, %x), kind=kLoop, calls=%put", False, 0),
    "a product of a library": ('%y = f32[8,8] custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"', True, 1),
    "a kernel on a TPU": ('%y = f32[8,8] custom-call(%x), custom_call_target="tpu_custom_call"', True, 1),
    "a copy": ("%y = (f32[8,8], f32[8,8], u32[]) copy-start(%x)", False, 0),
}


@pytest.mark.parametrize("beside", BESIDE)
def test_what_stands_between_start_and_end(beside):
    line, overlapped, products = BESIDE[beside]
    hop = f"%hop = (f32[8,8], f32[8,8], u32[], u32[]) collective-permute-start(%x), {PAIRS}"
    done = "%done = f32[8,8] collective-permute-done(%hop)"
    found = only(entry(hop, line, done))
    assert (found.kind, found.bytes, found.overlapped, found.products) == (
        "collective-permute",
        256,
        overlapped,
        products,
    )
    apart = only(entry(hop, done, line))
    assert (apart.overlapped, apart.products) == (False, 0)


def test_a_start_that_the_backend_marks_as_synchronous_is_not_overlapped():
    marked = '%sum = f32[8,8] all-reduce-start(%x), replica_groups={}, to_apply=%add, backend_config={"is_sync":true}'
    found = only(entry(marked, BESIDE["products"][0], "%done = f32[8,8] all-reduce-done(%sum)"))
    assert (found.kind, found.overlapped) == ("all-reduce", False)


def test_collectives_in_a_wrapper():
    start = "%start = ((f32[8,8]), f32[4,8], u32[]) async-start(%x), calls=%wrapped"
    update = "%update = ((f32[8,8]), f32[4,8], u32[]) async-update(%start)"
    found = only(entry(start, update, BESIDE["products"][0], "%done = f32[4,8] async-done(%update)"))
    assert (found.kind, found.axis, found.bytes, found.count) == ("reduce-scatter", "data", 256, 1)
    assert found.overlapped
    inside = only(entry("%start = f32[4,8] fusion(%x), kind=kCustom, calls=%wrapped"))
    assert (inside.kind, inside.overlapped) == ("reduce-scatter", False)


FUSIONS = """\
%begun (x.1: f32[4,8]) -> (f32[4,8], u32[]) {
  %x.1 = f32[4,8]{1,0} parameter(0)
  %copy.1 = f32[8,8]{1,0} all-gather(%x.1), replica_groups={{0,2},{1,3}}, frontend_attributes={chain_id="0"}
  ROOT %start = (f32[4,8], u32[]) custom-call(%copy.1), custom_call_target="AsyncCollectiveStart"
}

%going (x.2: f32[4,8], y.2: f32[8,8]) -> (f32[8,8], f32[4,8]) {
  %x.2 = f32[4,8]{1,0} parameter(0)
  %y.2 = f32[8,8]{1,0} parameter(1)
  %copy.2 = f32[8,8]{1,0} all-gather(%x.2), replica_groups={{0,2},{1,3}}, frontend_attributes={chain_id="0"}
  %product = f32[8,8]{1,0} convolution(%y.2, %y.2), dim_labels=bf_io->bf
  ROOT %both = (f32[8,8], f32[4,8]) tuple(%product, %x.2)
}

%ended (x.3: f32[4,8]) -> f32[8,8] {
  %x.3 = f32[4,8]{1,0} parameter(0)
  %copy.3 = f32[8,8]{1,0} all-gather(%x.3), replica_groups={{0,2},{1,3}}, frontend_attributes={chain_id="0"}
  ROOT %done = f32[8,8] custom-call(%x.3, %copy.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY"""


@pytest.mark.parametrize("beside", [True, False])
def test_a_collective_that_several_fusions_run_is_one(beside: bool) -> None:
    """As XLA for TPUs fuses an all-gather with a product that does not need it."""
    lines = [
        "%part = f32[4,8] slice(%x), slice={[0:4], [0:8]}",
        "%begin = (f32[4,8], u32[]) fusion(%part), kind=kCustom, calls=%begun",
        "%sent = f32[4,8] get-tuple-element(%begin), index=0",
        *["%go = (f32[8,8], f32[4,8]) fusion(%sent, %x), kind=kOutput, calls=%going"] * beside,
        *["%on = f32[4,8] get-tuple-element(%go), index=1"] * beside,
        f"%end = f32[8,8] fusion({'%on' if beside else '%sent'}), kind=kCustom, calls=%ended",
    ]
    found = only(entry(*lines).replace("ENTRY", FUSIONS))
    assert (found.name, found.kind, found.axis, found.bytes) == ("begin", "all-gather", "data", 256)
    assert (found.overlapped, found.products) == (beside, int(beside))


SCATTER = """\
%all-reduce-scatter.3 (x.4: f32[6,8]) -> f32[3,8] {
  %x.4 = f32[6,8]{1,0} parameter(0)
  %padded = f32[8,8]{1,0} pad(%x.4), padding=0_2x0_0
  %all-reduce.2 = f32[8,8]{1,0} all-reduce(%padded), replica_groups={{0,2},{1,3}}, to_apply=%add
  ROOT %mine = f32[3,8]{1,0} dynamic-slice(%all-reduce.2), dynamic_slice_sizes={3,8}
}

"""


def test_a_fusion_that_scatters_a_sum_is_a_reduce_scatter_of_what_it_leaves() -> None:
    """As libtpu 0.0.52 compiles a product for v5p whose sum is scattered."""
    lines = [
        "%part = f32[6,8] slice(%x), slice={[0:6], [0:8]}",
        "%scattered = f32[3,8] fusion(%part), kind=kCustom, calls=%all-reduce-scatter.3",
        BESIDE["products"][0],
        # Another collective that needs the result: the reduce-scatter is not beside what that one is beside.
        "%four = f32[4,8] pad(%scattered), padding=0_1x0_0",
        "%begin = (f32[4,8], u32[]) fusion(%four), kind=kCustom, calls=%begun",
        "%sent = f32[4,8] get-tuple-element(%begin), index=0",
        "%end = f32[8,8] fusion(%sent), kind=kCustom, calls=%ended",
    ]
    scatter, gather = collectives(entry(*lines).replace("ENTRY", SCATTER + FUSIONS), MESH, {})
    assert (scatter.name, scatter.kind, scatter.axis, scatter.group_size) == ("scattered", "reduce-scatter", "data", 2)
    assert (scatter.bytes, scatter.count) == (2 * 3 * 8 * 4, 1)
    assert (scatter.overlapped, scatter.products) == (False, 0)
    assert gather.kind == "all-gather"


LOOP = """\
%turn (s: f32[4,8]) -> f32[8,8] {{
  %s = f32[4,8] parameter(0)
  ROOT %gathered = f32[8,8] all-gather(%s), replica_groups={{{{0,2}},{{1,3}}}}, dimensions={{0}}
}}

%some (r: f32[8,8]) -> pred[] {{
  %r = f32[8,8] parameter(0)
  %turns = s32[] parameter(1)
  ROOT %fewer = pred[] compare(%r, %turns), direction=LT
}}

%body (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8] parameter(0)
  %hop = f32[8,8] collective-permute(%p), source_target_pairs={{{{0,1}},{{1,0}}}}
  %y = f32[4,8] conditional(%p), branch_computations={{%wrapped, %wrapped}}, metadata={{op_name="embed/cond"}}
  ROOT %z = f32[8,8] while(%y), condition=%some, body=%turn, metadata={{op_name="ticks/forward/while"}}
}}

%less (q: f32[8,8]) -> pred[] {{
  %q = f32[8,8] parameter(0)
  %bound = s32[] {bound}
  ROOT %lt = pred[] compare(%q, %bound), direction=LT
}}

ENTRY"""


@pytest.mark.parametrize(
    ("bound", "runs", "hops", "scatters", "gathers"),
    [
        ("constant(10)", {}, 10, 20, None),  # both branches, each at most so often
        ("constant(10)", {"embed": 8}, 10, 16, None),
        ("constant(10)", {"embed": 8, "forward": 24, "ticks": 99}, 10, 16, 24),
        ("parameter(1)", {"embed": 8, "forward": 0, "ticks": 11}, 11, 16, 0),
        ("parameter(1)", {"embed": 8}, None, 16, None),
        ("parameter(1)", {}, None, None, None),
    ],
)
def test_counts(bound, runs, hops, scatters, gathers):
    loop = '%loop = f32[8,8] while(%x), condition=%less, body=%body, metadata={op_name="step/ticks/while"}'
    text = entry(loop).replace("ENTRY", LOOP.format(bound=bound))
    found = {each.kind: each.count for each in collectives(text, MESH, runs)}
    assert found == {"collective-permute": hops, "reduce-scatter": scatters, "all-gather": gathers}


def test_a_loop_with_the_name_of_a_kernel_is_known_by_its_condition():
    """As libtpu 0.0.46 names the loop over the layers of a stage where attention runs in a kernel."""
    kernel = "jit(step)/shard_map/splash_mha_fwd_residuals/pallas_call"
    text = LOOP.replace("ticks/forward/while", kernel).replace(
        "direction=LT\n}}\n\n%body",
        'direction=LT, metadata={{op_name="jit(step)/shard_map/while/body/forward/while/cond/lt"}}\n}}\n\n%body',
    )
    loop = "%loop = f32[8,8] while(%x), condition=%less, body=%body"
    found = collectives(entry(loop).replace("ENTRY", text.format(bound="constant(10)")), MESH, {"forward": 24})
    assert {each.kind: each.count for each in found}["all-gather"] == 24


def test_leaves_out_what_moves_nothing():
    alone = "%sum = f32[8,8] all-reduce(%x), replica_groups={{0},{1},{2},{3}}, to_apply=%add"
    itself = "%hop = f32[8,8] collective-permute(%x), source_target_pairs={{0,0},{1,1}}"
    assert collectives(entry(alone, itself), MESH, {}) == []


def test_groups_in_words_that_are_not_known():
    found = only(entry("%sum = f32[8,8] all-reduce(%x), replica_groups=some(0,1), to_apply=%add"))
    assert (found.axis, found.group_size, found.bytes) == (None, None, 256)


@pytest.mark.parametrize(
    ("line", "crossing"),
    [
        ("f32[8,8] all-reduce(%x), replica_groups={{0,2},{1,3}}, to_apply=%add", 256),  # half of it on and back
        ("f32[8,8] all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add", 0),
        ("f32[8,8] all-reduce(%x), replica_groups={}, to_apply=%add", 128),  # each sends what it has reduced
        ("f32[16,8] all-gather(%x), replica_groups={{0,2},{1,3}}, dimensions={0}", 256),
        ("f32[2,8] reduce-scatter(%x), replica_groups={}, dimensions={0}, to_apply=%add", 64),
        ("f32[8,8] all-to-all(%x), replica_groups={}, dimensions={0}", 128),
        ("f32[8,8] collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3}}", 256),
        (f"f32[8,8] collective-permute(%x), {PAIRS}", 0),
        ("f32[8,8] all-reduce(%x), replica_groups=some(0,1), to_apply=%add", None),
    ],
)
def test_what_a_device_sends_to_other_hosts(line, crossing):
    sent = only(entry(f"%moved = {line}", "ROOT %y = f32[8,8] copy(%x)")).crossing_bytes
    assert (None if sent is None else sent.max()) == crossing


# Two slices of two devices, whose ids are 100000, 100001, 200000 and 200001; pipe is across.
SLICES = Places({"data": 2, "pipe": 2, "tensor": 1}, granules=(0, 1, 0, 1), ids=(100000, 200000, 100001, 200001))


def transfer(kind: str, target: str, *between: str) -> str:
    shapes = 'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
    name = f'{shapes}_xla_host_transfer_rendezvous="sum_0",_xla_megascale_target={target}'
    name += f',_xla_megascale_transfer_type="{kind}"}}'
    text = entry(
        "%after = token[] after-all()",
        f"%send = (f32[8,8]{{1,0}}, u32[], token[]) send(%x, %after), channel_id=2, {name}",
        f"%recv = (f32[8,8]{{1,0}}, u32[], token[]) recv(%after), channel_id=1, {name}",
        *between,
        "%sent = token[] send-done(%send), channel_id=2",
        "%received = (f32[8,8]{1,0}, token[]) recv-done(%recv), channel_id=1",
        BESIDE["products"][0],
    )
    return text.replace("HloModule jit_step", "HloModule jit_step, is_scheduled=true, num_partitions=2")


@pytest.mark.parametrize(
    ("kind", "target", "found"),
    [
        ("ALL_REDUCE", '"{1,2}x{0:1}"', ("all-reduce", "pipe", 2, 256, 256)),
        ("ALL_REDUCE", "{{100000,200000},{100001,200001}}", ("all-reduce", "pipe", 2, 256, 256)),
        ("ALL_GATHER", '"{1,2}x{0:1}"', ("all-gather", "pipe", 2, 512, 256)),
        ("REDUCE_SCATTER", '"{1,2}x{0:1}"', ("reduce-scatter", "pipe", 2, 256, 128)),
        ("ONE_TO_ONE", "{{100000->200000},{200001->100001}}", ("collective-permute", "pipe", 2, 256, 256)),
        ("ONE_TO_ONE", "{{100000->200001}}", ("collective-permute", "several", 2, 256, 256)),
        ("ALL_TO_ALL", '"some"', ("all-to-all", None, None, 256, None)),
    ],
)
def test_transfers_between_slices(kind, target, found):
    (one,) = collectives(transfer(kind, target), SLICES, {})
    sent = None if one.crossing_bytes is None else one.crossing_bytes.max()
    assert (one.kind, one.axis, one.group_size, one.bytes, sent) == found
    assert (one.count, one.overlapped) == (1, False)


def test_work_between_sending_to_another_slice_and_receiving_from_it():
    (one,) = collectives(transfer("ALL_REDUCE", '"{1,2}x{0:1}"', BESIDE["products"][0]), SLICES, {})
    assert (one.overlapped, one.products) == (True, 1)


def test_devices_of_a_slices_program_are_those_of_its_slice():
    text = entry("%sum = f32[8,8] all-reduce(%x), replica_groups={{0,1}}, to_apply=%add")
    (one,) = collectives(text.replace("jit_step", "jit_step, num_partitions=2"), SLICES, {})
    assert (one.axis, one.crossing_bytes.max()) == ("data", 0)
    assert collectives(text, SLICES, {})[0].axis == "pipe"


def test_the_device_that_sends_most_across_is_one_device():
    """A pipe of four ranks on two hosts sends forwards from rank 1 and backwards from rank 2, and sums over all."""
    pipe = Places({"data": 1, "pipe": 4, "tensor": 1}, granules=(0, 0, 1, 1), ids=(0, 1, 2, 3))
    forward = "%on = f32[8,8] collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3}}"
    backward = "%back = f32[8,8] collective-permute(%x), source_target_pairs={{1,0},{2,1},{3,2}}"
    reduced = "%sum = f32[8,8] all-reduce(%x), replica_groups={}, to_apply=%add"
    found = collectives(entry(forward, backward, reduced), pipe, {})
    assert crossings(found) == [("collective-permute", "pipe", 256), ("all-reduce", "pipe", 128)]
    assert crossings(found[:1]) == [("collective-permute", "pipe", 256)]
    assert crossings([]) == []
