"""Prints, checks, draws or exports a pipeline schedule, and tells what it costs.

    python experiments/schedule.py --name=1f1b --pipe=4 --microbatches=8
    python experiments/schedule.py --name=interleaved_1f1b --pipe=4 --chunks=2 --microbatches=8 --format=json
    python experiments/schedule.py --name=file:/tmp/mine.csv --costs=hop=0.1 --format=svg --output=/tmp/a.svg

Two clocks tell the cost: free-running, as papers print it, where each rank starts an action as soon as it can, and
lockstep, what the executor pays for stepping through one table on all ranks together.
"""

import json
import pathlib

from absl import flags

from fiddlex.errors import ConfigError
from fiddlex.flags import run
from fiddlex.pipeline.generators import GENERATORS, make_schedule
from fiddlex.pipeline.lowering import Lowered, lower
from fiddlex.pipeline.text import to_csv, to_text
from fiddlex.simulate.clock import Costs, free_running
from fiddlex.simulate.lockstep import lockstep
from fiddlex.simulate.timeline import Timeline

_NAME = flags.DEFINE_string("name", None, f"{', '.join(GENERATORS)} or file:PATH.csv", required=True)
_PIPE = flags.DEFINE_integer("pipe", None, "ranks; a file has its own")
_CHUNKS = flags.DEFINE_integer("chunks", None, "stages on a rank; by default as many as the schedule takes, or one")
_MICROBATCHES = flags.DEFINE_integer("microbatches", None, "microbatches in a batch; a file has its own")
_COSTS = flags.DEFINE_string(
    "costs",
    None,
    "times in any unit, as in forward=1,backward_input=1,backward_weight=1,hop=0.1; forward=1:1:2:1 has one for each "
    "stage; what is left out is 1, a hop 0",
)
_CLOCK = flags.DEFINE_enum("clock", "both", ["both", "free_running", "lockstep"], "what text and pictures show")
_FORMAT = flags.DEFINE_enum(
    "format",
    "text",
    ["text", "csv", "json", "svg", "png"],
    "text: grids and costs; csv: the table, which file: reads; json: the costs as one object; svg, png: a picture",
)
_OUTPUT = flags.DEFINE_string("output", None, "file to write; by default standard output, except for pictures")

_UNIT = "in microbatches of the whole rank"  # one of a rank's v stages counts 1/v


def main(argv: list[str]) -> None:
    """Prints or writes the schedule in the format asked for."""
    picture = _FORMAT.value in ("svg", "png")
    output = pathlib.Path(_OUTPUT.value) if _OUTPUT.value else None
    if picture and not output:
        raise ConfigError(f"--format={_FORMAT.value} needs --output, the file to write the picture to.")
    costs = Costs.parse(_COSTS.value or "")
    schedule = make_schedule(
        _NAME.value,
        pipe=_PIPE.value,
        chunks=_CHUNKS.value,
        num_microbatches=_MICROBATCHES.value,
        words=("--pipe", "--chunks", "--microbatches"),
    )
    lowered = lower(schedule)
    timelines = {"free_running": free_running(schedule, costs), "lockstep": lockstep(lowered, costs)}
    shown = {clock: timeline for clock, timeline in timelines.items() if _CLOCK.value in ("both", clock)}
    if picture and output:
        from fiddlex.simulate.plots import draw, save  # matplotlib is an extra, and slow to import

        named = {clock.replace("_", "-"): timeline for clock, timeline in shown.items()}
        save(draw(named), output, format=_FORMAT.value)
        return
    if _FORMAT.value == "csv":
        text = to_csv(schedule)
    elif _FORMAT.value == "json":
        text = json.dumps(_facts(lowered) | {clock: _costs(timeline) for clock, timeline in timelines.items()}) + "\n"
    else:
        text = _page(lowered, shown, costs)
    if output:
        output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


def _facts(lowered: Lowered) -> dict[str, object]:
    schedule = lowered.schedule
    sizes = {"pipe": schedule.num_ranks, "chunks": schedule.num_chunks, "microbatches": schedule.num_microbatches}
    return {"name": schedule.name, **sizes, "num_ticks": lowered.num_ticks}


def _costs(timeline: Timeline) -> dict[str, object]:
    fields = ("makespan", "bubble_fraction", "peak_inflight", "peak_weight_stash")
    return {field: getattr(timeline, field) for field in fields}


def _page(lowered: Lowered, timelines: dict[str, Timeline], costs: Costs) -> str:
    """The grids and a summary, for people."""
    schedule, facts = lowered.schedule, _facts(lowered)
    parts = ["{name}: pipe={pipe}, chunks={chunks}, microbatches={microbatches}\n".format(**facts)]
    if "free_running" in timelines:
        parts.append(f"\nfree-running, each action in one slot:\n{to_text(schedule)}")
    if "lockstep" in timelines:
        parts.append(f"\nlockstep, {lowered.num_ticks} ticks:\n{to_text(schedule, lowered.ticks)}")
    parts.append(f"\ncosts, in any unit: {costs}\n")
    for clock, timeline in timelines.items():
        name, makespan, bubble = clock.replace("_", "-"), timeline.makespan, timeline.bubble_fraction
        parts.append(
            f"\n{name}: makespan {makespan:g}, bubble {bubble:.4g} of the work\n"
            f"  most activations held by each rank, {_UNIT}: {_row(timeline.peak_inflight)}\n"
        )
        if schedule.split_backward:
            parts.append(f"  most left for W by each rank, {_UNIT}: {_row(timeline.peak_weight_stash)}\n")
    return "".join(parts)


def _row(numbers: tuple[float, ...]) -> str:
    return " ".join(f"{number:g}" for number in numbers)


if __name__ == "__main__":
    run(main)
