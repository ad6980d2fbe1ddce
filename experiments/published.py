"""Predicts published runs with the planner's cost model, and compares the predictions with the published figures.

    python -m experiments.published [--table=sc21 --table=2bw]

`sc21` is table 1 of Narayanan et al., SC 2021: ten GPTs on up to 3,072 A100s. One number is fitted on its first four
rows, the share of the peak that large products reach; the other rows are predicted. The paper does not list the
microbatch size, so it is the best one that fits. `2bw` is the throughput of Narayanan et al., ICML 2021, read off
charts: five ways to train on V100s. It uses the same share and microbatches of four, and fits one number again: the
share of 25 Gb/s that servers reach, from the throughput of 2BW itself with the GPTs on eight servers. All runs are
modelled as published: the vocabulary on the last stage, the free-running clock, float16, gradients of two bytes. In the
second table, replicas of a stage are in one server, and GPUs wait for messages, as in the paper's own planner.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

from configs.gpt3 import ROWS, get_config
from fiddlex.config import Config, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig
from fiddlex.costs.sizes import hardware_flops
from fiddlex.hardware.topology import Topology, load_topology
from fiddlex.planner.closed_forms import Shape, free_running_seconds, stage_ranks
from fiddlex.planner.cost_model import EFFICIENCY, CostModel, System
from fiddlex.planner.layouts import Layout, Problem
from fiddlex.planner.predict import Prediction
from fiddlex.planner.report import exchange_text
from fiddlex.planner.search import evaluate, search
from fiddlex.schedules.placement import place_layers
from fiddlex.simulate.clock import Costs
from fiddlex.terminal.command_line import run

_TABLES = flags.DEFINE_multi_enum("table", ["sc21", "2bw"], ["sc21", "2bw"], "tables to print")

# TFLOP/s of a GPU in table 1, counting recomputation.
TABLE_1 = [name for name in ROWS if name != "174.6b"]  # this one is in table 2
SC21 = dict(zip(TABLE_1, (137, 138, 142, 135, 138, 140, 148, 155, 163, 163), strict=True))
FITTED_ROWS = 4
MEGATRON = System(vocabulary_over_pipe=False, scatters_hops=True, gradient_bytes=2, flash=False)
PIPEDREAM = System(vocabulary_over_pipe=False, gradient_bytes=2, flash=False)
MICROBATCH = 4  # examples in a microbatch of the pipelined systems of 2BW's table
SYSTEMS = ("inter-layer", "tensor", "GPipe", "flush", "2BW")
STATE_BYTES = 16  # per weight with Adam in mixed precision: weight, gradient, master weight, two moments


class Throughput(NamedTuple):
    """A row of the 2BW paper: a model, GPUs, depth of the pipelines, batch, and sequences/s of each system."""

    model: str
    gpus: int
    depth: int
    batch: int
    published: tuple[float, ...]


TWO_BW = (
    Throughput("GPT 2.2B", 8, 8, 64, (7, 25, 18, 26, 43)),
    Throughput("GPT 2.2B", 8, 8, 256, (7, 26, 18, 38, 44)),
    Throughput("GPT 2.2B", 64, 8, 512, (11, 88, 80, 110, 160)),
    Throughput("GPT 2.2B", 64, 8, 2048, (12, 155, 80, 145, 168)),
    Throughput("GPT 3.8B", 64, 16, 512, (10, 8, 38, 75, 127)),
    Throughput("GPT 3.8B", 64, 16, 2048, (12, 8, 38, 115, 135)),
    Throughput("BERT 2.2B", 64, 8, 512, (30, 88, 122, 110, 160)),
    Throughput("BERT 2.2B", 64, 8, 2048, (30, 158, 122, 145, 168)),
    Throughput("BERT 3.8B", 64, 16, 512, (10, 8, 58, 75, 140)),
    Throughput("BERT 3.8B", 64, 16, 2048, (10, 8, 58, 115, 145)),
)
SHAPES = {"2.2B": (32, 2304, 32), "3.8B": (32, 3072, 32)}  # layers, hidden size, heads


def main(argv: list[str]) -> None:
    """Prints the tables."""
    if "sc21" in _TABLES.value:
        print(sc21_table())
    if "2bw" in _TABLES.value:
        print(two_bw_table())


def fit(ratio: Callable[[float], float]) -> float:
    """The share at which `ratio`, predicted over published, is 1; `ratio` must grow with the share."""
    low, high = 0.1, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(middle) < 1 else (low, middle)
    return (low + high) / 2


def fit_efficiency(topology: Topology) -> float:
    """The share of the peak at which the predictions of SC'21's first rows are right on average."""
    rows = TABLE_1[:FITTED_ROWS]
    return fit(lambda share: statistics.fmean(sc21_row(name, topology, share).tflops / SC21[name] for name in rows))


def fit_ethernet(topology: Topology) -> float:
    """The share of bandwidth between servers at which 2BW's GPTs on eight servers are right on average."""
    rows = [row for row in TWO_BW if row.gpus > 8 and row.model.startswith("GPT")]

    def ratio(share: float) -> float:
        slower = slowed(topology, share)
        return statistics.fmean(sequences_per_second("2BW", row, slower) / row.published[-1] for row in rows)

    return fit(ratio)


def slowed(topology: Topology, share: float) -> Topology:
    """A copy of a topology with only a share of the outermost link's bandwidth."""
    *inner, outer = topology.links
    return dataclasses.replace(topology, links=(*inner, dataclasses.replace(outer, bandwidth=share * outer.bandwidth)))


class Predicted(NamedTuple):
    """The fastest choice for a system."""

    tflops: float
    examples: int
    chunks: int


def sc21_row(name: str, topology: Topology, efficiency: float) -> Predicted:
    """The prediction for the published mesh with the best microbatch size and number of chunks that fit."""
    config = published_config(name)
    model = CostModel(config, topology, efficiency=efficiency, system=MEGATRON)
    mesh, found = config.mesh, []
    for examples, chunks in _choices(config):
        m = config.replica_batch_size // examples
        schedule = "interleaved_1f1b" if chunks > 1 else "1f1b"
        shape = Shape(schedule, mesh.pipe, chunks, m)
        placement = place_layers(stage_ranks(shape), config.model.num_layers)
        times = model.microbatch(mesh, num_microbatches=m, recompute="full")
        step = model.step(mesh, num_parameters=_device_weights(config))
        seconds = Prediction(free_running_seconds(shape, times.costs(placement)), step).seconds
        flops = hardware_flops(config) / seconds / mesh.num_devices
        found.append(Predicted(flops / 1e12, examples, chunks))
    return max(found)


def published_config(name: str) -> Config:
    """A row's config as it ran: float16, dropout, no sequence parallelism, no sharding of the optimizer state."""
    config = get_config(name)
    model = dataclasses.replace(config.model, dtype="float16", dropout=0.1)
    return dataclasses.replace(config, model=model, optimizer=dataclasses.replace(config.optimizer, zero1=False))


def _choices(config: Config) -> Iterator[tuple[int, int]]:
    """Microbatch sizes and numbers of chunks that fit the GPUs' memory and the schedule."""
    mesh, layers = config.mesh, config.model.num_layers // config.mesh.pipe
    chunks = [v for v in range(1, layers + 1) if layers % v == 0 and v <= 8] if mesh.pipe > 1 else [1]
    for examples in (1, 2, 4, 8, 16):
        if config.replica_batch_size % examples or _recomputing_bytes(config, examples) > 80e9:
            continue
        for v in chunks:
            if v == 1 or config.replica_batch_size // examples % mesh.pipe == 0:
                yield examples, v


def _device_weights(config: Config) -> float:
    """Weights of the fullest device: its layers and the embedding table, which the first and last stages have."""
    model, mesh = config.model, config.mesh
    layers = -(-model.num_layers // mesh.pipe) * 12 * model.hidden_size**2
    return (layers + model.vocab_size * model.hidden_size) / mesh.tensor


def _recomputing_bytes(config: Config, examples: int, in_flight: int | None = None) -> float:
    """Bytes of a device that saves only layer inputs: the state, the microbatches in flight, and a layer's activations.

    The activations of a layer take 34sbh + 5as²b bytes (Korthikanti et al., MLSys 2023, section 4.1), divided by the
    tensor ranks.
    """
    model, mesh = config.model, config.mesh
    tokens = examples * model.seq_len
    kept = -(-model.num_layers // mesh.pipe) * tokens * model.hidden_size * 2
    inside = (34 * tokens * model.hidden_size + 5 * model.num_heads * model.seq_len * tokens) / mesh.tensor
    return STATE_BYTES * _device_weights(config) + (in_flight or mesh.pipe) * kept + inside


def sc21_table() -> str:
    """Published and predicted TFLOP/s, and the layout that this project's planner chooses."""
    topology = load_topology("a100_80")
    efficiency = fit_efficiency(topology)
    rows = [
        f"SC'21, table 1 ({topology.name}, efficiency {efficiency:.3f}, fitted on the first {FITTED_ROWS} rows)",
        "",
        "| model | GPUs | published TF/s | predicted | off by | microbatch, chunks | published layout here, s | "
        "planned, s | planned layout |",
        "|---|---:|---:|---:|---:|---|---:|---:|---|",
    ]
    errors = []
    for name, published in SC21.items():
        predicted = sc21_row(name, topology, efficiency)
        errors.append(predicted.tflops / published - 1)
        config = get_config(name)
        problem = Problem(config, topology, config.mesh.num_devices, efficiency=efficiency)
        here, best = evaluate(problem, layout_of(config)), search(problem, keep=1).plans[0]
        rows.append(
            f"| {name} | {config.mesh.num_devices:,} | {published} | {predicted.tflops:.0f} | {errors[-1]:+.1%} | "
            f"{predicted.examples}, {predicted.chunks} | {here.step_time_s:.2f} | {best.step_time_s:.2f} | "
            f"{_short(best.layout)} |"
        )
    fitted, others = errors[:FITTED_ROWS], errors[FITTED_ROWS:]
    rows.append(
        f"\nMean absolute error {_mean(errors):.1%}: {_mean(fitted):.1%} over the fitted rows, "
        f"{_mean(others):.1%} over the others.\n"
    )
    return "\n".join(rows)


def layout_of(config: Config) -> Layout:
    """The layout of a config."""
    pipeline = config.pipeline
    return Layout(
        config.mesh,
        pipeline.schedule,
        pipeline.num_chunks,
        pipeline.num_microbatches,
        pipeline.semantics,
        pipeline.recompute,
    )


def _short(layout: Layout) -> str:
    chunks = f" v={layout.chunks}" * (layout.chunks > 1)
    mesh, across = layout.mesh, ", pipe outermost" * (layout.mesh.outermost == "pipe")
    return (
        f"{'×'.join(map(str, mesh.sizes.values()))}{exchange_text(mesh)}{across}, {layout.schedule}{chunks}, "
        f"m={layout.num_microbatches}, {layout.semantics}, {layout.recompute}"
    )


def _mean(errors: list[float]) -> float:
    return statistics.fmean(map(abs, errors))


def two_bw_table() -> str:
    """Predicted and published sequences/s of the five systems relative to 2BW's, and the order of the systems."""
    topology = load_topology("v100_16")
    share = fit_ethernet(topology)
    topology = slowed(topology, share)
    rows = [
        f"2BW, {topology.name} with {share:.0%} of its Ethernet; sequences/s over those of 2BW, predicted / published",
        "",
        f"| model, GPUs, depth, batch | {' | '.join(SYSTEMS)} | 2BW, sequences/s | pairs in order |",
        f"|---|{'---:|' * len(SYSTEMS)}---:|---|",
    ]
    for row in TWO_BW:
        speeds = [sequences_per_second(system, row, topology) for system in SYSTEMS]
        cells = (
            f"{mine / speeds[-1]:.2f} / {theirs / row.published[-1]:.2f}"
            for mine, theirs in zip(speeds, row.published, strict=True)
        )
        rows.append(
            f"| {row.model}, {row.gpus}, {row.depth}, {row.batch:,} | {' | '.join(cells)} | {speeds[-1]:.0f} / "
            f"{row.published[-1]} | {_pairs(speeds, row.published)} |"
        )
    return "\n".join(rows)


def _pairs(speeds: Sequence[float], published: Sequence[float]) -> str:
    """How many pairs of systems are in the published order, and which pairs are not."""
    pairs = list(itertools.combinations(range(len(SYSTEMS)), 2))
    wrong = [
        f"{SYSTEMS[i]} and {SYSTEMS[j]}"
        for i, j in pairs
        if (speeds[i] - speeds[j]) * (published[i] - published[j]) <= 0 and published[i] != published[j]
    ]
    return f"{len(pairs) - len(wrong)} of {len(pairs)}{': not ' + ', '.join(wrong) if wrong else ''}"


def sequences_per_second(system: str, row: Throughput, topology: Topology) -> float:
    """Sequences/s of a system; a tensor-parallel system has as many shards as the pipelines have stages."""
    depth = 1 if system == "tensor" else row.depth
    tensor = row.depth if system == "tensor" else 1
    return row.batch / _batch_seconds(system, _two_bw_config(row, depth, tensor), topology)


def _two_bw_config(row: Throughput, depth: int, tensor: int) -> Config:
    family, _, size = row.model.partition(" ")
    layers, hidden, heads = SHAPES[size]
    vocabulary = 50257 if family == "GPT" else 30522
    config = Config(
        model=ModelConfig(family.lower(), "", layers, hidden, heads, 0, vocabulary, 512, dtype="float16", dropout=0.1),
        mesh=MeshConfig(data=row.gpus // depth // tensor, pipe=depth, tensor=tensor, outermost="pipe"),
        pipeline=PipelineConfig(recompute="full"),
        optimizer=OptimizerConfig("adam", zero1=False),
    )
    config.data.global_batch_size = row.batch
    return config


def _batch_seconds(system: str, config: Config, topology: Topology) -> float:
    """Seconds of a batch."""
    mesh, m = config.mesh, config.replica_batch_size // MICROBATCH
    model = CostModel(config, topology, efficiency=EFFICIENCY, system=PIPEDREAM)
    times = model.microbatch(mesh, num_microbatches=m, recompute="full")
    step = sum(model.step(mesh, num_parameters=_device_weights(config)))
    costs = times.costs(place_layers(tuple(range(mesh.pipe)), config.model.num_layers))
    costs = _with_hops_inside(costs)
    if system in ("inter-layer", "tensor"):
        return m * free_running_seconds(Shape("1f1b", mesh.pipe, 1, 1), costs) + step
    if system == "GPipe":
        whole, rest = divmod(m, most := _most_held(config, topology))
        flushes = [most] * whole + [rest] * (rest > 0)
        return sum(free_running_seconds(Shape("gpipe", mesh.pipe, 1, number), costs) for number in flushes) + step
    if system == "flush":
        return free_running_seconds(Shape("1f1b", mesh.pipe, 1, m), costs) + step
    long = 4 * mesh.pipe
    ends = [free_running_seconds(Shape("1f1b", mesh.pipe, 1, number), costs) for number in (long, 2 * long)]
    return m * (ends[1] - ends[0]) / long + step


def _most_held(config: Config, topology: Topology) -> int:
    """The most microbatches that fit in memory at once under GPipe, which flushes when its memory is full.

    For each of them, the last stage saves the logits and their exponentials until it runs the backward pass.
    """
    logits = MICROBATCH * config.model.seq_len * config.model.vocab_size * 10
    numbers = range(1, config.replica_batch_size // MICROBATCH + 1)
    limit = topology.chip.memory_bytes
    return max(
        number for number in numbers if _recomputing_bytes(config, MICROBATCH, number) + number * logits <= limit
    )


def _with_hops_inside(costs: Costs) -> Costs:
    """Costs where ranks wait for messages, as in the 2BW paper's planner: a stage's time is work plus messages."""
    forward, backward_input, hops = (np.asarray(time) for time in (costs.forward, costs.backward_input, costs.hop))
    return dataclasses.replace(
        costs, forward=tuple(forward + hops), backward_input=tuple(backward_input + hops), hop=0.0
    )


if __name__ == "__main__":
    run(main)
