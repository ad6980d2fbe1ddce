"""What `pipeline.layers_per_stage` may be: numbers, or the word for the cut that the planner finds fastest."""

import re

from fiddlex.config import rules
from fiddlex.errors import ConfigError

BALANCED = "balanced"  # the planner decides (`fiddlex.planner.settle`)


def parse_layers_per_stage(text: str) -> tuple[int, ...]:
    """The number of layers of each stage, from a text such as `3,2,3`; each is at least 1."""
    parts = [part.strip() for part in text.split(",")]
    counts = tuple(int(part) if re.fullmatch(r"[0-9]{1,9}", part) else 0 for part in parts)
    if min(counts) < 1:
        hint = rules.close(text, [BALANCED])
        raise ConfigError(
            f"pipeline.layers_per_stage={text[:200]!r} must be {BALANCED}, or numbers of at least 1, one for each "
            f"stage, as in 3,2,3. {hint}".rstrip()
        )
    return counts


def check_layers_per_stage(text: str) -> None:
    """Raises ConfigError unless `text` is empty, `BALANCED`, or a list that `parse_layers_per_stage` takes."""
    if text not in ("", BALANCED):
        parse_layers_per_stage(text)
