"""What fills the memory of a compiled step, against what the parts of the prediction say."""

import json
import pathlib
from typing import Any

import pytest

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.xla.ahead_of_time import compile_ahead
from fiddlex.xla.peak_memory import MemoryUse, Use, memory_parts, read
from tests.compiling import needs_cuda_plugin
from tests.programs import ROOT, call

CASES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "recomputed": {"pipeline.recompute": "gelu,norms"},
    "split backwards": {"pipeline.schedule": "zb_h1"},
    "2bw": {"pipeline.semantics": "2bw"},
}
PROGRAM = """
  %weights = f32[8]{0} parameter(0), metadata={op_name="state.weights[\\'layers\\']"}
  %made = f32[16]{0} broadcast(), metadata={op_name="jit(step)/shard_map/stash/broadcast_in_dim"}
  %loop = (f32[16]{0}) while(), metadata={op_name="jit(step)/shard_map/while"}
  ROOT %last = f32[4]{0} add(), metadata={op_name="jit(step)/shard_map/add"}
"""
BUFFERS = """BufferAssignment:
allocation 0: size 32, parameter 0, shape |f32[8]| at ShapeIndex {}, maybe-live-out:
 value: <1 weights @0> (size=32,offset=0): f32[8]{0}
allocation 1: size 96, preallocated-temp:
 value: <2 made @0> (size=64,offset=0): f32[16]{0}
 value: <3 loop{0} (phi) @0> (size=64,offset=0): f32[16]{0}
 value: <4 last @0> (size=16,offset=0): f32[4]{0}
 value: <5 early @0> (size=16,offset=64): f32[4]{0}
allocation 2: size 1024, thread-local:
 value: <6 inside @0> (size=1024,offset=0): f32[256]{0}
allocation 3: size 512, color 1, preallocated-temp:
 value: <7 fast @0> (size=512,offset=0): f32[128]{0}
"""
RANGES = """HloLiveRange (max 9):
  InstructionSequence:
    0:weights
  BufferLiveRange:
    weights{}:0-9
    made{}:2-4
    loop{0}:5-6
    last{}:8-9
    early{}:1-3
  Live ranges at 3 (peak):
    made{}: 64 bytes (cumulative: 64 bytes)
"""


def test_places_are_told_by_any_name_of_their_values() -> None:
    found = read(PROGRAM, BUFFERS, RANGES)
    assert found == MemoryUse(
        (Use("weights", 32, 0, 9), Use("stash", 64, 2, 6), Use("working", 16, 8, 9), Use("working", 16, 1, 3)), 128
    )
    assert found.peak() == {"weights": 32, "stash": 64, "working": 16}
    assert found.at(7) == {"weights": 32}
    assert found.times == [0, 1, 2, 8]


def a_config(case: str, *, wide: bool = False) -> Config:
    """A pipeline of four ranks; `wide`, as on TPUs a small stash would lie in the chip's vector memory."""
    config = Config()
    config.model.num_layers, config.model.vocab_size = 8, 512
    config.model.hidden_size, config.model.seq_len = (512, 1024) if wide else (128, 128)
    config.model.num_heads, config.model.dtype = (8, "bfloat16") if wide else (4, "float32")
    config.mesh.data, config.mesh.pipe = 1, 4
    config.pipeline.num_microbatches, config.data.global_batch_size = 8, 32
    return replaced(config, CASES[case]).validate()


def check(parts: dict[str, dict[str, int]]) -> None:
    """Of all that XLA assigns 95% or more are told, and what lasts is as predicted."""
    found = {part: sizes["found"] for part, sizes in parts.items()}
    assert found["gaps"] <= 0.05 * sum(found.values())
    for part in ("weights", "optimizer", "stash", "weight_stash"):
        assert found[part] == pytest.approx(parts[part]["predicted"], rel=0.02, abs=1e4), part
    # Where a kernel's gradient has a place of its own before it is added, it counts as one of the gradients.
    kernel = 0.01 * sum(found.values())
    assert found["gradients"] == pytest.approx(parts["gradients"]["predicted"], rel=0.1, abs=kernel)
    assert found["working"] < 0.25 * sum(found.values())


@pytest.mark.parametrize("case", CASES)
def test_parts_are_those_that_are_predicted(case: str) -> None:
    config = a_config(case)
    check(memory_parts(config, "cpu", compile_ahead(config, make_mesh(config.mesh), reads_memory=True).memory_use))


@pytest.mark.parametrize(
    ("topology", "case"),
    [
        pytest.param("tpu:v5e:2x2", "1f1b"),
        *(pytest.param("tpu:v5e:2x2", case, marks=pytest.mark.long) for case in [*CASES][1:]),
        *(pytest.param("gpu:h100:1x4", case, marks=[pytest.mark.long, needs_cuda_plugin]) for case in CASES),
    ],
)
def test_parts_on_chips_are_those_that_are_predicted(topology: str, case: str, tmp_path: pathlib.Path) -> None:
    if topology.startswith("tpu"):
        pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    file, picture = tmp_path / "config.py", tmp_path / "memory.svg"
    text = repr(a_config(case, wide=True).to_json())
    file.write_text(f"from fiddlex.config import Config\n\n\ndef get_config():\n    return Config.from_json({text})\n")
    options = f"--config={file}", f"--topology={topology}", "--memory", f"--plot={picture}", "--format=json"
    facts = json.loads(call("compile", *options, environment={"XLA_FLAGS": ""}).stdout.splitlines()[-1])
    check(facts["memory_parts"])
    assert "weight_stash" in picture.read_text(encoding="utf-8") or case != "split backwards"


def test_the_memory_of_a_host_is_that_of_the_topology_file(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    catalogued = (ROOT / "fiddlex/hardware/topologies/tpu_v5e.toml").read_text(encoding="utf-8")
    own = tmp_path / "own.toml"
    own.write_text(catalogued.replace("memory_gib = 192", "memory_gib = 8"), encoding="utf-8")
    fields = {"mesh.data": 1, "mesh.pipe": 1, "mesh.tensor": 1, "pipeline.schedule": "1f1b", "pipeline.num_chunks": 1}
    options = [f"--config.{name}={value}" for name, value in (fields | {"optimizer.offload": "true"}).items()]
    done = call(
        "compile", "--config=gpt_tiny", *options, f"--topology={own}", "--format=json", environment={"XLA_FLAGS": ""}
    )
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["host_limit_bytes"] == 2 * 2**30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plot=a.svg"], "--plot=a.svg without --memory: it changes nothing. Add --memory, or leave it out."),
        (["--memory", "--plot=a.pdf"], "--plot=a.pdf: the name of a picture ends in .svg or .png."),
    ],
)
def test_mistakes(options: list[str], message: str) -> None:
    done = call("compile", "--config=gpt_tiny", *options, status=2)
    assert done.stderr == f"compile.py: {message}\n"
