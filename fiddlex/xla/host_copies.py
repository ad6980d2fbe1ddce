"""The copies of a compiled step between a device and its host that run beside other work, and that work.

The analysis reads the scheduled program (`fiddlex.xla.program_text`). XLA writes the memory of the host as `S(5)`.
"""

import dataclasses
import re

from fiddlex.xla.compiled_collectives import beside
from fiddlex.xla.program_text import nbytes, read

_HOST = "S(5)"
_ARRAY = re.compile(r"\b[a-z]\w*\[\d[^\]]*\](?:\{[^}]*\})?")  # of at least one dimension, with its layout


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """An asynchronous copy of an array, or of a slice, between a device and its host."""

    name: str  # name of the instruction that starts it
    to_host: bool
    bytes: int  # bytes of one execution on one device
    products: int  # matrix products while it runs, counting a conditional's largest branch and one trip of a loop


def host_copies(text: str) -> list[HostCopy]:
    """All asynchronous copies between a device and its host, in the order of the program."""
    program, found = read(text), []
    for body in program.computations.values():
        for place, instruction in enumerate(body):
            if not instruction.opcode.endswith("-start") or _HOST not in instruction.shape:
                continue
            arrays = _ARRAY.findall(instruction.shape)  # what is copied is the smallest of operands and result
            to_host = _HOST in arrays[0 if instruction.opcode == "copy-start" else -1]
            products = sum(map(program.products, beside(program, body, place)))
            found.append(HostCopy(instruction.name, to_host, min(map(nbytes, arrays)), products))
    return found
