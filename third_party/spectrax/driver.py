"""A driver of SpectraX (https://github.com/erfanzar/spectrax): its pipeline that scans a schedule in one `shard_map`.

    PYTHON -m third_party.spectrax.driver JOB.json

Options of the job: `mode` is a schedule of `third_party.spectrax.model.SCHEDULES`, `processes` the number of ranks (2),
which are fake devices of one process, and `microbatches` as for `third_party.torch.driver`. SpectraX keeps the inputs
of stages and recomputes the rest in the backward pass. The optimizer is optax's AdamW, whose state is on all ranks
like the weights outside of layers.
"""

import importlib.metadata
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from third_party.protocol import Job, Training, serve
from third_party.spectrax.model import AXIS, make_gradients, parameters

Tree = Any


def start(job: Job) -> Training:
    """Prepares the training that the job's options name."""
    step, mesh = make_step(job)
    weights = parameters(job, mesh.size)
    state = optimizer(job, weights).init(weights)
    weights, state = jax.device_put((weights, state), shardings((weights, state), mesh))
    tokens, targets = job.batches()
    done = 0

    def train(steps: int) -> list[float]:
        nonlocal weights, state, done
        losses = []
        for _ in range(steps):
            batch = done % len(tokens)
            rate = np.float32(job.learning_rate(done))
            weights, state, loss = step(weights, state, rate, tokens[batch], targets[batch])
            losses.append(loss)
            done += 1
        return [float(loss) for loss in losses]

    version = importlib.metadata.version("spectrax-lib")
    return Training(train, f"spectrax-lib {version}, jax {jax.__version__}")


def make_step(job: Job) -> tuple[jax.stages.Wrapped, Mesh]:
    """The jitted train step, from weights, optimizer state, learning rate and batch; and its mesh of fake devices."""
    processes = int(job.options.get("processes", 2))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", processes)
    mesh = jax.make_mesh((processes,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    num_microbatches = int(job.options.get("microbatches", job.num_microbatches))
    gradients = make_gradients(job, mesh, job.options["mode"], num_microbatches)
    clip_norm = job.config["optimizer"]["clip_norm"]

    def step(weights: Tree, state: Tree, rate: jax.Array, tokens: jax.Array, targets: jax.Array) -> Any:
        loss, grads = gradients(weights, tokens, targets)
        if clip_norm:
            grads = optax.clip_by_global_norm(clip_norm).update(grads, optax.EmptyState())[0]
        updates, state = optimizer(job, weights).update(grads, state, weights)
        weights = jax.tree.map(lambda weight, update: weight - rate * update, weights, updates)
        placed = jax.lax.with_sharding_constraint((weights, state), shardings((weights, state), mesh))
        return *placed, loss

    return jax.jit(step, donate_argnums=(0, 1)), mesh


def optimizer(job: Job, weights: tuple[Tree, Tree]) -> optax.GradientTransformation:
    """AdamW without its learning rate; weight decay applies to matrices, to which layers add two dimensions."""
    settings = job.config["optimizer"]
    layers, outer = weights
    decays = jax.tree.map(lambda x: x.ndim >= 4, layers), jax.tree.map(lambda x: x.ndim >= 2, outer)
    adam = optax.scale_by_adam(settings["beta1"], settings["beta2"], settings["epsilon"])
    return optax.chain(adam, optax.add_decayed_weights(settings["weight_decay"], mask=decays))


def shardings(tree: Tree, mesh: Mesh) -> Tree:
    """Shardings of weights or of what mirrors them: arrays of layers begin with the rank, which they are sharded by."""

    def of(path: Any, x: Any) -> NamedSharding:
        name = next((str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)), "transformer.")
        return NamedSharding(mesh, P() if name.startswith("transformer.") else P(AXIS))

    return jax.tree_util.tree_map_with_path(of, tree)


if __name__ == "__main__":
    serve(start)
