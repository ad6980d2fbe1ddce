"""Compiling ahead of time: what is told of memory is right, and a schedule takes the memory that it says it does."""

import importlib.util
import re
from typing import Any

import jax
import pytest

from experiments.memory_model import compiled_bytes
from fiddlex.cluster.mesh import make_mesh, make_topology_mesh
from fiddlex.config import Config, MeshConfig
from fiddlex.costs.sizes import model_flops
from fiddlex.errors import ConfigError, DeviceError
from fiddlex.train.step.program import Program
from fiddlex.train.trainer import Trainer
from fiddlex.xla.ahead_of_time import compile_ahead, memory, read_shortage, report
from fiddlex.xla.program_text import nbytes, read

NEW_WORDS = "Ran out of memory on HBM, the total memory required (33.19G) exceeds available HBM (15.75G)"


def pipelined(config: Config, schedule: str, *, microbatches: int, chunks: int = 1) -> Config:
    """A config whose stash is far larger than the workspace of a layer."""
    config.model.num_layers, config.model.hidden_size, config.model.seq_len = 16, 64, 64
    config.mesh.pipe, config.pipeline.schedule, config.pipeline.num_chunks = 4, schedule, chunks
    config.pipeline.num_microbatches, config.data.global_batch_size = microbatches, 2 * microbatches
    return config.validate()


def compiled(config: Config) -> jax.stages.Compiled:
    return compile_ahead(config, make_mesh(config.mesh)).compiled


def test_needs_no_data_and_tells_what_a_trainer_takes(tiny_config: Config) -> None:
    tiny_config.mesh.data, tiny_config.mesh.pipe, tiny_config.mesh.tensor = 2, 2, 2
    trainer = Trainer(tiny_config)
    list(trainer.steps(1))
    tiny_config.data.source = "tokens:/no/such/file"
    facts = report(tiny_config, compile_ahead(tiny_config, make_mesh(tiny_config.mesh)))
    state = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(trainer.state))
    batch = 3 * 4 * tiny_config.tokens_per_step // 2
    assert facts["argument_bytes"] == pytest.approx(state + batch, rel=1e-3)
    assert state < facts["output_bytes"] < state + 1000  # metrics
    assert facts["alias_bytes"] == pytest.approx(state, rel=1e-3)  # donated
    assert facts["peak_bytes"] >= facts["argument_bytes"] + facts["temp_bytes"]
    assert facts["mesh"] == {"data": 2, "pipe": 2, "tensor": 2}
    assert (facts["num_stages"], facts["num_ticks"], facts["device_kind"]) == (2, 3, "cpu")
    assert facts["trace_s"] > 0
    assert facts["compile_s"] > 0


def test_microbatches_take_no_memory_with_1f1b_and_do_with_gpipe(tiny_config: Config) -> None:
    temps: dict[str, list[Any]] = {
        schedule: [memory(compiled(pipelined(tiny_config, schedule, microbatches=m)))["temp_bytes"] for m in (8, 32)]
        for schedule in ("1f1b", "gpipe")
    }
    assert temps["1f1b"][1] == pytest.approx(temps["1f1b"][0], rel=0.01)
    assert temps["gpipe"][1] > 2 * temps["gpipe"][0]


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1)])
def test_nothing_that_ticks_carry_is_copied(schedule: str, chunks: int, tiny_config: Config) -> None:
    program = compiled(pipelined(tiny_config, schedule, microbatches=8, chunks=chunks))
    carried = max(map(nbytes, re.findall(r" = \(.*?\) while\(", program.as_text())))
    assert memory(program)["temp_bytes"] == pytest.approx(carried, rel=0.15)  # a copy would about double it


@pytest.mark.parametrize(
    ("schedule", "chunks", "family"), [("interleaved_1f1b", 4, "gpt"), ("zb_v", 2, "gpt"), ("zb_h2", 1, "bert")]
)
def test_nothing_of_a_slot_runs_in_ticks_in_which_the_slot_is_idle(
    schedule: str, chunks: int, family: str, tiny_config: Config
) -> None:
    """Loops of zero or one layer, of which XLA would move out what does not depend on the turn.

    BERT's embedding ends in a norm, so that the backward pass of the embedding runs the embedding again. With one
    microbatch, what that reads is the whole batch.
    """
    config = pipelined(tiny_config, schedule, microbatches=8 if family == "gpt" else 1, chunks=chunks)
    config.model.num_layers, config.model.family = 4 * chunks, family
    if family == "bert":
        config.model.objective, config.model.post_norm, config.model.dropout = "mlm_nsp", True, 0.1
        config.mesh.pipe, config.mesh.tensor = 1, 2
    activation = 4 * config.microbatch_size * config.model.seq_len * config.model.hidden_size
    text = read(compiled(config.validate()).as_text() or "")
    everything = [each for instructions in text.computations.values() for each in instructions]
    slot = r'op_name="[^"]*/(?:forward|backward|input_only|weights|head|embed_backward)/while'
    loops = [each for each in everything if each.opcode == "while" and re.search(slot + '"', each.attributes)]
    inside = {name for each in everything if each.opcode == "fusion" for name in each.called()}
    todo = [name for loop in loops for name in loop.called()]
    while todo:
        inside.add(name := todo.pop())
        todo += [each for instruction in text.computations[name] for each in instruction.called()]
    outside = [each for name in text.computations.keys() - inside for each in text.computations[name]]
    assert len(loops) >= 4
    assert [
        each.name
        for each in outside
        if re.search(slot + "/body", each.attributes)
        and each.opcode not in ("parameter", "get-tuple-element", "bitcast")
        and nbytes(each.shape) >= activation
    ] == []


def test_unknown_topologies_are_refused() -> None:
    for topology in ("gpu", "gpu:h100", "gpu:h100:8", "gpu:h100:0x8", "gpu:k80:1x8", "", "tpu", "tpu:", "cpu:2"):
        with pytest.raises(
            ConfigError, match=f"topology '{topology}' is not known. Use cpu; .* tpu:v5e:2x4.* gpu:h100:2x8"
        ):
            make_topology_mesh(MeshConfig(), topology)


def test_a_topology_that_libtpu_does_not_know_is_refused() -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    with pytest.raises(ConfigError, match=r"libtpu knows no topology 'v99:2x2' \(.*\). Use cpu; .* tpu:v5e:2x4"):
        make_topology_mesh(MeshConfig(), "tpu:v99:2x2")


@pytest.mark.parametrize(
    ("name", "kind"), [("v4", "TPU v4"), ("v5e", "TPU v5 lite"), ("v5p", "TPU v5"), ("v6e", "TPU v6 lite")]
)
def test_a_tpu_is_one_device_for_each_chip(name: str, kind: str) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    shape = "2x2" if name.endswith("e") else "2x2x1"
    mesh = make_topology_mesh(MeshConfig(data=2, tensor=2), f"tpu:{name}:{shape}")
    assert {device.device_kind for device in mesh.devices.flat} == {kind}
    with pytest.raises(DeviceError, match=f"needs 2 devices; tpu:{name}:{shape} has 4"):
        make_topology_mesh(MeshConfig(data=2), f"tpu:{name}:{shape}")


def test_without_libtpu_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match=r"tpu:v5e:2x4 takes libtpu, which is not installed.*'fiddlex\[aot\]'"):
        make_topology_mesh(MeshConfig(), "tpu:v5e:2x4")


def test_without_the_cuda_plugin_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match=r"gpu:h100:2x4 takes jax's CUDA plugin, which is not.*'fiddlex\[aot-gpu\]'"):
        make_topology_mesh(MeshConfig(), "gpu:h100:2x4")


def test_a_step_too_large_for_its_devices_is_a_result(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def compile(self, compiler_options: dict[str, Any]) -> None:
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {NEW_WORDS}.\nmore")

    monkeypatch.setattr(Program, "lower", lambda program: Full())
    facts = report(tiny_config, compile_ahead(tiny_config, make_mesh(tiny_config.mesh)))
    assert facts["fits"] is False
    assert facts["needed_bytes"] == round(33.19 * 2**30)
    assert facts["memory_limit_bytes"] == round(15.75 * 2**30)
    assert facts["reason"] == f"{NEW_WORDS}."
    assert facts["peak_bytes"] is facts["temp_bytes"] is facts["collectives"] is None
    assert facts["model_flops"] > 0


@pytest.mark.parametrize(
    ("words", "needed", "limit"),
    [
        (NEW_WORDS, 33.19 * 2**30, 15.75 * 2**30),
        ("Ran out of memory in memory space hbm. Used 2.5T of 950.0M hbm. Exceeded by 1.2T.", 2.5 * 2**40, 950 * 2**20),
        ("Ran out of memory in memory space vmem. Used 20.0M of 16.0M.", None, None),
        ("Out of memory while trying to allocate 12 bytes in HBM.", None, None),
    ],
)
def test_reads_sizes_from_the_words_of_the_compiler(words: str, needed: float | None, limit: float | None) -> None:
    found = read_shortage(f"RESOURCE_EXHAUSTED: {words}\nSee elsewhere.")
    assert found == (needed and round(needed), limit and round(limit), words)


def test_counts_collectives_as_the_schedule_has_them(tiny_config: Config) -> None:
    tiny_config.model.num_layers, tiny_config.pipeline.layers_per_stage = 5, "3,2"
    tiny_config.mesh.data, tiny_config.mesh.pipe, tiny_config.mesh.tensor = 2, 2, 2
    tiny_config.pipeline.num_microbatches, tiny_config.model.num_heads = 4, 4
    tiny_config.optimizer.name = "sgd"
    config = tiny_config.validate()
    ahead = compile_ahead(config, make_mesh(config.mesh))
    facts, activation = report(config, ahead), 2 * 16 * 32 * 4
    found = facts["collectives"]
    hops = [each for each in found if each["kind"] == "collective-permute"]
    assert [(each["axis"], each["count"], each["bytes"]) for each in hops] == 2 * [
        ("pipe", facts["num_ticks"], activation)
    ]
    sums = {
        axis: sum(
            each["count"]
            for each in found
            if (each["kind"], each["axis"]) == ("all-reduce", axis) and each["bytes"] == activation
        )
        for axis in ("pipe", "tensor")
    }
    # Embedding and head, forward and backward; over tensor the embedding forward and the head backward, and two in each
    # layer both ways, of the 3 that the larger stage has.
    assert sums["pipe"] == 4 * 4
    assert sums["tensor"] == 2 * 4 + 2 * 2 * 4 * 3
    assert (facts["fits"], facts["memory_limit_bytes"]) == (None, None)
    assert facts["needed_bytes"] == facts["peak_bytes"]
    assert facts["model_flops"] == model_flops(config)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [pytest.param("1f1b", 1, marks=pytest.mark.long), ("zb_h1", 1), ("interleaved_1f1b", 2)]
)
def test_gradients_that_go_on_are_reduced_once_for_each_layer_of_a_rank(
    schedule: str, chunks: int, tiny_config: Config
) -> None:
    config = pipelined(tiny_config, schedule, microbatches=4, chunks=chunks)
    config.model.num_layers, config.mesh.data, config.pipeline.semantics = 8, 2, "2bw"
    facts = report(config.validate(), compile_ahead(config, make_mesh(config.mesh)))
    counts = [each["count"] for each in facts["collectives"] if each["kind"] == "reduce-scatter"]
    assert len(counts) >= 12  # weights of a layer
    assert set(counts) == {1, 8 // config.mesh.pipe}  # of embedding and head, and of layers


def test_a_backend_that_tells_nothing_is_reported_as_such(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled(tiny_config)
    monkeypatch.setattr(type(program), "memory_analysis", lambda self: None)
    assert set(memory(program).values()) == {None}


def test_no_more_devices_are_faked_than_a_machine_can_hold() -> None:
    with pytest.raises(DeviceError, match=r"needs 100,000 devices; .* at most 4,096 fake devices are made"):
        make_mesh(MeshConfig(data=100_000))


def with_heads_for_tpus(config: Config, seq_len: int) -> Config:
    model, mesh = config.model, config.mesh
    model.hidden_size, model.num_heads, model.seq_len, model.dtype = 256, 4, seq_len, "bfloat16"
    mesh.pipe, mesh.tensor, config.pipeline.num_microbatches, config.data.global_batch_size = 2, 2, 2, 2
    return config.validate()


def test_attention_on_tpus_has_no_scores(tiny_config: Config) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    config = with_heads_for_tpus(tiny_config, 2048)
    text = Program(config, make_topology_mesh(config.mesh, "tpu:v5e:2x2")).lower().as_text()
    assert "tpu_custom_call" in text
    assert "2048x2048" not in text


@pytest.mark.long
def test_long_sequences_on_tpus_take_less_than_scores_would(tiny_config: Config) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    found = compiled_bytes(with_heads_for_tpus(tiny_config, 32768), "tpu:v5p:2x2x1")
    assert found[0] < 32768**2  # the scores of a single head, a byte each


def test_the_report_tells_in_which_kernel_attention_runs(tiny_config: Config) -> None:
    facts = report(tiny_config, compile_ahead(tiny_config, make_mesh(tiny_config.mesh)))
    assert facts["attention"].startswith(
        "attention runs without a flash kernel: that of CPUs, blocked, cuts a sequence into 2"
    )
