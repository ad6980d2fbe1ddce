"""Plots of timelines: what each rank does when, and what it holds over time, at the width of a page.

The module needs matplotlib (the extra `plot`). The colours are those of Okabe and Ito, which people with red-green
colour blindness can tell apart; shades of a colour show the chunks of a rank. Invariant: all panels of a figure share
one time scale, so that readers can compare lengths.
"""

import pathlib
from collections.abc import Mapping

from fiddlex.errors import FiddlexError
from fiddlex.schedules.schedule import Kind
from fiddlex.schedules.semantics import Semantics
from fiddlex.simulate.timeline import Event, Timeline

try:
    import matplotlib
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.colors import to_hex, to_rgb
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
except ModuleNotFoundError as error:
    raise FiddlexError(
        f"pictures need matplotlib, and there is no module {error.name!r}: pip install 'fiddlex[plot]'."
    ) from error

_COLOURS = {Kind.F: "#0072B2", Kind.B: "#D55E00", Kind.I: "#E69F00", Kind.W: "#009E73"}
_NAMES = {Kind.F: "F forward", Kind.B: "B backward", Kind.I: "I input gradient", Kind.W: "W weight gradient"}
_WIDTH, _ROW, _CURVES = 7.0, 0.21, 1.0  # inches: a page's text width, the height of a rank's row, that of the curves
_POINTS = 72 * _WIDTH * 0.87  # approximate length of the time axis
_SMALLEST_TEXT, _LARGEST_TEXT = 4.5, 8.0  # points
_MOST_TICK_LINES = 100
_VERSION_SHADES = 3  # used in turn; three are enough to tell a version from the previous and the next one
_MOST_NAMED_RANKS = 8


def draw(timelines: Mapping[str, Timeline], semantics: Mapping[str, Semantics] | None = None) -> Figure:
    """Draws timelines of one schedule below each other, each with curves of what its ranks hold.

    A box shows the number of its microbatch if the box is large enough.

    Args:
      timelines: at least one timeline, each under the name to print above it.
      semantics: the semantics of each timeline, under the same names, if the timelines have several batches; shades
        then show versions of the weights.

    Returns:
      The figure, 7 inches wide. `save` writes it.
    """
    first = next(iter(timelines.values()))
    heights = [_ROW * first.schedule.num_ranks + 0.1, _CURVES] * len(timelines)
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.5 * len(heights) + 0.7), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    longest = max(timeline.makespan for timeline in timelines.values()) or 1.0
    for number, (name, timeline) in enumerate(timelines.items()):
        boxes, curves = axes[2 * number : 2 * number + 2]
        # A timeline of several batches ends in the middle of the next batch, so its bubble means nothing.
        bubble = "" if semantics else f", bubble {timeline.bubble_fraction:.1%} of the work"
        boxes.set_title(f"{name}: {timeline.makespan:g} long{bubble}", fontsize=9)
        _draw_boxes(boxes, timeline, longest, semantics[name] if semantics else None)
        _draw_curves(curves, timeline)
        for panel in (boxes, curves):
            panel.set_xlim(0, longest)
            panel.tick_params(labelsize=7)
            panel.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("time (in the unit of the costs)", fontsize=8)
    figure.legend(handles=_legend(first, versions=bool(semantics)), loc="outside lower center", ncols=4, fontsize=7)
    return figure


def save(figure: Figure, path: pathlib.Path, *, format: str) -> None:
    """Writes a figure as `svg` or `png`, with the same bytes every time. Raises OSError when it cannot be written."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fiddlex"}):
        figure.savefig(path, format=format, dpi=200, metadata={"Date": None} if format == "svg" else {})


def _draw_boxes(axes: Axes, timeline: Timeline, longest: float, semantics: Semantics | None) -> None:
    if len(timeline.tick_starts) <= _MOST_TICK_LINES:
        axes.vlines(timeline.tick_starts, -0.5, len(timeline.events) - 0.5, color="0.6", linewidth=0.4, zorder=0)
    for rank, row in enumerate(timeline.events):
        boxes = [(event.start, event.end - event.start) for event in row]
        colours = [_colour(timeline, rank, event, semantics) for event in row]
        narrow = min(width for _, width in boxes) / longest * _POINTS < 2
        axes.broken_barh(
            boxes, (rank - 0.42, 0.84), facecolors=colours, edgecolor="white", linewidth=0 if narrow else 0.4
        )
        for event, colour in zip(row, colours, strict=True):
            _write_number(axes, rank, event, dark=sum(to_rgb(colour)) < 1.5, points=_POINTS / longest)
    axes.set_ylim(len(timeline.events) - 0.5, -0.5)
    axes.set_yticks(range(0, len(timeline.events), 1 + len(timeline.events) // 32))
    axes.set_ylabel("rank", fontsize=8)


def _write_number(axes: Axes, rank: int, event: Event, *, dark: bool, points: float) -> None:
    text = str(event.action.microbatch)
    size = min((event.end - event.start) * points / (0.65 * len(text)), 72 * _ROW * 0.6, _LARGEST_TEXT)
    if size >= _SMALLEST_TEXT:
        middle = (event.start + event.end) / 2
        colour = "white" if dark else "black"
        axes.text(middle, rank, text, ha="center", va="center_baseline", fontsize=size, color=colour)


def _draw_curves(axes: Axes, timeline: Timeline) -> None:
    for rank in range(timeline.schedule.num_ranks):
        share = 1 / len(timeline.schedule.stages_of(rank))
        for style, activation, weight_gradient in (("-", share, 0), (":", 0, share)):
            curve = dict(timeline.memory(rank, activation=activation, weight_gradient=weight_gradient))
            axes.step(
                [0, *curve], [0, *curve.values()], style, where="post", color=_line(timeline, rank), linewidth=0.9
            )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("held\n(microbatches)", fontsize=8)


def _colour(timeline: Timeline, rank: int, event: Event, semantics: Semantics | None) -> str:
    if semantics:
        return _shade(event.action.kind, semantics.version(event.action) % _VERSION_SHADES / (_VERSION_SHADES - 1))
    stages = timeline.schedule.stages_of(rank)
    return _shade(event.action.kind, stages.index(event.action.stage) / max(len(stages) - 1, 1))


def _shade(kind: Kind, lightness: float) -> str:
    """The colour of a kind, closer to white as `lightness` goes from 0 to 1."""
    red, green, blue = (part + 0.6 * lightness * (1 - part) for part in to_rgb(_COLOURS[kind]))
    return to_hex((red, green, blue))


def _line(timeline: Timeline, rank: int) -> str:
    return to_hex(matplotlib.colormaps["viridis"](rank / max(timeline.schedule.num_ranks - 1, 1) * 0.9))


def _legend(timeline: Timeline, *, versions: bool) -> list[Artist]:
    schedule = timeline.schedule
    kinds = {event.action.kind for row in timeline.events for event in row}
    handles: list[Artist] = [Patch(color=_shade(kind, 0), label=_NAMES[kind]) for kind in Kind if kind in kinds]
    if versions:
        handles.append(Patch(color=_shade(Kind.F, 0.5), label="shades: versions of the weights, dark, light, lightest"))
    elif schedule.num_chunks > 1:
        handles.append(Patch(color=_shade(Kind.F, 1), label="lighter: a later chunk"))
    few = schedule.num_ranks <= _MOST_NAMED_RANKS
    for rank in range(schedule.num_ranks) if few else (0, schedule.num_ranks - 1):
        handles.append(Line2D([], [], color=_line(timeline, rank), label=f"activations of rank {rank}"))
    if schedule.split_backward:
        handles.append(Line2D([], [], color="black", linestyle=":", label="what I leaves for W"))
    return handles
