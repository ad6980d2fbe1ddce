"""Older weights, from a state to a checkpoint and back."""

import chex
import jax

from fiddlex.config import Config
from fiddlex.train.trainer import Trainer
from fiddlex.train.transfer import whole


def test_older_weights_of_every_age_come_back(tiny_config: Config) -> None:
    tiny_config.pipeline.semantics, tiny_config.train.num_steps = "delay:3", 10
    tiny_config.optimizer.learning_rate = 1e-2
    trainer = Trainer(tiny_config)
    weights = [trainer.weights()]
    for _ in range(6):
        trainer.record(trainer.dispatch())
        weights.append(trainer.weights())
    program, state = trainer._program, trainer.state
    older = program.source.older(state)
    resumed = program.source.resume(state._replace(ahead=older)).ahead.versions
    assert list(older) == [f"weights_{age}_updates_ago" for age in (1, 2, 3)]
    for age, saved in enumerate(older.values(), start=1):
        place = (6 - age) % 4
        version = jax.tree.map(lambda stack, place=place: stack[place], resumed)
        for found in (saved, version):
            chex.assert_trees_all_equal(whole(found, program.model, program.layout), weights[6 - age])


def test_in_place_of_older_weights_that_were_not_saved_stand_the_oldest_that_were(tiny_config: Config) -> None:
    tiny_config.pipeline.semantics = "delay:3"
    trainer = Trainer(tiny_config)
    program, state = trainer._program, trainer.state
    one = jax.tree.map(lambda w: w + 1, program.source.older(state)["weights_1_updates_ago"])
    resumed = program.source.resume(state._replace(ahead={"weights_1_updates_ago": one})).ahead.versions
    for place in (1, 2, 3):  # W(−3), W(−2) and W(−1) of step 0
        chex.assert_trees_all_equal(jax.tree.map(lambda stack, place=place: stack[place], resumed), one)
