"""What the user can do about a lack of memory, given the config."""

import re
from typing import Any

from fiddlex.config.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.config.values.stash import SAME
from fiddlex.errors import ConfigError

_FORWARDS_FIRST = ("gpipe", "breadth_first")  # schedules whose stash grows with the microbatches on any mesh.pipe
_LACK_OF_MEMORY = re.compile("RESOURCE_EXHAUSTED|Out of memory", re.IGNORECASE)  # the second is in INTERNAL errors


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether an error is jax's for a device, or the fake devices of a CPU, that had no memory left."""
    return type(error).__name__ == "JaxRuntimeError" and bool(_LACK_OF_MEMORY.search(str(error)))


def memory_remedies(config: Config, *, fake: bool) -> dict[str, dict[str, Any]]:
    """Changes to a config that reduce the memory of its train step: for each, as text, the fields it sets, by path.

    A text that names no values has no fields. With a change the config may be invalid. `fake` devices of a CPU share
    one memory, so sharding over them saves none, and replicas cost memory.
    """
    most, data, microbatches = config.replica_batch_size, config.mesh.data, config.pipeline.num_microbatches
    lean = "attention,gelu,norms,masks" if config.model.dropout else "gelu,norms"
    stash = {} if config.pipeline.stash_dtype == SAME else {"pipeline.stash_dtype": SAME}
    free = not fake and not config.optimizer.offload and config.pipeline.prediction == "none"
    remedies: list[tuple[dict[str, Any], bool]] = [
        ({"pipeline.num_microbatches": most}, config.microbatch_size > 1),
        ({"pipeline.recompute": lean}, config.pipeline.recompute == "none"),
        ({"pipeline.recompute": "full"} | stash, config.pipeline.recompute != "full"),
        ({"mesh.data": 1, "pipeline.num_microbatches": microbatches * data}, fake and data > 1),
        ({"pipeline.stash_memory": "host"}, not fake and _may_spill(config)),
        ({"optimizer.zero1": True}, data > 1 and not config.optimizer.zero1),
        ({"optimizer.offload": True}, free),
        ({"pipeline.weights_memory": "host"}, not fake and _may_stream(config)),
    ]
    texts = {_text(fields, most): fields for fields, is_useful in remedies if is_useful}
    if not fake and config.mesh.tensor < config.model.num_heads:
        texts["raise mesh.tensor"] = {}
    return texts | {"train a smaller model": {}}


def _text(fields: dict[str, Any], most: int) -> str:
    if fields.keys() == {"pipeline.num_microbatches"}:
        return f"raise pipeline.num_microbatches (at most {most})"
    return f"set {' and '.join(f'{name}={value}' for name, value in fields.items())}"


def _may_spill(config: Config) -> bool:
    """Whether `pipeline.stash_memory=host` may copy anything: certainly not where this is false."""
    pipeline = config.pipeline
    if pipeline.spills or pipeline.num_microbatches * pipeline.num_chunks < 3:
        return False
    return config.mesh.pipe * pipeline.num_chunks > 2 or pipeline.schedule in _FORWARDS_FIRST


def _may_stream(config: Config) -> bool:
    """Whether `pipeline.weights_memory=host` is valid and frees memory; with two chunks, devices hold all weights."""
    pipeline = config.pipeline
    if pipeline.streams or pipeline.schedule != "breadth_first" or pipeline.num_chunks < 3:
        return False
    try:
        replaced(config, {"pipeline.weights_memory": "host"}).validate()
    except ConfigError:
        return False
    return True
