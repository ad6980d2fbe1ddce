"""The checksum of an array is the same on devices and by numpy, and no single change escapes it."""

import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from fiddlex.train.run.checkpoints import checksums as module
from fiddlex.train.run.checkpoints.checksums import checksum_of_stored, checksums

DTYPES = [np.float32, jnp.bfloat16, np.float16, np.int32]
SPECIAL = [0.0, -0.0, 1e-41, -1e-39, 6e-8, 1.0, -2.5, np.inf, -np.inf]  # denormal in float32, in bfloat16, in float16


def on_device(x: np.ndarray) -> int:
    return checksums({"x": jnp.asarray(x)})["x"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@hypothesis.given(data=st.data())
def test_devices_and_numpy_agree(dtype: type, data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(), (1,), (7,), (3, 4), (2, 3, 5), (2, 1, 2, 3), (0, 3), (3, 0)]))
    numbers = data.draw(arrays.arrays(np.float64, shape, elements=st.sampled_from(SPECIAL)))
    x = np.nan_to_num(numbers, posinf=9, neginf=-9).astype(dtype) if dtype is np.int32 else numbers.astype(dtype)
    assert checksum_of_stored(x) == on_device(x)


@pytest.mark.parametrize("shape", [(1, 50), (50, 1), (6, 17), (2, 3, 4, 5)])
def test_blocks_give_the_sum_of_the_whole(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    whole = checksum_of_stored(x)
    monkeypatch.setattr(module, "_BLOCK", 7)
    assert checksum_of_stored(x) == whole == on_device(x)


@hypothesis.given(place=st.integers(0, 23), bit=st.integers(0, 31))
def test_a_flipped_bit_changes_the_checksum(place: int, bit: int) -> None:
    """A zero that becomes a denormal number too, which XLA on CPUs takes for zero."""
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    x[1] = 0
    changed = x.copy()
    changed.view(np.uint32).reshape(-1)[place] ^= np.uint32(1 << bit)
    sign_of_zero = x.flat[place] == 0 and bit == 31
    assert (on_device(changed) == on_device(x)) == sign_of_zero
    assert (checksum_of_stored(changed) == checksum_of_stored(x)) == sign_of_zero
