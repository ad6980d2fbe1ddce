"""All mutations, by the part of fiddlex that they break."""

from tests.mutations import (
    checkpoints,
    commands,
    data,
    faults,
    launching,
    megatron,
    memory,
    models,
    pipeline,
    planning,
    processes,
    reading,
    spent_time,
    stalls,
    synthesis,
    training,
)

MUTATIONS = (
    *pipeline.MUTATIONS,
    *models.MUTATIONS,
    *training.MUTATIONS,
    *checkpoints.MUTATIONS,
    *spent_time.MUTATIONS,
    *faults.MUTATIONS,
    *data.MUTATIONS,
    *megatron.MUTATIONS,
    *memory.MUTATIONS,
    *planning.MUTATIONS,
    *synthesis.MUTATIONS,
    *commands.MUTATIONS,
    *launching.MUTATIONS,
    *processes.MUTATIONS,
    *reading.MUTATIONS,
    *stalls.MUTATIONS,
)
