"""The train step of a config on a mesh, before there is any data or state: it can be lowered and compiled as it is."""

import jax
from jax.sharding import Mesh

from fiddlex.config import Config
from fiddlex.models import make_model
from fiddlex.train.feed import abstract_batch
from fiddlex.train.optimizer import learning_rate_schedule, make_optimizer
from fiddlex.train.state import TrainState, abstract_state, init_state, make_blocks, make_layout, state_specs
from fiddlex.train.step import init_key, make_train_step


class Program:
    """Everything about training that follows from a config and a mesh alone.

    Args:
      config: validated.
      mesh: of its sizes; its devices need not be there (`fiddlex.mesh.make_topology_mesh`), but for `init_state`.

    Attributes:
      mesh: the mesh.
      model: what is trained.
      layout: where its weights lie.
      abstract_state: shapes, dtypes and shardings of the train state.

    Raises:
      ConfigError, ScheduleError: when layers, stages or schedule do not fit the mesh.
    """

    def __init__(self, config: Config, mesh: Mesh):
        self._config, self.mesh = config, mesh
        self.model = make_model(config)
        self.layout = make_layout(self.model, config)
        blocks = make_blocks(self.model, config, self.layout)
        self._optimizer = make_optimizer(config.optimizer, num_steps=config.train.num_steps, blocks=blocks)
        self._specs = state_specs(self._optimizer, self.layout)
        self._train_step = make_train_step(
            self.model,
            config,
            self._optimizer,
            learning_rate=learning_rate_schedule(config.optimizer, config.train.num_steps),
            mesh=mesh,
            layout=self.layout,
            specs=self._specs,
        )
        self.abstract_state = abstract_state(
            self.model, self._optimizer, mesh=mesh, layout=self.layout, specs=self._specs
        )

    def lower(self) -> jax.stages.Lowered:
        """The train step as XLA takes it; nothing is put on a device."""
        return self._train_step.lower(self.abstract_state, abstract_batch(self._config, self.mesh))

    def init_state(self) -> TrainState:
        """A fresh train state, made from `train.seed`."""
        key = init_key(self._config.train.seed)
        return init_state(self.model, self._optimizer, key, mesh=self.mesh, layout=self.layout, specs=self._specs)
