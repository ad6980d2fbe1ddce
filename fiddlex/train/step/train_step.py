"""The compiled train step: gradients of a global batch, and the update.

Gradients leave `shard_map` on the shards whose master weights they update. They come from a pipeline that is flushed
after each batch (`fiddlex.train.step.flushed`) or from one that is not (`fiddlex.train.step.unflushed`). The update
itself is plain optax on global arrays, outside `shard_map`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fiddlex.config import Config
from fiddlex.parallel.sharding import named
from fiddlex.train.step.gradients import GradientSource, Update
from fiddlex.train.step.measures import measure
from fiddlex.train.step.optimizer import clip_by_global_norm, num_updates
from fiddlex.train.step.scaling import next_scaling
from fiddlex.train.step.spikes import Usual, is_spike, next_usual
from fiddlex.train.step.state import TrainState, WeightLayout
from fiddlex.train.step.update import Apply

Metrics = dict[str, Any]


def make_train_step(
    config: Config,
    apply: Apply,
    source: GradientSource,
    *,
    learning_rate: optax.Schedule,
    mesh: Mesh,
    layout: WeightLayout,
    shardings: TrainState,
) -> jax.stages.Wrapped:
    """Compiles `(state, inputs) -> (state, metrics)`; the state is donated, and `source` makes the inputs.

    Metrics are device scalars: `loss` (mean over the scored tokens or labels of the batch, at the weights of its
    forward pass), `grad_norm` (global, before clipping), `learning_rate`, `weights_finite` (after the update), and
    `nonfinite`, which says for every weight (and layer) whether its gradient has a value that is not finite. In float16
    there is also `loss_scale`, the scale of the step's batch. Where layers add losses, `layer_loss` is the part of
    `loss` that they add. With `train.spike_bound`, `spike` says whether the step is one, beside `usual_loss` and
    `usual_grad_norm`.

    A step does not change weights and optimizer when it is a spike, and when `grad_norm` or `loss` is not finite in
    float16, with `train.spike_bound` or without `train.on_nonfinite=stop`.
    """

    def step(state: TrainState, inputs: Any) -> tuple[TrainState, Metrics]:
        loss, grads, pipeline = source.gradients(state, inputs)
        loss, *of_layers = loss if loss.ndim else [loss]
        if scales:
            grads = jax.tree.map(lambda g: g / state.scaling.scales[0], grads)
        norm, nonfinite = measure(grads, layout.placement, mesh)
        good = jnp.bool(True)
        if checks:
            good = jnp.isfinite(norm) & jnp.isfinite(loss)
        scaling = next_scaling(state.scaling, good, config.optimizer) if scales else ()
        usual: Usual | tuple[()] = ()
        if bound:
            spike = is_spike(state.usual, loss, norm, bound=bound)
            good &= ~spike
            usual = next_usual(state.usual, loss, norm, good=good)
        if config.optimizer.offload:  # the update waits for the norm, whatever uses it (`by_leaf`)
            good &= (norm >= 0) | jnp.isnan(norm)  # always true
        with jax.named_scope("update"):
            clip = functools.partial(clip_by_global_norm, norm=norm, clip_norm=config.optimizer.clip_norm)
            applied = apply(grads, state.optimizer, state.weights, clip, good)
        new = TrainState(state.step + 1, applied.weights, applied.optimizer, pipeline, scaling, usual)
        new = new._replace(pipeline=source.updated(new, Update(applied.change, applied.grads, kept=good), inputs))
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": learning_rate(num_updates(state.optimizer)),
            "weights_finite": applied.finite,
            "nonfinite": nonfinite,
        }
        if of_layers:
            metrics["layer_loss"] = of_layers[0]
        if scales:
            metrics["loss_scale"] = state.scaling.scales[0]
        if bound:
            metrics |= {"spike": spike, "usual_loss": state.usual.loss, "usual_grad_norm": state.usual.grad_norm}
        return new, metrics

    scales, bound = config.model.dtype == "float16", config.train.spike_bound
    checks = scales or bool(bound) or config.train.on_nonfinite != "stop"
    return jax.jit(
        step,
        in_shardings=(shardings, jax.tree.map(lambda x: x.sharding, source.abstract_inputs)),
        out_shardings=(shardings, named(mesh, P())),
        donate_argnums=0,
    )
