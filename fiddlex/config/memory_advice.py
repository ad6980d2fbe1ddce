"""What a person may still do about a lack of memory, given what the config already does."""

from fiddlex.config import Config


def memory_remedies(config: Config, *, fake: bool) -> list[str]:
    """Changes of a config under which its train step takes less memory on each device.

    Args:
      config: of the run.
      fake: whether the devices are a CPU's, which share one memory, so that spreading things over them helps nothing.
    """
    most = config.replica_batch_size
    useful = {
        f"raise pipeline.num_microbatches (at most {most})": config.microbatch_size > 1,
        "set pipeline.recompute=full": config.pipeline.recompute != "full",
        "set optimizer.zero1=True": config.mesh.data > 1 and not config.optimizer.zero1,
        "raise mesh.tensor": not fake and config.mesh.tensor < config.model.num_heads,
        "train a smaller model": True,
    }
    return [remedy for remedy, is_useful in useful.items() if is_useful]
