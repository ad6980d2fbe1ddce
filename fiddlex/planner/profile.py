"""Predicts steps from times measured on the user's machine, in place of those that follow from a topology.

A profile holds what `fiddlex benchmark --profile` measured: for each shape that it ran, the seconds of a layer and of
embedding and head; the seconds of the rest of a step; and how much devices that share a processor's cores slow each
other down, as the fake devices of a CPU do. The cost model returns measured times unchanged. For other shapes it scales
the times of the nearest entry by the ratio of the work (`fiddlex.costs.work`). Entries measured with products in pieces
(`mesh.collective_matmul`) predict only configs with pieces, and other entries only configs without. Invariant: on the
number of devices of the measurement, the prediction for a measured shape equals its measured time.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, PipelineConfig, rules
from fiddlex.config.records import from_mapping
from fiddlex.config.sections import OPTIMIZERS
from fiddlex.config.values.recompute import check_recompute, recomputed, written
from fiddlex.costs.weight_memory import num_moments
from fiddlex.costs.work import Work, edge_work, layer_work
from fiddlex.errors import ConfigError
from fiddlex.files.small_files import read_object
from fiddlex.files.whole_files import write_whole
from fiddlex.planner.times import MicrobatchTimes, StepTimes

VERSION = 1
# How many operations a CPU's core performs in the time of a byte read or written; used only to scale between shapes.
_FLOPS_PER_BYTE = 8.0


@dataclasses.dataclass(frozen=True)
class Entry:
    """The measured times of one shape, with one replica and no pipeline."""

    model: ModelConfig  # of the measured model, for its sizes; it had few layers
    tensor: int  # devices that shared each layer; the times are those of all of these devices working at once
    sequence_parallel: bool
    microbatch_size: int  # number of examples
    recompute: str  # as in `PipelineConfig`
    forward_s: float  # of a layer, for a microbatch
    backward_s: float  # of a layer, for a microbatch, with what it recomputes
    edges_s: float  # of embedding, head and the embedding's gradient, for a microbatch
    collective_matmul: bool = False  # whether the products of the layers ran in rings

    def validate(self, where: str) -> None:
        """Raises ConfigError, whose message begins with `where`, when a value is out of its range."""
        try:
            self.model.validate()
            check_recompute("recompute", self.recompute)
            for name in ("tensor", "microbatch_size"):
                rules.at_least(name, getattr(self, name), 1)
            self.mesh.validate()
            for name in ("forward_s", "backward_s"):
                rules.positive(name, getattr(self, name))
            rules.at_least("edges_s", self.edges_s, 0)
            rules.divides("model.num_heads", self.model.num_heads, "tensor", self.tensor, "each rank has as many heads")
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    @property
    def shape(self) -> tuple[Any, ...]:
        """All fields except for the times, with the number of layers set to 1 so that it makes no difference."""
        model = dataclasses.replace(self.model, num_layers=1)
        return model, self.mesh, self.microbatch_size, written(recomputed(self.recompute))

    @classmethod
    def of(cls, config: Config, *, forward_s: float, backward_s: float, edges_s: float) -> "Entry":
        """The entry of a config's shape."""
        mesh = config.mesh
        return cls(
            model=config.model,
            tensor=mesh.tensor,
            sequence_parallel=mesh.sequence_parallel,
            microbatch_size=config.microbatch_size,
            recompute=config.pipeline.recompute,
            forward_s=forward_s,
            backward_s=backward_s,
            edges_s=edges_s,
            collective_matmul=mesh.collective_matmul,
        )

    @property
    def mesh(self) -> MeshConfig:
        return MeshConfig(
            tensor=self.tensor, sequence_parallel=self.sequence_parallel, collective_matmul=self.collective_matmul
        )

    def config(self) -> Config:
        """A config of one microbatch of this shape."""
        return Config(
            model=self.model,
            mesh=self.mesh,
            pipeline=PipelineConfig(recompute=self.recompute),
            data=DataConfig(global_batch_size=self.microbatch_size),
        )


@dataclasses.dataclass(frozen=True)
class Profile:
    """The measured times of a machine."""

    machine: str  # description
    jax_version: str  # of the measurement
    date: str  # ISO date of the measurement
    optimizer: str  # whose update was measured
    devices: tuple[int, ...]  # for which `sharing`, `tick_s` and `exchange_s` were measured, from 1 on, ascending
    # for each of `devices`, how many times as long work takes while that many devices are active
    sharing: tuple[float, ...]
    tick_s: tuple[float, ...]  # for each of `devices`, of a pipeline's tick, in addition to the work in it
    # for each of `devices`, as replicas: to reduce gradients and gather weights, per weight of a device
    exchange_s: tuple[float, ...]
    update_s: float  # of the optimizer's update, per weight, while one device is active
    fixed_s: float  # that every step takes, whatever its work
    entries: tuple[Entry, ...]
    version: int = VERSION  # of the file format

    def validate(self, where: str) -> None:
        """Raises ConfigError, whose message begins with `where`, when a value is out of its range."""
        if self.version != VERSION:
            raise ConfigError(f"{where}.version={self.version}: this fiddlex reads {VERSION}. Measure it anew.")
        if self.devices[:1] != (1,) or any(a >= b for a, b in zip(self.devices, self.devices[1:], strict=False)):
            raise ConfigError(f"{where}.devices={list(self.devices)} must begin with 1 and ascend.")
        for name, least in (("sharing", 1.0), ("tick_s", 0.0), ("exchange_s", 0.0)):
            row = getattr(self, name)
            if len(row) != len(self.devices):
                raise ConfigError(
                    f"{where}.{name} has {len(row)} values for {len(self.devices)} numbers of devices: give one each."
                )
            if not all(least <= value < math.inf for value in row):
                raise ConfigError(f"{where}.{name}={list(row)} must be at least {least:g} and finite.")
        rules.choice(f"{where}.optimizer", self.optimizer, OPTIMIZERS)
        for name in ("update_s", "fixed_s"):
            rules.at_least(f"{where}.{name}", getattr(self, name), 0)
        if not self.entries:
            raise ConfigError(f"{where}.entries is empty: there is nothing to predict from. Measure a config.")
        for number, entry in enumerate(self.entries):
            entry.validate(f"{where}.entries[{number}]")

    def with_entry(self, entry: Entry) -> "Profile":
        """The profile with another entry, which replaces an entry of the same shape."""
        others = tuple(each for each in self.entries if each.shape != entry.shape)
        return dataclasses.replace(self, entries=(*others, entry))

    def at(self, name: str, number: int) -> float:
        """`sharing`, `tick_s` or `exchange_s` on so many devices, interpolated linearly between measured numbers.

        Beyond the last measured number, `sharing` grows in proportion to the number of devices, because the processor
        is busy; the other values stay constant.
        """
        row, last = getattr(self, name), self.devices[-1]
        value = float(np.interp(number, self.devices, row))
        return value * number / last if name == "sharing" and number > last else value


def load_profile(path: str | Path) -> Profile:
    """Reads a profile; the message of its ConfigErrors names the file and the field."""
    try:
        values = read_object(path)
    except FileNotFoundError:
        raise ConfigError(f"there is no profile {path}. Make one: fiddlex benchmark --profile={path}.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no profile: {error}. Name one that fiddlex benchmark --profile wrote.") from error
    profile = from_mapping(Profile, values, f"{path}: profile.")
    profile.validate(f"{path}: profile")
    return profile


def save_profile(profile: Profile, path: str | Path) -> None:
    write_whole(path, json.dumps(dataclasses.asdict(profile), indent=1) + "\n")


class ProfiledCostModel:
    """The times of a step of one model from a profile; replaces `CostModel`.

    It ignores the mesh of the config and, of its pipeline, all but the stash.

    Raises:
      ConfigError: when the profile has no entry of the model's dtype, or something of the config waits on the host.
    """

    def __init__(self, config: Config, profile: Profile):
        pipeline = config.pipeline
        on_host = {
            "optimizer.offload=True": config.optimizer.offload,
            "pipeline.stash_memory=host": pipeline.spills,
            f"pipeline.weights_memory={pipeline.weights_memory}": pipeline.by_chunk,
        }
        if told := [name for name, waits in on_host.items() if waits]:
            raise ConfigError(
                f"{' and '.join(told)}: a profile has no times of copies to and from the host. Name a topology in "
                "place of the profile, or leave everything on the devices."
            )
        self._config, self._profile = config, profile
        self._entries = [entry for entry in profile.entries if entry.model.dtype == config.model.dtype]
        if not self._entries:
            known = ", ".join(sorted({entry.model.dtype for entry in profile.entries}))
            raise ConfigError(
                f"model.dtype={config.model.dtype}: the profile of {profile.machine} has entries of {known} alone. "
                "Measure one of this dtype too (fiddlex benchmark --profile)."
            )

    def microbatch(self, mesh: MeshConfig, *, num_microbatches: int, recompute: str) -> MicrobatchTimes:
        """The times of a microbatch on a mesh; the measured times include communication inside a layer.

        I and W share the time of the backward pass in proportion to their work.
        """
        examples = self._config.data.global_batch_size // mesh.data // num_microbatches
        wanted = _sized(self._config, dataclasses.replace(mesh, data=1, pipe=1), examples, recompute)
        entry = nearest_entry(self._alike(mesh), wanted)
        old, new = layer_work(entry.config()), layer_work(wanted)
        together = self._slower(mesh.tensor) / self._slower(entry.tensor)
        backward, measured = ([work.again, work.backward_input, work.backward_weight] for work in (new, old))
        forward_s = entry.forward_s * together * _ratio([new.forward], [old.forward])
        backward_s = entry.backward_s * together * _ratio(backward, measured)
        weight_s = backward_s * _ratio([new.backward_weight], backward)
        edges, shards = edge_work(wanted, shards=mesh.tensor * mesh.pipe), self._slower(mesh.num_devices)
        whole = edge_work(entry.config(), shards=entry.tensor)
        embed, head, embed_backward = (
            entry.edges_s * _ratio([part], whole) * shards / self._slower(entry.tensor) for part in edges
        )
        alone = self._slower(mesh.tensor)
        return MicrobatchTimes(
            forward_s,
            backward_s - weight_s,
            weight_s,
            exchange=0.0,
            embed=embed,
            head=head,
            embed_backward=embed_backward,
            edge_exchange=0.0,
            hops=(0.0,) * mesh.pipe,
            sharing=tuple(self._slower(mesh.data * mesh.tensor * (rank + 1)) / alone for rank in range(mesh.pipe)),
            tick=self._profile.at("tick_s", mesh.num_devices) if mesh.pipe > 1 else 0.0,
        )

    def step(self, mesh: MeshConfig, *, num_parameters: float, streamed_rows: int = 0) -> StepTimes:
        """The times of a step outside the pipeline; the time of the update includes `Profile.fixed_s`."""
        del streamed_rows  # none are streamed, see `__init__`
        profile, optimizer = self._profile, self._config.optimizer
        mine = num_parameters / (mesh.data if optimizer.zero1 else 1)
        others = self._slower(mesh.num_devices) / self._slower(mesh.data)
        exchange = profile.at("exchange_s", mesh.data) * num_parameters * others
        update = mine * profile.update_s * _update_ratio(optimizer.name, profile.optimizer)
        return StepTimes(exchange, 0.0, profile.fixed_s + update * self._slower(mesh.num_devices))

    def _alike(self, mesh: MeshConfig) -> list[Entry]:
        """The entries whose products ran in pieces exactly if those of `mesh` do."""
        alike = [entry for entry in self._entries if _in_pieces(entry.mesh) == _in_pieces(mesh)]
        if not alike:
            raise ConfigError(
                f"mesh.collective_matmul={mesh.collective_matmul} with mesh.tensor={mesh.tensor}: all entries that the "
                f"profile of {self._profile.machine} has of {self._config.model.dtype} were measured "
                f"{'without' if _in_pieces(mesh) else 'with'} products in pieces. Measure such a config too (fiddlex "
                "benchmark --profile)."
            )
        return alike

    def _slower(self, number: int) -> float:
        return self._profile.at("sharing", number)


def _in_pieces(mesh: MeshConfig) -> bool:
    """Whether the layers' products run in pieces: with one tensor rank they do not."""
    return mesh.collective_matmul and mesh.tensor > 1


def nearest_entry(entries: Sequence[Entry], config: Config) -> Entry:
    """The entry from which to scale the times of a config of one microbatch.

    It is the entry that differs in the fewest of the choices that change how a device works, such as recomputation;
    among such entries, the one whose sizes differ by the smallest ratios.
    """

    def distance(entry: Entry) -> tuple[int, float]:
        old, new, mesh = entry.model, config.model, config.mesh
        kinds = (
            (entry.tensor == 1, mesh.tensor == 1),
            (entry.sequence_parallel, mesh.sequence_parallel),
            (recomputed(entry.recompute), config.pipeline.recomputed),
            (old.task, new.task),
        )
        pairs = (
            (old.hidden_size, new.hidden_size),
            (old.seq_len, new.seq_len),
            (old.mlp_size, new.mlp_size),
            (old.num_heads, new.num_heads),
            (old.kv_heads, new.kv_heads),
            (old.vocab_size, new.vocab_size),
            (entry.microbatch_size, config.data.global_batch_size),
            (entry.tensor, mesh.tensor),
        )
        return sum(a != b for a, b in kinds), sum(abs(math.log(a / b)) for a, b in pairs)

    return min(entries, key=distance)


def _sized(config: Config, mesh: MeshConfig, examples: int, recompute: str) -> Config:
    data = dataclasses.replace(config.data, global_batch_size=examples)
    pipeline = PipelineConfig(recompute=recompute, stash_dtype=config.pipeline.stash_dtype)
    return dataclasses.replace(config, mesh=mesh, data=data, pipeline=pipeline)


def _ratio(new: Sequence[Work], old: Sequence[Work]) -> float:
    """The ratio of new to old work, products and memory traffic together."""
    amounts = (sum(work.flops + work.traffic * _FLOPS_PER_BYTE for work in works) for works in (new, old))
    first, second = amounts
    return first / second


def _update_ratio(name: str, measured: str) -> float:
    """The bytes that an optimizer's update moves, divided by those of the measured optimizer, as in `CostModel`."""
    moved = (4 + 2 * num_moments(each, momentum=0.9) for each in (name, measured))
    first, second = moved
    return first / second
