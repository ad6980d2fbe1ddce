"""Formats plans as text, as JSON and as config files."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from fiddlex.config import Config, MeshConfig
from fiddlex.config.sections import AXES, OUTERMOST_AXES
from fiddlex.costs.backend import backend_of
from fiddlex.costs.memory import Memory
from fiddlex.costs.sizes import num_parameters
from fiddlex.planner.auto_schedule import AUTO
from fiddlex.planner.layouts import Layout, Problem, outermost_axes
from fiddlex.planner.plans import Plan
from fiddlex.planner.search import Found, evaluate
from fiddlex.simulate.timeline import BUBBLE
from fiddlex.terminal.readable import counted, gib, readable_size, readable_time

GIB = 2**30
PLACES = ("stash_memory", "weights_memory")  # fields of the pipeline that say where something waits


def as_text(problem: Problem, found: Found, flushed: Plan | None = None) -> str:
    """The plans as a table, and details of the first plan: the whole run, memory, communication and bubble.

    Args:
      problem: the problem that the search solved.
      found: the result of the search, with at least one plan.
      flushed: the best plan whose weights do not lag; None: those of the first plan do not lag either.
    """
    best = found.plans[0]
    columns = _columns(problem, best)
    rows = [list(columns), *([cell(plan) for cell in columns.values()] for plan in found.plans)]
    exposed = ", ".join(f"{name} {time / best.step_time_s:.1%}" for name, time in best.exposed_s.items())
    lines = [
        f"{describe(problem)}\n{found.space:,} layouts; {found.simulated:,} simulated, the others ruled out by a lower "
        f"bound or by memory\n\n{table(rows)}\n",
        f"The first: {_whole_run(best)}.",
        f"Memory of a device, GiB, not all of it at once: {parts_text(best.memory)}.",
        f"Communication that nothing hides, of a step: {exposed}.",
        f"Bubble, without such communication: {best.bubble:.1%} ({BUBBLE}).",
    ]
    kernel = backend_of(problem.topology.compiler).flash_kernel(best.config)
    lines.append(f"In all plans {kernel}.")
    lines += _links_text(problem, best)
    lines += _host_text(problem, best)
    lines += _semantics_text(problem, best, flushed)
    if any(plan.layout.mesh.collective_matmul for plan in found.plans):
        lines.append(
            "+cm, mesh.collective_matmul: the exchange of tensor ranks is taken to run beside products, as in the "
            "programs that XLA compiles. It was timed on no chip yet: measure with it and without it."
        )
    lines.append(
        f"Large products are taken to reach {problem.efficiency:.1%} of the peak, which was fitted to A100s: on other "
        "chips compare plans, not seconds. Plans within some percent of each other are equally good (docs/planner.md)."
    )
    return "\n".join(lines)


def _links_text(problem: Problem, best: Plan) -> list[str]:
    """Which links the axes of the best plan cross, and what they would cross with another axis outermost."""
    if not best.traffic:
        return []
    lines = [f"Links, with what a device sends in a step: {traffic_text(problem, best)}."]
    layout, mesh = best.layout, best.layout.mesh
    other = next((axis for axis in outermost_axes(problem, mesh) if axis != mesh.outermost), "")
    if other and layout.schedule != AUTO:  # which would need another search
        placed = evaluate(problem, layout._replace(mesh=dataclasses.replace(mesh, outermost=other)))
        more = placed.step_time_s / best.step_time_s - 1
        lines.append(
            f"With mesh.outermost={other} it would take {placed.step_time_s:.4g} s ({more:+.1%}): "
            f"{traffic_text(problem, placed)}."
        )
    return lines


def _host_text(problem: Problem, best: Plan) -> list[str]:
    memory = best.memory
    if not memory.of_host:
        return []
    lines, bandwidth, times = list[str](), problem.topology.host_memory.bandwidth, best.times
    there = f"of its host, which has {gib(problem.host_limit)} GiB for it"
    if memory.host_state:
        lines.append(
            f"optimizer.offload=True keeps {gib(memory.host_state)} GiB of each device's train state in the memory "
            f"{there}. An update takes {readable_time(best.step.update)}, at {bandwidth / 1e9:g} GB/s each way."
        )
        there = "of its host too"
    if memory.host_stash:
        forward, backward = times.forward, times.layer - times.forward
        lines.append(
            f"pipeline.stash_memory=host keeps {gib(memory.host_stash)} GiB of each device's stash in the memory "
            f"{there}. What a layer saves, {_crossing(times.spill, bandwidth)}, travels in "
            f"{readable_time(times.spill)} each way at {bandwidth / 1e9:g} GB/s, there beside a forward pass of "
            f"{readable_time(forward)} and back beside a backward pass of {readable_time(backward)}."
        )
    if memory.host_weights:
        chunks = best.layout.chunks
        lines.append(
            f"pipeline.weights_memory=host keeps {gib(memory.host_weights)} GiB of the layers' weights and gradients "
            f"in the memory {there}; a device holds two of {chunks} chunks of each. A layer's weights, "
            f"{_crossing(times.load, bandwidth)}, come in {readable_time(times.load)}, and its gradients, "
            f"{_crossing(times.store, bandwidth)}, go in {readable_time(times.store)}. In a batch {2 * chunks - 2} "
            f"chunks of weights come and {chunks} of gradients go, most of them beside the passes of "
            "the microbatches through a chunk."
        )
    if waits := best.exposed_s.get("host", 0.0):
        lines[-1] += f" The passes of a step wait {readable_time(waits)} for copies to and from the host."
    return lines


def further_text(asked: Problem, solved: Problem) -> str:
    """What the plans set that `search_further` found for `solved`, since no layout fits `asked`."""
    before, after = asked.config, solved.config
    limit, offloads = readable_size(asked.limit), after.optimizer.offload and not before.optimizer.offload
    pairs = {name: (getattr(before.pipeline, name), getattr(after.pipeline, name)) for name in PLACES}
    moved = [f"pipeline.{name}={new}" for name, (old, new) in pairs.items() if new != old]
    if not moved:
        return f"No layout fits {limit} a device without optimizer.offload. These plans set it."
    if not offloads:
        it = "it" if len(moved) == 1 else "both"
        return f"No layout fits {limit} a device without {' and '.join(moved)}. These plans set {it}."
    return (
        f"No layout fits {limit} a device, not even with optimizer.offload. These plans set it and also "
        f"{' and '.join(moved)} (docs/offload.md)."
    )


def _crossing(seconds: float, bandwidth: float) -> str:
    """What crosses a link of so many bytes/s in this time."""
    return readable_size(seconds * bandwidth)


def traffic_text(problem: Problem, plan: Plan) -> str:
    """For each axis the links that it crosses, the outermost first, each with bytes and seconds in a step."""
    by_axis: dict[str, list[str]] = {}
    for axis, link, size, seconds in reversed(plan.traffic):
        verb = "" if axis in by_axis else "stays in " if link == problem.topology.links[0] else "crosses "
        by_axis.setdefault(axis, []).append(f"{verb}{link.name}: {readable_size(size)} in {readable_time(seconds)}")
    return "; ".join(f"{axis} {', and '.join(links)}" for axis, links in reversed(by_axis.items()))


def _semantics_text(problem: Problem, best: Plan, flushed: Plan | None) -> list[str]:
    """How the best plan's semantics differ from a flush, or from the semantics that the config has."""
    pipeline, own = best.config.pipeline, problem.config.pipeline.semantics
    if pipeline.semantics == "sync":
        if own == "sync" or "2bw" not in problem.semantics:
            return []
        return [
            f"It has a flush, in place of the config's pipeline.semantics={own}: no plan without a flush is better."
        ]
    lines = []
    if flushed is not None:
        slower = flushed.step_time_s / best.step_time_s - 1
        others = flushed.layout.mesh.num_devices != best.layout.mesh.num_devices
        where = f" on {flushed.layout.mesh.num_devices} devices" if others else ""
        lines.append(
            f"Its weights lag by one update (docs/semantics.md). The best with a flush takes {flushed.step_time_s:.4g} "
            f"s ({slower:+.1%}){where}: {layout_text(flushed.layout)}."
        )
    if pipeline.prediction != "none":
        lines.append(
            f"Its batches run with predicted weights: pipeline.prediction={pipeline.prediction} and prediction_order="
            f"{pipeline.prediction_order}, which --write sets (docs/prediction.md)."
        )
    else:
        lines.append(
            f"Its batches run with weights that are not predicted, since optimizer.name={best.config.optimizer.name} "
            "has no momentum to predict from (docs/prediction.md)."
        )
    return lines


def _columns(problem: Problem, best: Plan) -> dict[str, Callable[[Plan], str]]:
    """The table's headings, each with the function that formats a plan's cell."""
    price = best.usd_per_step
    costs = {} if price is None else {"USD/step": lambda plan: _like(price, plan.usd_per_step)}
    hosts = {"host GiB": lambda plan: gib(plan.memory.of_host)} if best.memory.of_host else {}
    devices = {"devices": lambda plan: f"{plan.layout.mesh.num_devices}"} if problem.objective == "cost" else {}
    return {
        **devices,
        **{axis: functools.partial(_devices_along, axis) for axis in AXES},
        "outermost": lambda plan: plan.layout.mesh.outermost,
        "schedule": lambda plan: f"{plan.layout.schedule}{f' v={plan.layout.chunks}' * (plan.layout.chunks > 1)}",
        "microbatches": lambda plan: f"{plan.layout.num_microbatches} of {plan.config.microbatch_size}",
        "semantics": lambda plan: plan.layout.semantics,
        "recompute": lambda plan: plan.layout.recompute,
        "step, s": lambda plan: _like(best.step_time_s, plan.step_time_s),
        "TFLOP/s": lambda plan: f"{plan.tflops_per_device:.1f}",
        "of peak": lambda plan: f"{plan.utilisation:.1%}",
        "GiB": lambda plan: gib(plan.memory.peak),
        **hosts,
        "bubble": lambda plan: f"{plan.bubble:.1%}",
        "exposed": lambda plan: f"{sum(plan.exposed_s.values()) / plan.step_time_s:.1%}",
        **costs,
    }


def _like(best: float, number: float) -> str:
    """The number with as many decimals as give `best` four figures."""
    return f"{number:.{max(3 - math.floor(math.log10(best)), 0)}f}"


def _whole_run(plan: Plan) -> str:
    """Tokens per second, and the time and price of all steps of the config."""
    config, steps = plan.config, plan.config.train.num_steps
    time, price = readable_time(steps * plan.step_time_s), plan.usd_per_step
    return (
        f"{config.tokens_per_step / plan.step_time_s:,.0f} tokens/s; train.num_steps={steps:,} of "
        f"{config.tokens_per_step:,} tokens take {time}{'' if price is None else f' and {steps * price:,.2f} USD'}"
    )


def parts_text(memory: Memory) -> str:
    """The parts of at least 1% of the peak, the largest first."""
    parts = memory_parts(memory).items()
    return ", ".join(f"{name} {gib(size)}" for name, size in parts if size >= memory.peak / 100)


def describe(problem: Problem) -> str:
    """The problem in one line."""
    config, chip = problem.config, problem.topology.chip
    return (
        f"{num_parameters(config):,} parameters in {config.model.dtype}, batches of "
        f"{config.data.global_batch_size:,} examples, {problem.num_devices:,} {chip.name}, "
        f"{readable_size(problem.limit)} of each to use"
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """A text table of rows of cells, the headings first, with right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def as_json(problem: Problem, found: Found) -> dict[str, Any]:
    return {
        "topology": problem.topology.name,
        "num_devices": problem.num_devices,
        "objective": problem.objective,
        "memory_limit_bytes": problem.limit,
        "layouts": found.space,
        "simulated": found.simulated,
        "plans": [plan_facts(plan) for plan in found.plans],
    }


def plan_facts(plan: Plan) -> dict[str, Any]:
    """One plan as a JSON object; its `mesh` and `pipeline` have the fields of the config's sections."""
    return {
        "mesh": dataclasses.asdict(plan.config.mesh),
        "pipeline": dataclasses.asdict(plan.config.pipeline),
        "microbatch_size": plan.config.microbatch_size,
        "step_time_s": plan.step_time_s,
        "tokens_per_second": plan.config.tokens_per_step / plan.step_time_s,
        "tflops_per_device": plan.tflops_per_device,
        "utilisation": plan.utilisation,
        "bubble_fraction": plan.bubble,
        "waiting_s": plan.waiting_s,
        "exposed_s": plan.exposed_s,
        "usd_per_step": plan.usd_per_step,
        "traffic": [{**each._asdict(), "link": each.link.name} for each in plan.traffic],
        "peak_bytes": plan.memory.peak,
        "host_bytes": plan.memory.of_host,
        "memory_bytes": memory_parts(plan.memory),
    }


def memory_parts(memory: Memory) -> dict[str, int]:
    """Bytes on each device by purpose, the largest part first."""
    return dict(sorted(memory.of_device.items(), key=lambda part: -part[1]))


def layout_text(layout: Layout) -> str:
    """A layout in one line."""
    mesh = layout.mesh
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.sizes.items())
    across = f", outermost={mesh.outermost}" * (mesh.outermost != OUTERMOST_AXES[0])
    rings = ", collective_matmul=True" * mesh.collective_matmul
    return (
        f"{sizes}, sequence_parallel={mesh.sequence_parallel}{rings}{across}, "
        f"{layout.schedule} with {counted(layout.chunks, 'chunk')} and {layout.num_microbatches} microbatches, "
        f"{layout.semantics}, recompute={layout.recompute}"
    )


def _devices_along(axis: str, plan: Plan) -> str:
    mesh = plan.layout.mesh
    return f"{mesh.sizes[axis]}{exchange_text(mesh) * (axis == 'tensor')}"


def exchange_text(mesh: MeshConfig) -> str:
    """What follows the number of tensor ranks: `+sp` for sequence parallelism, `+cm` for collective matmul."""
    return "+sp" * mesh.sequence_parallel + "+cm" * mesh.collective_matmul


def as_python(config: Config, title: str, *, registering: str = "") -> str:
    """A config file that gives `config`; it leaves out fields with their default values.

    Args:
      config: the config to write.
      title: first line of the file's docstring.
      registering: a config file that registers a name that `config` uses, which the file runs; empty: none.
    """
    title = title.replace("\\", "\\\\").replace('"', '\\"')  # a topology's path or chip may contain these characters
    names = [type(getattr(config, section.name)).__name__ for section in dataclasses.fields(config)]
    sections = []
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        fields = [
            f"            {field.name}={getattr(values, field.name)!r},\n"
            for field in dataclasses.fields(values)
            if getattr(values, field.name) != field.default
        ]
        body = f"\n{''.join(fields)}        " if fields else ""
        sections.append(f"        {section.name}={type(values).__name__}({body}),\n")
    imported = f"from fiddlex.config import {', '.join(sorted(['Config', *names]))}\n"
    if registering:
        imported += f"from fiddlex.config.files import load_config\n\nload_config({registering!r})  # for its names\n"
    return f'"""{title}"""\n\n{imported}\n\ndef get_config() -> Config:\n    return Config(\n{"".join(sections)}    )\n'
