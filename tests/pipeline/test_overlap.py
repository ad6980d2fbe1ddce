"""In the step compiled for TPUs every hop between stages travels beside a whole slot of work.

The order of a tick's operations decides that and is fragile, so it is read off the program that XLA has scheduled: each
hop is asynchronous, and between its start and its end stands a conditional with a stage's pass in it.
"""

import os
import re
import subprocess
import sys

import pytest

from fiddlex.config import Config

# In a process of its own, since that for which to compile has to be set before jax starts.
PROGRAM = """
import sys
from fiddlex.config import Config
from fiddlex.mesh import make_topology_mesh
from fiddlex.train.ahead import compile_ahead

config = Config.from_json(sys.argv[1]).validate()
print(compile_ahead(config, make_topology_mesh(config.mesh, sys.argv[2])).compiled.as_text())
"""
# Without the tests' own XLA flags.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
PRODUCTS_OF_A_LAYER = 6  # queries, keys and values; scores; values by scores; projection; two of the MLP


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2)])
def test_every_hop_has_a_slot_of_work_beside_it(schedule: str, chunks: int, recompute: str) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.num_heads = 8, 256, 4
    config.model.vocab_size, config.model.seq_len, config.model.dtype = 1024, 256, "bfloat16"
    config.mesh.data, config.mesh.pipe = 2, 4
    config.pipeline.schedule, config.pipeline.num_chunks, config.pipeline.recompute = schedule, chunks, recompute
    config.pipeline.num_microbatches, config.data.global_batch_size = 8, 32
    config.optimizer.name = "sgd"  # the least to compile
    command = [sys.executable, "-c", PROGRAM, config.to_json(), "tpu:v5e:2x4"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    computations = read(result.stdout)
    tick = next(text for text in computations.values() if "permute-start(" in text and "conditional(" in text)
    assert " collective-permute(" not in tick
    lines = tick.splitlines()
    slots = [at for at, line in enumerate(lines) if products(line, computations) >= PRODUCTS_OF_A_LAYER]
    assert len(slots) == 2  # forward and backward
    hops = {}
    for start, line in enumerate(lines):
        if hop := re.match(r"\s*%(\S+) = .* collective-permute-start\(.*source_target_pairs=\{\{(\d),(\d)\}", line):
            done = next(at for at, other in enumerate(lines) if f"collective-permute-done(%{hop[1]})" in other)
            hops[int(hop[2]), int(hop[3])] = [slots.index(slot) for slot in slots if start < slot < done]
    # From the first rank of a pipe to its second, and gradients from the first to the last, which has no use for them.
    assert hops == {(0, 1): [1], (0, 3): [0]}


def read(text: str) -> dict[str, str]:
    """The computations of a program by name; instructions stand in the order of the schedule."""
    return dict(re.findall(r"^(?:ENTRY )?%(\S+) \(.*\{\n((?:  .*\n)*)\}", text, re.MULTILINE))


def products(conditional: str, computations: dict[str, str]) -> int:
    """Matrix products in the largest branch of a line that is a conditional; 0 for any other line."""
    branches = re.search(r" conditional\(.*branch_computations=\{(.*?)\}", conditional)
    names = re.findall(r"%([^\s,]+)", branches[1]) if branches else []
    return max((_products(name, computations) for name in names), default=0)


def _products(name: str, computations: dict[str, str]) -> int:
    body = computations[name]
    called = re.findall(r"(?:calls|body|to_apply)=%([^\s,})]+)", body)
    return len(re.findall(r" (?:convolution|dot)\(", body)) + sum(_products(inner, computations) for inner in called)
