"""Small problems for the planner."""

import dataclasses

from fiddlex.config import Config, ModelConfig
from fiddlex.config.overrides import replaced
from fiddlex.hardware.topology import load_topology
from fiddlex.planner.layouts import OFFLOAD, SPILL, STREAM, Problem


def a_problem(*, num_devices=8, layers=4, heads=4, batch=16, **changes):
    model = ModelConfig("gpt", "", layers, 64 * heads, heads, vocab_size=512, seq_len=128, dtype="bfloat16")
    config = Config(model=model)
    config.data.global_batch_size = batch
    return dataclasses.replace(Problem(config, load_topology("a100_80"), num_devices), **changes)


def servers_of(number, name="a100_80"):
    """A topology's devices, so many of which are in a server or a slice."""
    topology = load_topology(name)
    inner, outer = topology.links
    return dataclasses.replace(topology, links=(dataclasses.replace(inner, devices=number), outer))


def offloading(problem):
    return dataclasses.replace(problem, config=replaced(problem.config, OFFLOAD))


def streaming(problem):
    return dataclasses.replace(problem, config=replaced(problem.config, OFFLOAD | STREAM))


def all_on_hosts(problem):
    return dataclasses.replace(problem, config=replaced(problem.config, OFFLOAD | STREAM | SPILL))
