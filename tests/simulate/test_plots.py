import dataclasses
import resource

import matplotlib.colors
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fiddlex.errors import ConfigError
from fiddlex.schedules.generators import make_schedule
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.semantics import make_semantics
from fiddlex.schedules.weight_stream import stream_weights
from fiddlex.schedules.windows import unroll
from fiddlex.simulate import panels
from fiddlex.simulate.clock import Costs, free_running
from fiddlex.simulate.lockstep import lockstep
from fiddlex.simulate.plots import draw, save
from fiddlex.simulate.steady import first_steps
from fiddlex.simulate.timeline import BUBBLE


def timelines(name, pipe, chunks, num_microbatches):
    schedule = make_schedule(name, pipe=pipe, chunks=chunks, num_microbatches=num_microbatches)
    return {"free-running": free_running(schedule, Costs()), "lockstep": lockstep(lower(schedule), Costs())}


def boxes(axes):
    """Start, end, top, bottom and colour of each."""
    for collection in axes.collections:
        if len(collection.get_facecolors()):
            for path, colour in zip(collection.get_paths(), collection.get_facecolors(), strict=True):
                corners = path.get_extents()
                yield corners.x0, corners.x1, corners.y0, corners.y1, matplotlib.colors.to_hex(colour)


def test_every_action_is_a_box_in_its_ranks_row():
    shown = timelines("zb_v", 3, 2, 4)
    figure = draw(shown)
    for axes, timeline in zip(figure.axes[::2], shown.values(), strict=True):
        drawn = sorted((round((top + bottom) / 2), start, end) for start, end, top, bottom, _ in boxes(axes))
        events = sorted((rank, event.start, event.end) for rank, row in enumerate(timeline.events) for event in row)
        assert drawn == events
        assert axes.yaxis.get_inverted()


def test_kinds_and_chunks_differ_in_colour_and_have_a_legend():
    shown = timelines("zb_v", 2, 2, 3)
    figure = draw(shown)
    starts = {(rank, e.start): e.action for rank, row in enumerate(shown["lockstep"].events) for e in row}
    colours = {}
    for start, _, top, bottom, colour in boxes(figure.axes[2]):
        action = starts[round((top + bottom) / 2), start]
        later = shown["lockstep"].schedule.stages_of(round((top + bottom) / 2)).index(action.stage)
        colours.setdefault((action.kind, later), set()).add(colour)
    assert len(colours) == 6
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == 6
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "F forward",
        "I input gradient",
        "W weight gradient",
        "lighter: a later chunk",
        "number: the microbatch",
        "grey line: a tick starts",
        "solid: activations in flight",
        "dotted: what I leaves for W",
        "rank 0",
        "rank 1",
    ]
    assert {matplotlib.colors.to_hex(patch.get_facecolor()) for patch in legend.get_patches()} <= set.union(
        *colours.values()
    )


def test_boxes_are_numbered_where_numbers_can_be_read():
    few, many = draw(timelines("1f1b", 2, 1, 3)), draw(timelines("1f1b", 4, 1, 128))
    assert [text.get_text() for text in few.axes[0].texts] == [
        "0",
        "1",
        "0",
        "2",
        "1",
        "2",
        "0",
        "0",
        "1",
        "1",
        "2",
        "2",
    ]
    assert len(many.axes[0].texts) == 0


@pytest.mark.parametrize(
    ("sizes", "numbered"),
    [(("1f1b", 4, 1, 12), False), (("1f1b", 4, 1, 10), True), (("zb_v", 4, 2, 8), True), (("zb_v", 8, 2, 16), False)],
)
def test_numbers_have_one_size_and_fit_into_their_boxes_or_there_are_none(sizes, numbered):
    shown = timelines(*sizes)
    figure = draw(shown)
    FigureCanvasAgg(figure).draw()
    rows = [axes for axes in figure.axes if axes.get_ylabel() == "rank"]
    texts = [text for axes in rows for text in axes.texts]
    assert len(texts) == (2 * sum(map(len, shown["lockstep"].events)) if numbered else 0)
    assert len({text.get_fontsize() for text in texts}) == numbered
    for axes, timeline in zip(rows, shown.values(), strict=True):
        ends = {(rank, (e.start + e.end) / 2): e for rank, row in enumerate(timeline.events) for e in row}
        for text in axes.texts:
            event = ends[text.get_position()[1], text.get_position()[0]]
            left, right = (axes.transData.transform((time, 0))[0] for time in (event.start, event.end))
            extent = text.get_window_extent()
            assert left <= extent.x0 <= extent.x1 <= right


def test_curves_are_what_is_held_in_microbatches():
    shown = timelines("zb_v", 3, 2, 6)
    figure = draw(shown)
    for axes, timeline in zip(figure.axes[1::2], shown.values(), strict=True):
        solid = [max(line.get_ydata()) for line in axes.lines if line.get_linestyle() == "-"]
        dotted = [max(line.get_ydata()) for line in axes.lines if line.get_linestyle() == ":"]
        assert solid == pytest.approx(timeline.peak_inflight)
        assert dotted == pytest.approx(timeline.peak_weight_stash)


def test_panels_share_one_scale_of_time_and_say_what_they_show():
    shown = timelines("zb_h1", 3, 1, 6)
    figure = draw(shown)
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    assert [axes.get_ylabel() for axes in figure.axes] == ["rank", "microbatches"] * 2
    assert figure.axes[-1].get_xlabel() == f"time (in the unit of the costs)\nbubble: {BUBBLE}"
    assert figure.get_suptitle() == "zb_h1: p = 3 ranks, v = 1 chunk, m = 6 microbatches"
    assert figure.axes[0].get_title() == "free-running: makespan 20, bubble 11.1% of the work"
    assert [text.get_text() for text in figure.axes[1].texts] == ["peak 3\n(all ranks)\nfor W 3\n(rank 2)"]
    assert len(draw({"lockstep": shown["lockstep"]}).axes) == 2


def test_titles_have_in_common_what_the_schedules_have_in_common():
    several = {
        f"{name}, lockstep": timelines(name, 2, chunks, 4)["lockstep"] for name, chunks in (("1f1b", 1), ("zb_v", 2))
    }
    figure = draw(several, brief=True)
    assert figure.get_suptitle() == "p = 2 ranks, m = 4 microbatches"
    assert [axes.get_title() for axes in figure.axes] == [
        "1f1b, lockstep, v = 1 chunk: makespan 15, bubble 25.0% of the work, at most 3 in flight",
        "zb_v, lockstep, v = 2 chunks: makespan 25, bubble 4.2% of the work, at most 2 in flight",
    ]


def test_of_many_ranks_the_first_and_last_have_lines_within_a_band():
    shown = timelines("1f1b", 12, 1, 24)
    figure = draw(shown)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][-3:] == ["rank 0", "rank 11", "grey band: all ranks"]
    for axes, timeline in zip(figure.axes[1::2], shown.values(), strict=True):
        (band,) = axes.collections
        assert band.get_paths()[0].get_extents().y1 == max(timeline.peak_inflight)
        assert [max(line.get_ydata()) for line in axes.lines] == [timeline.peak_inflight[rank] for rank in (0, 11)]


def mixture(timeline, rank, start, end):
    """The mean colour of a rank between two times, by the lengths of its actions there; white where it is idle."""
    colour = np.ones(3)
    for event, one in panels.coloured(timeline, rank, None):
        overlap = max(min(event.end, end) - max(event.start, start), 0) / (end - start)
        colour -= overlap * (1 - np.asarray(matplotlib.colors.to_rgb(one)))
    return colour


def test_a_large_schedule_is_a_raster_of_shares_with_its_ends_enlarged(tmp_path):
    shown = timelines("zb_h1", 24, 1, 128)
    figure = draw(shown)
    assert [axes.get_ylabel() for axes in figure.axes] == ["rank", "rank", "rank", "microbatches"] * 2
    for number, timeline in enumerate(shown.values()):
        whole, start, end, _ = figure.axes[4 * number : 4 * number + 4]
        (image,) = whole.images
        raster = image.get_array()
        assert len(raster) == 24
        assert not list(boxes(whole))
        # In the middle a rank is always busy, with as many F as I and W. At the start it is idle.
        for rank in (0, 23):
            np.testing.assert_allclose(raster[rank][600], mixture(timeline, rank, 150, 300), atol=0.02)
        np.testing.assert_array_equal(raster[23][0], 1)
        assert end.get_xlim()[1] == timeline.makespan
        assert start.get_xlim()[0] == 0
        lines = sorted(line.get_xdata()[0] for line in whole.lines)
        assert lines == [start.get_xlim()[1], end.get_xlim()[0]]
        assert start.get_title() == "the start of ranks 0 to 15, enlarged"
        events = [e for row in timeline.events[:16] for e in row if e.start <= start.get_xlim()[1]]
        assert sorted((left, right) for left, right, *_ in boxes(start)) == sorted((e.start, e.end) for e in events)
    assert "mixed colours: shares of time" in [text.get_text() for text in figure.legends[0].get_texts()]
    for format, most in (("svg", 1.2e6), ("pdf", 4e5), ("png", 1e6)):
        save(figure, tmp_path / "large", format=format)
        assert (tmp_path / "large").stat().st_size < most


def streamed():
    lowered = lower(make_schedule("breadth_first", pipe=2, chunks=3, num_microbatches=4))
    return lockstep(lowered, Costs(load=1.0, store=1.5), stream_weights(lowered, rows_per_chunk=2))


def test_copies_before_the_first_tick_and_after_the_last_are_grey():
    timeline = streamed()
    figure = draw({"lockstep": timeline})
    spans = [patch.get_extents().transformed(figure.axes[0].transData.inverted()) for patch in figure.axes[0].patches]
    assert [(span.x0, span.x1) for span in spans] == [
        pytest.approx((0, 2)),
        pytest.approx((timeline.makespan - 3, timeline.makespan)),
    ]
    assert "copies from or to the host" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert not panels.copies(timelines("1f1b", 2, 1, 2)["lockstep"])


def drawn(case):
    """A figure of each kind."""
    if case == "brief":
        schedules = [("1f1b", 4, 1, 8), ("interleaved_1f1b", 4, 2, 8), ("zb_v", 4, 2, 8)]
        runs = {f"{sizes[0]}, {clock}": run for sizes in schedules for clock, run in timelines(*sizes).items()}
        return draw(runs, brief=True)
    if case == "weights on the host":
        return draw({"lockstep": streamed()})
    if case == "a long name":
        schedule = make_schedule("zb_v", pipe=2, num_microbatches=4)
        named = dataclasses.replace(schedule, name=f"file:/a/{'long/' * 40}$folder$/\udc00\n.csv")
        return draw({f"{named.name}, free-running": free_running(named, Costs()), "other": streamed()})
    return draw(timelines(*case))


@pytest.mark.parametrize(
    "case",
    [
        ("1f1b", 4, 1, 8),
        ("zb_v", 8, 2, 16),
        ("gpipe", 1, 1, 1),
        ("zb_h1", 17, 1, 80),
        "brief",
        "weights on the host",
        "a long name",
    ],
    ids=str,
)
def test_nothing_overlaps_and_nothing_is_cut_off(case):
    figure = drawn(case)
    FigureCanvasAgg(figure).draw()
    parts = [axes.get_tightbbox() for axes in figure.axes]
    parts += [legend.get_window_extent() for legend in figure.legends] + [figure._suptitle.get_window_extent()]
    for number, part in enumerate(parts):
        assert -1 < part.x0 < part.x1 < figure.bbox.width + 1
        assert -1 < part.y0 < part.y1 < figure.bbox.height + 1
        for other in parts[:number]:
            apart = part.x1 <= other.x0 or other.x1 <= part.x0 or part.y1 <= other.y0 or other.y1 <= part.y0
            assert apart, (number, part, other)


@pytest.mark.parametrize("format", ["svg", "pdf", "png"])
def test_a_file_is_the_same_every_time(format, tmp_path):
    for name in ("a", "b"):
        save(draw(timelines("1f1b", 2, 1, 2), brief=True), tmp_path / name, format=format)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_text_of_a_drawing_is_text_and_letters_that_the_font_lacks_are_no_error(tmp_path):
    schedule = dataclasses.replace(make_schedule("1f1b", pipe=2, num_microbatches=2), name="file:排程.csv")
    save(draw({"free-running": free_running(schedule, Costs())}), tmp_path / "a", format="svg")
    assert "file:排程.csv: p = 2 ranks" in (tmp_path / "a").read_text()


@pytest.mark.parametrize(("pipe", "num_microbatches"), [(2, 2), (20, 80)])
def test_costs_of_nothing_can_be_drawn(pipe, num_microbatches, tmp_path):
    schedule = make_schedule("1f1b", pipe=pipe, num_microbatches=num_microbatches)
    save(draw({"nothing": free_running(schedule, Costs(0.0, 0.0, 0.0))}), tmp_path / "a", format="png")


def test_a_rank_that_does_nothing_in_an_enlarged_part_and_a_timeline_that_is_shorter_than_one():
    schedule = make_schedule("1f1b", pipe=16, num_microbatches=160)
    slow, fast = free_running(schedule, Costs(hop=20.0)), timelines("1f1b", 2, 1, 2)["lockstep"]
    figure = draw({"slow": slow, "fast": fast})
    *_, start, end, _ = figure.axes
    assert start.get_xlim() == end.get_xlim() == (0, fast.makespan)
    assert len(list(boxes(figure.axes[1]))) < sum(map(len, slow.events))


def test_versions_of_the_weights_are_shades():
    schedule = make_schedule("1f1b", pipe=2, num_microbatches=2)
    semantics = make_semantics("2bw", num_stages=2, batch_size=2)
    windows = unroll(schedule, semantics, lambda number: make_schedule("1f1b", pipe=2, num_microbatches=number))
    run = first_steps(windows, 5, Costs())
    figure = draw({"2bw": run}, {"2bw": semantics})
    starts = {(rank, e.start): e.action for rank, row in enumerate(run.events) for e in row}
    colours = {}
    for start, _, top, bottom, colour in boxes(figure.axes[0]):
        action = starts[round((top + bottom) / 2), start]
        version = max(action.microbatch // 2 - 1, 0)
        colours.setdefault((action.kind, version % 3), set()).add(colour)
    assert all(len(same) == 1 for same in colours.values())
    assert len(set.union(*colours.values())) == len(colours) == 6


def test_a_png_that_would_be_too_high_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"The picture would be 328 inches high, and a png can be 327. Draw fewer"):
        save(Figure(figsize=(7, 328)), tmp_path / "a", format="png")
    save(Figure(figsize=(7, 328)), tmp_path / "a", format="svg")


@pytest.mark.parametrize("format", ["svg", "pdf", "png"])
def test_a_picture_that_cannot_be_written_leaves_the_one_before(format, tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            save(draw(timelines("1f1b", 2, 1, 2)), path, format=format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
