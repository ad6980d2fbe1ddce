"""Numbers as messages give them to people: durations, sizes and counts; and values from files, short whatever they are.

All that fiddlex prints gives sizes in binary units, as the memory of a device is told: GiB, or MiB where all of a
table's figures are small. Rates of links and of memory stay in GB/s, as their makers tell them.
"""

import reprlib
import signal
from typing import Any

_GIB, _MIB = 2**30, 2**20
_MOST_NAME = 160  # characters; the longest names of the classes that fiddlex has are below 70

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60
_repr.maxlevel = 2


def readable_time(seconds: float) -> str:
    """`25 µs`, `4.0 ms`, `210 ms`, `5.2 s`, `42 s`, `3 min 05 s`, `2 h 03 min` or `12 days 05 h`."""
    whole = round(seconds)
    if whole >= 48 * 3600:
        hours = round(seconds / 3600)
        return f"{hours // 24:,} days {hours % 24:02d} h"
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    if round(seconds, 1) >= 10 or seconds == 0:
        return f"{whole} s"
    for unit, number in (("s", seconds), ("ms", 1e3 * seconds), ("µs", 1e6 * seconds)):
        if round(1000 * number) >= 1000:
            return f"{number:.{0 if round(number, 1) >= 10 else 1}f} {unit}"
    return "less than 1 µs"


def readable_size(num_bytes: float) -> str:
    """`612 bytes`, `6.74 KiB`, `91.17 MiB`, `480.0 GiB`: in the largest unit of which there is at least one."""
    power = next((power for power in (4, 3, 2, 1) if round(num_bytes / 1024**power, 3) >= 1), 0)
    number = num_bytes / 1024**power
    if not power:
        return f"{number:.0f} bytes" if number != 1 else "1 byte"
    return f"{number:,.{1 if number >= 100 else 2}f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def gib(num_bytes: float) -> str:
    """The number of GiB, for a table or a list in GiB: to a tenth from 1 GiB on, below that to two figures."""
    return f"{num_bytes / _GIB:.1f}" if num_bytes >= _GIB else f"{num_bytes / _GIB:.2g}"


def mib(num_bytes: float) -> str:
    """The number of MiB, to a tenth, for a table or a list in MiB."""
    return f"{num_bytes / _MIB:,.1f}"


def counted(number: int, one: str, several: str = "") -> str:
    """`1 step`, `3,000 steps`; `several` is what several are called, by default `one` with an s more."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def signal_name(number: int) -> str:
    """`SIGKILL`; `signal 35` for a realtime signal between the first and the last, which has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shown(value: Any) -> str:
    """The Python representation of `value`, without its middle when it is long."""
    return _repr.repr(value)


def shortened(name: str) -> str:
    """A name as it is, without its middle when it has more than `_MOST_NAME` characters."""
    half = _MOST_NAME // 2
    return name if len(name) <= _MOST_NAME else f"{name[:half]}...{name[-half:]}"
