"""The copies between a device and its host are read off a program, each with the products beside it."""

from fiddlex.xla.host_copies import HostCopy, host_copies

TPU = """
HloModule jit_step, is_scheduled=true

%body (p: (f32[4,8]{1,0:S(5)}, f32[8,8]{1,0})) -> f32[8,8]{1,0} {
  %host = f32[4,8]{1,0:T(8,128)S(5)} parameter(0)
  %x = f32[8,8]{1,0} parameter(1)
  %place = s32[] constant(1)
  %value = f32[1,8]{1,0} slice(%x), slice={[0:1], [0:8]}
  %put = ((f32[4,8]{1,0:S(5)}, f32[1,8]{1,0}, s32[]), f32[4,8]{1,0:S(5)}, u32[]) async-start(%host, %value, %place)
  %dot.1 = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %dot.2 = f32[8,8]{1,0} dot(%dot.1, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %put-done = f32[4,8]{1,0:S(5)} async-done(%put)
  %get = ((f32[4,8]{1,0:S(5)}, s32[]), f32[1,8]{1,0}, u32[]{:S(2)}) async-start(%put-done, %place), calls=%b
  %get-done = f32[1,8]{1,0} async-done(%get)
  %near = (f32[8,8]{1,0:S(1)}, f32[8,8]{1,0}, u32[]{:S(2)}) copy-start(%dot.2)
  %near-done = f32[8,8]{1,0:S(1)} copy-done(%near)
  %far = (f32[8,8]{1,0:S(5)}, f32[8,8]{1,0}, u32[]{:S(2)}) copy-start(%dot.2)
  %dot.3 = f32[8,8]{1,0} dot(%dot.2, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %far-done = f32[8,8]{1,0:S(5)} copy-done(%far)
}
"""


def test_copies_have_a_direction_a_size_and_the_products_beside_them() -> None:
    assert host_copies(TPU) == [
        HostCopy("put", to_host=True, bytes=4 * 8, products=2),
        HostCopy("get", to_host=False, bytes=4 * 8, products=0),
        HostCopy("far", to_host=True, bytes=4 * 8 * 8, products=1),
    ]
