"""What stands in place of older weights that a checkpoint does not have; tests/train/test_semantics.py has the rest."""

import chex
import jax

from fiddlex.config import Config
from fiddlex.train.step.state import SavedState
from fiddlex.train.trainer import Trainer


def test_in_place_of_older_weights_that_were_not_saved_stand_the_oldest_that_were(tiny_config: Config) -> None:
    tiny_config.pipeline.semantics = "delay:3"
    trainer = Trainer(tiny_config)
    program, state = trainer._program, trainer.state
    one = jax.tree.map(lambda w: w + 1, program.source.saved(state).older["weights_1_updates_ago"])
    saved = SavedState(state.step, state.weights, older={"weights_1_updates_ago": one})
    resumed = program.source.resume(saved).versions.weights
    for place in (1, 2, 3):  # W(−3), W(−2) and W(−1) of step 0
        chex.assert_trees_all_equal(jax.tree.map(lambda stack, place=place: stack[place], resumed), one)
