"""The panels of a picture of timelines: boxes for actions, a raster where boxes would be too narrow, and curves.

The colours are those of Okabe and Ito, which people with red-green colour blindness can tell apart; shades of a colour
show the chunks of a rank or, where weights lag, versions of the weights. Colours of lines go from dark to light with
the rank. Invariant: a panel depends on its timeline and the scale alone, so equal times are equally long everywhere.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb

from fiddlex.schedules.schedule import Kind
from fiddlex.schedules.semantics import Semantics
from fiddlex.simulate.density import highest, shares
from fiddlex.simulate.timeline import Event, Timeline

TICK_LINE, COPIES, BAND = "0.6", "0.88", "0.8"  # greys
ZOOM_LINE = 0.8  # points: the width of dashed lines

_COLOURS = {Kind.F: "#0072B2", Kind.B: "#D55E00", Kind.I: "#E69F00", Kind.W: "#009E73"}  # Okabe and Ito
_MOST_NAMED_RANKS = 8  # which have a line each; of more, the first and the last have one
_VERSION_SHADES = 3  # used in turn; three are enough to tell a version from the previous and the next one
_MOST_TICK_LINES = 100
_SMALLEST_TEXT, _LARGEST_TEXT = 5.0, 7.0  # points
_DIGIT = 0.9  # width of a digit with its margin, as a share of the size of the text
_NARROWEST = 2.0  # points: where boxes are narrower on average, a raster takes their place
_MOST_BOXES = 3000  # of a timeline, so that files stay small; of more, a raster takes their place
_DOTS = 1200  # of a raster in a row
_SMOOTHED = 6  # a dot of a raster mixes the colours of about so many actions before it and after it
_ZOOMED, _ZOOMED_RANKS = 5.0, 16  # of enlarged panels: the average width of a box in points, and the most ranks
_DOTTED = 0.9  # points: the width of dotted lines
_MOST_STEPS = 2000  # of a curve that is drawn exactly; longer ones show the most in each of half as many pieces


@dataclasses.dataclass(frozen=True)
class Scale:
    """What all panels of a figure have in common."""

    end: float  # the time at the right end of panels that show whole timelines
    points: float  # points (1/72 inch) of a unit of time in these panels
    # Size of the microbatches' numbers, in points; 0: there are none, as some would not fit into their boxes.
    numeral: float
    crowded: bool  # whether panels show rasters, as boxes would be too narrow or too many
    zoomed: float  # time that an enlarged panel shows; such a panel is half as wide as the others

    @classmethod
    def of(cls, timelines: Sequence[Timeline], *, width: float, row: float) -> "Scale":
        """The scale of a figure whose panels are `width` points wide and whose ranks have rows of `row` points."""
        end = max(timeline.makespan for timeline in timelines) or 1.0
        average, points = min(map(_average, timelines)) or end, width / end
        events = [event for timeline in timelines for row in timeline.events for event in row]
        room = min(
            ((event.end - event.start) / len(_number(event)) for event in events if event.end > event.start),
            default=end,
        )
        most = max(sum(map(len, timeline.events)) for timeline in timelines)
        crowded = average * points < _NARROWEST or most > _MOST_BOXES
        size = min(room * points / _DIGIT, 0.6 * row, _LARGEST_TEXT)
        return cls(
            end,
            points,
            numeral=size if size >= _SMALLEST_TEXT and not crowded else 0.0,
            crowded=crowded,
            zoomed=min(average * width / 2 / _ZOOMED, end),
        )


def draw_boxes(
    axes: Axes,
    timeline: Timeline,
    semantics: Semantics | None,
    *,
    span: tuple[float, float],
    points: float,
    ranks: range | None = None,
    numeral: float = 0.0,
) -> None:
    """Draws each action as a box in its rank's row; shades show versions of the weights or, without semantics, chunks.

    `span` is the first and the last time to draw, `points` those of a unit of time, and `numeral` the size of the
    microbatches' numbers, in points; 0: none.
    """
    ranks = range(len(timeline.events)) if ranks is None else ranks
    for rank in ranks:
        shown = [
            pair for pair in coloured(timeline, rank, semantics) if pair[0].end >= span[0] and pair[0].start <= span[1]
        ]
        boxes = [(event.start, event.end - event.start) for event, _ in shown]
        narrow = min((length for _, length in boxes), default=0.0) * points < 2
        axes.broken_barh(
            boxes,
            (rank - 0.42, 0.84),
            facecolors=[colour for _, colour in shown],
            edgecolor="white",
            linewidth=0 if narrow else 0.4,
        )
        for event, colour in shown if numeral else ():
            axes.text(
                (event.start + event.end) / 2,
                rank,
                _number(event),
                ha="center",
                va="center_baseline",
                fontsize=numeral,
                color="white" if sum(to_rgb(colour)) < 1.5 else "black",
            )
    ticks = tick_lines(timeline, span)
    axes.vlines(ticks, ranks[0] - 0.5, ranks[-1] + 0.5, color=TICK_LINE, linewidth=0.4, zorder=0)
    _finish_rows(axes, timeline, span, ranks)


def draw_density(axes: Axes, timeline: Timeline, semantics: Semantics | None, scale: Scale) -> None:
    """Draws ranks as rows of a raster, whose dots mix the colours of the actions near them by shares of the time."""
    end, nearby = timeline.makespan or scale.end, _SMOOTHED * _average(timeline)
    num_dots = max(round(_DOTS * end / scale.end), 1)
    raster = np.ones((len(timeline.events), num_dots, 3))
    for rank in range(len(timeline.events)):
        events: dict[str, list[Event]] = {}
        for event, colour in coloured(timeline, rank, semantics):
            events.setdefault(colour, []).append(event)
        for colour, row in events.items():
            starts, ends = [event.start for event in row], [event.end for event in row]
            share = shares(starts, ends, end=end, num_columns=num_dots, width=nearby)
            raster[rank] -= share[:, None] * (1 - np.asarray(to_rgb(colour)))
    extent = (0.0, end, len(timeline.events) - 0.5, -0.5)
    axes.imshow(np.clip(raster, 0, 1), extent=extent, aspect="auto")
    _finish_rows(axes, timeline, (0.0, scale.end), range(len(timeline.events)))


def draw_curves(axes: Axes, timeline: Timeline, scale: Scale) -> None:
    """Draws what ranks hold over time, in microbatches of the whole rank, and writes the peaks beside the panel.

    Solid lines are activations in flight, dotted ones what an I leaves for its W. With many ranks the first and the
    last have lines, and a grey band goes from the least to the most activations of any rank.
    """
    num_ranks, end = timeline.schedule.num_ranks, timeline.makespan or scale.end
    for style, split in (("-", False), (":", True)) if timeline.schedule.split_backward else (("-", False),):
        curves = [_changes(timeline, rank, split=split) for rank in range(num_ranks)]
        edges = np.unique(np.concatenate([[0.0, end], *(times for times, _ in curves)]))
        if len(edges) > _MOST_STEPS:
            edges = np.linspace(0, end, _MOST_STEPS // 2 + 1)
        levels = np.stack([[*highest(times, amounts, edges), amounts[-1]] for times, amounts in curves])
        if num_ranks > _MOST_NAMED_RANKS and not split:
            axes.fill_between(edges, levels.min(axis=0), levels.max(axis=0), step="post", color=BAND, linewidth=0)
        for rank in named_ranks(timeline):
            width = _DOTTED if split else line_width(timeline, rank)
            axes.step(edges, levels[rank], style, where="post", color=line_colour(timeline, rank), linewidth=width)
    axes.text(1.01, 1.0, _peaks(timeline), transform=axes.transAxes, ha="left", va="top", fontsize=7)
    axes.set_xlim(0, scale.end)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("microbatches", fontsize=8)


def coloured(timeline: Timeline, rank: int, semantics: Semantics | None) -> Iterator[tuple[Event, str]]:
    stages = timeline.schedule.stages_of(rank)
    places = {stage: place / max(len(stages) - 1, 1) for place, stage in enumerate(stages)}
    for event in timeline.events[rank]:
        kind, stage = event.action.kind, event.action.stage
        if semantics:
            yield event, shade(kind, semantics.version(event.action) % _VERSION_SHADES / (_VERSION_SHADES - 1))
        else:
            yield event, shade(kind, places[stage])


def shade(kind: Kind, lightness: float) -> str:
    """The colour of a kind, closer to white as `lightness` goes from 0 to 1."""
    red, green, blue = (part + 0.6 * lightness * (1 - part) for part in to_rgb(_COLOURS[kind]))
    return to_hex((red, green, blue))


def tick_lines(timeline: Timeline, span: tuple[float, float]) -> list[float]:
    """The starts of ticks that are drawn as lines: those in the span, or none if there are too many."""
    starts = [start for start in timeline.tick_starts if span[0] <= start <= span[1]]
    return starts if len(starts) <= _MOST_TICK_LINES else []


def copies(timeline: Timeline) -> list[tuple[float, float]]:
    """The times before the first tick and after the last in which weights and gradients are copied, not empty."""
    if not timeline.tick_starts or timeline.ticks_end is None:
        return []
    spans = (0.0, timeline.tick_starts[0]), (timeline.ticks_end, timeline.makespan)
    return [span for span in spans if span[1] > span[0]]


def ends(timeline: Timeline, scale: Scale) -> dict[str, tuple[tuple[float, float], range]]:
    """The parts of a timeline to enlarge, `start` and `end`: times and ranks, among them the first or last to run."""
    first = min(range(len(timeline.events)), key=lambda rank: timeline.events[rank][0].start)
    last = max(range(len(timeline.events)), key=lambda rank: timeline.events[rank][-1].end)
    end = timeline.makespan or scale.end
    spans = (0.0, min(scale.zoomed, end)), (max(end - scale.zoomed, 0.0), end)
    number = min(_ZOOMED_RANKS, len(timeline.events))
    parts = {}
    for name, span, rank in zip(("start", "end"), spans, (first, last), strict=True):
        begin = min(max(rank - number // 2, 0), len(timeline.events) - number)
        parts[name] = span, range(begin, begin + number)
    return parts


def named_ranks(timeline: Timeline) -> list[int]:
    """The ranks that have lines of their own."""
    ranks = range(timeline.schedule.num_ranks)
    return list(ranks) if len(ranks) <= _MOST_NAMED_RANKS else [ranks[0], ranks[-1]]


def line_colour(timeline: Timeline, rank: int) -> str:
    return to_hex(matplotlib.colormaps["viridis"](rank / max(timeline.schedule.num_ranks - 1, 1) * 0.9))


def line_width(timeline: Timeline, rank: int) -> float:
    """The width of a rank's lines in points: later ranks, drawn above earlier ones, leave their rims to be seen."""
    ranks = named_ranks(timeline)
    return 2.0 - 1.2 * ranks.index(rank) / max(len(ranks) - 1, 1)


def _changes(timeline: Timeline, rank: int, *, split: bool) -> tuple[np.ndarray, np.ndarray]:
    """When the amount that a rank holds changes, and the amounts: of activations or of what each I leaves."""
    share = 1 / len(timeline.schedule.stages_of(rank))
    curve = timeline.memory(rank, activation=0 if split else share, weight_gradient=share if split else 0)
    times, amounts = np.asarray(curve or [(0.0, 0.0)], float).T
    return times, amounts


def _peaks(timeline: Timeline) -> str:
    parts = [("peak", timeline.peak_inflight)]
    if timeline.schedule.split_backward:
        parts.append(("for W", timeline.peak_weight_stash))
    lines = []
    for name, peaks in parts:
        ranks = [rank for rank, peak in enumerate(peaks) if peak == max(peaks)]
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"{'all' if len(ranks) == len(peaks) else len(ranks)} ranks"
        lines.append(f"{name} {max(peaks):g}\n({who})")
    return "\n".join(lines)


def _average(timeline: Timeline) -> float:
    """The average time of the actions that take any; 0 if none does."""
    lengths = [event.end - event.start for row in timeline.events for event in row if event.end > event.start]
    return sum(lengths) / max(len(lengths), 1)


def _number(event: Event) -> str:
    return str(event.action.microbatch)


def _finish_rows(axes: Axes, timeline: Timeline, span: tuple[float, float], ranks: range) -> None:
    for start, end in copies(timeline):
        axes.axvspan(start, end, color=COPIES, linewidth=0, zorder=0)
    axes.set_xlim(span)
    axes.set_ylim(ranks[-1] + 0.5, ranks[0] - 0.5)
    axes.set_yticks(ranks[:: 1 + len(ranks) // 13] if len(ranks) == len(timeline.events) else ranks[::4])
    axes.set_ylabel("rank", fontsize=8)
