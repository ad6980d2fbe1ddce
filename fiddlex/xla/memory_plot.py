"""A picture of the memory of a compiled program."""

from matplotlib.figure import Figure

from fiddlex.xla.peak_memory import MemoryUse

COLOURS = {  # Okabe and Ito's, which people with red-green colour blindness can tell apart, and shades of them
    "weights": "#0072B2",
    "optimizer": "#56B4E9",
    "compute_weights": "#003B5C",
    "versions": "#A6DCF7",
    "gradients": "#CC79A7",
    "stash": "#E69F00",
    "weight_stash": "#F0E442",
    "inboxes": "#D55E00",
    "working": "#009E73",
    "update": "#7FCEB9",
    "inputs": "#999999",
}


def draw(use: MemoryUse) -> Figure:
    """Draws the bytes in use over the program's instructions, by part; those of a loop are there once."""
    times = use.times
    levels = [use.at(time) for time in times]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    rows = {part: [level.get(part, 0) / 1e9 for level in levels] for part in COLOURS}
    shown = {part: row for part, row in rows.items() if any(row)}
    colours = [COLOURS[part] for part in shown]
    axes.stackplot(times, list(shown.values()), labels=list(shown), colors=colours, step="post")
    axes.set_xlabel("instructions of the program in their order")
    axes.set_ylabel("GB in use on a device")
    axes.set_xlim(times[0], times[-1])
    figure.legend(loc="outside right upper", reverse=True, fontsize=8)
    return figure
