"""The memory of a train step on one device, computed from the schedule's table and the model without compiling it.

The parts are in `weight_memory` (weights, gradients, optimizer), `layer_memory` (what the passes through layers,
embedding and head save, and what they hold while they run) and `backend` (XLA's choices that the program does not
determine). Every device has arrays of the same shapes, so the numbers are the same for all devices. They leave out the
few bytes that depend on the number of microbatches: dropout keys, losses and the schedule's table. Invariant: each
number follows from the program or is a fact of the backend, found by experiment; none is fitted. docs/memory.md reports
the accuracy.
"""

import math
from typing import NamedTuple

from fiddlex.config import Config
from fiddlex.costs.backend import TPU, Backend
from fiddlex.costs.layer_memory import LayerMemory, outside_layers
from fiddlex.costs.weight_memory import WeightBytes, weight_bytes
from fiddlex.models.device_arrays import FLOAT32, ITEMSIZES, num_scored
from fiddlex.models.registry import network_of
from fiddlex.models.task_sizes import example_fields
from fiddlex.schedules.buffers import IN_TRANSIT, Sizes
from fiddlex.schedules.placement import LayerPlacement

WORD = 4  # bytes of an element of a batch: of a token, a target, a weight of a target


class Memory(NamedTuple):
    """Bytes on one device, by purpose."""

    weights: int  # float32 master weights, sharded over `data` with ZeRO-1
    optimizer: int  # optimizer state, sharded in the same way as the master weights
    compute_weights: int  # gathered weights in the compute dtype; 0: the step computes with the master weights
    # older compute weights, of batches in flight; with prediction also the head's own versions and the last update
    versions: int
    gradients: int  # float32 gradient sums of all batches in flight
    # activations that forward passes save for backward passes, in all slots, and one on its way to the host or back
    stash: int
    weight_stash: int  # arrays that passes I save for W, in all slots
    # received activations and gradients that wait for use, trash slots included, and one outgoing gradient
    inboxes: int
    working: int  # arrays of the pass through one layer, embedding or head while it runs, whichever takes most
    update: int  # arrays for reducing gradients or gathering weights, before and after the loop over ticks
    inputs: int  # the step's batch, and the later batches that are in flight
    host_state: int = 0  # master weights and optimizer state on the host (`optimizer.offload`), each device's own
    host_weights: int = 0  # compute weights and reduced gradients of the layers on the host (`pipeline.weights_memory`)
    host_stash: int = 0  # activations of the stash that wait on the host (`pipeline.stash_memory`), in all slots

    @property
    def of_device(self) -> dict[str, int]:
        """The bytes in the device's own memory, by purpose."""
        return {name: size for name, size in self._asdict().items() if not name.startswith("host_")}

    @property
    def of_host(self) -> int:
        """Bytes in the memory of the host."""
        return self.host_state + self.host_weights + self.host_stash

    @property
    def peak(self) -> int:
        """The larger of the bytes in the loop over ticks and outside it.

        With a flush after each batch, the arrays that only the loop uses are freed when the loop ends. Where batches
        are in flight between steps, these arrays are part of the train state and stay in memory. The step's input state
        is donated, so these arrays exist once.
        """
        always = self.weights + self.optimizer + self.versions + self.gradients + self.inputs
        of_loop = self.compute_weights + self.stash + self.weight_stash + self.inboxes
        return always + max(of_loop + self.working, self.update + (of_loop if self.versions else 0))

    @property
    def at_peak(self) -> dict[str, int]:
        """The bytes in the device's own memory at the moment of the peak, by purpose; their sum is `peak`."""
        of_loop = set() if self.versions else {"compute_weights", "stash", "weight_stash", "inboxes"}
        absent = {"update"}, {"working"} | of_loop
        moments = [{name: size for name, size in self.of_device.items() if name not in each} for each in absent]
        return max(moments, key=lambda moment: sum(moment.values()))


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
      config: a valid config.
      sizes: sizes of the schedule's buffers: `make_spec(…).sizes`, or `common_spec(…).sizes` for windows.
      placement: placement of the layers on stages.
      backend: backend that compiles the step.
      weights: result of `weight_bytes` for the config; None: the function computes it.
    """
    layer, rows = LayerMemory.of(config, backend), placement.rows_per_chunk
    all_rows, slots, continuous = placement.rows_per_rank, sizes.slots, sizes.versions > 1
    weights = weights or weight_bytes(config, all_rows, backend)
    compute = _compute_weights(config, weights, backend, continuous=continuous)
    finished = sizes.finished * weights.reduced_layers
    if continuous:  # a single `finished` is allocated after the newest weights are gathered
        update = max(weights.outer, compute - (finished if sizes.finished == 1 else 0), weights.streamed)
    else:
        update = _reduced(config, weights, backend) + weights.streamed
    gradients = sizes.sums * weights.layers + sizes.outer_sums * weights.outer + finished
    if sizes.streamed:
        compute, of_layers = _of_two_chunks(config, weights, sizes, placement)
        gradients, update = weights.outer + of_layers, max(update - of_layers, 0)  # the update begins without them
    working = max(layer.working(), outside_layers(config, backend))
    return Memory(
        weights=weights.master,
        optimizer=weights.optimizer,
        compute_weights=compute,
        versions=(sizes.versions - 1) * compute + _predicting(config, sizes, weights),
        gradients=gradients,
        stash=(slots.stash + IN_TRANSIT * bool(slots.host_stash)) * rows * layer.stash(),
        weight_stash=slots.weight_stash * rows * layer.weight_stash(),
        inboxes=(slots.forward_inbox + slots.backward_inbox + 1) * layer.input,
        working=working + sizes.versions * (2 * rows if sizes.streamed else all_rows) * layer.copied(),
        update=update + weights.apart,
        inputs=sizes.batches * _batch(config),
        host_state=weights.host,
        host_weights=weights.host_weights,
        host_stash=slots.host_stash * rows * layer.stash(),
    )


def scoring_memory(config: Config, placement: LayerPlacement, backend: Backend) -> Memory:
    """The least that scoring a batch takes: weights, batch and, in `working`, the float32 logits of a microbatch."""
    weights = weight_bytes(config, placement.rows_per_rank, backend)
    columns = config.padded_vocab_size // network_of(config).vocab_shards(config.mesh.vocab_shards)
    return Memory(
        weights=weights.master,
        optimizer=0,
        compute_weights=_compute_weights(config, weights, backend, continuous=False),
        versions=0,
        gradients=0,
        stash=0,
        weight_stash=0,
        inboxes=0,
        working=num_scored(config) * columns * FLOAT32,
        update=0,
        inputs=_batch(config),
    )


def _of_two_chunks(config: Config, weights: WeightBytes, sizes: Sizes, placement: LayerPlacement) -> tuple[int, int]:
    """Bytes of compute weights, and of gradients of layers, where two chunks of each are on the device.

    The gradients of the chunk that runs are not yet reduced. One transfer of each is on its way. Vectors of all layers
    stay on the device too.
    """
    rows, all_rows, itemsize = placement.rows_per_chunk, placement.rows_per_rank, ITEMSIZES[config.model.dtype]
    vectors = weights.layers - weights.kernels
    compute = weights.outer + weights.layers * 2 * rows // all_rows + weights.kernels * sizes.streamed // all_rows
    gradients = weights.layers * rows // all_rows + weights.reduced_layers * (rows + sizes.streamed) // all_rows
    return (compute + vectors) * itemsize // FLOAT32, gradients + vectors


def _predicting(config: Config, sizes: Sizes, weights: WeightBytes) -> int:
    """Bytes that the prediction of weights adds to the train state."""
    pipeline = config.pipeline
    if pipeline.prediction == "none":
        return 0
    of_head = sizes.head_versions * weights.outer * ITEMSIZES[config.model.dtype] // FLOAT32
    return of_head + (weights.master if pipeline.stores_last_update else 0)


def _compute_weights(config: Config, weights: WeightBytes, backend: Backend, *, continuous: bool) -> int:
    """Bytes of one version of the compute weights; 0: the step computes with the master weights."""
    everything = weights.layers + weights.outer
    if config.model.dtype != "float32":
        return everything * ITEMSIZES[config.model.dtype] // FLOAT32
    if continuous or config.optimizer.offload:
        return everything
    if not config.optimizer.zero1 or config.mesh.data == 1:
        return 0
    return everything - (weights.kernels // 2 if backend.rounds_products else 0)  # kernels are stored in bfloat16


def _reduced(config: Config, weights: WeightBytes, backend: Backend) -> int:
    """Bytes that the reduced gradients add to the unreduced ones; with one replica, bytes of the updates."""
    if config.mesh.data == 1 and backend.fuses:  # a backend that fuses elementwise work holds no updates in memory
        return 0
    if config.pipeline.streams:  # those of the layers are on the host
        return weights.reduced_outer
    if config.optimizer.zero1 and (config.optimizer.offload or not backend.reduces_whole):
        return weights.reduced_layers + weights.reduced_outer
    return weights.layers + weights.outer


def _batch(config: Config) -> int:
    """Bytes of a replica's part of a batch, whose fields are those of `fiddlex.models.task_sizes.example_fields`."""
    elements = sum(math.prod(field.shape) for field in example_fields(config).values())
    return config.replica_batch_size * elements * WORD
