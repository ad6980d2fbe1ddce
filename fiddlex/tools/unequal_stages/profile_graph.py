r"""Reads the profile of a model as PipeDream's profiler writes it, and makes a chain of layers of it.

The file (graph.txt of msr-fiddle/pipedream) has a line for each operation and, after a tab, one for each edge; times
are in milliseconds and sizes in bytes, of a minibatch. A size may be a list, of a result with several arrays.

    node4 -- Linear(8, 8) -- forward_compute_time=1.5, backward_compute_time=3.0, activation_size=64, parameter_size=256
    \tnode3 -- node4

PipeDream's states are the antichains of the graph (SOSP 2019, section 3.1, and its optimizer): the operations up to an
antichain form the first stages, and the graph is cut behind it. Here the states are one chain of such sets: the
operations in a topological order that stays on a branch as long as it can, cut behind any of them. For a graph without
branches these are all states. Behind a cut go the results of all operations before it that one after it reads. Inputs
of the model (sources named `Input…`) cost nothing and are never sent, as in PipeDream's optimizer: each stage reads its
own.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fiddlex.config.rules import nearest
from fiddlex.errors import ConfigError
from fiddlex.files.small_files import read_small

MOST_LAYERS = 128  # a chain of more merges neighbours, so that both partitioners take seconds
MOST = 1e100  # the largest number allowed, so that sums stay finite

_FIELDS = "forward_compute_time", "backward_compute_time", "activation_size", "parameter_size"
_STAGE = re.compile(r"stage_id=\d+|\d+")  # ends the lines of graphs that are partitioned already
_FORM = f"NAME -- OPERATION -- {', '.join(f'{field}=NUMBER' for field in _FIELDS)}"


class Operation(NamedTuple):
    """An operation of a profile."""

    name: str
    text: str  # what it is, for people
    forward: float  # seconds of its forward pass
    backward: float  # seconds of its backward pass
    activation_bytes: float  # bytes of its result
    parameter_bytes: float


class ProfiledLayer(NamedTuple):
    """A run of operations in the chain."""

    names: tuple[str, ...]
    seconds: float  # seconds of their forward and backward passes
    activation_bytes: float  # bytes of their results, which wait for the backward pass
    sent_bytes: float  # bytes that go to the next stage if the chain is cut behind the run
    weight_bytes: float  # bytes of their weights


def read_profile(path: str) -> tuple[ProfiledLayer, ...]:
    """The chain of layers of a profile, at most `MOST_LAYERS` (`_merged`)."""
    try:
        text = read_small(path)
    except OSError as error:
        raise ConfigError(f"--profile_graph={path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--profile_graph={path} is no text. It must be PipeDream's graph.txt.") from None
    except ValueError as error:
        raise ConfigError(f"--profile_graph={path} cannot be read: {error}.") from None
    operations, edges = parse_profile(text, path)
    order = _sorted(operations, edges, path)
    joined = {name for source, readers in edges.items() for name in (source, *readers)}
    if alone := [operation.name for operation in order if operation.name not in joined and len(order) > 1]:
        raise ConfigError(
            f"--profile_graph={path}: node {alone[0]!r} has no edge: it reads no result, and none reads its own. Is "
            "the file cut short?"
        )
    if not any(operation.forward + operation.backward for operation in order):
        raise ConfigError(
            f"--profile_graph={path}: no operation takes any time, so that any cut is as good as another."
        )
    return _merged(list(_layers(order, edges)))


Edges = dict[str, list[str]]


def parse_profile(text: str, path: str) -> tuple[dict[str, Operation], Edges]:
    """The operations of a profile by name, and the names of the nodes that read each one's result."""
    operations, edges, read_at = dict[str, Operation](), dict[str, list[str]](), list[tuple[int, str, str]]()
    for number, line in enumerate(text.splitlines(), 1):
        place = f"--profile_graph={path}, line {number}"
        if line.startswith("\t"):
            ends = line.strip().split(" -- ")
            if len(ends) != 2 or not all(ends):
                raise ConfigError(f"{place}: {line.strip()[:80]!r} is no edge. It must be NAME -- NAME after a tab.")
            read_at.append((number, ends[0], ends[1]))
        elif line.strip():
            operation = _operation(line.strip(), place)
            if operations.setdefault(operation.name, operation) is not operation:
                raise ConfigError(f"{place}: node {operation.name!r} is there twice. Each line must have its own name.")
    if not operations:
        raise ConfigError(f"--profile_graph={path} has no operations. Its lines must be {_FORM}.")
    for number, source, target in read_at:
        for name in (source, target):
            if name not in operations:
                raise ConfigError(
                    f"--profile_graph={path}, line {number}: an edge has node {name!r}, which has no line of its own. "
                    f"{nearest(name, operations) if len(operations) < 20 else 'Is the file cut short?'}"
                )
        readers = edges.setdefault(source, [])
        if target not in readers:
            readers.append(target)
    return operations, edges


def _operation(line: str, place: str) -> Operation:
    parts = line.split(" -- ")
    if len(parts) == 4 and _STAGE.fullmatch(parts[3]):
        parts.pop()
    values = dict(field.split("=", 1) for field in parts[2].split(", ") if "=" in field) if len(parts) == 3 else {}
    if not parts[0] or set(values) != set(_FIELDS):
        raise ConfigError(f"{place}: {line[:80]!r} is no operation. It must be {_FORM}; is the file cut short?")
    forward, backward, activation, parameters = (_number(field, values[field], place) for field in _FIELDS)
    return Operation(parts[0], parts[1], forward / 1e3, backward / 1e3, activation, parameters)


def _number(field: str, text: str, place: str) -> float:
    """A number, or the sum of a list such as `[64.0; 8.0]`."""
    listed = text.startswith("[") and text.endswith("]")
    try:
        number = sum(map(float, text[1:-1].split(";") if listed else [text]))
    except ValueError:
        raise ConfigError(f"{place}: {field}={text[:80]!r} is no number; is the file cut short?") from None
    if not 0 <= number <= MOST:
        raise ConfigError(f"{place}: {field}={text[:80]} must be at least 0 and at most {MOST:g}.")
    return number


def _sorted(operations: dict[str, Operation], edges: Edges, path: str) -> list[Operation]:
    """The operations in an order in which each follows all that it reads, one branch after another."""
    waits = dict.fromkeys(operations, 0)
    for readers in edges.values():
        for reader in readers:
            waits[reader] += 1
    ready, order = [name for name in reversed(operations) if not waits[name]], list[Operation]()
    for name in (each for each in reversed(operations) if not waits[each]):
        if operations[name].text.startswith("Input"):
            operations[name] = Operation(name, operations[name].text, 0.0, 0.0, 0.0, 0.0)
    while ready:
        name = ready.pop()
        order.append(operations[name])
        for reader in reversed(edges.get(name, [])):
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    if len(order) < len(operations):
        raise ConfigError(
            f"--profile_graph={path} has a cycle: {' -> '.join(_cycle(waits, edges))}. A profile's edges must go from "
            "each operation to those that read its result, without a way back."
        )
    return order


def _cycle(waits: dict[str, int], edges: Edges) -> list[str]:
    """A cycle among the nodes that still wait, its first node repeated at the end; no more than ten nodes of it."""
    sources = {reader: name for name, readers in edges.items() if waits[name] for reader in readers if waits[reader]}
    name, seen = next(iter(sources)), list[str]()
    while name not in seen:
        seen.append(name)
        name = sources[name]
    cycle = [*seen[seen.index(name) :], name][::-1]
    return cycle if len(cycle) <= 10 else [*cycle[:5], "…", *cycle[-4:]]


def _layers(order: Sequence[Operation], edges: Edges) -> Iterator[ProfiledLayer]:
    """The operations as layers of one each; those that cost nothing join the one before."""
    places = {operation.name: place for place, operation in enumerate(order)}
    last_read = [max((places[reader] for reader in edges.get(each.name, [])), default=0) for each in order]
    ending: dict[int, float] = {}
    sent = 0.0
    run: ProfiledLayer | None = None
    for place, operation in enumerate(order):
        if last_read[place] > place:
            sent += operation.activation_bytes
            ending[last_read[place]] = ending.get(last_read[place], 0.0) + operation.activation_bytes
        sent -= ending.pop(place, 0.0)
        seconds = operation.forward + operation.backward
        layer = ProfiledLayer(
            (operation.name,), seconds, operation.activation_bytes, max(sent, 0.0), operation.parameter_bytes
        )
        if run is None:
            run = layer
        elif not (seconds or operation.parameter_bytes) or not (run.seconds or run.weight_bytes):
            run = _joined(run, layer)
        else:
            yield run
            run = layer
    assert run is not None
    yield run


def _joined(first: ProfiledLayer, second: ProfiledLayer) -> ProfiledLayer:
    return ProfiledLayer(
        first.names + second.names,
        first.seconds + second.seconds,
        first.activation_bytes + second.activation_bytes,
        second.sent_bytes,
        first.weight_bytes + second.weight_bytes,
    )


def _merged(layers: list[ProfiledLayer]) -> tuple[ProfiledLayer, ...]:
    """The layers, with neighbours that take least time joined until there are no more than `MOST_LAYERS`."""
    while len(layers) > MOST_LAYERS:
        together = [first.seconds + second.seconds for first, second in itertools.pairwise(layers)]
        place = together.index(min(together))
        layers[place : place + 2] = [_joined(*layers[place : place + 2])]
    return tuple(layers)
