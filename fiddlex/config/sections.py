"""The sections of a config that describe a step: the model, the mesh, the pipeline and the optimizer.

Each section checks its values in `validate`; `Config.validate` checks rules that involve two sections. Every message
gives the values, the rule and the remedy.
"""

import dataclasses
import functools
import math
from typing import Any

from fiddlex.config import rules
from fiddlex.config.families import FAMILIES, family
from fiddlex.config.fields import FAMILY, MEANING, RUN, SHAPES, UPDATES, WEIGHTS, facts_of, field
from fiddlex.config.records import Checked
from fiddlex.config.unused import OWN, Other
from fiddlex.config.values.every import AUTO
from fiddlex.config.values.recompute import FULL, check_recompute, recomputed
from fiddlex.config.values.schedule_source import is_function, source_of
from fiddlex.config.values.stages import check_layers_per_stage
from fiddlex.config.values.stash import SAME, STASH_DTYPES
from fiddlex.errors import ConfigError

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
GELUS = ("tanh", "erf")
AXES = ("data", "pipe", "tensor")  # of the mesh, the fields of `MeshConfig` that count devices
SIZES = f"{', '.join(f'mesh.{axis}' for axis in AXES[:-1])} and mesh.{AXES[-1]}"  # for messages
OUTERMOST_AXES = ("data", "pipe")
ROPE_SCALINGS = ("none", "linear", "llama3")
MOST_ROPE = 1e12  # of the base and the factor; far above any in use
MEMORIES = ("device", "host")
ORDERS = ("auto", "strict", "ahead")
PREDICTIONS = ("none", "extrapolate", "momentum")
MOST_PREDICTION_SCALE = 10.0  # far above what is stable
OPTIMIZERS = ("adamw", "nadamw", "adam", "adan", "lion", "muon", "lamb", "adafactor", "sgd")
MOST_LOSS_SCALE = 2.0**40  # far above what float16 can use, and far below what float32 can hold
LEAST_FLOAT32, MOST_FLOAT32 = 1.2e-38, 3.4e38  # the range of positive values that devices do not round to 0 or infinity
MOST_INIT_STD = 100.0  # far above any in use; with much larger values the first loss overflows float32
MOST_LAYERS = 2**16  # each takes memory on the host before any weight is read or made
MOST_WEIGHTS = 2**58  # in one array; XLA holds its size in bytes in a 64-bit integer and aborts on overflow
LEARNING_RATE_SCHEDULES = ("cosine", "linear", "constant")
# Which values of other fields use a field (`fiddlex.config.unused`).
TENSOR_PARALLEL = {"mesh.tensor": (Other(2),)}
PIPELINED, REPLICATED = {"mesh.pipe": (Other(2),)}, {"mesh.data": (Other(2),)}
SCALED = {"model.rope_scaling": ("linear", "llama3")}
LLAMA3 = {"model.rope_scaling": ("llama3",)}
SWITCHED = {"pipeline.semantics_schedule": (AUTO,)}
PREDICTED = {"pipeline.prediction": ("extrapolate", "momentum")}
DECAYED = {"optimizer.schedule": ("cosine", "linear", OWN)}
MOMENTS = {"optimizer.name": ("adamw", "nadamw", "adam", "adan", "lion", "muon", "lamb", OWN)}
SQUARES = {"optimizer.name": ("adamw", "nadamw", "adam", "adan", "muon", "lamb", OWN)}
ADAN = {"optimizer.name": ("adan", OWN)}
MOMENTUM = {"optimizer.name": ("sgd", "muon", OWN)}
FLOAT16 = {"model.dtype": ("float16",)}


@dataclasses.dataclass(unsafe_hash=True)
class ModelConfig(Checked, prefix="config.model."):
    """Shape of the network, in the field's standard terms.

    Hashable, since the modules of `fiddlex.flax.models` keep a copy, which jax compares: set no field of that one.
    """

    # kind of network: gpt | llama | bert, or another of fiddlex.config.families.FAMILIES
    family: str = field("gpt", WEIGHTS)
    # lm; bert: mlm | mlm_nsp | mlm_sop | classification | multiple_choice; empty: lm or mlm
    objective: str = field("", SHAPES, value="task")
    num_layers: int = field(4, WEIGHTS)  # layers of the transformer, in all stages together
    hidden_size: int = field(128, WEIGHTS)  # width of the activations between layers
    num_heads: int = field(4, WEIGHTS)  # attention heads of a layer
    # width of the MLP's hidden layer; 0: four times the hidden size
    ffn_size: int = field(0, WEIGHTS, value="mlp_size")
    vocab_size: int = field(256, WEIGHTS)  # tokens of the vocabulary, at least as many as the tokenizer has
    seq_len: int = field(128, SHAPES)  # tokens of a sequence
    dropout: float = 0.0  # rate of dropout for embeddings, attention probabilities and both residual branches
    dtype: str = "float32"  # float32 | bfloat16 | float16: of activations and products; master weights stay float32
    # LayerNorm after each residual sum (published BERT) instead of before each branch (GPT-2)
    post_norm: bool = field(False, WEIGHTS | FAMILY)
    layer_norm_epsilon: float = field(1e-5, MEANING)  # added to the variance in LayerNorm and RMSNorm
    # formula of the activation in the MLP: tanh (GPT-2) | erf (published BERT)
    gelu: str = field("tanh", MEANING | FAMILY)
    init_std: float = 0.02  # standard deviation of the initial weights
    vocab_multiple: int = 1  # each shard of the vocabulary is padded to a multiple of this (128 suits matrix units)
    # heads of keys and values, each for num_heads / num_kv_heads queries; 0: num_heads
    num_kv_heads: int = field(0, WEIGHTS | FAMILY, value="kv_heads")
    head_dim: int = field(0, WEIGHTS | FAMILY, value="head_size")  # width of a head; 0: hidden_size / num_heads
    qk_norm: bool = field(False, WEIGHTS | FAMILY)  # RMSNorm of each head's queries and keys
    qkv_bias: bool = field(False, WEIGHTS | FAMILY)  # the products for queries, keys and values have a bias
    tied_embeddings: bool = field(True, WEIGHTS | FAMILY)  # the table of the embedding also scores the vocabulary
    rope_base: float = field(10000.0, MEANING | FAMILY)  # base of the wavelengths of rotary positions
    # none | linear | llama3: how rope_factor lengthens the wavelengths
    rope_scaling: str = field("none", MEANING | FAMILY)
    rope_factor: float = field(1.0, MEANING | FAMILY, SCALED)  # factor of the lengthening; 1: none
    # llama3: wavelengths above rope_original_len / this are lengthened
    rope_low_frequency: float = field(1.0, MEANING | FAMILY, LLAMA3)
    # llama3: wavelengths below rope_original_len / this stay
    rope_high_frequency: float = field(4.0, MEANING | FAMILY, LLAMA3)
    # llama3: length of the sequences before the lengthening
    rope_original_len: int = field(8192, MEANING | FAMILY, LLAMA3)

    @property
    def task(self) -> str:
        """What the model is trained to do: `objective`, or the default of its family when `objective` is empty."""
        return self.objective or family(self.family).objectives[0]

    @property
    def mlp_size(self) -> int:
        """Width of the MLP's hidden layer."""
        return self.ffn_size or 4 * self.hidden_size

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    def validate(self) -> None:
        rules.choice(f"model.family={self.family}: model.objective", self.task, family(self.family).objectives)
        self._validate_family()
        rules.choice("model.dtype", self.dtype, COMPUTE_DTYPES)
        rules.between("model.num_layers", self.num_layers, 1, MOST_LAYERS)
        for name in ("hidden_size", "num_heads", "vocab_size", "seq_len", "vocab_multiple"):
            rules.at_least(f"model.{name}", getattr(self, name), 1)
        rules.at_least("model.ffn_size", self.ffn_size, 0)
        rules.fraction("model.dropout", self.dropout)
        rules.between("model.layer_norm_epsilon", self.layer_norm_epsilon, LEAST_FLOAT32, MOST_FLOAT32)
        rules.positive("model.init_std", self.init_std, MOST_INIT_STD)
        if not self.head_dim:
            rules.divides(
                "model.hidden_size",
                self.hidden_size,
                "model.num_heads",
                self.num_heads,
                "each attention head gets an equal part of the hidden size",
            )
        rules.divides(
            "model.num_heads",
            self.num_heads,
            "model.num_kv_heads",
            self.kv_heads,
            "each head of keys and values serves equally many heads of queries",
        )
        of_layers = self.num_layers * max(2 * self.mlp_size, 3 * self.hidden_size, self.num_heads * self.head_size)
        if (most := self.hidden_size * max(of_layers, self.vocab_size, self.seq_len)) > MOST_WEIGHTS:
            raise ConfigError(
                f"model.num_layers={self.num_layers}, hidden_size={self.hidden_size}, ffn_size={self.ffn_size}, "
                f"vocab_size={self.vocab_size}, seq_len={self.seq_len}: one array would hold {most:.1e} weights; it "
                f"can hold {MOST_WEIGHTS:.1e}. Take smaller sizes."
            )

    def _validate_family(self) -> None:
        for each in dataclasses.fields(self):
            name, value = each.name, getattr(self, each.name)
            has = FAMILY not in facts_of(each).roles or name in family(self.family).fields
            if not has and value != each.default:
                having = ", ".join(each for each, entry in FAMILIES.items() if name in entry.fields)
                raise ConfigError(
                    f"model.{name}={value!r} with model.family={self.family}: this family does not have it. Use "
                    f"{each.default!r}, or a family that has it ({having})."
                )
        rules.choice("model.gelu", self.gelu, GELUS)
        for name in ("num_kv_heads", "head_dim"):
            rules.at_least(f"model.{name}", getattr(self, name), 0)
        rules.choice("model.rope_scaling", self.rope_scaling, ROPE_SCALINGS)
        rules.between("model.rope_base", self.rope_base, 1, MOST_ROPE)
        rules.between("model.rope_factor", self.rope_factor, 1, MOST_ROPE)
        rules.positive("model.rope_low_frequency", self.rope_low_frequency, MOST_ROPE)
        rules.positive("model.rope_high_frequency", self.rope_high_frequency, MOST_ROPE)
        rules.at_least("model.rope_original_len", self.rope_original_len, 1)
        if self.rope_low_frequency >= self.rope_high_frequency:
            raise ConfigError(
                f"model.rope_low_frequency={self.rope_low_frequency:g} must be below model.rope_high_frequency="
                f"{self.rope_high_frequency:g}: between them the lengthening falls off. Llama 3 has 1 and 4."
            )
        if "rope_base" in family(self.family).fields and self.head_size % 2:
            raise ConfigError(
                f"model.head_dim={self.head_size} with model.family={self.family}: rotary positions turn pairs of a "
                "head's elements. Use an even width."
            )


@dataclasses.dataclass(unsafe_hash=True)
class MeshConfig(Checked, prefix="config.mesh."):
    """Devices along each axis of the mesh. The product is the number of devices the run uses.

    Hashable, since caches of the planner use it as a key: do not set fields of a mesh that a layout has.
    """

    data: int = 1  # replicas of the model, each with an equal part of the batch
    pipe: int = 1  # pipeline ranks, each with pipeline.num_chunks stages
    tensor: int = 1  # devices that share the heads, the MLP and the vocabulary of each layer
    # shards norms, dropout and residuals over `tensor` along the sequence
    sequence_parallel: bool = field(False, TENSOR_PARALLEL)
    # data | pipe: axis with neighbours farthest apart, the first to cross hosts or slices
    outermost: str = field("data", PIPELINED, REPLICATED)
    # the exchanges of sequence parallelism run in pieces, beside the layers' products
    collective_matmul: bool = field(False, TENSOR_PARALLEL)

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return math.prod(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis, by its name."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def text(self) -> str:
        """The sizes for people: 'data=2 × pipe=4 × tensor=1'."""
        return " × ".join(f"{axis}={size}" for axis, size in self.sizes.items())

    @property
    def placement_order(self) -> tuple[str, ...]:
        """The axes in the order in which devices are numbered: the first varies slowest, `tensor` fastest."""
        return self.outermost, *(axis for axis in AXES if axis != self.outermost)

    def stride(self, axis: str) -> int:
        """Distance between neighbours along an axis, in device numbers."""
        order = self.placement_order
        return math.prod(getattr(self, inner) for inner in order[order.index(axis) + 1 :])

    def along(self, *axes: str) -> "MeshConfig":
        """This mesh with one device along each other axis, and `data` outermost; it keeps `sequence_parallel`."""
        return _along(self, axes)

    @property
    def plain(self) -> "MeshConfig":
        """The same devices in the same order, without sequence parallelism and collective matmul."""
        return _plain(self)

    @property
    def vocab_shards(self) -> int:
        """Number of shards of the vocabulary, which is sharded over pipe and tensor."""
        return self.pipe * self.tensor

    def validate(self) -> None:
        for axis, size in self.sizes.items():
            rules.at_least(f"mesh.{axis}", size, 1)
        rules.choice("mesh.outermost", self.outermost, OUTERMOST_AXES)
        if self.collective_matmul and not self.sequence_parallel:
            raise ConfigError(
                "mesh.collective_matmul=True with mesh.sequence_parallel=False: only the exchanges of sequence "
                "parallelism can be divided along the sequence. Set mesh.sequence_parallel=True too, or neither."
            )


@functools.lru_cache(maxsize=4096)
def _along(mesh: MeshConfig, axes: tuple[str, ...]) -> MeshConfig:
    alone: dict[str, Any] = {axis: 1 for axis in AXES if axis not in axes}
    return dataclasses.replace(mesh, outermost=OUTERMOST_AXES[0], **alone)


@functools.lru_cache(maxsize=4096)
def _plain(mesh: MeshConfig) -> MeshConfig:
    return dataclasses.replace(mesh, sequence_parallel=False, collective_matmul=False)


@dataclasses.dataclass
class PipelineConfig(Checked, prefix="config.pipeline."):
    """How the model is cut into stages and a replica's batch into microbatches, and in which order they run."""

    # a name that `fiddlex schedule --help` lists | file:PATH.csv | PATH.py:FUNCTION | auto
    schedule: str = field("1f1b", short="schedule")
    num_chunks: int = 1  # stages on each pipe rank
    num_microbatches: int = 1  # microbatches in one replica's batch
    layers_per_stage: str = ""  # layers of each stage, as in 3,2,3 | balanced: the fastest | empty: as even as possible
    order: str = "auto"  # strict: one action a tick, in order | ahead: F and B share ticks | auto: the schedule's own
    recompute: str = "none"  # some of attention,gelu,norms,masks | none | selective (= attention) | full (whole layers)
    stash_memory: str = "device"  # where what a forward saves waits for its backward: device | host (TPUs and GPUs)
    # where the layers' weights and gradients wait for their chunk's turn: device | host
    weights_memory: str = field("device", UPDATES)
    stash_dtype: str = "same"  # of activations saved for the backward pass: same | float8_e4m3fn | int8 (both lossy)
    # delays of the weights: sync | 2bw | stash | vertical_sync | delay:K | PATH.py:FUNCTION
    semantics: str = field("sync", UPDATES)
    # replaces semantics=sync: phases and their lengths, as in sync:0.2,2bw; or auto
    semantics_schedule: str = field("", UPDATES)
    switch_window: int = field(25, SWITCHED)  # for auto: steps over whose mean loss it decides
    # for auto: share of the loss; a window that falls by less ends sync
    switch_threshold: float = field(0.01, SWITCHED)
    # of delayed weights: none | extrapolate (past updates) | momentum (the optimizer's)
    prediction: str = field("none", UPDATES)
    # 1 | 2: 2 also uses what the last gradient added to the momentum
    prediction_order: int = field(1, UPDATES, PREDICTED)
    prediction_scale: float = field(1.0, UPDATES, PREDICTED)  # multiplies the predicted update

    @property
    def recomputed(self) -> frozenset[str]:
        """The parts of a layer that the backward pass recomputes (`fiddlex.config.values.recompute`)."""
        return recomputed(self.recompute)

    @property
    def spills(self) -> bool:
        """Whether what forward passes save may wait on the host."""
        return self.stash_memory == "host"

    @property
    def streams(self) -> bool:
        """Whether the layers' weights come from the host chunk by chunk, and their gradients go there."""
        return self.weights_memory == "host"

    @property
    def by_chunk(self) -> bool:
        """Whether devices hold the weights and gradients of two chunks at a time; those of others wait elsewhere."""
        return self.weights_memory != "device"

    @property
    def stores_last_update(self) -> bool:
        """Whether the prediction uses the update before the last, which is stored from step to step."""
        return self.prediction == "extrapolate" and self.prediction_order == 2

    def validate(self) -> None:
        rules.at_least("pipeline.num_microbatches", self.num_microbatches, 1)
        rules.at_least("pipeline.num_chunks", self.num_chunks, 1)
        check_layers_per_stage(self.layers_per_stage)
        check_recompute("pipeline.recompute", self.recompute)
        rules.choice("pipeline.order", self.order, ORDERS)
        rules.choice("pipeline.stash_memory", self.stash_memory, MEMORIES)
        rules.choice("pipeline.weights_memory", self.weights_memory, MEMORIES)
        rules.choice("pipeline.stash_dtype", self.stash_dtype, STASH_DTYPES)
        if self.stash_dtype != SAME and FULL in self.recomputed:
            raise ConfigError(
                f"pipeline.stash_dtype={self.stash_dtype} with pipeline.recompute={FULL}: it changes nothing. The "
                "stash then holds only the inputs of layers, and these are never encoded. Use pipeline.stash_dtype="
                f"{SAME}, or another pipeline.recompute."
            )
        rules.at_least("pipeline.switch_window", self.switch_window, 1)
        rules.fraction("pipeline.switch_threshold", self.switch_threshold)
        rules.choice("pipeline.prediction", self.prediction, PREDICTIONS)
        rules.between("pipeline.prediction_order", self.prediction_order, 1, 2)
        rules.positive("pipeline.prediction_scale", self.prediction_scale, MOST_PREDICTION_SCALE)


@dataclasses.dataclass
class OptimizerConfig(Checked, prefix="config.optimizer."):
    """The update rule, its learning-rate schedule, clipping, and whether its state is sharded."""

    # rule: adamw | nadamw | adam | adan | lion | muon | lamb | adafactor | sgd | PATH.py:FUNCTION
    name: str = field("adamw", RUN, value="rule", short="optimizer")
    learning_rate: float = 1e-3  # highest learning rate, reached at the end of the warm-up
    # shape after the warm-up: cosine | linear | constant; PATH.py:FUNCTION gives all learning rates
    schedule: str = "cosine"
    warmup_steps: int = 0  # steps in which the learning rate rises from 0
    decay_steps: int = field(0, DECAYED)  # steps of the whole schedule, warm-up included; 0: train.num_steps
    final_learning_rate: float = field(0.0, DECAYED)  # learning rate at decay_steps and from then on
    weight_decay: float = 0.0  # decay of matrices in each step, times the learning rate; norms and biases have none
    clip_norm: float = 0.0  # largest global norm of the gradient, which is scaled down to it; 0: no clipping
    beta1: float = field(0.9, MOMENTS)  # decay of the mean of the gradients
    beta2: float = field(0.95, MOMENTS)  # decay of the mean of their squares; lion: of the momentum
    epsilon: float = field(1e-8, SQUARES)  # added to the denominator of an update
    beta3: float = field(0.99, ADAN)  # decay of the mean of squares, for adan alone
    momentum: float = field(0.9, MOMENTUM)  # decay of the momentum, for sgd and, of matrices, for muon
    zero1: bool = True  # shards master weights and optimizer state over `data`
    offload: bool = field(False, UPDATES)  # keeps matrices and tables of weights and state on the host between steps
    loss_scale: float = field(65536.0, FLOAT16)  # initial loss scale of float16; halved when gradients overflow
    loss_scale_window: int = field(1000, FLOAT16)  # steps without an overflow after which the loss scale doubles

    @property
    def rule(self) -> str:
        """The name of the update rule; of a function of the user's without its folder, since its file may move."""
        return f"PATH.py:{source_of(self.name).function}" if is_function(self.name) else self.name

    @property
    def momentum_field(self) -> str:
        """The field with the decay of the momentum; empty without one, and for a user's rule, where it is unknown."""
        if is_function(self.name):
            return ""
        return {"adafactor": "", "sgd": "momentum", "muon": "momentum"}.get(self.name, "beta1")

    @property
    def decay_of_momentum(self) -> float:
        """The factor by which the optimizer's momentum decays in each update (muon: that of matrices); 0 without."""
        return getattr(self, self.momentum_field) if self.momentum_field else 0.0

    def validate(self) -> None:
        if not is_function(self.name):
            rules.choice("optimizer.name", self.name, OPTIMIZERS)
        if not is_function(self.schedule):
            rules.choice("optimizer.schedule", self.schedule, LEARNING_RATE_SCHEDULES)
        rules.between("optimizer.loss_scale", self.loss_scale, 1, MOST_LOSS_SCALE)
        rules.at_least("optimizer.loss_scale_window", self.loss_scale_window, 1)
        for name in ("learning_rate", "final_learning_rate", "weight_decay", "clip_norm"):
            rules.between(f"optimizer.{name}", getattr(self, name), 0, MOST_FLOAT32)
        for name in ("warmup_steps", "decay_steps"):
            rules.at_least(f"optimizer.{name}", getattr(self, name), 0)
        for name in ("beta1", "beta2", "beta3", "momentum"):
            rules.fraction(f"optimizer.{name}", getattr(self, name))
        rules.between("optimizer.epsilon", self.epsilon, LEAST_FLOAT32, MOST_FLOAT32)
        if self.decay_steps and self.decay_steps < self.warmup_steps:
            raise ConfigError(
                f"optimizer.decay_steps={self.decay_steps} is shorter than optimizer.warmup_steps="
                f"{self.warmup_steps}: decay_steps counts the warm-up too; raise it or set it to 0 (train.num_steps)."
            )
