"""Settles what a config leaves to its costs: `pipeline.schedule=auto` and `pipeline.layers_per_stage=balanced`.

A settled config has a table and numbers in place of the words, and everything below the planner takes settled configs
only. Whoever knows what a config is for settles it: `fiddlex.train.step.program` for devices, `fiddlex.tools.what_if`
and `fiddlex compile` for a topology or a profile. With both words, the search of a schedule takes even stages, and
layers are then balanced for what it found. Invariant: the same config settles to the same table and numbers on the same
kind of devices, in every process of a run.
"""

import logging
import math

from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.config.sections import COMPUTE_DTYPES
from fiddlex.config.values.stages import BALANCED
from fiddlex.costs.backend import backend_of
from fiddlex.costs.utilisation import topology_of
from fiddlex.hardware.chips import Chip, HostMemory
from fiddlex.hardware.links import Link
from fiddlex.hardware.topology import Topology
from fiddlex.planner.auto_schedule import AUTO, Memory, Settled, find_schedule
from fiddlex.planner.balance import Balanced, balance
from fiddlex.planner.cost_model import CostModel
from fiddlex.planner.layouts import HEADROOM
from fiddlex.planner.predict import StepModel
from fiddlex.planner.profile import Profile, ProfiledCostModel
from fiddlex.planner.times import MicrobatchTimes
from fiddlex.simulate.timeline import BUBBLE

logger = logging.getLogger(__name__)

# Devices that take a second for each operation and no time for anything else: only the ratio of times counts.
_COUNTING = Topology(
    "operations",
    "devices whose time is the number of operations",
    Chip(
        "operations", memory_gib=1, memory_bandwidth=math.inf, peak_flops=dict.fromkeys(COMPUTE_DTYPES, 1.0), source=""
    ),
    links=(Link("none", devices=0, bandwidth=math.inf, latency_s=0.0, source=""),),
    host=HostMemory(memory_gib=1, devices=1, bandwidth=math.inf, source=""),
)


def settle(
    config: Config, topology: Topology | None = None, *, profile: Profile | None = None, device_kind: str = ""
) -> Config:
    """The config with what its costs decide in place of `auto` and `balanced`, which the log tells.

    The costs are those of the profile, the topology, or the kind of devices (as jax calls it), whichever is given;
    where the catalogue does not have that kind, as on CPU devices, they are the numbers of operations.

    Raises:
      ConfigError: when the config has no pipeline, as in `resolve`, or `train.topology` does not exist.
    """
    pipeline = config.pipeline
    if pipeline.schedule != AUTO and pipeline.layers_per_stage != BALANCED:
        return config
    topology = topology or topology_of(config, device_kind)
    model, source = _costs(config, topology, profile)
    times = model.microbatch(config.mesh, num_microbatches=pipeline.num_microbatches, recompute=pipeline.recompute)
    if pipeline.schedule == AUTO:
        config = _with_schedule(config, times, topology, source)
    if pipeline.layers_per_stage != BALANCED:
        return config
    found = balance(config, times)
    logger.info("pipeline.layers_per_stage=%s: %s.", BALANCED, describe(found, source))
    return replaced(config, {"pipeline.layers_per_stage": _written(found.cut)})


def _with_schedule(config: Config, times: MicrobatchTimes, topology: Topology | None, source: str) -> Config:
    memory = None
    if topology is not None:
        limit = int(topology.chip.memory_bytes * (1 - HEADROOM))
        memory = Memory(limit, backend_of(topology.compiler))
    words = {"pipeline.layers_per_stage": config.pipeline.layers_per_stage}
    even = replaced(config, {"pipeline.layers_per_stage": ""}) if BALANCED in words.values() else config
    settled = find_schedule(even, times, memory)
    logger.info("pipeline.schedule=%s: %s.", AUTO, describe_schedule(settled, source))
    return replaced(settled.config, words)


def describe_schedule(settled: Settled, source: str) -> str:
    """Which schedule was found and why, in a line for a log; `source` names the costs."""
    found = settled.found
    held, whole = max(found.judged.peaks), settled.cap == math.inf
    text = (
        f"a table found among {found.tried:,} schedules, from {found.origin}; by {source} its bubble is "
        f"{settled.bubble_fraction:.1%} ({BUBBLE}), with at most {held:g} microbatches on a rank"
        + ("" if whole else f" of {settled.cap:g} allowed")
    )
    if settled.fits is False:
        text += ", which is predicted not to fit the memory of the devices; no schedule needs less"
    return text


def with_settled(config: Config, settled: Config) -> Config:
    """A config with what `settle` put in place of its words in another config, which has perhaps another mesh."""
    fields = ["schedule", "order"] * (config.pipeline.schedule == AUTO)
    fields += ["layers_per_stage"] * (config.pipeline.layers_per_stage == BALANCED)
    return replaced(config, {f"pipeline.{field}": getattr(settled.pipeline, field) for field in fields})


def describe(found: Balanced, source: str) -> str:
    """Which layers stages get and why, in a line for a log; `source` names the costs."""
    if found.num_tried == 1:
        return f"{_written(found.cut)}, the only cut"
    number = math.comb(sum(found.cut) - 1, len(found.cut) - 1)  # of all cuts
    tried = f"all {number} cuts" if found.num_tried == number else f"{found.num_tried} cuts of {number:,}"
    if found.cut == found.even_cut:
        return f"{_written(found.cut)}, the even stages; by {source} the fastest of {tried}"
    gain, most, most_even = 1 - found.seconds / found.even_seconds, max(found.cut), max(found.even_cut)
    return (
        f"{_written(found.cut)}; by {source} the fastest of {tried}: a batch takes {gain:.2%} less time in the "
        f"pipeline than with {_written(found.even_cut)}"
        + (f", and each stage memory for {most} layers instead of {most_even}" if most > most_even else "")
    )


def _costs(config: Config, topology: Topology | None, profile: Profile | None) -> tuple[StepModel, str]:
    """A source of times for a config, and its name for people."""
    if profile is not None:
        return ProfiledCostModel(config, profile), f"the times measured on {profile.machine}"
    if topology is None or config.model.dtype not in topology.chip.peak_flops:
        return CostModel(config, _COUNTING), "the numbers of operations"
    return CostModel(config, topology), f"the costs on {topology.chip.name}"


def _written(cut: tuple[int, ...]) -> str:
    return ",".join(map(str, cut))
