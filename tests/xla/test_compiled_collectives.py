"""Collectives of small programs in the words of XLA's backends; `tests/xla/test_ahead_of_time.py` has truly compiled
ones."""

import pytest

from fiddlex.xla.compiled_collectives import Collective, collectives
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


LOOP = """\
%body (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8] parameter(0)
  %hop = f32[8,8] collective-permute(%p), source_target_pairs={{{{0,1}},{{1,0}}}}
  ROOT %y = f32[4,8] conditional(%p), branch_computations={{%wrapped, %wrapped}}, metadata={{op_name="forward/cond"}}
}}

%less (q: f32[8,8]) -> pred[] {{
  %q = f32[8,8] parameter(0)
  %bound = s32[] {bound}
  ROOT %lt = pred[] compare(%q, %bound), direction=LT
}}

ENTRY"""


@pytest.mark.parametrize(
    ("bound", "runs", "hops", "scatters"),
    [
        ("constant(10)", {}, 10, 20),  # both branches, each at most so often
        ("constant(10)", {"forward": 8}, 10, 16),
        ("constant(10)", {"forward": 8, "ticks": 99}, 10, 16),
        ("parameter(1)", {"forward": 8, "ticks": 10.5}, 10.5, 16),
        ("parameter(1)", {"forward": 8}, None, 16),
        ("parameter(1)", {}, None, None),
    ],
)
def test_counts(bound, runs, hops, scatters):
    loop = '%loop = f32[8,8] while(%x), condition=%less, body=%body, metadata={op_name="step/ticks/while"}'
    text = entry(loop).replace("ENTRY", LOOP.format(bound=bound))
    found = {each.kind: each.count for each in collectives(text, MESH, runs)}
    assert found == {"collective-permute": hops, "reduce-scatter": scatters}


def test_leaves_out_what_moves_nothing():
    alone = "%sum = f32[8,8] all-reduce(%x), replica_groups={{0},{1},{2},{3}}, to_apply=%add"
    itself = "%hop = f32[8,8] collective-permute(%x), source_target_pairs={{0,0},{1,1}}"
    assert collectives(entry(alone, itself), MESH, {}) == []


def test_groups_in_words_that_are_not_known():
    found = only(entry("%sum = f32[8,8] all-reduce(%x), replica_groups=some(0,1), to_apply=%add"))
    assert (found.axis, found.group_size, found.bytes) == (None, None, 256)
