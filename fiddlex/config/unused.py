"""Names the fields of a valid config that change nothing in its train step, for programs to tell the user.

`Config.validate` refuses a field that changes nothing where the config alone shows it and no one sets it on purpose.
The fields here are legitimate: `pipeline.stash_memory=host` depends on the schedule, which a plan may replace, and one
list of `pipeline.recompute` may serve models with dropout and without.
"""

from fiddlex.config.config import Config


def unused_fields(config: Config, *, host_stash_slots: int, has_whole: bool) -> list[str]:
    """A sentence for each field that changes nothing.

    Args:
      config: a valid config.
      host_stash_slots: slots of the stash in the memory of the host, in the config's schedule
        (`fiddlex.schedules.buffers.Slots`).
      has_whole: whether the config's schedule has a whole backward pass (B).
    """
    pipeline, mesh = config.pipeline, config.mesh
    found = []
    if pipeline.spills and not host_stash_slots:
        found.append(
            f"pipeline.stash_memory=host changes nothing with pipeline.schedule={pipeline.schedule}, "
            f"pipeline.num_chunks={pipeline.num_chunks}, pipeline.num_microbatches={pipeline.num_microbatches} and "
            f"mesh.pipe={mesh.pipe}: copies to the host, which take a slot of the stash themselves, would save no "
            "memory there, so nothing is copied."
        )
    if pipeline.order != "auto" and not has_whole:
        found.append(
            f"pipeline.order={pipeline.order} changes nothing with pipeline.schedule={pipeline.schedule}: it splits "
            "all backward passes into I and W, and each rank then runs one action per tick in the schedule's order."
        )
    if "masks" in pipeline.recomputed and not config.model.dropout:
        found.append(
            f"masks in pipeline.recompute={pipeline.recompute} changes nothing with model.dropout=0: without dropout "
            "there are no masks to recompute."
        )
    return found
