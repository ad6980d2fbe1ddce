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
    """A layout and the predictions for it."""

    layout: Layout
    config: Config  # of the run, with this layout
    times: MicrobatchTimes
    step: StepTimes  # outside the pipeline
    memory: Memory  # of each device
    step_time_s: float
    tflops_per_device: float  # model operations per second and device, in units of 10¹², without recomputation
    utilisation: float  # share of the chip's peak in the model's dtype that the model operations reach
    # seconds of a step in which the rank with most layers waits for others; hops and host copies are in `exposed_s`
    waiting_s: float
    bubble: float  # of the pipeline in lockstep, without hops and host copies (`fiddlex.simulate.timeline.BUBBLE`)
    # seconds of a step's communication that overlaps with no work, by purpose; `host`: waits for copies to and from it
    exposed_s: dict[str, float]
    usd_per_step: float | None  # None: the topology has no price
    traffic: tuple[Traffic, ...]  # what each axis sends over each link in a step


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
    """The predictions for a layout; `seconds` gives those of a batch in the pipeline for any costs of the stages."""
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
