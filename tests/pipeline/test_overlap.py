"""In the step compiled for TPUs, and for GPUs, every hop between stages travels beside a whole slot of work.

The order of a tick's operations decides that and is fragile, so it is read off the program that XLA has scheduled: each
hop is asynchronous, and between its start and its end stand the matrix products of a stage's pass.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from fiddlex.config import Config
from tests.compiling import needs_cuda_plugin

# In a process of its own, since that for which to compile has to be set before jax starts.
PROGRAM = """
import json, sys
from fiddlex.config import Config
from fiddlex.mesh import make_topology_mesh
from fiddlex.train.ahead import compile_ahead, report

config = Config.from_json(sys.argv[1]).validate()
print(json.dumps(report(config, compile_ahead(config, make_topology_mesh(config.mesh, sys.argv[2])))))
"""
# Without the tests' own XLA flags.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
SEVERAL_AT_ONCE = "--xla_gpu_experimental_parallel_collective_overlap_limit=4"  # that XLA lets run beside one another
PRODUCTS_OF_A_LAYER = 6  # queries, keys and values; scores; values by scores; projection; two of the MLP


def pipelined(schedule: str, chunks: int, recompute: str, semantics: str = "sync") -> Config:
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.num_heads = 8, 256, 4
    config.model.vocab_size, config.model.seq_len, config.model.dtype = 1024, 256, "bfloat16"
    config.mesh.data, config.mesh.pipe = 2, 4
    config.pipeline.schedule, config.pipeline.num_chunks, config.pipeline.recompute = schedule, chunks, recompute
    config.pipeline.num_microbatches, config.data.global_batch_size = 8, 32
    config.pipeline.semantics = semantics
    config.optimizer.name = "sgd"  # the least to compile
    return config.validate()


def facts(config: Config, topology: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM, config.to_json(), topology]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, env=ENVIRONMENT | environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def check_hops(found: dict[str, Any], config: Config, ticks: float) -> None:
    hops = [each for each in found["collectives"] if each["kind"] == "collective-permute"]
    assert len(hops) == 2
    for hop in hops:
        assert hop["overlapped"]
        assert hop["products"] >= PRODUCTS_OF_A_LAYER
        activation = 2 * config.model.seq_len * config.model.hidden_size * config.microbatch_size
        assert (hop["axis"], hop["count"], hop["bytes"]) == ("pipe", ticks, activation)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2)])
def test_every_hop_has_a_slot_of_work_beside_it(schedule: str, chunks: int, recompute: str) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    config = pipelined(schedule, chunks, recompute)
    found = facts(config, "tpu:v5e:2x4")
    check_hops(found, config, found["num_ticks"])
    assert found["fits"]
    assert found["memory_limit_bytes"] == pytest.approx(15.75 * 2**30)
    # Sums over the pipe: embeddings in and their gradients back, what is scored and its gradient.
    sums = [each for each in found["collectives"] if each["kind"] == "all-reduce" and each["axis"] == "pipe"]
    assert sum(each["count"] for each in sums if each["bytes"] == 2 * 256 * 256 * 2) == 4 * 8


@pytest.mark.long
@needs_cuda_plugin
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2)])
def test_hops_on_gpus_have_work_beside_them_once_several_collectives_may_be_under_way(
    schedule: str, chunks: int
) -> None:
    config = pipelined(schedule, chunks, "none")
    config.model.hidden_size, config.model.seq_len, config.model.vocab_size = 2048, 1024, 32_000
    found = facts(config, "gpu:h100:2x4", XLA_FLAGS=SEVERAL_AT_ONCE)
    check_hops(found, config, found["num_ticks"])
    assert found["fits"]
    assert found["memory_limit_bytes"] > 80e9


def test_without_a_flush_hops_are_counted_by_the_ticks_of_a_batch() -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    config = pipelined("1f1b", 1, "none", semantics="2bw")
    found = facts(config, "tpu:v5e:2x4")
    assert found["semantics"] == {"2bw": 8}
    check_hops(found, config, 8)
