"""Runs attention in the fused kernel of the device at hand, and compares it with attention that computes all scores.

    python -m experiments.on_device.flash DTYPE LENGTH HEAD_SIZE KIND

runs one case, forward and backward, on the first device of JAX_PLATFORMS, and prints a line of JSON. KIND is `causal`
(GPT) or `segments` (BERT, which masks between segments). The oracle computes all scores in float32, with products of
full float32 precision.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config, MeshConfig, ModelConfig
from fiddlex.errors import FiddlexError
from fiddlex.models.attention import attend
from fiddlex.models.context import AttentionKernel, Context
from fiddlex.models.flash import kernel_on, make_kernel

BATCH, HEADS = 2, 4
CAUSAL, SEGMENTS = "causal", "segments"
RESULTS = ("y", "dq", "dk", "dv")

# The kernel may be so many times as far from the oracle as attention that computes all scores in the kernel's dtype; in
# float32, where both are near it, the relative difference may be FLOAT32_LIMIT.
MOST_TIMES = 2.0
FLOAT32_LIMIT = 1e-5


def case_config(dtype: str, length: int, head_size: int, kind: str) -> Config:
    """A config with attention of this kind."""
    model = ModelConfig(num_heads=HEADS, hidden_size=HEADS * head_size, seq_len=length, dtype=dtype)
    if kind == SEGMENTS:
        model.family, model.objective = "bert", "mlm_nsp"
    return Config(model=model)


def compare(config: Config, kind: str) -> dict[str, Any]:
    """Runs a case.

    Returns:
      `kernel`, the name of the fused kernel; where it runs, `kernel_errors` and `open_errors`, the relative differences
      of y, dq, dk and dv from the oracle, with the kernel and with all scores in the same dtype; and `error`, where the
      kernel is too far from the oracle; else `skipped`, why there is no kernel.
    """
    mesh = make_mesh(MeshConfig())
    found, kernel = kernel_on(mesh, config, dropout=False), make_kernel(config, mesh)
    if kernel is None:
        return {"kernel": "", "skipped": found.reason}
    arrays = _drawn(config)
    with jax.default_matmul_precision("highest"):
        oracle = _passes(None, kind, mesh)(*arrays)
    dtype = jnp.dtype(config.model.dtype)
    q, k, v, segments, g = arrays
    given = [*(x.astype(dtype) for x in (q, k, v)), segments, g.astype(dtype)]
    errors = [_errors(_passes(each, kind, mesh)(*given), oracle) for each in (kernel, None)]
    facts: dict[str, Any] = {"kernel": found.name}
    facts |= dict(zip(("kernel_errors", "open_errors"), errors, strict=True))
    wrong = [name for name, ours, open_ in zip(RESULTS, *errors, strict=True) if not ours <= _most(config, open_)]
    if wrong:
        facts["error"] = f"too far from the oracle: {', '.join(wrong)}"
    return facts


def _most(config: Config, open_error: float) -> float:
    return FLOAT32_LIMIT if config.model.dtype == "float32" else MOST_TIMES * open_error


def _passes(kernel: AttentionKernel | None, kind: str, mesh: jax.sharding.Mesh) -> Any:
    """`(q, k, v, segments, g) -> [y, dq, dk, dv]`, compiled."""

    def passes(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, g: jax.Array) -> list[jax.Array]:
        own = segments if kind == SEGMENTS else None
        context = Context(False, kernel, causal=kind == CAUSAL, segments_BS=own)
        y, backward = jax.vjp(lambda q, k, v: attend(q, k, v, context).reshape(q.shape), q, k, v)
        return [y, *backward(g)]

    by_example = P(mesh.axis_names)
    return jax.jit(jax.shard_map(passes, mesh=mesh, in_specs=(by_example,) * 5, out_specs=[by_example] * 4))


def _drawn(config: Config) -> list[jax.Array]:
    """Float32 queries, keys and values, segments of random lengths, and a gradient of the result.

    Values are those of the config's dtype, so that rounding the inputs adds no difference.
    """
    model, random = config.model, np.random.default_rng(0)
    shape = (BATCH, model.seq_len, model.num_heads, model.head_size)
    q, k, v, g = (jnp.asarray(random.normal(size=shape), model.dtype).astype(jnp.float32) for _ in range(4))
    segments = np.sort(random.integers(0, 4, shape[:2]), axis=1)
    return [q, k, v, jnp.int32(segments), g]


def _errors(found: list[jax.Array], oracle: list[jax.Array]) -> list[float]:
    """For each array the norm of the difference, relative to the oracle's."""
    pairs = [[np.asarray(x, np.float64) for x in pair] for pair in zip(found, oracle, strict=True)]
    return [float(np.linalg.norm(ours - wanted) / np.linalg.norm(wanted)) for ours, wanted in pairs]


def main() -> None:
    """Runs the case of the command line."""
    dtype, length, head_size, kind = sys.argv[1:]
    print(json.dumps(compare(case_config(dtype, int(length), int(head_size), kind), kind)))


if __name__ == "__main__":
    try:
        main()
    except FiddlexError as error:
        sys.exit(str(error))
