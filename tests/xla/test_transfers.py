"""A step whose weights come from the host chunk by chunk, compiled for TPUs and for GPUs: its bytes, and its copies."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from fiddlex.config import Config
from fiddlex.costs.backend import backend_for
from fiddlex.planner.predict import needed_memory
from tests.compiling import answer_of, needs_cuda_plugin

PROGRAM = """
import json, re, sys
from fiddlex.config import Config
from fiddlex.cluster.mesh import make_topology_mesh
from fiddlex.xla.ahead_of_time import compile_ahead, memory
from fiddlex.xla.host_copies import host_copies

config = Config.from_json(sys.argv[1]).validate()
ahead = compile_ahead(config, make_topology_mesh(config.mesh, sys.argv[2]))
scopes = dict(re.findall(r'%([\\w.-]+) = .*op_name="([^"]*)"', ahead.text))
copies = [(scopes.get(each.name, ""), each.bytes, each.products) for each in host_copies(ahead.text)]
print(json.dumps({**memory(ahead.compiled), "copies": copies}))
"""
MATRICES = 4  # of a layer: queries, keys and values; projection; two of the MLP
PRODUCTS_OF_A_LAYER = 5


@pytest.fixture
def compiled(tmp_path: pathlib.Path) -> Callable[..., dict[str, Any]]:
    """The memory of a config's step that is compiled for a topology, and its copies to and from the host."""
    return functools.partial(answer_of, PROGRAM, tmp_path)


def config_of(stash_memory: str) -> Config:
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.num_heads = 24, 1024, 8
    config.model.vocab_size, config.model.seq_len, config.model.dtype = 1024, 256, "bfloat16"
    config.mesh.data, config.mesh.pipe = 2, 2
    config.pipeline.schedule, config.pipeline.num_chunks, config.pipeline.weights_memory = "breadth_first", 6, "host"
    config.pipeline.num_microbatches, config.data.global_batch_size = 4, 8
    config.pipeline.stash_memory, config.optimizer.offload = stash_memory, True
    return config.validate()


def check(found: dict[str, Any], config: Config, topology: str) -> None:
    predicted = needed_memory(config, backend_for(topology))
    assert found["host_bytes"] == pytest.approx(predicted.of_host, rel=0.02)
    assert found["peak_bytes"] == pytest.approx(predicted.peak, rel=0.1)
    # A matrix of the MLP in float32, of two layers, is the most that one copy has: the whole gradient of chunk 0.
    assert max(size for _, size, _ in found["copies"]) <= 4 * 2 * 4 * 1024**2
    for scope in ("load", "store"):
        of_periods = [products for name, _, products in found["copies"] if f"/periods/while/body/{scope}/" in name]
        assert len(of_periods) == MATRICES
        assert min(of_periods) >= PRODUCTS_OF_A_LAYER


@pytest.mark.parametrize("stash_memory", ["device", pytest.param("host", marks=pytest.mark.long)])
def test_tpus_load_and_store_rows_beside_ticks(stash_memory: str, compiled: Any) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    config = config_of(stash_memory)
    check(compiled(config, "tpu:v5e:2x2"), config, "tpu:v5e:2x2")


@needs_cuda_plugin
@pytest.mark.parametrize("stash_memory", ["device", pytest.param("host", marks=pytest.mark.long)])
def test_gpus_load_and_store_rows_beside_ticks(stash_memory: str, compiled: Any) -> None:
    config = config_of(stash_memory)
    check(compiled(config, "gpu:h100:1x4"), config, "gpu:h100:1x4")
