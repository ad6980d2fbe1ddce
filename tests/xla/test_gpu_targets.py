"""What XLA makes of the descriptions of GPUs."""

import json
import pathlib

from tests.compiling import needs_cuda_plugin
from tests.programs import call

PROGRAM = """
import json, re
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from fiddlex.cluster.mesh import make_topology_mesh
from fiddlex.config import MeshConfig

def product(x_MK, y_NK):
    return jax.lax.dot_general(x_MK, y_NK, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)

found = {}
for name in ("a100", "h100", "h200", "b200", "gb200"):
    everywhere = NamedSharding(make_topology_mesh(MeshConfig(), f"gpu:{name}:1x1"), PartitionSpec())
    x = jax.ShapeDtypeStruct((256, 256), jnp.float8_e4m3fn, sharding=everywhere)
    text = jax.jit(product, out_shardings=everywhere).lower(x, x).compile().as_text()
    found[name] = re.findall(r'custom_call_target="([^"]+)"', text)
print(json.dumps(found))
"""


@needs_cuda_plugin
def test_gpus_with_units_for_float8_multiply_it_in_cublaslt(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    done = call(path, environment={"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"})
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("a100") == ["__cublas$lt$matmul"]
    assert set(map(tuple, found.values())) == {("__cublas$lt$matmul$f8",)}
