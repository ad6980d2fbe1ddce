"""Pictures of timelines: what each rank does when, and what it holds over time, at the width of a page.

    save(draw({"free-running": …, "lockstep": …}), path, format="pdf")

The module needs matplotlib (the extra `plot`). `fiddlex.simulate.panels` draws the panels. Invariant: panels that show
whole timelines share one time scale, so that readers can compare lengths, and numbers in boxes have one size.
"""

import io
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fiddlex.errors import ConfigError, FiddlexError, installation
from fiddlex.files.whole_files import write_output
from fiddlex.schedules.schedule import Kind
from fiddlex.schedules.semantics import Semantics
from fiddlex.simulate.timeline import BUBBLE, Timeline
from fiddlex.terminal.readable import counted

try:
    import matplotlib
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    from fiddlex.simulate import panels
except ModuleNotFoundError as error:
    raise FiddlexError(
        f"pictures need matplotlib, and there is no module {error.name!r}: {installation('plot')}."
    ) from error

_NAMES = {Kind.F: "F forward", Kind.B: "B backward", Kind.I: "I input gradient", Kind.W: "W weight gradient"}
_WIDTH = 7.0  # inches: a page's text width
_POINTS = 72 * _WIDTH * 0.8  # approximate width of a panel
_ROW, _ROWS = 0.21, 2.4  # inches: the most that a rank's row takes, and all rows of a timeline
_RASTER = 1.7  # inches: the most that a raster takes
_CURVES, _ZOOM, _BETWEEN, _LEGEND_LINE = 1.0, 1.2, 0.42, 0.17  # inches
_LEGEND_TEXT, _SAMPLE = 7.0, 36.0  # points: the size of the legend's text; the width of a sample with its margins
_LETTER_WIDTH = 0.56  # the average width of a letter, as a share of the size of the text
_LONGEST_NAME = 60
_DPI = 200  # dots per inch of a png and of rasters
_METADATA: dict[str, dict[str, None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def draw(
    timelines: Mapping[str, Timeline], semantics: Mapping[str, Semantics] | None = None, *, brief: bool = False
) -> Figure:
    """Draws timelines below each other, each with curves of what its ranks hold.

    Sizes that all timelines have in common are in the figure's title, others in the panels'. Where boxes of actions
    would be too narrow to be seen, a timeline has a raster instead, and its start and end enlarged below. The figure
    is 7 inches wide.

    Args:
      timelines: at least one timeline, each under the name to print above it.
      semantics: those of timelines of several batches, under the same names; shades then show versions of the weights.
      brief: whether to leave out curves and enlarged parts; titles then say how much is in flight at most.
    """
    row = min(_ROW, _ROWS / max(len(timeline.events) for timeline in timelines.values()))
    scale = panels.Scale.of(list(timelines.values()), width=_POINTS, row=72 * row)
    heights = []
    for timeline in timelines.values():
        whole = row * len(timeline.events) + 0.1
        heights += [min(whole, _RASTER) if scale.crowded else whole]
        heights += [] if brief else [*[_ZOOM] * scale.crowded, _CURVES]
    legend = _legend(timelines, scale, versions=bool(semantics), brief=brief)
    columns = _columns(legend)
    height = sum(heights) + _BETWEEN * len(heights) + _LEGEND_LINE * -(-len(legend) // columns) + 0.85
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    places = iter(range(len(heights)))
    shared, own = _titles(timelines, semantics, brief=brief)
    figure.suptitle(shared, fontsize=_fitting(shared, 10), parse_math=False)
    for name, timeline in timelines.items():
        lag = semantics[name] if semantics else None
        axes = figure.add_subplot(grid[next(places), :])
        axes.set_title(own[name], fontsize=_fitting(own[name], 9), parse_math=False)
        if scale.crowded:
            panels.draw_density(axes, timeline, lag, scale)
        else:
            span = (0.0, scale.end)
            panels.draw_boxes(axes, timeline, lag, span=span, points=scale.points, numeral=scale.numeral)
        if scale.crowded and not brief:
            place = next(places)
            halves = [figure.add_subplot(grid[place, side]) for side in range(2)]
            _draw_ends(axes, halves, timeline, lag, scale)
        if not brief:
            panels.draw_curves(figure.add_subplot(grid[next(places), :]), timeline, scale)
    for axes in figure.axes:
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[-1].set_xlabel(f"time (in the unit of the costs)\nbubble: {BUBBLE}", fontsize=8)
    figure.legend(handles=legend, loc="outside lower center", ncols=columns, fontsize=_LEGEND_TEXT)
    return figure


def save(figure: Figure, path: pathlib.Path, *, format: str) -> None:
    """Writes a figure as `svg`, `pdf` or `png`, with the same bytes every time; text stays text in svg and pdf.

    Raises:
      OSError: when the file cannot be written; what was at `path` stays there.
      ConfigError: when a png would be too high, as of very many timelines.
    """
    height = figure.get_figheight()
    if format == "png" and height * _DPI >= 2**16:
        raise ConfigError(
            f"The picture would be {height:.0f} inches high, and a png can be {2**16 // _DPI}. Draw fewer schedules or "
            "one clock, or take svg or pdf."
        )
    # Fonts of type 42 are TrueType, as publishers ask.
    fonts: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "fiddlex", "pdf.fonttype": 42}
    content = io.BytesIO()
    with matplotlib.rc_context(fonts), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the font lacks a letter of a file's name
        figure.savefig(content, format=format, dpi=_DPI, metadata=_METADATA.get(format))
    write_output(path, content.getvalue())


def _draw_ends(
    whole: Axes, halves: Sequence[Axes], timeline: Timeline, semantics: Semantics | None, scale: panels.Scale
) -> None:
    """Draws the start and the end of a timeline enlarged, and lines in the panel of the whole that show how far."""
    for axes, (name, (span, ranks)) in zip(halves, panels.ends(timeline, scale).items(), strict=True):
        axes.set_title(f"the {name} of ranks {ranks[0]} to {ranks[-1]}, enlarged", fontsize=8)
        panels.draw_boxes(axes, timeline, semantics, span=span, points=_POINTS / 2 / scale.zoomed, ranks=ranks)
        whole.axvline(span[name == "start"], color="black", linestyle="--", linewidth=panels.ZOOM_LINE)


def _titles(
    timelines: Mapping[str, Timeline], semantics: Mapping[str, Semantics] | None, *, brief: bool
) -> tuple[str, dict[str, str]]:
    """The title of the figure, with what all schedules have in common, and that of each timeline."""
    facts = {}
    for name, timeline in timelines.items():
        schedule = timeline.schedule
        size = semantics[name].batch_size if semantics else schedule.num_microbatches
        facts[name] = {
            "name": _readable(schedule.name),
            "p": f"p = {counted(schedule.num_ranks, 'rank')}",
            "v": f"v = {counted(schedule.num_chunks, 'chunk')}",
            "m": f"m = {size:,} microbatch{'es' * (size != 1)}{' a batch' * bool(semantics)}",
        }
    first, *others = facts.values()
    shared = {key: fact for key, fact in first.items() if all(other[key] == fact for other in others)}
    own = {}
    for name, timeline in timelines.items():
        sizes = [fact for key, fact in facts[name].items() if key not in shared and key != "name"]
        own[name] = f"{', '.join([_readable(name), *sizes])}: makespan {timeline.makespan:g}"
        if not semantics:  # a timeline of several batches ends within a batch, so that its bubble means nothing
            own[name] += f", bubble {timeline.bubble_fraction:.1%} of the work"
        if brief:
            own[name] += f", at most {max(timeline.peak_inflight):g} in flight"
    title = ", ".join(fact for key, fact in shared.items() if key != "name")
    return f"{shared['name']}: {title}" if "name" in shared else title, own


def _fitting(text: str, size: float) -> float:
    """The size of the text in points, smaller if it would be wider than the figure."""
    return min(size, 72 * _WIDTH / (_LETTER_WIDTH * max(len(text), 1)))


def _readable(name: str) -> str:
    """A name that can be drawn: its end if it is long, without characters that no font has."""
    name = name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)


def _legend(timelines: Mapping[str, Timeline], scale: panels.Scale, *, versions: bool, brief: bool) -> list[Artist]:
    several = list(timelines.values())
    drawn = {event.action.kind for timeline in several for row in timeline.events for event in row}
    kinds = [kind for kind in Kind if kind in drawn]
    handles: list[Artist] = [Patch(color=panels.shade(kind, 0), label=_NAMES[kind]) for kind in kinds]
    if versions:
        handles.append(Patch(color=panels.shade(Kind.F, 0.5), label="shades: versions of weights"))
    elif any(timeline.schedule.num_chunks > 1 for timeline in several):
        handles.append(Patch(color=panels.shade(Kind.F, 1), label="lighter: a later chunk"))
    if scale.numeral:
        handles.append(Line2D([], [], color="black", linestyle="", marker="$3$", label="number: the microbatch"))
    if scale.crowded:
        red, green, blue = np.mean([to_rgb(panels.shade(kind, 0)) for kind in kinds], axis=0)
        handles.append(Patch(color=(red, green, blue), label="mixed colours: shares of time"))
    if scale.crowded and not brief:
        label = "dashed: enlarged below"
        handles.append(Line2D([], [], color="black", linestyle="--", linewidth=panels.ZOOM_LINE, label=label))
    if any(panels.copies(timeline) for timeline in several):
        handles.append(Patch(color=panels.COPIES, label="copies from or to the host"))
    if any(_has_tick_lines(timeline, scale, brief=brief) for timeline in several):
        handles.append(Line2D([], [], color=panels.TICK_LINE, linewidth=0.6, label="grey line: a tick starts"))
    return handles + ([] if brief else _of_curves(several))


def _columns(legend: Sequence[Artist]) -> int:
    """The most columns, up to five, in which the legend is no wider than the figure."""
    for columns in (5, 4, 3, 2):
        lines = -(-len(legend) // columns)
        widest = [
            max(len(str(each.get_label())) for each in legend[at : at + lines]) for at in range(0, len(legend), lines)
        ]
        if sum(_LETTER_WIDTH * _LEGEND_TEXT * letters + _SAMPLE for letters in widest) < 72 * _WIDTH:
            break
    return columns


def _has_tick_lines(timeline: Timeline, scale: panels.Scale, *, brief: bool) -> bool:
    spans = [span for span, _ in panels.ends(timeline, scale).values()] if scale.crowded else [(0.0, scale.end)]
    return any(panels.tick_lines(timeline, span) for span in spans) and not (scale.crowded and brief)


def _of_curves(timelines: Sequence[Timeline]) -> list[Artist]:
    most = max(timelines, key=lambda timeline: timeline.schedule.num_ranks)
    handles: list[Artist] = [Line2D([], [], color="black", label="solid: activations in flight")]
    if any(timeline.schedule.split_backward for timeline in timelines):
        handles.append(Line2D([], [], color="black", linestyle=":", label="dotted: what I leaves for W"))
    for rank in panels.named_ranks(most):
        width = panels.line_width(most, rank)
        handles.append(Line2D([], [], color=panels.line_colour(most, rank), linewidth=width, label=f"rank {rank}"))
    if len(panels.named_ranks(most)) < most.schedule.num_ranks:
        handles.append(Patch(color=panels.BAND, label="grey band: all ranks"))
    return handles
