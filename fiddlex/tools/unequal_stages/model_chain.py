"""The chain of layers of a config's model, from the planner's costs and the memory model.

The embedding is the first layer and the head the last one: a pipeline of unequal stages has them on its first and on
its last stage, as the papers do, and not sharded over the pipe as in this project's executor. A head that is tied to
the embedding has a copy of the table. Tensor ranks shard their stage's layers, with sequence parallelism where the
sequence can be divided, and collective matmul where that makes layers faster.
"""

import dataclasses
import math
from collections.abc import Iterator

from fiddlex.config import Config, MeshConfig, PipelineConfig
from fiddlex.costs.backend import backend_of
from fiddlex.costs.layer_memory import LayerMemory, outside_layers
from fiddlex.costs.weight_memory import local_shape, num_moments
from fiddlex.models.device_arrays import FLOAT32, ITEMSIZES
from fiddlex.models.registry import network_of
from fiddlex.models.spec import Parameter, leaves
from fiddlex.planner.cost_model import CostModel
from fiddlex.planner.layouts import Problem, matmul_choices, planned_stash, recompute_choices, splits_sequence
from fiddlex.tools.unequal_stages.chain import Chain, Choice, ShardedLayer, StageProblem


def tensor_sizes(problem: Problem) -> list[int]:
    """The tensor sizes that a stage may have: within a group of the innermost link between chips."""
    model = problem.config.model
    largest = math.gcd(model.num_heads, model.mlp_size, problem.num_devices)
    largest = math.gcd(largest, problem.topology.between_chips.devices or largest)
    divisors = (size for size in range(1, largest + 1) if largest % size == 0)
    return [size for size in divisors if model.kv_heads % size == 0 or size % model.kv_heads == 0]


def model_problem(problem: Problem, examples: int) -> StageProblem:
    """The planner's problem for Piper, with microbatches of `examples` examples, which divide the batch."""
    config = dataclasses.replace(problem.config, pipeline=PipelineConfig())
    costs = CostModel(config, problem.topology, efficiency=problem.efficiency)
    return StageProblem(
        {size: _fastest_chain(problem, costs, size, examples) for size in tensor_sizes(problem)},
        problem.num_devices,
        problem.limit,
        problem.topology.link_between(0, problem.num_devices - 1).bandwidth,
        config.data.global_batch_size // examples,
    )


def _fastest_chain(problem: Problem, costs: CostModel, tensor: int, examples: int) -> Chain:
    """The chain on so many tensor ranks, with or without collective matmul, whichever has the faster layers."""
    sequence_parallel = splits_sequence(problem, MeshConfig(tensor=tensor))
    chains = (
        _chain(
            problem,
            costs,
            MeshConfig(tensor=tensor, sequence_parallel=sequence_parallel, collective_matmul=matmul),
            examples,
        )
        for matmul in matmul_choices(problem, sequence_parallel, tensor, examples)
    )
    return min(chains, key=lambda chain: min(choice.seconds for choice in chain.layers[1].choices))


def _chain(problem: Problem, costs: CostModel, mesh: MeshConfig, examples: int) -> Chain:
    backend, number = backend_of(problem.topology.compiler), problem.config.data.global_batch_size // examples
    flash, choices, working = bool(backend.flash_kernel(problem.config).name), list[Choice](), 0
    for recompute in recompute_choices(problem.config, flash=flash):
        pipeline = PipelineConfig(
            num_microbatches=number, recompute=recompute, stash_dtype=planned_stash(problem.config, recompute)
        )
        config = dataclasses.replace(problem.config, mesh=mesh, pipeline=pipeline)
        times = costs.microbatch(mesh, num_microbatches=number, recompute=recompute)
        memory = LayerMemory.of(config, backend)
        choices.append(Choice(times.layer, memory.stash(), recompute))
        working = max(working, memory.working())
    network = network_of(config)
    embedding = list(leaves(network.embedding))
    head = [*leaves(network.head), *_tied(embedding, list(leaves(network.head)))]
    outputs = memory.input
    layer = _layer(config, list(leaves(network.layer)), tuple(_undominated(choices)), outputs)
    first = _layer(config, embedding, (Choice(times.embed + times.embed_backward, 0.0),), outputs)
    last = _layer(config, head, (Choice(times.head, 0.0),), 0.0)
    last = last._replace(kept_bytes=last.kept_bytes + outside_layers(config, backend))
    return Chain((first, *[layer] * network.num_layers, last), working)


def _undominated(choices: list[Choice]) -> Iterator[Choice]:
    """The choices that no other beats in both seconds and bytes, the fastest first."""
    least = math.inf
    for choice in sorted(choices):
        if choice.stash_bytes < least:
            least = choice.stash_bytes
            yield choice


def _tied(embedding: list[Parameter], head: list[Parameter]) -> list[Parameter]:
    """The table of the embedding where the head, which has none of its own, scores with it."""

    def tables(parameters: list[Parameter]) -> list[Parameter]:
        return [each for each in parameters if "vocab" in each.axes and len(each.shape) == 2]

    return [] if tables(head) else tables(embedding)


def _layer(
    config: Config, parameters: list[Parameter], choices: tuple[Choice, ...], output_bytes: float
) -> ShardedLayer:
    """A layer with these weights: in the compute dtype, with sums of gradients, master weights and optimizer state."""
    optimizer, number = config.optimizer, sum(math.prod(local_shape(each, config)) for each in parameters)
    compute = ITEMSIZES[config.model.dtype] if config.model.dtype != "float32" else 0
    state = FLOAT32 * (1 + num_moments(optimizer.name, optimizer.momentum))
    kept, divided = compute + FLOAT32, state
    if not optimizer.zero1:
        kept, divided = kept + state, 0
    return ShardedLayer(choices, output_bytes, number * FLOAT32, number * kept, number * divided)
