"""What fills a device's memory while a compiled program runs, by the parts of the prediction.

XLA writes two reports on a program (`xla_dump_to`). One lists its buffers: allocations of memory, and which values lie
where in each. The other lists the instructions in their order, and from which to which of them each value is live. What
the program's source calls an instruction (`jax.named_scope`) tells the part: the executor writes into the stash under
the name `stash`, and so on. A value that passes through loops has many names and one place; one name is enough. The
parts are those of `fiddlex.costs.memory.Memory`. Zhu et al. ("Benchmarking and Analyzing Deep Neural Network Training",
IISWC 2018) ask of other frameworks which data structures take which memory.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fiddlex.config import Config
from fiddlex.costs.backend import backend_for
from fiddlex.planner.predict import needed_memory

# The parts that scopes of the program tell, and that fields of the train state tell; the first of several decides.
SCOPES = {
    "weight_stash": "weight_stash",
    "stash": "stash",
    "spill": "stash",
    "fetch": "stash",
    "inbox": "inboxes",
    "gradients": "gradients",
    "compute_weights": "compute_weights",
    "load": "compute_weights",
    "store": "gradients",
    "update": "update",
}
FIELDS = {
    "weight_stash": "weight_stash",
    "stash": "stash",
    "forward_inbox": "inboxes",
    "backward_inbox": "inboxes",
    "outgoing": "inboxes",
    "grads": "gradients",
    "finished": "gradients",
    "optimizer": "optimizer",
    "versions": "versions",
    "weights": "weights",
}
INPUTS, WORKING = "inputs", "working"
# What the loop over ticks carries and these slots write, where XLA has fused the writing with a product.
CARRIED = {
    "forward": "stash",
    "backward": "gradients",
    "weights": "gradients",
    "head": "gradients",
    "embed_backward": "gradients",
}
TICKS = re.compile(r"^jit\(step\)/shard_map/(ticks/)?while(/body/closed_call/while)?$")  # over ticks, or over periods
_VALUE = re.compile(r"^ value: <\d+ ([^ {]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)")
_RANGE = re.compile(r"^    (\S+?)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name=\"((?:[^\"\\]|\\.)*)\"", re.MULTILINE)
_WORD = re.compile(r"[a-z_]+")


class Use(NamedTuple):
    """A place in memory while it holds one value after another of one part."""

    part: str
    bytes: int  # the size of the place
    first: int  # the instruction, by its number in the program's order, from which it holds them
    last: int  # the last instruction with them


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """The memory of a program over time."""

    uses: tuple[Use, ...]  # all uses of the device's main memory
    total_bytes: int  # bytes of main memory that XLA assigns, gaps between buffers included

    @property
    def times(self) -> list[int]:
        """The instructions at which anything begins to be used."""
        return sorted({use.first for use in self.uses})

    def at(self, time: int) -> dict[str, int]:
        """Bytes in use at an instruction, by part."""
        found: dict[str, int] = defaultdict(int)
        for use in self.uses:
            if use.first <= time <= use.last:
                found[use.part] += use.bytes
        return dict(found)

    def peak(self) -> dict[str, int]:
        """Bytes in use where most are, by part."""
        changes: dict[int, int] = defaultdict(int)
        for use in self.uses:
            changes[use.first] += use.bytes
            changes[use.last + 1] -= use.bytes
        level, best = 0, (0, 0)
        for time in sorted(changes):
            level += changes[time]
            best = max(best, (level, -time))
        return self.at(-best[1])


def memory_parts(config: Config, topology: str, use: MemoryUse | None) -> dict[str, dict[str, int | None]]:
    """Bytes of each part of a device's memory: predicted, and found in the program where most is in use.

    The parts `compute_weights` and `versions`, of which a program does not tell the newest version, are one.
    """
    predicted = needed_memory(config, backend_for(topology)).of_device
    found = use.peak() if use else {}
    for sizes in (predicted, found):
        sizes["compute_weights"] = sizes.get("compute_weights", 0) + sizes.pop("versions", 0)
    parts = {
        part: {"predicted": size, "found": found.get(part, 0) if use else None} for part, size in predicted.items()
    }
    gaps = use.total_bytes - sum(found.values()) if use else None
    return parts | {"gaps": {"predicted": 0, "found": gaps}}


def read(program: str, buffers: str, ranges: str) -> MemoryUse:
    """Reads the memory from a program with metadata, and XLA's reports of buffer assignment and of live ranges."""
    names = dict(_INSTRUCTION.findall(program))
    spans = {(name, index): (int(first), int(last)) for name, index, first, last in _RANGE.findall(ranges)}
    end = max((last for _, last in spans.values()), default=0)
    uses: list[Use] = []
    total = 0
    for size, always, values in _allocations(buffers):
        total += size
        places: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
        for name, index, value_size, offset in values:
            first, last = spans.get((name, index), (0, end))
            places[offset, value_size].append((first, last, names.get(name, "")))
        for (_, value_size), held in places.items():
            whole = [(0, end, name) for *_, name in held] if always else held
            uses += (Use(_part(told), value_size, first, last) for first, last, told in _joined(whole))
    return MemoryUse(tuple(uses), total)


class _Allocation(NamedTuple):
    """An allocation in main memory; a value is its name, its index in a tuple, its size and its offset."""

    size: int
    always_used: bool
    values: list[tuple[str, str, int, int]]


def _allocations(text: str) -> Iterator[_Allocation]:
    current: _Allocation | None = None
    for line in text.splitlines():
        if line.startswith("allocation "):
            if current:
                yield current
            current = None
            match = re.match(r"allocation \d+: size (\d+)", line)
            if match and ", color " not in line and ", thread-local" not in line:
                always = ", parameter " in line or ", maybe-live-out" in line or ", output shape" in line
                current = _Allocation(int(match[1]), always, [])
        elif current and (match := _VALUE.match(line)):
            current.values.append((match[1], match[2] or "", int(match[3]), int(match[4])))
    if current:
        yield current


def _joined(held: Iterable[tuple[int, int, str]]) -> Iterator[tuple[int, int, list[str]]]:
    """Joins values of one place that follow each other without a gap, with the names of all."""
    first, last, told = None, -1, list[str]()
    for start, stop, name in sorted(held):
        if first is not None and start > last + 1:
            yield first, last, told
            first, told = None, []
        first = start if first is None else first
        last = max(last, stop)
        told.append(name)
    if first is not None:
        yield first, last, told


def _part(told: Iterable[str]) -> str:
    """The part of a place, from the names of its values: paths of scopes, or arguments such as `state.weights[…]`."""
    told = list(told)
    fields = {word for name in told if name.startswith("state.") for word in _WORD.findall(name)}
    scopes = {scope for name in told for scope in name.split("/")}
    found = [part for name, part in FIELDS.items() if name in fields]
    found += [part for name, part in SCOPES.items() if name in scopes]
    if any(name.startswith("inputs") for name in told):
        found.append(INPUTS)
    if any(TICKS.search(name) for name in told):
        found += [part for name, part in CARRIED.items() if name in scopes]
    return found[0] if found else WORKING
