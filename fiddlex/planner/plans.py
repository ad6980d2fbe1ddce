"""A plan: a layout of a run on a cluster, with the predictions for it, and the score by which plans are compared."""

import dataclasses
from collections.abc import Callable

from fiddlex.config import Config
from fiddlex.costs.memory import Memory
from fiddlex.costs.sizes import model_flops
from fiddlex.costs.weight_memory import device_parameters
from fiddlex.planner.cost_model import CostModel, Traffic
from fiddlex.planner.layouts import Layout, Problem
from fiddlex.planner.predict import Prediction
from fiddlex.planner.times import MicrobatchTimes, StepTimes
from fiddlex.schedules.placement import LayerPlacement
from fiddlex.simulate.clock import Costs


@dataclasses.dataclass(frozen=True)
class Plan:
    """A layout and the predictions for it.

    Attributes:
      layout: the layout.
      config: the config of the run with this layout.
      times: seconds of a microbatch's parts.
      step: seconds of the parts of a step outside the pipeline.
      memory: bytes on each device.
      step_time_s: seconds of a step.
      tflops_per_device: model operations per second and device, in units of 10¹², without recomputation.
      utilisation: share of the chip's peak in the model's dtype that the model operations reach.
      waiting_s: seconds of a step in which the rank with most layers waits for other ranks; hops, and copies to and
        from the host, are in `exposed_s` instead.
      bubble: the bubble (`fiddlex.simulate.timeline.BUBBLE`) of the pipeline in lockstep, without hops and such copies.
      exposed_s: seconds of a step's communication that overlaps with no computation, by its purpose; `host` is what
        the pipeline waits for its copies to and from the host, where it has such copies.
      usd_per_step: price of a step in USD; None: the topology has no price.
      traffic: what each axis sends over each link in a step.
    """

    layout: Layout
    config: Config
    times: MicrobatchTimes
    step: StepTimes
    memory: Memory
    step_time_s: float
    tflops_per_device: float
    utilisation: float
    waiting_s: float
    bubble: float
    exposed_s: dict[str, float]
    usd_per_step: float | None
    traffic: tuple[Traffic, ...]


def plan_of(
    problem: Problem,
    layout: Layout,
    config: Config,
    placement: LayerPlacement,
    times: MicrobatchTimes,
    step: StepTimes,
    memory: Memory,
    seconds: Callable[[Costs], float],
    model: CostModel,
) -> Plan:
    """The predictions for a layout.

    Args:
      problem: the problem that the layout solves.
      layout: the layout.
      config: the config of the run with this layout.
      placement: its layers on stages.
      times: seconds of a microbatch's parts.
      step: seconds of the parts of a step outside the pipeline.
      memory: bytes on each device.
      seconds: gives the seconds of a batch in the pipeline for any costs of the stages.
      model: the cost model that gave the times.
    """
    costs, m = times.costs(placement), layout.num_microbatches
    pipeline_s = seconds(costs)
    step_s, uses_host = Prediction(pipeline_s, step).seconds, config.pipeline.streams or config.pipeline.spills
    without = dataclasses.replace(costs, load=0.0, store=0.0, spill=0.0)
    unhindered_s = seconds(without) if uses_host else pipeline_s
    hops_s = unhindered_s - seconds(dataclasses.replace(without, hop=0.0))
    most = placement.most_layers_of_rank
    busy_s = m * (most * times.layer + times.edges)
    waiting_s = max(unhindered_s - busy_s - hops_s, 0.0)
    flops = model_flops(config) / step_s / layout.mesh.num_devices
    price = problem.topology.price
    return Plan(
        layout,
        config,
        times,
        step,
        memory,
        step_s,
        tflops_per_device=flops / 1e12,
        utilisation=flops / problem.topology.chip.peak(config.model.dtype),
        waiting_s=waiting_s,
        bubble=waiting_s / busy_s,
        exposed_s={
            "tensor": m * most * times.exchange,
            "vocabulary": m * times.edge_exchange,
            "pipe": max(hops_s, 0.0),
            "data": step.reduce + step.gather,
            **({"host": pipeline_s - unhindered_s} if uses_host else {}),
        },
        usd_per_step=price.usd_per_device_hour * layout.mesh.num_devices * step_s / 3600 if price else None,
        traffic=model.traffic(
            config.mesh,
            placement=placement,
            num_microbatches=m,
            recompute=layout.recompute,
            num_parameters=device_parameters(config, placement.rows_per_rank),
        ),
    )


Score = tuple[float, float]


def score(objective: str, plan: Plan) -> Score:
    """The value that the search minimizes, and the value that breaks ties."""
    if objective == "memory":
        return plan.memory.peak, plan.step_time_s
    return plan.step_time_s * (plan.layout.mesh.num_devices if objective == "cost" else 1), plan.memory.peak
