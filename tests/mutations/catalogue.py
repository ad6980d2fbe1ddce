"""All mutations, by the part of fiddlex that they break."""

from tests.mutations import (
    commands,
    data,
    launching,
    megatron,
    models,
    pipeline,
    planning,
    processes,
    spent_time,
    stalls,
    training,
)

MUTATIONS = (
    *pipeline.MUTATIONS,
    *models.MUTATIONS,
    *training.MUTATIONS,
    *spent_time.MUTATIONS,
    *data.MUTATIONS,
    *megatron.MUTATIONS,
    *planning.MUTATIONS,
    *commands.MUTATIONS,
    *launching.MUTATIONS,
    *processes.MUTATIONS,
    *stalls.MUTATIONS,
)
