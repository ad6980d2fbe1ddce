import matplotlib.colors
import pytest

from fiddlex.schedules.generators import make_schedule
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.semantics import make_semantics
from fiddlex.schedules.windows import unroll
from fiddlex.simulate.clock import Costs, free_running
from fiddlex.simulate.lockstep import lockstep
from fiddlex.simulate.plots import draw, save
from fiddlex.simulate.steady import first_steps


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
        "activations of rank 0",
        "activations of rank 1",
        "what I leaves for W",
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
    assert [axes.get_ylabel() for axes in figure.axes] == ["rank", "held\n(microbatches)"] * 2
    assert figure.axes[-1].get_xlabel() == "time (in the unit of the costs)"
    assert figure.axes[0].get_title() == "free-running: 20 long, bubble 11.1% of the work"
    assert len(draw({"lockstep": shown["lockstep"]}).axes) == 2


def test_of_many_ranks_the_first_and_last_are_named():
    (legend,) = draw(timelines("1f1b", 12, 1, 2)).legends
    assert [text.get_text() for text in legend.get_texts()][-2:] == ["activations of rank 0", "activations of rank 11"]


def test_a_file_is_the_same_every_time_and_its_text_is_text(tmp_path):
    for name in ("a", "b"):
        save(draw(timelines("1f1b", 2, 1, 2)), tmp_path / name, format="svg")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert "held" in (tmp_path / "a").read_text()


def test_costs_of_nothing_can_be_drawn():
    schedule = make_schedule("1f1b", pipe=2, chunks=1, num_microbatches=2)
    draw({"nothing": free_running(schedule, Costs(0.0, 0.0, 0.0))})


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
