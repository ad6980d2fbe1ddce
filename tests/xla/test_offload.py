"""A step whose optimizer is on the host, compiled for TPUs and for GPUs: where its bytes are, and when they travel."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from fiddlex.config import Config
from fiddlex.costs.backend import backend_for
from fiddlex.planner.predict import needed_memory
from fiddlex.xla.compiled_collectives import beside
from fiddlex.xla.host_copies import host_copies
from fiddlex.xla.program_text import read
from tests.compiling import answer_of, needs_cuda_plugin

PROGRAM = """
import json, sys
from fiddlex.config import Config
from fiddlex.cluster.mesh import make_topology_mesh
from fiddlex.xla.ahead_of_time import compile_ahead, memory

config = Config.from_json(sys.argv[1]).validate()
ahead = compile_ahead(config, make_topology_mesh(config.mesh, sys.argv[2]))
print(json.dumps({**memory(ahead.compiled), "text": ahead.text}))
"""


@pytest.fixture
def compiled(tmp_path: pathlib.Path) -> Callable[..., dict[str, Any]]:
    """The memory and the text of a config's step that is compiled for a topology."""
    return functools.partial(answer_of, PROGRAM, tmp_path)


def config_of(*, offload: bool) -> Config:
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.num_heads = 8, 1024, 8
    config.model.vocab_size, config.model.seq_len, config.model.dtype = 1024, 256, "bfloat16"
    config.mesh.data, config.mesh.pipe = 2, 2
    config.pipeline.num_microbatches, config.data.global_batch_size = 4, 8
    config.optimizer.offload, config.optimizer.clip_norm = offload, 1.0
    return config.validate()


def check(compiled: Callable[..., dict[str, Any]], topology: str) -> str:
    """Checks where the bytes are; returns the text of the program."""
    here, there = (compiled(config_of(offload=offload), topology) for offload in (False, True))
    predicted = needed_memory(config_of(offload=True), backend_for(topology))
    assert here["host_bytes"] == 0
    assert there["host_bytes"] == pytest.approx(predicted.of_host, rel=0.02)
    # Nothing but what a step of a few rows needs has come in the place of what is on the host now.
    assert here["peak_bytes"] - there["peak_bytes"] > 0.8 * predicted.of_host
    return there["text"]


def rows_beside_others(text: str) -> list[bool]:
    """For each loop that fetches rows of a weight and two moments, whether other work begins while a row is on its way.

    That is the update of the row before, or its way back to the host. The text is a scheduled program.
    """
    program, found = read(text), []
    comes = {copy.name: not copy.to_host for copy in host_copies(text)}
    for body in program.computations.values():
        inside = [each for each in body if "update/while/body" in each.attributes]
        fetches = [place for place, each in enumerate(inside) if comes.get(each.name, False)]
        if len(fetches) == 3:
            others = [each for place in fetches for each in beside(program, inside, place)]
            found.append(any(each.opcode == "fusion" or not comes.get(each.name, True) for each in others))
    return found


def test_tpus_keep_the_optimizer_on_the_host_and_fetch_beside_work(compiled: Any) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    beside = rows_beside_others(check(compiled, "tpu:v5e:2x2"))
    assert beside, "no loop over rows of weight and moments"
    assert all(beside)


@needs_cuda_plugin
def test_gpus_keep_the_optimizer_on_the_host_and_fetch_beside_work(compiled: Any) -> None:
    beside = rows_beside_others(check(compiled, "gpu:h100:1x4"))
    assert beside, "no loop over rows of weight and moments"
    assert all(beside)
