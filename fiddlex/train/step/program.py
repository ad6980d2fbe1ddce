"""The train step of a config on a mesh, before there is any data or state: it can be lowered and compiled as it is.

Invariant, here and for the programs of `fiddlex.train.step.train_step` and `fiddlex.train.inference.sampling`: jax
traces them in 32 bits, so that a run has the same bits whether or not its process has set JAX_ENABLE_X64.
"""

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.config import Config
from fiddlex.models.registry import make_model
from fiddlex.parallel.sharding import named
from fiddlex.train.step.continuous import Continuous
from fiddlex.train.step.flushed import Flushed
from fiddlex.train.step.gradients import GradientSource, init_key
from fiddlex.train.step.optimizer import learning_rate_schedule, make_optimizer
from fiddlex.train.step.scaling import Scaling, fit, start_scaling
from fiddlex.train.step.state import (
    SavedState,
    TrainState,
    abstract_state,
    make_blocks,
    make_init,
    make_layout,
    state_specs,
)
from fiddlex.train.step.train_step import make_train_step


class Program:
    """Everything about training that follows from a config and a mesh alone.

    Args:
      config: validated.
      mesh: of its sizes; its devices need not be there (`fiddlex.cluster.mesh.make_topology_mesh`), except for
        `init_state`.

    Attributes:
      config: the config.
      mesh: the mesh.
      model: what is trained.
      layout: its schedule, and where its weights lie.
      optimizer: the update.
      specs: PartitionSpecs of the train state.
      source: of the gradients.
      step: `(state, inputs) -> (state, metrics)`, see `make_train_step`; the inputs are those of `source`.
      abstract_state: shapes, dtypes and shardings of the train state.

    Raises:
      ConfigError, ScheduleError: when layers, stages or schedule do not fit the mesh.
    """

    @jax.enable_x64(False)
    def __init__(self, config: Config, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.model = make_model(config)
        self.layout = make_layout(self.model, config)
        blocks = make_blocks(self.model, config)
        self.optimizer = make_optimizer(config.optimizer, num_steps=config.train.num_steps, blocks=blocks)
        source = Continuous if self.layout.pipeline.windows else Flushed
        self.source: GradientSource = source(self.model, config, mesh, self.layout)
        scales = config.model.dtype == "float16"
        self.specs = state_specs(
            self.optimizer, self.layout, pipeline=self.source.state_specs, scaling=Scaling(P(), P()) if scales else ()
        )
        self.step = make_train_step(
            config,
            self.optimizer,
            self.source,
            learning_rate=learning_rate_schedule(config.optimizer, config.train.num_steps),
            mesh=mesh,
            layout=self.layout,
            specs=self.specs,
        )
        self._init = make_init(
            self.model,
            self.optimizer,
            self.layout,
            pipeline=self.source.start,
            scaling=lambda: start_scaling(config.optimizer, self.source.max_batches) if scales else (),
        )
        self.abstract_state = abstract_state(self._init, mesh=mesh, specs=self.specs)

    @jax.enable_x64(False)
    def lower(self) -> jax.stages.Lowered:
        """The train step as XLA takes it; nothing is put on a device."""
        return self.step.lower(self.abstract_state, self.source.abstract_inputs)

    @property
    def compiler_options(self) -> dict[str, bool | str]:
        """What XLA is to do besides its defaults, on GPUs.

        It is to put work between the start and the end of collectives; and to see that what a conditional changes in
        place nobody reads any more, without which each tick copies the whole stash there (docs/ahead_of_time.md).
        """
        if self.mesh.devices.flat[0].platform != "gpu":
            return {}
        return {
            "xla_gpu_enable_latency_hiding_scheduler": True,
            "xla_gpu_copy_insertion_use_region_analysis": True,
        }

    @jax.enable_x64(False)
    def resume(self, saved: SavedState) -> TrainState:
        """The train state that goes on from a saved one, with nothing under way."""
        state = TrainState(saved.step, saved.weights, saved.optimizer, self.source.resume(saved))
        if not self.abstract_state.scaling:
            return state
        scaling = saved.scaling or start_scaling(self.config.optimizer, self.source.max_batches)
        everywhere = NamedSharding(self.mesh, P())
        return state._replace(scaling=jax.device_put(fit(scaling, self.source.max_batches), everywhere))

    def abstract_saved(self) -> SavedState:
        """Shapes, dtypes and shardings of what `resume` takes."""
        state = self.abstract_state
        return SavedState(state.step, state.weights, state.optimizer, self.source.abstract_older())

    def saved(self, state: TrainState) -> SavedState:
        """What of a train state a run goes on from."""
        return SavedState(state.step, state.weights, state.optimizer, self.source.older(state), state.scaling)

    @jax.enable_x64(False)
    def init_state(self) -> TrainState:
        """A fresh train state, made from `train.seed`."""
        init = jax.jit(self._init, out_shardings=named(self.mesh, self.specs))
        return init(init_key(self.config.train.seed))
