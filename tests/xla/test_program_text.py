import pytest

from fiddlex.xla.program_text import element, nbytes, read

# The forms that XLA's backends print, cut down: a loop of known length around a conditional, with products below both.
TEXT = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8,8]{1,0})->f32[8,8]{1,0}}

FileNames
1 "step.py"

%less (p: (s32[], f32[8,8])) -> pred[] {
  %p = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)}) parameter(0)
  %bound = s32[]{:T(128)} constant(5), metadata={op_name="jit(step)/while/cond"}
  %index = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%index, %bound), direction=LT, metadata={op_name="jit(step)/ticks/while/cond/lt"}
}

%idle (q: f32[8,8]) -> f32[8,8] {
  ROOT %q = f32[8,8]{1,0} parameter(0)
}

%fused (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %once = f32[8,8]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
  ROOT %twice = f32[8,8]{1,0} dot(%once, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%busy (r: f32[8,8]) -> f32[8,8] {
  %r = f32[8,8]{1,0} parameter(0)
  %gemm = (f32[8,8]{1,0}, s8[64]{0}) custom-call(%r, /*index=1*/%r), custom_call_target="__cublas$gemm"
  %got = f32[8,8]{1,0} get-tuple-element(%gemm), index=0
  ROOT %sum = f32[8,8]{1,0:T(8,128)S(1)} fusion(%got, %r), kind=kOutput, calls=%fused, metadata={op_name="a/b"}
}

%body (p.1: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %p.1 = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p.1), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%p.1), index=1
  %y = f32[8,8]{1,0} conditional(%i, %x, %x), branch_computations={%idle, %busy}, metadata={op_name="s/forward/cond"}
  ROOT %t = (s32[], /*index=1*/f32[8,8]{1,0}) tuple(%i, %y)
}

ENTRY %main (x.1: f32[8,8]) -> f32[8,8] {
  %x.1 = f32[8,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], f32[8,8]{1,0}) tuple(%zero, %x.1)
  %loop = (s32[], f32[8,8]{1,0}) while(%init), condition=%less, body=%body, metadata={op_name="jit(step)/ticks/while"}
  ROOT %out = f32[8,8]{1,0} get-tuple-element(%loop), index=1
}
"""
KNOWN = 'condition=%less, body=%body, backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0"}}'


def instruction(text: str, name: str):
    return next(each for body in read(text).computations.values() for each in body if each.name == name)


def test_reads_computations_in_the_order_of_the_schedule():
    program = read(TEXT)
    assert program.entry == "main"
    assert set(program.computations) == {"less", "idle", "fused", "busy", "body", "main"}
    assert [each.opcode for each in program.computations["busy"]] == [
        *("parameter", "custom-call", "get-tuple-element", "fusion")
    ]
    total = program.computations["busy"][-1]
    assert (total.shape, total.operands, total.is_root) == (
        "f32[8,8]{1,0:T(8,128)S(1)}",
        (("got", ()), ("r", ())),
        True,
    )
    assert instruction(TEXT, "gemm").operands == (("r", ()), ("r", ()))
    assert instruction(TEXT, "gemm").shape == "(f32[8,8]{1,0}, s8[64]{0})"


def test_lines_of_a_kernel_end_neither_its_instruction_nor_the_computation() -> None:
    """As XLA writes a kernel that Pallas makes for TPUs."""
    metadata = 'metadata={op_name="jit(step)/layers/kernel/pallas_call"}'
    lines = [
        'custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={',
        '"xprof_metadata":"{\\"block_q\\": 512}"',
        f"}}}}, {metadata}",
    ]
    text = TEXT.replace('custom_call_target="__cublas$gemm"', "\n".join(lines))
    program = read(text)
    assert [each.name for each in program.computations["busy"]] == ["r", "gemm", "got", "sum"]
    kernel = instruction(text, "gemm")
    assert (kernel.scope, program.products(kernel)) == ("kernel", 1)


def test_knows_what_calls_what_and_its_scope():
    loop, branches = instruction(TEXT, "loop"), instruction(TEXT, "y")
    assert loop.called() == ["body"]
    assert loop.called("condition") == ["less"]
    assert branches.called() == ["idle", "busy"]
    assert instruction(TEXT, "sum").called() == ["fused"]
    assert (loop.scope, branches.scope, instruction(TEXT, "i").scope) == ("ticks", "forward", "")


@pytest.mark.parametrize(
    ("old", "new", "trips"),
    [
        ("", "", 5),
        ("condition=%less, body=%body", KNOWN, 7),
        ("constant(5)", "parameter(1)", None),  # a bound that is data
        ("direction=LT", "direction=GE", None),
    ],
)
def test_trips_of_a_loop(old, new, trips):
    text = TEXT.replace(old, new)
    assert read(text).trips(instruction(text, "loop")) == trips


def test_counts_the_products_of_the_largest_branch():
    program = read(TEXT)
    counts = {name: program.products(instruction(TEXT, name)) for name in ("loop", "y", "sum", "gemm", "got")}
    assert counts == {"loop": 3, "y": 3, "sum": 2, "gemm": 1, "got": 0}


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[2,3]{1,0:T(8,128)(2,1)S(1)}", 24),
        ("(bf16[4], /*index=1*/pred[3]{0:T(512)}, u32[]{:S(2)})", 15),
        ("f8e4m3fn[5]", 5),
        ("s4[3]", 2),
        ("c128[2]", 32),
        ("(token[], f32[0,7])", 0),
        ("f32[<=16]", 64),
    ],
)
def test_bytes_of_a_shape(shape, size):
    assert nbytes(shape) == size


def test_an_operand_may_be_an_element_of_a_tuple() -> None:
    """As XLA writes it from jax 0.12 on, in place of instructions that take the element."""
    text = TEXT.replace("%got = f32[8,8]{1,0} get-tuple-element(%gemm), index=0\n  ", "").replace(
        "(%got, %r)", "(%gemm#0, %r)"
    )
    assert instruction(text, "sum").operands == (("gemm", (0,)), ("r", ()))
    pair = "(s32[]{:T(128)}, /*index=1*/(pred[2,256]{1,0:T(4,128)(4,1)S(1)}, f32[8]{0}))"
    assert element(pair, ()) == pair
    assert element(pair, (0,)) == "s32[]{:T(128)}"
    assert element(pair, (1, 0)) == "pred[2,256]{1,0:T(4,128)(4,1)S(1)}"
    assert nbytes(element(pair, (1,))) == 2 * 256 + 8 * 4
