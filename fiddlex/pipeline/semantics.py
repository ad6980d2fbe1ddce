"""Weight-update semantics: by how many updates the weights that a batch is run with lag behind the newest.

Batch b of a stage with delay D runs forward and backward with W(b − D), where W(k) is the weights after k updates and
W(k) = W(0) for k < 0; then W(b + 1) = optimizer(W(b), gradient of batch b). A delay is what lets a pipeline go on from
batch to batch without draining: batch b may start when update b − D − 1 is done. Imports no jax.

References:
  2BW: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021, section 3.1. Weight stashing and
  vertical sync: Harlap et al., PipeDream (SOSP 2019), section 3.3, where a batch is one microbatch.
"""

import dataclasses
import re

from fiddlex.config import nearest
from fiddlex.errors import ConfigError

NAMES = ("sync", "2bw", "stash", "vertical_sync", "delay:K")


@dataclasses.dataclass(frozen=True)
class Semantics:
    """Delays of the weights.

    Attributes:
      delays: of each stage, in updates.
      batch_size: microbatches in a batch.
    """

    delays: tuple[int, ...]
    batch_size: int

    @property
    def num_versions(self) -> int:
        """Versions of the weights that are needed at once."""
        return 1 + max(self.delays)

    def batch(self, microbatch: int) -> int:
        """The batch that a microbatch belongs to, when both are counted through."""
        return microbatch // self.batch_size


def make_semantics(name: str, *, num_stages: int, batch_size: int) -> Semantics:
    """The semantics `name` for a pipeline.

    Args:
      name: `sync` (a flush after each batch), `2bw` (delay 1), `stash` (stage s of n lags n − 1 − s updates behind),
        `vertical_sync` (all stages lag n − 1 behind), or `delay:K`.
      num_stages: n.
      batch_size: microbatches in a batch.

    Raises:
      ConfigError: when there are no such semantics.
    """
    uniform = {"sync": 0, "2bw": 1, "vertical_sync": num_stages - 1}
    if name == "stash":
        return Semantics(tuple(reversed(range(num_stages))), batch_size)
    if match := re.fullmatch(r"delay:(\d{1,3})", name, re.ASCII):
        return Semantics((int(match[1]),) * num_stages, batch_size)
    if name not in uniform:
        raise ConfigError(f"pipeline.semantics={name!r} is not one of {', '.join(NAMES)}. {nearest(name, NAMES)}")
    return Semantics((uniform[name],) * num_stages, batch_size)
