"""What the backward pass of a layer makes again instead of reading it from the stash: `pipeline.recompute`.

It is a list of `PARTS`, as in `gelu,norms`, or one of `MODES`. All of them train the same weights, but for rounding:

- `attention`: scores, probabilities and their dropout (Korthikanti et al., MLSys 2023, section 5). A fused kernel of
  attention always recomputes them.
- `gelu`: the result of the MLP's activation function, whichever that is, from its inputs.
- `norms`: the result of a norm that products read, from the norm's input; under sequence parallelism the tensor ranks
  gather it once more.
- `masks`: what dropout keeps and, where attention drops probabilities, the probabilities after dropout.

`selective` is `attention`. `full` makes the whole layer again from its input.
"""

import functools
from collections.abc import Iterable

from fiddlex.config import rules
from fiddlex.errors import ConfigError

PARTS = ("attention", "gelu", "norms", "masks")
FULL = "full"
MODES = ("none", "selective", FULL)


@functools.cache
def recomputed(recompute: str) -> frozenset[str]:
    """The parts that a valid value names; `full` is a part by itself."""
    if recompute == "none":
        return frozenset()
    return frozenset("attention" if part == "selective" else part for part in _listed(recompute))


def written(parts: Iterable[str]) -> str:
    """The value that names these parts, in the order of `PARTS`."""
    parts = set(parts)
    return ",".join(part for part in (*PARTS, FULL) if part in parts) or "none"


def check_recompute(name: str, recompute: str) -> None:
    if recompute in MODES:
        return
    parts = _listed(recompute)
    if len(parts) == 1:
        rules.choice(name, recompute, (*PARTS, *MODES))
    for place, part in enumerate(parts):
        if part in MODES:
            raise ConfigError(
                f"{name}={recompute}: {part} stands by itself. Leave the rest out, or list some of {', '.join(PARTS)}."
            )
        if part not in PARTS:
            known = f"which is not one of {', '.join(PARTS)}. {rules.close(part, PARTS)}"
            raise ConfigError(f"{name}={recompute} lists {part!r}, {known}".rstrip())
        if part in parts[:place]:
            raise ConfigError(f"{name}={recompute} names {part} twice. Name it once.")


def _listed(recompute: str) -> list[str]:
    return [part.strip() for part in recompute.split(",")]
