"""In the step compiled for TPUs, and for GPUs, every hop between stages travels beside a whole slot of work.

The order of a tick's operations decides that and is fragile, so it is read off the program that XLA has scheduled: each
hop is asynchronous, and between its start and its end stand the matrix products of a stage's pass.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from fiddlex.config import Config, MeshConfig
from fiddlex.costs.backend import GPU, TPU
from fiddlex.planner.predict import needed_memory
from tests.compiling import answer_of, needs_cuda_plugin

PROGRAM = """
import json, sys
from fiddlex.config import Config
from fiddlex.cluster.mesh import make_topology_mesh
from fiddlex.xla.ahead_of_time import compile_ahead, report

config = Config.from_json(sys.argv[1]).validate()
print(json.dumps(report(config, compile_ahead(config, make_topology_mesh(config.mesh, sys.argv[2])))))
"""
SEVERAL_AT_ONCE = "--xla_gpu_experimental_parallel_collective_overlap_limit=4"  # that XLA lets run beside one another
PRODUCTS_OF_THE_HEAD = 3  # logits, and the gradients of both factors
PRODUCTS_OF_A_LAYER = 5  # queries, keys and values; the kernel of attention; projection; two of the MLP


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


@pytest.fixture
def facts(tmp_path: pathlib.Path) -> Callable[..., dict[str, Any]]:
    """What is told of a config's step that is compiled for a topology, without the tests' own XLA flags."""
    return functools.partial(answer_of, PROGRAM, tmp_path)


def check_hops(found: dict[str, Any], config: Config, ticks: float, *, least: int = PRODUCTS_OF_A_LAYER) -> None:
    hops = [each for each in found["collectives"] if each["kind"] == "collective-permute"]
    assert len(hops) == 2
    assert max(hop["products"] for hop in hops) >= PRODUCTS_OF_A_LAYER
    for hop in hops:
        assert hop["overlapped"]
        assert hop["products"] >= least
        activation = 2 * config.model.seq_len * config.model.hidden_size * config.microbatch_size
        assert (hop["axis"], hop["count"], hop["bytes"]) == ("pipe", ticks, activation)


@pytest.mark.parametrize(
    ("schedule", "chunks", "recompute"),
    [
        ("1f1b", 1, "none"),
        pytest.param("1f1b", 1, "full", marks=pytest.mark.long),
        pytest.param("interleaved_1f1b", 2, "none", marks=pytest.mark.long),
        pytest.param("interleaved_1f1b", 2, "full", marks=pytest.mark.long),
    ],
)
def test_every_hop_has_a_slot_of_work_beside_it(schedule: str, chunks: int, recompute: str, facts: Any) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    config = pipelined(schedule, chunks, recompute)
    found = facts(config, "tpu:v5e:2x4")
    check_hops(found, config, found["num_ticks"])
    assert found["fits"]
    assert found["memory_limit_bytes"] == pytest.approx(15.75 * 2**30)
    # Sums over the pipe: embeddings in and their gradients back, what is scored and its gradient.
    sums = [each for each in found["collectives"] if each["kind"] == "all-reduce" and each["axis"] == "pipe"]
    assert sum(each["count"] for each in sums if each["bytes"] == 2 * 256 * 256 * 2) == 4 * 8


@pytest.mark.parametrize(
    ("shape", "recompute"),
    [
        ("v5e:2x4", "none"),
        pytest.param("v5p:2x2x2", "none", marks=pytest.mark.long),
        pytest.param("v5p:2x2x2", "full", marks=pytest.mark.long),
    ],
)
def test_parts_of_the_sequence_travel_beside_the_products_of_others(shape: str, recompute: str, facts: Any) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    config = pipelined("1f1b", 1, recompute)
    config.model.hidden_size, config.model.seq_len = 2048, 2048
    config.mesh = MeshConfig(pipe=2, tensor=4, sequence_parallel=True, collective_matmul=True)
    config.data.global_batch_size = 8
    found = [each for each in facts(config.validate(), f"tpu:{shape}")["collectives"] if each["axis"] == "tensor"]
    half = 2 * 2048 * 2048 // 4 // 2  # bytes of half of a part; XLA's own permutes, for sums, are smaller
    hops = [each for each in found if (each["kind"], each["bytes"]) == ("collective-permute", half)]
    # Each half of a part makes three hops; a layer has four rings forward and six backward, and recomputes three: the
    # result of its last product is not needed again.
    number = 2 * 3 * (13 if recompute == "full" else 10) * 8 * 4
    assert sum(each["count"] for each in hops) == number
    assert sum(each["count"] for each in hops if each["overlapped"]) >= 0.95 * number
    assert sum(each["count"] for each in hops if each["products"]) >= 0.7 * number
    # What is left: a microbatch's embedding, the head's input and the gradients of both; gradients after all of them.
    others = sum(each["count"] for each in found if each["kind"] != "collective-permute" and each["bytes"] > 2**20)
    assert others == 4 * 8 + 1


@pytest.mark.long
@needs_cuda_plugin
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_blocks_of_the_sequence_travel_beside_the_products_of_others(recompute: str, facts: Any) -> None:
    config = pipelined("1f1b", 1, recompute)
    config.model.hidden_size, config.model.seq_len = 2048, 2048
    config.mesh = MeshConfig(pipe=2, tensor=4, sequence_parallel=True, collective_matmul=True)
    config.data.global_batch_size = 8
    found = [each for each in facts(config.validate(), "gpu:h100:1x8")["collectives"] if each["axis"] == "tensor"]
    block, layers = 2 * 2048 * 2048 // 8, 8 * 4  # bytes of a block of all ranks; layers of all microbatches of a rank
    blocks = [each for each in found if each["kind"] != "all-reduce" and each["bytes"] == block]
    # A layer has four exchanges of eight blocks each way, and recomputes three.
    number = 8 * (11 if recompute == "full" else 8) * layers
    assert sum(each["count"] for each in blocks) == number
    assert sum(each["count"] for each in blocks if each["overlapped"]) >= 0.85 * number
    assert sum(each["count"] for each in found if each["bytes"] == 8 * block and each["overlapped"]) >= 2 * layers


def check_host_copies(found: dict[str, Any]) -> None:
    """Each array that a layer saves is spilled beside a forward slot and fetched beside a backward slot."""
    there, back = ([each for each in found["host_copies"] if each["to_host"] is to_host] for to_host in (True, False))
    assert len(there) > 5
    assert sorted(each["bytes"] for each in there) == sorted(each["bytes"] for each in back)
    assert min(each["products"] for each in there) >= PRODUCTS_OF_A_LAYER
    assert min(each["products"] for each in back) >= PRODUCTS_OF_A_LAYER


@pytest.mark.parametrize(
    ("schedule", "chunks", "semantics"),
    [
        ("1f1b", 1, "sync"),
        pytest.param("1f1b", 1, "2bw", marks=pytest.mark.long),
        pytest.param("interleaved_1f1b", 2, "sync", marks=pytest.mark.long),
        pytest.param("gpipe", 1, "sync", marks=pytest.mark.long),
    ],
)
def test_spills_and_fetches_travel_beside_slots_of_work(schedule: str, chunks: int, semantics: str, facts: Any) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    config = pipelined(schedule, chunks, "none", semantics)
    config.pipeline.stash_memory = "host"
    found = facts(config, "tpu:v5e:2x4")
    check_host_copies(found)
    check_hops(found, config, 8 if semantics == "2bw" else found["num_ticks"])
    assert found["host_bytes"] == pytest.approx(needed_memory(config, TPU).of_host, rel=0.02)


@needs_cuda_plugin
@pytest.mark.parametrize("semantics", ["sync", pytest.param("2bw", marks=pytest.mark.long)])
def test_spills_and_fetches_of_gpus_travel_beside_slots_of_work(semantics: str, facts: Any) -> None:
    config = pipelined("1f1b", 1, "none", semantics)
    config.pipeline.stash_memory = "host"
    config.model.hidden_size, config.model.seq_len, config.model.vocab_size = 2048, 1024, 32_000
    found = facts(config, "gpu:h100:1x8")
    check_host_copies(found)
    assert found["host_bytes"] == pytest.approx(
        needed_memory(config, GPU).of_host, rel=0.02
    )  # XLA copies nothing there


@pytest.mark.long
@needs_cuda_plugin
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2)])
def test_hops_on_gpus_have_work_beside_them_once_several_collectives_may_be_under_way(
    schedule: str, chunks: int, facts: Any
) -> None:
    config = pipelined(schedule, chunks, "none")
    config.model.hidden_size, config.model.seq_len, config.model.vocab_size = 2048, 1024, 32_000
    found = facts(config, "gpu:h100:2x4", xla_flags=SEVERAL_AT_ONCE)
    check_hops(found, config, found["num_ticks"])
    assert found["fits"]
    assert found["memory_limit_bytes"] > 80e9


@needs_cuda_plugin
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_of_one_tick_compiles_for_gpus(recompute: str, tiny_config: Config, facts: Any) -> None:
    """There XLA knows how often the loops over layers run, and looks for where each turn reads the stash."""
    tiny_config.pipeline.recompute = recompute
    found = facts(tiny_config.validate(), "gpu:h100:1x1")
    assert found["num_ticks"] == 1
    assert found["fits"]


@pytest.mark.long
def test_without_a_flush_hops_are_counted_by_the_ticks_of_a_batch(facts: Any) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    config = pipelined("1f1b", 1, "none", semantics="2bw")
    found = facts(config, "tpu:v5e:2x4")
    assert found["semantics"] == {"2bw": 8}
    check_hops(found, config, 8, least=PRODUCTS_OF_THE_HEAD)  # XLA starts the hop of gradients after the forward slot
