"""What the state of a step without a flush is made of; tests/train/test_semantics.py has what it computes."""

import chex
import jax
import pytest

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config
from fiddlex.train.step.program import Program
from fiddlex.train.step.state import SavedState
from fiddlex.train.trainer import Trainer


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])  # the second has a weight stash
def test_no_array_of_the_state_is_empty(schedule: str, tiny_config: Config) -> None:
    """XLA of jaxlib 0.11.2 crashes at an empty array among the inputs of a `shard_map`."""
    tiny_config.mesh.pipe, tiny_config.pipeline.num_microbatches = 2, 2
    tiny_config.pipeline.semantics, tiny_config.pipeline.schedule = "2bw", schedule
    program = Program(tiny_config.validate(), make_mesh(tiny_config.mesh))
    assert [leaf for leaf in jax.tree.leaves(program.abstract_state) if not leaf.size] == []


def test_in_place_of_older_weights_that_were_not_saved_stand_the_oldest_that_were(tiny_config: Config) -> None:
    tiny_config.pipeline.semantics = "delay:3"
    trainer = Trainer(tiny_config)
    program, state = trainer._program, trainer.state
    one = jax.tree.map(lambda w: w + 1, program.source.saved(state).older["weights_1_updates_ago"])
    saved = SavedState(state.step, state.weights, older={"weights_1_updates_ago": one})
    resumed = program.source.resume(saved).versions.weights
    for place in (1, 2, 3):  # W(−3), W(−2) and W(−1) of step 0
        chex.assert_trees_all_equal(jax.tree.map(lambda stack, place=place: stack[place], resumed), one)
