"""Fields that change nothing are named, and only these."""

import pytest

from fiddlex.config import Config
from fiddlex.config.overrides import override
from fiddlex.config.unused import unused_fields
from fiddlex.schedules.resolve import resolve

STASH = (
    "pipeline.stash_memory=host changes nothing with pipeline.schedule=1f1b, pipeline.num_chunks=1, "
    "pipeline.num_microbatches=8 and mesh.pipe={pipe}: copies to the host, which take a slot of the stash themselves, "
    "would save no memory there, so nothing is copied."
)
MASKS = (
    "masks in pipeline.recompute=gelu,masks changes nothing with model.dropout=0: without dropout there are no masks "
    "to recompute."
)
ORDER = (
    "pipeline.order=strict changes nothing with pipeline.schedule=zb_h1: it splits all backward passes into I and W, "
    "and each rank then runs one action per tick in the schedule's order."
)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([], []),
        (["pipeline.stash_memory=host"], [STASH.format(pipe=1)]),
        (["pipeline.stash_memory=host", "mesh.pipe=2"], [STASH.format(pipe=2)]),
        (["pipeline.stash_memory=host", "mesh.pipe=2", "pipeline.semantics=2bw"], [STASH.format(pipe=2)]),
        (["pipeline.stash_memory=host", "mesh.pipe=4"], []),
        (["pipeline.stash_memory=host", "mesh.pipe=4", "pipeline.semantics=2bw"], []),
        (["pipeline.stash_memory=host", "mesh.pipe=2", "pipeline.schedule=gpipe"], []),
        (["pipeline.order=strict"], []),
        (["pipeline.order=strict", "pipeline.schedule=zb_h1"], [ORDER]),
        (["pipeline.recompute=gelu,masks"], [MASKS]),
        (["pipeline.recompute=gelu,masks", "model.dropout=0.1"], []),
        (["pipeline.recompute=full"], []),
        (["pipeline.stash_memory=host", "pipeline.recompute=gelu,masks"], [STASH.format(pipe=1), MASKS]),
    ],
)
def test_fields_that_change_nothing_are_named(fields: list[str], expected: list[str]) -> None:
    config = override(Config(), "pipeline.num_microbatches=8", *fields).validate()
    spec = resolve(config).spec
    assert unused_fields(config, host_stash_slots=spec.sizes.slots.host_stash, has_whole=spec.has_whole) == expected
