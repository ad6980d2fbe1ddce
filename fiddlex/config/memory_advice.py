"""What the user can do about a lack of memory, given the config."""

from fiddlex.config.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.config.stash import SAME
from fiddlex.errors import ConfigError

_FORWARDS_FIRST = ("gpipe", "breadth_first")  # schedules whose stash grows with the microbatches on any mesh.pipe


def memory_remedies(config: Config, *, fake: bool) -> list[str]:
    """Changes to a config that reduce the memory of its train step on each device.

    Args:
      config: the run's config.
      fake: whether the devices are fake devices of a CPU. They share one memory, so sharding over them saves none.
    """
    most = config.replica_batch_size
    lean = "attention,gelu,norms,masks" if config.model.dropout else "gelu,norms"
    exact = "" if config.pipeline.stash_dtype == SAME else f" and pipeline.stash_dtype={SAME}"
    useful = {
        f"raise pipeline.num_microbatches (at most {most})": config.microbatch_size > 1,
        f"set pipeline.recompute={lean}": config.pipeline.recompute == "none",
        f"set pipeline.recompute=full{exact}": config.pipeline.recompute != "full",
        "set pipeline.stash_memory=host": not fake and _may_spill(config),
        "set optimizer.zero1=True": config.mesh.data > 1 and not config.optimizer.zero1,
        "set optimizer.offload=True": not fake
        and not config.optimizer.offload
        and config.pipeline.prediction == "none",
        "set pipeline.weights_memory=host": not fake and _may_stream(config),
        "raise mesh.tensor": not fake and config.mesh.tensor < config.model.num_heads,
        "train a smaller model": True,
    }
    return [remedy for remedy, is_useful in useful.items() if is_useful]


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
