"""Reads a compiled and scheduled program from the text that XLA prints (`compiled.as_text()`).

Invariant: the instructions of a computation are in the order of the schedule. The reader keeps instructions as text,
and parses only what the analysis of collectives and the work that overlaps them needs
(`fiddlex.xla.compiled_collectives`).
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

# Bits per element of each type; types that are not listed (token, opaque) hold no data.
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_BITS |= {f"{kind}{bits}": bits for kind in "suf" for bits in (2, 4, 8, 16, 32, 64)}
_ARRAY = re.compile(r"\b([a-z]\d*\w*)\[([\d,<=]*)\]")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?(\S+) = (.*?) ([a-z][a-z\d-]*)\(([^()]*)\)?(.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{$")
_END = re.compile(r"\}(, \w+=.*)?$")  # of a computation
_PRODUCTS = ("dot", "convolution")
# Kernels of libraries, and those that Pallas makes for TPUs; fiddlex has one of the latter, for attention.
_PRODUCT_CALLS = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|fmha|conv|tpu_custom_call)', re.IGNORECASE)


class Operand(NamedTuple):
    """An operand of an instruction: the result of another instruction, or an element of that result."""

    name: str  # name of the instruction that makes the result
    # index of a tuple's element, which XLA names from jax 0.12 on (`%param.1#2`), by level; empty: the whole result
    elements: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation."""

    name: str  # name of the instruction, without its %
    shape: str  # shape of the result, as XLA prints it
    opcode: str  # as XLA prints it: `fusion` or `all-gather-start`, for example
    operands: tuple[Operand, ...]
    attributes: str  # all text after the operands
    is_root: bool  # whether it makes the computation's result

    @property
    def scope(self) -> str:
        """The innermost `jax.named_scope`: the last name before that of the operation itself; empty without one."""
        path = re.search(r'op_name="([^"]*)"', self.attributes)
        return path[1].split("/")[-2] if path and "/" in path[1] else ""

    def called(self, *names: str) -> list[str]:
        """The computations that the attributes `names` refer to; by default, all computations the instruction runs."""
        names = names or ("calls", "body", "to_apply", "branch_computations", "true_computation", "false_computation")
        found = re.findall(rf"\b(?:{'|'.join(names)})=(?:\{{([^}}]*)\}}|(%?[^\s,}})]+))", self.attributes)
        return re.findall(r"[^\s,%]+", " ".join(f"{several} {one}" for several, one in found))


@dataclasses.dataclass(frozen=True)
class ProgramText:
    """A compiled program."""

    computations: dict[str, list[Instruction]]  # instructions by computation, in the order of the schedule
    entry: str  # the computation at which the program starts
    num_partitions: int | None  # devices that the program runs on; None where the text does not say

    def trips(self, loop: Instruction) -> int | None:
        """How often the body of a `while` runs; None where the program does not say.

        The number comes from XLA's annotation, or from a condition that compares with a constant. In that second case,
        the method assumes that the loop counts up from 0 by 1, as jax's loops do.
        """
        known = re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.attributes)
        if known:
            return int(known[1])
        root, condition = self._condition(loop)
        bound = condition.get(root.operands[-1].name) if root.operands else None
        if root.opcode != "compare" or "direction=LT" not in root.attributes or not bound or bound.opcode != "constant":
            return None
        return int(bound.attributes) if re.fullmatch(r"\d+", bound.attributes) else None

    def loop_scope(self, loop: Instruction) -> str:
        """The innermost `jax.named_scope` around a `while`, from the name of its condition; else from its own.

        XLA may give the loop the name of an instruction of its body: libtpu 0.0.46 gives it that of a kernel.
        """
        path = re.search(r'op_name="([^"]*)/while/cond/', self._condition(loop)[0].attributes)
        return path[1].split("/")[-1] if path else loop.scope

    def _condition(self, loop: Instruction) -> tuple[Instruction, dict[str, Instruction]]:
        """The root of the condition of a `while`, and all its instructions by name."""
        condition = {each.name: each for each in self.computations[loop.called("condition")[0]]}
        return next(each for each in condition.values() if each.is_root), condition

    def products(self, instruction: Instruction) -> int:
        """Matrix products that an instruction runs: in the largest branch of a conditional, in one trip of a loop.

        A kernel counts as one, however many it computes.
        """
        if instruction.opcode in _PRODUCTS:
            return 1
        if instruction.opcode == "custom-call":
            return int(bool(_PRODUCT_CALLS.search(instruction.attributes)))
        of_each = [sum(map(self.products, self.computations[name])) for name in instruction.called()]
        return max(of_each, default=0)


def read(text: str) -> ProgramText:
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in _joined(text):
        if current is None:
            header = _COMPUTATION.match(line)
            if header:
                current = computations[header[2]] = []
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif parts := _INSTRUCTION.match(line):
            root, name, shape, opcode, inputs, attributes = parts.groups()
            if opcode == "constant":
                inputs, attributes = "", inputs
            operands = tuple(map(_operand, re.findall(r"%([^\s,)]+)", inputs)))
            current.append(Instruction(name, shape, opcode, operands, attributes, bool(root)))
    partitions = re.search(r"^HloModule .*\bnum_partitions=(\d+)", text, re.MULTILINE)
    return ProgramText(computations, entry, int(partitions[1]) if partitions else None)


def _joined(text: str) -> list[str]:
    """The lines of a program; the further lines of an instruction, with a kernel's own attributes, are part of it."""
    lines: list[str] = []
    for line in text.splitlines():
        if lines and _INSTRUCTION.match(lines[-1]) and not line.startswith(" ") and not _END.match(line):
            lines[-1] += line
        else:
            lines.append(line)
    return lines


def element(shape: str, indices: Sequence[int]) -> str:
    """The shape of an element of a tuple, as XLA prints it; further indices select within nested tuples."""
    for index in indices:
        depth, parts = 0, [""]
        for character in shape.removeprefix("(").removesuffix(")"):
            depth += (character in "([{") - (character in ")]}")
            if character == "," and not depth:
                parts.append("")
            else:
                parts[-1] += character
        shape = re.sub(r"/\*.*?\*/", "", parts[index]).strip()
    return shape


def nbytes(shape: str) -> int:
    """Total bytes of all arrays in a shape, which may be a tuple, without the padding of their layouts."""
    bits = sum(
        _bits(kind) * math.prod(int(size.removeprefix("<=")) for size in sizes.split(",") if size)
        for kind, sizes in _ARRAY.findall(shape)
    )
    return -(-bits // 8)


def _operand(text: str) -> Operand:
    name, *elements = text.split("#")
    return Operand(name, tuple(map(int, elements)))


def _bits(kind: str) -> int:
    return _BITS.get(kind, 8 if kind.startswith("f8") else 4 if kind.startswith("f4") else 0)
