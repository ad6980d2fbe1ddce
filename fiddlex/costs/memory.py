"""Memory of a train step on one device, as the schedule's table and the model's formulas tell, without compiling it.

The parts stand in `weight_memory` (weights, gradients, optimizer), `layer_memory` (what passes through layers,
embedding and head leave and have alive) and `backend` (what XLA does that the program does not say). Every device has
arrays of the same shapes, so the numbers hold for each of them. Invariant: a number here follows from the program or is
a fact of the backend, found by experiment; none is fitted. docs/memory.md tells how near they come.

Not known here: the few bytes that follow the number of microbatches (keys of dropout, losses, the schedule's table).
"""

import math
from typing import NamedTuple

from fiddlex.config import Config
from fiddlex.costs.backend import TPU, Backend
from fiddlex.costs.layer_memory import FLOAT32, ITEMSIZES, LayerMemory, outside_layers
from fiddlex.costs.weight_memory import WeightBytes, weight_bytes
from fiddlex.models.task_sizes import example_fields
from fiddlex.schedules.buffers import Sizes
from fiddlex.schedules.placement import LayerPlacement

WORD = 4  # bytes of an element of a batch: of a token, a target, a weight of a target


class Memory(NamedTuple):
    """Bytes on one device, by what they are for.

    Attributes:
      weights: float32 master weights, sharded over `data` with ZeRO-1.
      optimizer: the optimizer's state, sharded alike.
      compute_weights: in the compute dtype, gathered, where they are not the master weights themselves.
      versions: older versions of those that batches under way are run with.
      gradients: float32 sums, of all batches under way.
      stash: what forwards leave for their backwards, over all slots.
      weight_stash: what I leaves for W, over all slots.
      inboxes: what waits to be used, trash slots included, and the gradient under way.
      working: what the pass through one layer, embedding or head has alive besides, whichever takes most.
      update: what reducing the gradients, or gathering weights, takes besides, before and after the loop over ticks.
      inputs: the batch, and those after it that are under way.
    """

    weights: int
    optimizer: int
    compute_weights: int
    versions: int
    gradients: int
    stash: int
    weight_stash: int
    inboxes: int
    working: int
    update: int
    inputs: int

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment: in the loop over ticks, or outside it.

        With a flush after each batch what the loop alone has is free when it has ended. Where batches are under way
        between steps it is part of the train state, and stays; as that is donated, it is there once.
        """
        always = self.weights + self.optimizer + self.versions + self.gradients + self.inputs
        of_loop = self.compute_weights + self.stash + self.weight_stash + self.inboxes
        return always + max(of_loop + self.working, self.update + (of_loop if self.versions else 0))


def device_memory(
    config: Config,
    sizes: Sizes,
    placement: LayerPlacement,
    backend: Backend = TPU,
    *,
    weights: WeightBytes | None = None,
) -> Memory:
    """The memory of a train step.

    Args:
      config: a valid one.
      sizes: of the schedule's memories: `make_spec(…).sizes`, or of windows `common_spec(…).sizes`.
      placement: of the layers.
      backend: what it is compiled for.
      weights: `weight_bytes` of it, where they are known already.
    """
    layer, rows = LayerMemory.of(config, backend), placement.rows_per_chunk
    all_rows, slots, continuous = placement.rows_per_rank, sizes.slots, sizes.versions > 1
    weights = weights or weight_bytes(config, all_rows, backend)
    compute = _compute_weights(config, weights, backend, continuous=continuous)
    finished = sizes.finished * weights.reduced_layers
    if continuous:  # the first of `finished` is made when the newest weights have been gathered
        update = max(weights.outer, compute - (finished if sizes.finished == 1 else 0))
    else:
        update = _reduced(config, weights, backend)
    working = max(layer.working(), outside_layers(config, backend))
    return Memory(
        weights=weights.master,
        optimizer=weights.optimizer,
        compute_weights=compute,
        versions=(sizes.versions - 1) * compute,
        gradients=sizes.sums * weights.layers + sizes.outer_sums * weights.outer + finished,
        stash=slots.stash * rows * layer.stash(),
        weight_stash=slots.weight_stash * rows * layer.weight_stash(),
        inboxes=(slots.forward_inbox + slots.backward_inbox + 1) * layer.residual * layer.itemsize,
        working=working + sizes.versions * all_rows * layer.copied(),
        update=update,
        inputs=sizes.batches * _batch(config),
    )


def _compute_weights(config: Config, weights: WeightBytes, backend: Backend, *, continuous: bool) -> int:
    """Bytes of one version of the compute weights."""
    everything = weights.layers + weights.outer
    if config.model.dtype != "float32":
        return everything * ITEMSIZES[config.model.dtype] // FLOAT32
    if continuous:
        return everything
    if not config.optimizer.zero1 or config.mesh.data == 1:
        return 0
    return everything - (weights.kernels // 2 if backend.rounds_products else 0)


def _reduced(config: Config, weights: WeightBytes, backend: Backend) -> int:
    """Bytes of the gradients once reduced, beside those that are not; of one replica updates, unless all is fused."""
    if config.mesh.data == 1 and backend.fuses:
        return 0
    if config.optimizer.zero1 and not backend.reduces_whole:
        return weights.reduced_layers + weights.reduced_outer
    return weights.layers + weights.outer


def _batch(config: Config) -> int:
    """Bytes of a replica's part of a batch (`fiddlex.models.task_sizes.example_fields`)."""
    elements = sum(math.prod(field.shape) for field in example_fields(config).values())
    return config.replica_batch_size * elements * WORD
