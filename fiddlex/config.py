"""The typed configuration of a run: what is trained, on which mesh, on what data.

A config file in `configs/` is a plain function returning a `Config`; the binaries lay `--config.section.field=value`
over it (`fiddlex.flags`). Each section checks itself in `validate`; rules that involve two sections are checked by
`Config.validate`. Every message gives the values, the rule and the remedy. Derived values (`Config.replica_batch_size`
and the like) are computed here and nowhere else. Imports no jax.
"""

import dataclasses
import difflib
import json
import math
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from fiddlex.errors import ConfigError

MODEL_FAMILIES = ("gpt",)
COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
RECOMPUTE_MODES = ("none", "selective", "full")
OPTIMIZERS = ("adamw", "adam", "sgd", "lamb", "adafactor")
INTEGER_LIMIT = 2**31  # steps, examples and sizes are 32-bit integers on the devices
MOST_LOSS_SCALE = 2.0**40  # far above what float16 can use, and far below what float32 can hold
LEARNING_RATE_SCHEDULES = ("cosine", "linear", "constant")


@dataclasses.dataclass
class ModelConfig:
    """Shape of the network, in the field's own words (GPT-2 names in comments where they differ)."""

    family: str = "gpt"
    num_layers: int = 4
    hidden_size: int = 128
    num_heads: int = 4
    ffn_size: int = 0  # 0: four times the hidden size
    vocab_size: int = 256
    seq_len: int = 128
    dropout: float = 0.0  # of embeddings, attention probabilities and both residual branches
    dtype: str = "float32"  # of activations and matrix products; master weights are always float32
    layer_norm_epsilon: float = 1e-5
    init_std: float = 0.02
    vocab_multiple: int = 1  # the vocabulary is padded to a multiple of this on every shard (128 suits matrix units)

    @property
    def mlp_size(self) -> int:
        """Width of the MLP's hidden layer."""
        return self.ffn_size or 4 * self.hidden_size

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    def validate(self) -> None:
        """Raises ConfigError when a field is out of its range or two of them contradict each other."""
        _choice("model.family", self.family, MODEL_FAMILIES)
        _choice("model.dtype", self.dtype, COMPUTE_DTYPES)
        for name in ("num_layers", "hidden_size", "num_heads", "vocab_size", "seq_len", "vocab_multiple"):
            _at_least(f"model.{name}", getattr(self, name), 1)
        _at_least("model.ffn_size", self.ffn_size, 0)
        _fraction("model.dropout", self.dropout)
        _positive("model.layer_norm_epsilon", self.layer_norm_epsilon)
        _positive("model.init_std", self.init_std)
        _divides(
            "model.hidden_size",
            self.hidden_size,
            "model.num_heads",
            self.num_heads,
            "each attention head gets an equal part of the hidden size",
        )


@dataclasses.dataclass
class MeshConfig:
    """Devices along each axis of the mesh. The product is the number of devices the run uses."""

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    sequence_parallel: bool = False  # norms, dropout and residuals sharded over `tensor` along the sequence

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return self.data * self.pipe * self.tensor

    @property
    def vocab_shards(self) -> int:
        """Parts into which the vocabulary is cut: it is sharded over pipe and tensor."""
        return self.pipe * self.tensor

    def validate(self) -> None:
        """Raises ConfigError when an axis has no devices."""
        for name in ("data", "pipe", "tensor"):
            _at_least(f"mesh.{name}", getattr(self, name), 1)


@dataclasses.dataclass
class PipelineConfig:
    """How the model is cut into stages and a replica's batch into microbatches, and in which order they run."""

    schedule: str = "1f1b"  # gpipe | 1f1b | interleaved_1f1b | zb_h1 | zb_h2 | zb_v | file:PATH.csv
    num_chunks: int = 1  # stages on each pipe rank
    num_microbatches: int = 1  # of one replica's batch
    layers_per_stage: str = ""  # layers of each stage in order, as in 3,2,3; empty: as even as can be
    recompute: str = "none"  # none | selective (attention internals) | full (whole layers)
    semantics: str = "sync"  # sync | 2bw | stash | vertical_sync | delay:K: by how many updates weights lag behind
    semantics_schedule: str = ""  # in place of semantics: phases with their lengths, as in sync:0.2,2bw

    def validate(self) -> None:
        """Raises ConfigError when a field is out of its range."""
        _at_least("pipeline.num_microbatches", self.num_microbatches, 1)
        _at_least("pipeline.num_chunks", self.num_chunks, 1)
        _choice("pipeline.recompute", self.recompute, RECOMPUTE_MODES)


@dataclasses.dataclass
class OptimizerConfig:
    """The update rule, its learning-rate schedule, clipping and where its state lives."""

    name: str = "adamw"
    learning_rate: float = 1e-3
    schedule: str = "cosine"  # after the warm-up
    warmup_steps: int = 0
    decay_steps: int = 0  # length of the whole schedule, warm-up included; 0: train.num_steps
    final_learning_rate: float = 0.0  # reached at decay_steps and kept
    weight_decay: float = 0.0  # of matrices only: norms and biases are left alone
    clip_norm: float = 0.0  # global norm; 0: no clipping
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    momentum: float = 0.9  # of sgd
    zero1: bool = True  # master weights and optimizer state sharded over `data`
    loss_scale: float = 65536.0  # of float16 at first; halved when gradients overflow
    loss_scale_window: int = 1000  # steps without an overflow after which it doubles

    def validate(self) -> None:
        """Raises ConfigError when a field is out of its range."""
        _choice("optimizer.name", self.name, OPTIMIZERS)
        _choice("optimizer.schedule", self.schedule, LEARNING_RATE_SCHEDULES)
        _between("optimizer.loss_scale", self.loss_scale, 1, MOST_LOSS_SCALE)
        _at_least("optimizer.loss_scale_window", self.loss_scale_window, 1)
        for name in ("learning_rate", "final_learning_rate", "weight_decay", "clip_norm"):
            _at_least(f"optimizer.{name}", getattr(self, name), 0)
        for name in ("warmup_steps", "decay_steps"):
            _at_least(f"optimizer.{name}", getattr(self, name), 0)
        for name in ("beta1", "beta2", "momentum"):
            _fraction(f"optimizer.{name}", getattr(self, name))
        _positive("optimizer.epsilon", self.epsilon)
        if self.decay_steps and self.decay_steps < self.warmup_steps:
            raise ConfigError(
                f"optimizer.decay_steps={self.decay_steps} is shorter than optimizer.warmup_steps="
                f"{self.warmup_steps}: decay_steps counts the warm-up too; raise it or set it to 0 (train.num_steps)."
            )


@dataclasses.dataclass
class DataConfig:
    """Where examples come from and how many make a batch."""

    source: str = "stdlib"  # stdlib | text:PATH | tokens:PATH
    eval_source: str = ""  # same forms; empty: a held-out share of `source`
    eval_fraction: float = 0.05  # the held-out share; unused with eval_source
    tokenizer: str = "bytes"  # bytes | path of a `tokenizers` JSON file
    token_dtype: str = "uint16"  # of tokens: files; uint16 | uint32
    global_batch_size: int = 32  # examples per step, over all replicas and microbatches
    eval_batches: int = 0  # batches per evaluation; 0: all held-out data
    seed: int = 0  # of the order of examples

    def validate(self) -> None:
        """Raises ConfigError when a field is out of its range."""
        for name in ("source", "eval_source"):
            _source(f"data.{name}", getattr(self, name), optional=name == "eval_source")
        _choice("data.token_dtype", self.token_dtype, ("uint16", "uint32"))
        _at_least("data.global_batch_size", self.global_batch_size, 1)
        _at_least("data.eval_batches", self.eval_batches, 0)
        _at_least("data.seed", self.seed, 0)
        _fraction("data.eval_fraction", self.eval_fraction)


@dataclasses.dataclass
class TrainConfig:
    """Length of the run and what happens along it. `*_every` count steps; 0 turns the thing off."""

    num_steps: int = 100
    seed: int = 0  # of initial weights and dropout
    log_every: int = 10
    eval_every: int = 0  # an evaluation also closes the run unless this is 0
    checkpoint_every: int = 0  # a checkpoint also closes the run unless this is 0
    keep_checkpoints: int = 1  # besides the newest
    sample_tokens: int = 0  # length of the text sampled at the end of the run

    def validate(self) -> None:
        """Raises ConfigError when a field is out of its range."""
        _at_least("train.num_steps", self.num_steps, 1)
        _at_least("train.keep_checkpoints", self.keep_checkpoints, 1)
        _at_least("train.seed", self.seed, 0)
        for name in ("log_every", "eval_every", "checkpoint_every", "sample_tokens"):
            _at_least(f"train.{name}", getattr(self, name), 0)


@dataclasses.dataclass
class Config:
    """Everything that defines a run; it gives the same weights, up to rounding, on every layout."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)

    @property
    def replica_batch_size(self) -> int:
        """Examples per step on one data-parallel replica."""
        return self.data.global_batch_size // self.mesh.data

    @property
    def microbatch_size(self) -> int:
        """Examples in one microbatch of one replica."""
        return self.replica_batch_size // self.pipeline.num_microbatches

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding on this mesh: the vocabulary rounded up so that every shard is equal."""
        multiple = self.mesh.vocab_shards * self.model.vocab_multiple
        return -(-self.model.vocab_size // multiple) * multiple

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step trains on."""
        return self.data.global_batch_size * self.model.seq_len

    def validate(self) -> "Config":
        """Checks every section and the rules between them.

        Returns:
          The config itself, so that calls chain.

        Raises:
          ConfigError: with the values, the rule and the remedy.
        """
        for section in dataclasses.fields(self):
            getattr(self, section.name).validate()
        mesh, model = self.mesh, self.model
        _divides(
            "model.num_heads",
            model.num_heads,
            "mesh.tensor",
            mesh.tensor,
            "attention heads are spread evenly over the tensor axis",
        )
        _divides(
            "model.ffn_size" if model.ffn_size else "model.ffn_size (4·hidden_size)",
            model.mlp_size,
            "mesh.tensor",
            mesh.tensor,
            "the MLP is cut into equal columns over the tensor axis",
        )
        stages = mesh.pipe * self.pipeline.num_chunks
        if model.num_layers < stages and not self.pipeline.schedule.startswith("file:"):  # whose stages the file tells
            raise ConfigError(
                f"model.num_layers={model.num_layers} is less than the {stages} stages of mesh.pipe={mesh.pipe} × "
                f"pipeline.num_chunks={self.pipeline.num_chunks}: each stage needs a layer. Lower either of them, or "
                "take more layers."
            )
        if mesh.sequence_parallel:
            _divides(
                "model.seq_len",
                model.seq_len,
                "mesh.tensor",
                mesh.tensor,
                "sequence parallelism gives every tensor rank an equal part of the sequence",
            )
        _divides(
            "data.global_batch_size",
            self.data.global_batch_size,
            "mesh.data",
            mesh.data,
            "every replica takes an equal part of the batch",
        )
        _divides(
            "data.global_batch_size / mesh.data",
            self.replica_batch_size,
            "pipeline.num_microbatches",
            self.pipeline.num_microbatches,
            "a replica's batch is cut into equal microbatches",
        )
        return self

    def to_json(self) -> str:
        """The resolved config as indented JSON, the form in which a workdir keeps it."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Config":
        """Reads what `to_json` wrote.

        Raises:
          ConfigError: on an unknown field (with the nearest name) or a value of the wrong type.
        """
        try:
            values = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(f"not JSON: {error}") from error
        return _from_mapping(cls, values, path="")


def nearest(name: str, names: Iterable[str]) -> str:
    """' Did you mean x?' for the closest of `names`, or all of them when none is close."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(names)}."


def check_field(path: str) -> None:
    """Raises ConfigError when dotted `path` (`mesh.pipe`) names no field of a `Config`, with the nearest name."""
    holder: Any = Config
    seen: list[str] = []
    for part in path.split("."):
        if not dataclasses.is_dataclass(holder):
            raise ConfigError(f"config.{path}: config.{'.'.join(seen)} is a value and has no field {part!r}.")
        fields = {f.name: f.type for f in dataclasses.fields(holder)}
        if part not in fields:
            where = ".".join(["config", *seen])
            raise ConfigError(f"{where} has no field {part!r}. {nearest(part, fields)}")
        seen.append(part)
        holder = fields[part]


def _from_mapping(cls: type, values: Any, path: str) -> Any:
    where = f"config.{path}".rstrip(".")
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be an object with fields, not {values!r}.")
    fields = {f.name: f.type for f in dataclasses.fields(cls)}
    kwargs = {}
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(f"{where} has no field {name!r}. {nearest(name, fields)}")
        kwargs[name] = _typed(fields[name], value, f"{path}{name}")
    return cls(**kwargs)


def _typed(kind: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _from_mapping(typing.cast(type, kind), value, f"{path}.")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"config.{path}={value!r} is a {type(value).__name__}; it must be of type {kind.__name__}.")
    return value


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(choices)}. {nearest(value, choices)}")


def _at_least(name: str, value: float, least: float) -> None:
    if not least <= value < _limit(value):
        raise ConfigError(f"{name}={value} must be at least {least} and below {_limit(value)}.")


def _between(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name}={value} must be at least {least} and at most {most:g}.")


def _positive(name: str, value: float) -> None:
    if not 0 < value < _limit(value):
        raise ConfigError(f"{name}={value} must be greater than 0 and below {_limit(value)}.")


def _limit(value: float) -> float:
    return INTEGER_LIMIT if isinstance(value, int) else math.inf


def _fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(f"{name}={value} must be at least 0 and below 1.")


def _source(name: str, value: str, *, optional: bool) -> None:
    kind, _, path = value.partition(":")
    known = (kind == "stdlib" and not path) or (kind in ("text", "tokens") and path)
    if not known and not (optional and not value):
        raise ConfigError(f"{name}={value!r} is not a data source: use stdlib, text:PATH or tokens:PATH.")


def _divides(name: str, value: int, by_name: str, by: int, why: str) -> None:
    if value % by:
        small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
        divisors = {*small, *(value // d for d in small)}
        near = sorted(sorted(divisors, key=lambda d: abs(d - by))[:4])
        below, above = value // by * by, -(-value // by) * by
        sizes = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            f"{name}={value} is not a multiple of {by_name}={by}: {why}. "
            f"Use {by_name} {', '.join(map(str, near))}, or {name} {sizes}."
        )
