"""The cases of `experiments.slow_links`: what is compiled for two slices or hosts, its results, and their table."""

import dataclasses
import datetime
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from fiddlex.config import Config
from fiddlex.config.files import load_config
from fiddlex.config.overrides import replaced
from fiddlex.costs.weight_memory import device_parameters
from fiddlex.errors import DeviceError
from fiddlex.hardware.topology import load_topology
from fiddlex.planner.cost_model import CostModel, Traffic
from fiddlex.planner.predict import pipeline_of

ROOT = pathlib.Path(__file__).parents[1]
CLUSTERS = {"tpu_v5e": "tpu:v5e:2x4:2", "h100": "gpu:h100:2x8"}  # two slices or hosts of eight devices
PER_GRANULE = 8
MODELS = {
    "configs/gpt_tiny.py": {"mesh.data": 4, "mesh.pipe": 2, "mesh.tensor": 2, "pipeline.num_microbatches": 4},
    "configs/gpt3.py:1.7b": {"mesh.data": 2, "mesh.pipe": 4, "mesh.tensor": 2, "pipeline.num_microbatches": 256},
}
PIPELINES = (("data", "1f1b", 1), ("pipe", "1f1b", 1), ("pipe", "interleaved_1f1b", 2))


class SlowCase(NamedTuple):
    """A step to compile.

    Attributes:
      cluster: name of the cluster's topology in the catalogue.
      model: config file with its argument.
      outermost: the axis across the slow link.
      schedule: the schedule.
      chunks: number of stages on each pipe rank.
    """

    cluster: str
    model: str
    outermost: str
    schedule: str
    chunks: int

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the config that the case sets."""
        pipeline = {"pipeline.schedule": self.schedule, "pipeline.num_chunks": self.chunks}
        return {**MODELS[self.model], "mesh.outermost": self.outermost, **pipeline}

    def config(self) -> Config:
        """The config of the step."""
        return replaced(load_config(str(ROOT / self.model)), self.fields).validate()


def cases() -> Iterator[SlowCase]:
    """All cases."""
    for cluster in CLUSTERS:
        for model in MODELS:
            for outermost, schedule, chunks in PIPELINES:
                yield SlowCase(cluster, model, outermost, schedule, chunks)


def compiled(case: SlowCase) -> dict[str, Any]:
    """What XLA lets cross the slow link in a case, and facts of the compilation.

    Raises:
      DeviceError: when the step does not compile, or does not fit.
    """
    command = [sys.executable, "-P", "-m", "fiddlex", "compile", f"--config={ROOT / case.model}", "--format=json"]
    command += [f"--topology={CLUSTERS[case.cluster]}", *(f"--config.{name}={at}" for name, at in case.fields.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise DeviceError(f"{case}: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
    facts = json.loads(done.stdout.splitlines()[-1])
    if facts["crossing"] is None:
        raise DeviceError(f"{case} does not fit: {facts['reason']}")
    kept = ("jax_version", "compile_s", "needed_bytes", "num_ticks", "crossing")
    date = datetime.date.today().isoformat()
    return {"case": list(case), "date": date, **{name: facts[name] for name in kept}}


def planned(case: SlowCase) -> list[Traffic]:
    """What the planner expects each axis to send over the slow link in a step."""
    config, topology = case.config(), load_topology(case.cluster)
    inner, outer = topology.links
    topology = dataclasses.replace(topology, links=(dataclasses.replace(inner, devices=PER_GRANULE), outer))
    placement = pipeline_of(config).placement
    traffic = CostModel(config, topology).traffic(
        config.mesh,
        placement=placement,
        num_microbatches=config.pipeline.num_microbatches,
        recompute=config.pipeline.recompute,
        num_parameters=device_parameters(config, placement.rows_per_rank),
    )
    return [each for each in traffic if each.link == outer]


def table(results: dict[SlowCase, dict[str, Any]]) -> str:
    """The table of all results; kinds of collectives with less than 1% of a step's bytes are left out of the list."""
    rows = [
        "| model | on | across | schedule | what crosses, MB by XLA | MB, XLA | MB, planner | s, planner |",
        "|---|---|---|---|---|---:|---:|---:|",
    ]
    for case, result in results.items():
        sizes = {f"{each['kind']} over {each['axis']}": each["bytes"] / 1e6 for each in result["crossing"]}
        whole = sum(sizes.values())
        listed = ", ".join(f"{name} {_mb(size)}" for name, size in sorted(sizes.items()) if size >= whole / 100)
        schedule = f"{case.schedule}, v={case.chunks}" if case.chunks > 1 else case.schedule
        expected = planned(case)
        rows.append(
            f"| `{case.model.removeprefix('configs/')}` | {CLUSTERS[case.cluster]} | {case.outermost} | {schedule} | "
            f"{listed} | {_mb(whole)} | {_mb(sum(each.bytes for each in expected) / 1e6)} | "
            f"{sum(each.seconds for each in expected):.2g} |"
        )
    return "\n".join(rows)


def _mb(size: float) -> str:
    return f"{size:,.0f}" if size >= 1000 else f"{size:.3g}"
