"""The train step of a config on a mesh, which can be lowered and compiled without any data or state.

Invariant, also for the programs of `fiddlex.train.step.train_step` and `fiddlex.train.inference.sampling`: jax traces
every program under `fixed_settings`, so that a run computes the same bits whatever settings of jax its process has.
"""

import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.cluster.jax_settings import fixed_settings
from fiddlex.config import Config
from fiddlex.config.user_code.own_rules import rule_function
from fiddlex.config.values.schedule_source import is_function
from fiddlex.errors import DeviceError
from fiddlex.models.registry import make_model
from fiddlex.parallel.sharding import on_devices
from fiddlex.planner.settle import settle
from fiddlex.terminal.memory_advice import is_lack_of_memory
from fiddlex.train.step.flushed import Flushed
from fiddlex.train.step.gradients import GradientSource, init_key
from fiddlex.train.step.muon import deal_over
from fiddlex.train.step.optimizer import Apart, learning_rate_schedule, make_optimizer
from fiddlex.train.step.own_rate import check_own_rate
from fiddlex.train.step.own_rule import check_own_rule
from fiddlex.train.step.refusal import refusal
from fiddlex.train.step.scaling import Scaling, fit, start_scaling
from fiddlex.train.step.spikes import Usual, start_usual
from fiddlex.train.step.state import (
    SavedState,
    TrainState,
    abstract_state,
    make_blocks,
    make_init,
    make_layout,
    state_shardings,
)
from fiddlex.train.step.train_step import make_train_step
from fiddlex.train.step.unflushed import Unflushed
from fiddlex.train.step.update import at_once, by_leaf
from fiddlex.train.step.whole_weights import WholeWeights

_OF_OTHERS = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED")  # errors of the coordination service
MOST_COPIES = 64  # more than arrays that a layer saves


class Program:
    """Everything about training that follows from a validated config and a mesh of the config's sizes alone.

    Only `init_state` needs the mesh's devices to exist (`fiddlex.cluster.mesh.make_topology_mesh`). The constructor
    raises ConfigError or ScheduleError when layers, stages or schedule do not fit the mesh.
    """

    @fixed_settings()
    def __init__(self, config: Config, mesh: Mesh):
        config = settle(config, device_kind=mesh.devices.flat[0].device_kind)
        self.config, self.mesh = config, mesh
        self.model = make_model(config)
        self.layout = make_layout(self.model, config)
        blocks = make_blocks(self.model, config)
        make_rule = functools.partial(
            make_optimizer,
            config.optimizer,
            num_steps=config.train.num_steps,
            deal=deal_over(mesh, zero1=config.optimizer.zero1),
            apart=_checked(config, WholeWeights(self.layout, blocks, mesh)),
        )
        self.optimizer = make_rule(blocks=blocks)
        source = Unflushed if self.layout.pipeline.windows else Flushed
        self.source: GradientSource = source(self.model, config, mesh, self.layout, self.optimizer)
        scales, compares = config.model.dtype == "float16", bool(config.train.spike_bound)
        self.shardings = state_shardings(
            self.optimizer,
            self.layout,
            mesh,
            pipeline=self.source.state_specs,
            scaling=Scaling(P(), P()) if scales else (),
            usual=Usual(P(), P(), P()) if compares else (),
        )
        self.step = make_train_step(
            config,
            by_leaf(make_rule, blocks, mesh) if config.optimizer.offload else at_once(self.optimizer),
            self.source,
            learning_rate=learning_rate_schedule(config.optimizer, config.train.num_steps),
            mesh=mesh,
            layout=self.layout,
            shardings=self.shardings,
        )
        self._init = make_init(
            self.model,
            self.optimizer,
            self.layout,
            pipeline=self.source.start,
            scaling=lambda: start_scaling(config.optimizer, self.layout.pipeline.delay) if scales else (),
            usual=lambda: start_usual() if compares else (),
        )
        self.abstract_state = abstract_state(self._init, self.shardings)

    @fixed_settings()
    def lower(self) -> jax.stages.Lowered:
        """The lowered train step, the input of XLA's compiler; puts nothing on a device."""
        return self.step.lower(self.abstract_state, self.source.abstract_inputs)

    def compile(self, lowered: jax.stages.Lowered, **options: object) -> jax.stages.Compiled:
        """Compiles the lowered step with `compiler_options` and further ones.

        Raises:
          jax.errors.JaxRuntimeError: when the devices have too little memory, or another process of the run is lost.
          DeviceError: when the compiler refuses the step for another reason.
        """
        try:
            return lowered.compile(compiler_options=self.compiler_options | options)
        except jax.errors.JaxRuntimeError as error:
            if is_lack_of_memory(error) or str(error).startswith(_OF_OTHERS):
                raise
            raise DeviceError(refusal(str(error), self.config, self.mesh)) from error

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The compiler options that differ from XLA's defaults, on GPUs."""
        if self.mesh.devices.flat[0].platform != "gpu":
            return {}
        # XLA shall schedule work between the start and the end of collectives.
        options: dict[str, Any] = {"xla_gpu_enable_latency_hiding_scheduler": True}
        if self.config.mesh.collective_matmul:
            # XLA shall not combine all-gathers of blocks (`fiddlex.models.blocks`) that different products need.
            options["xla_gpu_all_gather_combine_threshold_bytes"] = 0
        sizes = self.layout.pipeline.spec.sizes
        if sizes.slots.host_stash or sizes.streamed:
            # All arrays copied to the host or back shall travel at the same time; by default XLA waits for all but two.
            options["xla_gpu_experimental_parallel_async_compute_limit"] = MOST_COPIES
        return options

    @fixed_settings()
    def resume(self, saved: SavedState) -> TrainState:
        """The train state that continues from a saved one, with no batch in flight."""
        state = TrainState(saved.step, saved.weights, saved.optimizer, self.source.resume(saved))
        everywhere = NamedSharding(self.mesh, P())
        if self.abstract_state.usual:
            state = state._replace(usual=on_devices(saved.usual or start_usual(), everywhere))
        if self.abstract_state.scaling:
            scaling = saved.scaling or start_scaling(self.config.optimizer, self.layout.pipeline.delay)
            state = state._replace(scaling=on_devices(fit(scaling, self.layout.pipeline.delay), everywhere))
        return state

    def abstract_saved(self) -> SavedState:
        """Shapes, dtypes and shardings of the state that `resume` takes."""
        return self.source.abstract_saved(self.abstract_state)

    @fixed_settings()
    def saved(self, state: TrainState) -> SavedState:
        """The parts of a train state from which a run can resume."""
        return self.source.saved(state)

    @fixed_settings()
    def init_state(self) -> TrainState:
        """A fresh train state, made from `train.seed`."""
        weights = jax.jit(self._init.weights, out_shardings=self.shardings.weights)(init_key(self.config.train.seed))
        rest = jax.jit(
            lambda weights: self._init.rest(weights)._replace(weights={}),
            out_shardings=self.shardings._replace(weights={}),
        )
        state: TrainState = rest(weights)
        return state._replace(weights=weights)


def _checked(config: Config, whole: WholeWeights) -> Apart:
    """Checks the functions of the user's that update weights; returns what gives the rule its weights."""
    optimizer = config.optimizer
    if is_function(optimizer.schedule):
        check_own_rate(optimizer, config.train.num_steps)
    if is_function(optimizer.name):
        check_own_rule(optimizer, whole.shapes())
        if not rule_function(optimizer.name).elementwise:
            return whole.rule
    return lambda rule: rule
