"""One schedule and what the clocks say of it: a page of text for people, and values for JSON."""

from collections.abc import Mapping

from fiddlex.schedules.lowering import Lowered
from fiddlex.schedules.text import copies_to_text, order_to_text, stream_to_text, to_text
from fiddlex.schedules.ticks import order_facts
from fiddlex.schedules.weight_stream import CHUNKS_HELD, WeightStream
from fiddlex.schedules.windows import Windows
from fiddlex.simulate.clock import Costs
from fiddlex.simulate.steady import first_steps, no_gain, steady
from fiddlex.simulate.timeline import Timeline, bubble_in
from fiddlex.terminal.readable import counted

CLOCKS = {"free_running": "free-running", "lockstep": "lockstep"}  # each with its name for people
_UNIT = "in microbatches of the whole rank"  # one of a rank's v stages counts 1/v


def page(lowered: Lowered, stream: WeightStream | None, timelines: Mapping[str, Timeline], costs: Costs) -> str:
    """The grids and a summary, for people; `timelines` are named as in `CLOCKS`."""
    schedule, facts = lowered.schedule, schedule_facts(lowered)
    parts = ["{name}: pipe={pipe}, chunks={chunks}, microbatches={microbatches}\n".format(**facts)]
    parts += [f"  {note}\n" for note in schedule.notes]
    if "free_running" in timelines:
        parts.append(f"\nfree-running, each action in one slot:\n{to_text(schedule)}")
    if "lockstep" in timelines:
        parts.append(f"\nlockstep, {lowered.num_ticks} ticks:\n{to_text(schedule, lowered.ticks)}")
        if order := order_to_text(lowered, "--order"):
            parts.append(f"  {order}\n")
    if lowered.host_stash_slots:
        parts.append(
            "\ncopies to the host (↑, beside the forward pass of the tick) and back (↓, beside its backward pass):\n"
            f"{copies_to_text(lowered)}"
            f"  forward passes of a stage stashed at most on a device: {lowered.stash_slots}; on the host: "
            f"{lowered.host_stash_slots}\n"
        )
    if stream:
        parts.append(_of_transfers(lowered, stream))
    parts.append(f"\ncosts, in any unit: {costs}\nbubble: {bubble_in(timelines)}\n")
    for clock, timeline in timelines.items():
        name, makespan, bubble = CLOCKS[clock], timeline.makespan, timeline.bubble_fraction
        parts.append(
            f"\n{name}: makespan {makespan:g}, bubble {bubble:.4g} of the work: a batch takes "
            f"{timeline.batch_time:g}, the busiest rank works {timeline.ideal:g}\n"
            f"  most activations held by each rank, {_UNIT}: {_row(timeline.peak_inflight)}\n"
        )
        if schedule.split_backward:
            parts.append(f"  most left for W by each rank, {_UNIT}: {_row(timeline.peak_weight_stash)}\n")
    return "".join(parts)


def _of_transfers(lowered: Lowered, stream: WeightStream) -> str:
    loads, stores = stream.chunks_each_way
    schedule = lowered.schedule
    numbers = {len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks)}
    who = "each rank" if len(numbers) == 1 else "the rank with most stages"
    return (
        "\nstages whose weights come from the host (↓) and whose gradients go to it (↑) beside the ticks from each "
        f"column's number on:\n{stream_to_text(lowered, stream)}"
        "  before the first tick the weights of each rank's first stage come; after the last its gradients go\n"
        f"  a transfer: {counted(stream.rows, 'layer')} each way in {counted(stream.period, 'tick')}; in a batch "
        f"{who} gets weights of {counted(loads, 'stage')} and sends gradients of {stores}; a device holds "
        f"{CHUNKS_HELD} stages of each\n"
    )


def unflushed_page(name: str, windows: Windows, costs: Costs) -> str:
    """The grid of a pipeline that is not flushed, and its cost."""
    facts, steps = steady(windows, costs), len(windows.first) + len(windows.cycle)
    lowered, reason = windows.over(steps), no_gain(windows, "--order")
    first = "step" if steps == 1 else f"{steps} steps"
    return (
        f"\n{semantics_title(name, windows)}, lockstep, the ticks of the first {first}:\n"
        f"{to_text(lowered.schedule, lowered.ticks)}"
        f"  the first step takes {facts.fill_ticks} ticks, {facts.fill:g} long; then a batch takes "
        f"{facts.period_ticks:g} ticks, {facts.period:g} long, bubble {facts.bubble_fraction:.4g} of the work\n"
        f"  versions of the weights: {windows.sizes.versions}; forward passes of a stage stashed at most: "
        f"{windows.sizes.slots.stash}{_on_host(windows)}\n" + (f"  {reason}\n" if reason else "")
    )


def _on_host(windows: Windows) -> str:
    number = windows.lowered.host_stash_slots
    return f"; on the host: {number}" if number else ""


def unflushed_run(name: str, windows: Windows, steps: int, costs: Costs) -> tuple[str, Timeline]:
    """The title of a pipeline that is not flushed, for a picture, and its first steps in lockstep."""
    bubble = f"bubble {steady(windows, costs).bubble_fraction:.1%} of the work"
    return f"{semantics_title(name, windows)}, {bubble}; {steps} steps", first_steps(windows, steps, costs)


def semantics_title(name: str, windows: Windows) -> str:
    return f"{name}, {'from batch to batch' if max(windows.semantics.delays) else 'flushed'}"


def schedule_facts(lowered: Lowered) -> dict[str, object]:
    """The name and the sizes of a schedule, and what the ticks do to its order, for JSON."""
    schedule = lowered.schedule
    sizes = {"pipe": schedule.num_ranks, "chunks": schedule.num_chunks, "microbatches": schedule.num_microbatches}
    order = order_facts(schedule, lowered.ticks)
    return {"name": schedule.name, **sizes, "num_ticks": lowered.num_ticks, **order}


def timeline_facts(timeline: Timeline) -> dict[str, object]:
    fields = ("makespan", "batch_time", "ideal", "bubble_fraction", "peak_inflight", "peak_weight_stash")
    return {field: getattr(timeline, field) for field in fields}


def stream_facts(stream: WeightStream) -> dict[str, object]:
    """How weights and gradients travel between host and device, for JSON."""
    loads, stores = stream.chunks_each_way
    sizes = {"layers_per_transfer": stream.rows, "ticks_per_period": stream.period, "num_periods": len(stream.loads)}
    return {**sizes, "chunks_held": CHUNKS_HELD, "weight_chunks_per_batch": loads, "gradient_chunks_per_batch": stores}


def _row(numbers: tuple[float, ...]) -> str:
    return " ".join(f"{number:g}" for number in numbers)
