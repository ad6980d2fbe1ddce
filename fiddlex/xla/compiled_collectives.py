"""The collectives of a compiled step: the bytes of each, how often it runs, its mesh axis, and what it overlaps.

The analysis reads the scheduled program (`fiddlex.xla.program_text`). The program of a TPU slice reaches other slices
through its hosts: a `send` and a `recv` of the runtime megascale stand for a collective of one device of each slice.
Where the program does not say how often a conditional or loop runs, the schedule of the pipeline does; the executor's
`jax.named_scope` names identify them.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fiddlex.xla.device_groups import Groups, Places, axis_of, groups_of
from fiddlex.xla.program_text import Instruction, ProgramText, element, nbytes, read

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# Kinds of what the programs of several TPU slices send to each other.
_TRANSFERS = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "REDUCE_SCATTER": "reduce-scatter",
}
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
# Instructions that compute nothing: they move data, or do nothing at all.
_MOVES = re.compile(
    r"(after-all|bitcast|bitcast-convert|broadcast|concatenate|constant|convert|copy|custom-call|domain|dynamic-slice|dynamic-update-slice"
    r"|gather|get-tuple-element|iota|opt-barrier|optimization-barrier|pad|parameter|partition-id|recv|reshape|reverse|send|slice"
    r"|transpose|tuple|replica-id|rng-get-and-update-state|.*-start|.*-done|.*-update|" + "|".join(KINDS) + ")"
)
# Programs of TPUs run some asynchronous collectives in fusions: the first one starts the collective, others run a
# product while it goes on, and the last one ends it. Each of them has a copy of the collective.
_FUSED_START, _FUSED_DONE = (f'custom_call_target="AsyncCollective{end}"' for end in ("Start", "Done"))
_FUSED_PART = 'frontend_attributes={chain_id="'
# Programs of TPUs run some reduce-scatters as a fusion. The computation that it calls has a name that begins so, and
# holds an all-reduce of an array that may be padded, and a slice: the part that each device keeps.
_FUSED_SCATTER = "all-reduce-scatter"
_WRAPPERS = ("fusion", "while", "conditional", "call")  # these run the computations that they call


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled step.

    A device in a group of n sends (n − 1)/n of `bytes` over a ring, twice as much for an all-reduce, and all of it in a
    permute. In a conditional, or in a loop whose trips the schedule decides, `count` is how often the device runs the
    branch or the body that does so most often; in a conditional of which the schedule says nothing, how often the
    conditional runs. For `crossing_bytes`, each slice (TPU) or host (GPU) first reduces or afterwards gathers what its
    devices have.
    """

    name: str
    kind: str  # one of `KINDS`
    # `data`, `pipe` or `tensor` where it runs along one axis of the mesh, else `several`; None if not known
    axis: str | None
    group_size: int | None  # devices that take part together; 2 for a permute, which sends from one to another
    bytes: int  # bytes of one execution on one device, for the whole array: an all-gather's result, any other's operand
    count: float | None  # executions on a device in a step; None where the program does not say
    # asynchronous, and the device computes before it ends: matrix products, or arithmetic on at least `bytes`
    overlapped: bool
    products: int  # matrix products between its start and end, of a conditional's largest branch and one trip of a loop
    # bytes that each place of the mesh sends to other slices or hosts in an execution; None if not known
    crossing_bytes: np.ndarray | None


class Crossing(NamedTuple):
    """What collectives of one kind along one axis send to other slices or hosts in a step."""

    kind: str  # one of `KINDS`
    axis: str | None  # as in `Collective`
    bytes: float  # bytes that a device sends


def crossings(found: Sequence[Collective]) -> list[Crossing]:
    """What the device that sends most to other slices or hosts sends there, by kind and axis.

    Collectives of which bytes or count are not known are left out.
    """
    sent: dict[tuple[str, str | None], np.ndarray] = {}
    for each in found:
        if each.crossing_bytes is not None and each.count is not None:
            key = each.kind, each.axis
            sent[key] = sent.get(key, 0) + each.crossing_bytes * each.count
    if not sent:
        return []
    busiest = int(np.argmax(sum(sent.values())))
    return [Crossing(*key, float(sizes[busiest])) for key, sizes in sent.items() if sizes[busiest]]


class _Site(NamedTuple):
    """A collective instruction and its position in the program."""

    instruction: Instruction
    computation: str
    place: int


def collectives(text: str, places: Places, runs: Mapping[str, float]) -> list[Collective]:
    """All collectives of a step except those within single devices, in the order of the program.

    `runs` has, by the name of a scope, how often a step runs, in all, the branch of a conditional there, or the body of
    a loop whose number of trips the program does not say.
    """
    program = read(text)
    counts: dict[_Site, float | None] = {}
    _count(program, program.entry, 1, runs, counts)
    found = []
    for site, count in counts.items():
        one = _described(program, site, places, count)
        if one.group_size != 1:
            found.append(one)
    return found


def _count(
    program: ProgramText,
    computation: str,
    times: float | None,
    runs: Mapping[str, float],
    counts: dict[_Site, float | None],
) -> None:
    """Adds to `counts` how often each collective in a computation runs, if the computation runs `times` times."""
    for place, instruction in enumerate(program.computations[computation]):
        inner: float | None = times
        if instruction.opcode == "while":
            if (trips := program.trips(instruction)) is None:
                inner = runs.get(program.loop_scope(instruction))
            else:
                inner = None if times is None else times * trips
        elif instruction.opcode == "conditional" and instruction.scope in runs:
            inner = runs[instruction.scope]
        if _kind(program, instruction):
            site = _Site(instruction, computation, place)
            before = counts.get(site, 0)
            counts[site] = None if times is None or before is None else before + times
        else:
            for name in instruction.called():
                _count(program, name, inner, runs, counts)


def _kind(program: ProgramText, instruction: Instruction) -> str:
    """The kind of collective that an instruction is or starts, directly or in an async wrapper or fusion; else empty.

    Of the copies of a collective that several fusions run, only the fusion that starts it has a kind.
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind == "fusion":
        if any(name.startswith(_FUSED_SCATTER) for name in instruction.called()):
            return "reduce-scatter"
        return _part(program, instruction)[1].opcode if _holds(program, instruction, _FUSED_START) else ""
    if _FUSED_PART in instruction.attributes:
        return ""
    if kind == "send":
        transfer = _TRANSFER.search(instruction.attributes)
        return _TRANSFERS.get(transfer[1], "") if transfer else ""
    if kind == "async":
        inner = [each.opcode for name in instruction.called() for each in program.computations[name]]
        return next((opcode for opcode in inner if opcode in KINDS), "")
    return kind if kind in KINDS else ""


def _holds(program: ProgramText, fusion: Instruction, attributes: str) -> bool:
    """Whether an instruction that a fusion runs has the text `attributes` among its attributes."""
    if fusion.opcode != "fusion":
        return False
    return any(attributes in each.attributes for name in fusion.called() for each in program.computations[name])


def _part(program: ProgramText, fusion: Instruction) -> tuple[list[Instruction], Instruction]:
    """The computation of a fusion that starts or is a collective, and the collective in it."""
    (name,) = fusion.called()
    return program.computations[name], next(each for each in program.computations[name] if each.opcode in KINDS)


def _groups(program: ProgramText, instruction: Instruction, kind: str, places: Places) -> Groups | None:
    """The groups of places that exchange data; None if not known."""
    attributes = instruction.attributes
    if instruction.opcode == "send":
        return places.between_slices(attributes)
    if instruction.opcode == "async-start":
        wrapped = program.computations[instruction.called()[0]]
        attributes = next(each.attributes for each in wrapped if each.opcode == kind)
    here = places.of_program(program.num_partitions or len(places.granules))
    groups = groups_of(attributes, len(here))
    return None if groups is None else [[here[partition] for partition in group] for group in groups]


def _described(program: ProgramText, site: _Site, places: Places, count: float | None) -> Collective:
    instruction, kind = site.instruction, _kind(program, site.instruction)
    body = program.computations[site.computation]
    between = beside(program, body, site.place)
    scatters = instruction.opcode == "fusion" and kind == "reduce-scatter"
    if instruction.opcode == "fusion":
        body, instruction = _part(program, instruction)
    groups = _groups(program, instruction, kind, places)
    group_size = None if groups is None else len(groups[0])
    shapes = {each.name: each.shape for each in body}
    size = sum(nbytes(element(shapes[each.name], each.elements)) for each in instruction.operands)
    if kind == "all-gather":
        size *= group_size or 1
    if scatters:  # what the fusion reduces may be padded
        size = nbytes(site.instruction.shape) * (group_size or 1)
    return Collective(
        site.instruction.name,
        kind,
        axis=None if groups is None else axis_of(groups, places.sizes),
        group_size=group_size,
        bytes=size,
        count=count if count is None or count % 1 else int(count),
        overlapped=any(_computes(program, each, size) for each in between),
        products=sum(map(program.products, between)),
        crossing_bytes=None if groups is None else places.crossing_bytes(kind, size, groups),
    )


def beside(program: ProgramText, body: Sequence[Instruction], start: int) -> Sequence[Instruction]:
    """The instructions scheduled between the start and the end of an asynchronous one; none if it is synchronous.

    `body` is its computation, and `start` the place there of the instruction that starts it.
    """
    instruction = body[start]
    if instruction.opcode == "send":
        received = {
            each.name for each in body if each.opcode == "recv" and _rendezvous(each) == _rendezvous(instruction)
        }
        ends = [
            place for place, each in enumerate(body) if each.opcode == "recv-done" and each.operands[0].name in received
        ]
        return body[start + 1 : ends[0]] if ends else ()
    fused = _holds(program, instruction, _FUSED_START)
    if not (fused or instruction.opcode.endswith("-start")) or '"is_sync":true' in instruction.attributes:
        return ()
    names = {instruction.name}
    for end, each in enumerate(body[start + 1 :], start + 1):
        if names.intersection(operand.name for operand in each.operands):
            if _holds(program, each, _FUSED_DONE) if fused else each.opcode.endswith("-done"):
                return body[start + 1 : end]
            names.add(each.name)  # an async-update or a fusion, which continues the collective
    return ()


def _rendezvous(instruction: Instruction) -> str:
    """The name that a `send` and the `recv` of the same transfer have in common."""
    found = _RENDEZVOUS.search(instruction.attributes)
    return found[1] if found else ""


def _computes(program: ProgramText, instruction: Instruction, size: int) -> bool:
    """Whether an instruction multiplies matrices or does other arithmetic on at least `size` bytes."""
    if instruction.opcode in _WRAPPERS:
        inner = (each for name in instruction.called() for each in program.computations[name])
        return any(_computes(program, each, size) for each in inner)
    if program.products(instruction):
        return True
    return not _MOVES.fullmatch(instruction.opcode) and nbytes(instruction.shape) >= size
