"""The collectives of a compiled step: what each carries, how often, over which axis, and what runs beside it.

Read off the scheduled program (`fiddlex.xla.program_text`). What it cannot tell, the schedule of the pipeline does:
conditionals and loops have the names that the executor gives them (`jax.named_scope`).
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fiddlex.xla.device_groups import axis_of, groups_of
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
# Instructions that compute nothing: they move numbers, or none.
_MOVES = re.compile(
    r"(after-all|bitcast|bitcast-convert|broadcast|concatenate|constant|convert|copy|custom-call|domain|dynamic-slice|dynamic-update-slice"
    r"|gather|get-tuple-element|iota|opt-barrier|optimization-barrier|pad|parameter|partition-id|reshape|reverse|slice"
    r"|transpose|tuple|replica-id|rng-get-and-update-state|.*-start|.*-done|.*-update|" + "|".join(KINDS) + ")"
)
_WRAPPERS = ("fusion", "while", "conditional", "call")  # which do what stands in the computations that they call


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled step.

    Attributes:
      name: of the instruction.
      kind: one of `KINDS`.
      axis: `data`, `pipe` or `tensor` where it runs along one axis of the mesh, else `several`; None: not known.
      group_size: devices that take part in one together; 2 for a permute, which takes from one to another.
      bytes: of one execution on one device: the whole array that it works on, the result of an all-gather and the
        operand of any other. A device of a group of n sends (n − 1)/n of that over a ring, twice as much for an
        all-reduce, and all of it in a permute.
      count: executions on a device in a step; None where the program does not tell. In a conditional, as often as the
        schedule takes the branch on the device that takes it most often, or as the conditional runs if it does not say.
      overlapped: whether it is asynchronous and the device computes between its start and its end: matrix products, or
        other arithmetic on an array of at least `bytes`.
      products: matrix products between its start and its end, those of the largest branch of a conditional and of one
        trip of a loop.
    """

    name: str
    kind: str
    axis: str | None
    group_size: int | None
    bytes: int
    count: float | None
    overlapped: bool
    products: int


class _Site(NamedTuple):
    """A collective where it stands."""

    instruction: Instruction
    computation: str
    place: int


def collectives(text: str, mesh: Mapping[str, int], runs: Mapping[str, float]) -> list[Collective]:
    """All collectives of a step but those within single devices, in the order of the program.

    Args:
      text: the scheduled program, as XLA prints it.
      mesh: sizes of its axes, the last varying fastest over the devices.
      runs: by the name of a scope, how often a step runs the branch of a conditional there; of a loop whose trips the
        program does not tell, its trips, on average where they differ from time to time.
    """
    program = read(text)
    counts: dict[_Site, float | None] = {}
    _count(program, program.entry, 1, runs, counts)
    found = []
    for site, count in counts.items():
        one = _described(program, site, mesh, count)
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
    """Adds how often the collectives in a computation run that itself runs so many times."""
    for place, instruction in enumerate(program.computations[computation]):
        inner: float | None = times
        if instruction.opcode == "while":
            trips: float | None = program.trips(instruction)
            trips = runs.get(instruction.scope) if trips is None else trips
            inner = None if trips is None or times is None else times * trips
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
    """The kind of collective that an instruction is or starts, in a wrapper of its own or not; empty: it is none."""
    kind = instruction.opcode.removesuffix("-start")
    if kind == "async":
        inner = [each.opcode for name in instruction.called() for each in program.computations[name]]
        return next((opcode for opcode in inner if opcode in KINDS), "")
    return kind if kind in KINDS else ""


def _described(program: ProgramText, site: _Site, mesh: Mapping[str, int], count: float | None) -> Collective:
    instruction, kind = site.instruction, _kind(program, site.instruction)
    body = program.computations[site.computation]
    if instruction.opcode == "async-start":
        wrapped = program.computations[instruction.called()[0]]
        attributes = next(each.attributes for each in wrapped if each.opcode == kind)
    else:
        attributes = instruction.attributes
    groups = groups_of(attributes, math.prod(mesh.values()))
    group_size = None if groups is None else len(groups[0])
    shapes = {each.name: each.shape for each in body}
    size = sum(nbytes(element(shapes[each.name], each.elements)) for each in instruction.operands)
    if kind == "all-gather":
        size *= group_size or 1
    beside = _beside(body, site.place)
    count = None if count is None else round(count, 6)  # a whole number in parts of a tick, and back
    return Collective(
        instruction.name,
        kind,
        axis=None if groups is None else axis_of(groups, mesh),
        group_size=group_size,
        bytes=size,
        count=count if count is None or count % 1 else int(count),
        overlapped=any(_computes(program, each, size) for each in beside),
        products=sum(map(program.products, beside)),
    )


def _beside(body: Sequence[Instruction], start: int) -> Sequence[Instruction]:
    """What is scheduled between a collective's start and its end; nothing when it is synchronous."""
    instruction = body[start]
    if not instruction.opcode.endswith("-start") or '"is_sync":true' in instruction.attributes:
        return ()
    names = {instruction.name}
    for end, each in enumerate(body[start + 1 :], start + 1):
        if names.intersection(operand.name for operand in each.operands):
            if each.opcode.endswith("-done"):
                return body[start + 1 : end]
            names.add(each.name)  # an async-update, which goes on for it
    return ()


def _computes(program: ProgramText, instruction: Instruction, size: int) -> bool:
    """Whether an instruction multiplies matrices or does other arithmetic on at least `size` bytes."""
    if instruction.opcode in _WRAPPERS:
        inner = (each for name in instruction.called() for each in program.computations[name])
        return any(_computes(program, each, size) for each in inner)
    if program.products(instruction):
        return True
    return not _MOVES.fullmatch(instruction.opcode) and nbytes(instruction.shape) >= size
