"""Compiling ahead of time: what is told of memory is right, and a schedule takes the memory that it says it does."""

import importlib.util
import math
import re
from typing import Any

import jax
import pytest

from fiddlex.config import Config, MeshConfig
from fiddlex.errors import ConfigError, DeviceError
from fiddlex.mesh import make_mesh, make_topology_mesh
from fiddlex.train.ahead import compile_ahead, memory, report
from fiddlex.train.program import Program
from fiddlex.train.trainer import Trainer

ITEM_SIZES = {"pred": 1, "bf16": 2, "f32": 4, "s32": 4, "u32": 4}


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


def nbytes(shapes: str) -> int:
    """Bytes of all arrays in a line of a compiled program."""
    arrays = re.findall(r"\b([a-z]\w+)\[([\d,]*)\]", shapes)
    return sum(ITEM_SIZES[dtype] * math.prod(int(size) for size in sizes.split(",") if size) for dtype, sizes in arrays)


def test_unknown_topologies_are_refused() -> None:
    for topology in ("gpu", "", "tpu", "tpu:", "cpu:2"):
        with pytest.raises(ConfigError, match=f"topology '{topology}' is not known. Use cpu, or .* tpu:v5e:2x4"):
            make_topology_mesh(MeshConfig(), topology)


def test_without_libtpu_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match=r"tpu:v5e:2x4 takes libtpu, which is not installed.*'\.\[aot\]'"):
        make_topology_mesh(MeshConfig(), "tpu:v5e:2x4")


def test_a_step_too_large_for_its_devices_is_told_with_remedies(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def compile(self) -> None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 33.19G exceeds available HBM (15.75G).\nmore")

    monkeypatch.setattr(Program, "lower", lambda program: Full())
    with pytest.raises(DeviceError) as error:
        compile_ahead(tiny_config, make_mesh(tiny_config.mesh))
    assert "set pipeline.recompute=full" in str(error.value)
    assert str(error.value).endswith("33.19G exceeds available HBM (15.75G).")


def test_a_backend_that_tells_nothing_is_reported_as_such(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled(tiny_config)
    monkeypatch.setattr(type(program), "memory_analysis", lambda self: None)
    assert set(memory(program).values()) == {None}
