"""The sections of a config: the model, the mesh, the pipeline, the optimizer, the data, and the run itself.

Each section checks its values in `validate`; `Config.validate` checks rules that involve two sections. Every message
gives the values, the rule and the remedy.
"""

import dataclasses
import math

from fiddlex.config import rules
from fiddlex.config.every import Every, EveryField
from fiddlex.config.families import FAMILIES, FAMILY_FIELDS, family
from fiddlex.config.megatron_source import parse_source, parse_split
from fiddlex.config.profiled import parse_ranks, parse_steps
from fiddlex.config.records import Checked
from fiddlex.errors import ConfigError

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
RECOMPUTE_MODES = ("none", "selective", "full")
GELUS = ("tanh", "erf")
OUTERMOST_AXES = ("data", "pipe")
ROPE_SCALINGS = ("none", "linear", "llama3")
MOST_ROPE = 1e12  # of the base and the factor; far above any in use
PREDICTIONS = ("none", "extrapolate", "momentum")
MOST_PREDICTION_SCALE = 10.0  # far above what is stable
OPTIMIZERS = ("adamw", "nadamw", "adam", "adan", "lion", "muon", "lamb", "adafactor", "sgd")
MOST_LOSS_SCALE = 2.0**40  # far above what float16 can use, and far below what float32 can hold
LEAST_FLOAT32, MOST_FLOAT32 = 1.2e-38, 3.4e38  # the range of positive values that devices do not round to 0 or infinity
MOST_INIT_STD = 100.0  # far above any in use; with much larger values the first loss overflows float32
MOST_LAYERS = 2**16  # each takes memory on the host before any weight is read or made
MOST_WEIGHTS = 2**58  # in one array; XLA holds its size in bytes in a 64-bit integer and aborts on overflow
MOST_CACHE_GIB = 2.0**20
MOST_THREADS = 256
LEARNING_RATE_SCHEDULES = ("cosine", "linear", "constant")
ON_FAULT = ("stop", "skip", "rollback")
LEAST_SPIKE, MOST_SPIKE = 1.1, 1e6  # bounds of a spike
LEAST_OVERHEAD, MOST_OVERHEAD = 1e-4, 1.0  # of checkpoints, as a share of the time of steps
LEAST_FAILURE_H, MOST_FAILURE_H = 1e-3, 1e6  # between two failures of a run
SOURCE_KINDS = ("text", "hf", "array_record", "tokens", "megatron", "tsv", "jsonl")  # each with a path


@dataclasses.dataclass
class ModelConfig(Checked, prefix="config.model."):
    """Shape of the network, in the field's standard terms."""

    family: str = "gpt"  # gpt | llama | bert, or another of fiddlex.config.families.FAMILIES
    objective: str = ""  # lm; bert: mlm | mlm_nsp | mlm_sop | classification | multiple_choice; empty: lm or mlm
    num_layers: int = 4
    hidden_size: int = 128
    num_heads: int = 4
    ffn_size: int = 0  # 0: four times the hidden size
    vocab_size: int = 256
    seq_len: int = 128
    dropout: float = 0.0  # rate for embeddings, attention probabilities and both residual branches
    dtype: str = "float32"  # type of activations and matrix products; master weights are always float32
    post_norm: bool = False  # LayerNorm after each residual sum (published BERT) instead of before each branch (GPT-2)
    layer_norm_epsilon: float = 1e-5  # of LayerNorm and RMSNorm
    gelu: str = "tanh"  # tanh (GPT-2) | erf (published BERT)
    init_std: float = 0.02
    vocab_multiple: int = 1  # each shard of the vocabulary is padded to a multiple of this (128 suits matrix units)
    num_kv_heads: int = 0  # heads of keys and values, each for num_heads / num_kv_heads queries; 0: num_heads
    head_dim: int = 0  # width of a head; 0: hidden_size / num_heads
    qk_norm: bool = False  # RMSNorm of each head's queries and keys
    tied_embeddings: bool = True  # the table of the embedding also scores the vocabulary
    rope_base: float = 10000.0  # of rotary positions
    rope_scaling: str = "none"  # none | linear | llama3: how rope_factor lengthens the wavelengths
    rope_factor: float = 1.0
    rope_low_frequency: float = 1.0  # llama3: wavelengths above rope_original_len / this are lengthened
    rope_high_frequency: float = 4.0  # llama3: wavelengths below rope_original_len / this stay
    rope_original_len: int = 8192  # llama3: length of the sequences before the lengthening

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

    @property
    def suits_flash(self) -> bool:
        """Whether cuDNN's flash kernel takes this model: half precision, heads up to 128 wide, even masked lengths."""
        masked = self.task != "lm"
        return (
            self.dtype != "float32"
            and self.head_size % 8 == 0
            and self.head_size <= 128
            and not (masked and self.seq_len % 2)
        )

    def validate(self) -> None:
        """Raises ConfigError when a field is out of its range or two fields contradict each other."""
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
        """Checks the fields that only some families read."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in FAMILY_FIELDS:
            value = getattr(self, name)
            if name not in family(self.family).fields and value != defaults[name]:
                having = ", ".join(each for each, entry in FAMILIES.items() if name in entry.fields)
                raise ConfigError(
                    f"model.{name}={value!r} with model.family={self.family}: this family does not have it. Use "
                    f"{defaults[name]!r}, or a family that has it ({having})."
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
        if self.rope_scaling == "none" and self.rope_factor != 1:
            raise ConfigError(
                f"model.rope_factor={self.rope_factor:g} with model.rope_scaling=none: it changes nothing. Set it to "
                "1, or use model.rope_scaling=linear or llama3."
            )
        if "rope_base" in family(self.family).fields and self.head_size % 2:
            raise ConfigError(
                f"model.head_dim={self.head_size} with model.family={self.family}: rotary positions turn pairs of a "
                "head's elements. Use an even width."
            )


@dataclasses.dataclass
class MeshConfig(Checked, prefix="config.mesh."):
    """Devices along each axis of the mesh. The product is the number of devices the run uses."""

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    sequence_parallel: bool = False  # shards norms, dropout and residuals over `tensor` along the sequence
    outermost: str = "data"  # data | pipe: axis with neighbours farthest apart, the first to cross hosts or slices

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return self.data * self.pipe * self.tensor

    @property
    def placement_order(self) -> tuple[str, str, str]:
        """The axes in the order in which devices are numbered: the first varies slowest, `tensor` fastest."""
        return ("pipe", "data", "tensor") if self.outermost == "pipe" else ("data", "pipe", "tensor")

    def stride(self, axis: str) -> int:
        """Distance between neighbours along an axis, in device numbers."""
        order = self.placement_order
        return math.prod(getattr(self, inner) for inner in order[order.index(axis) + 1 :])

    @property
    def vocab_shards(self) -> int:
        """Number of shards of the vocabulary, which is sharded over pipe and tensor."""
        return self.pipe * self.tensor

    def validate(self) -> None:
        """Raises ConfigError when an axis has no devices, or `outermost` is not an axis that it may be."""
        for name in ("data", "pipe", "tensor"):
            rules.at_least(f"mesh.{name}", getattr(self, name), 1)
        rules.choice("mesh.outermost", self.outermost, OUTERMOST_AXES)


@dataclasses.dataclass
class PipelineConfig(Checked, prefix="config.pipeline."):
    """How the model is cut into stages and a replica's batch into microbatches, and in which order they run."""

    schedule: str = "1f1b"  # gpipe | 1f1b | interleaved_1f1b | zb_h1 | zb_h2 | zb_v | file:PATH.csv
    num_chunks: int = 1  # stages on each pipe rank
    num_microbatches: int = 1  # in one replica's batch
    layers_per_stage: str = ""  # layers of each stage in order, as in 3,2,3; empty: as even as possible
    recompute: str = "none"  # none | selective (attention internals) | full (whole layers)
    semantics: str = "sync"  # delay of the weights, in updates: sync | 2bw | stash | vertical_sync | delay:K
    semantics_schedule: str = ""  # replaces semantics=sync: phases and their lengths, as in sync:0.2,2bw; or auto
    switch_window: int = 25  # for auto: steps over whose mean loss it decides
    switch_threshold: float = 0.01  # for auto: share of the loss; a window that falls by less ends sync
    prediction: str = "none"  # of delayed weights: none | extrapolate (past updates) | momentum (the optimizer's)
    prediction_order: int = 1  # 1 | 2; 2 also uses what the last gradient added to the momentum
    prediction_scale: float = 1.0  # multiplies the predicted update

    @property
    def stores_last_update(self) -> bool:
        """Whether the prediction uses the update before the last, which is stored from step to step."""
        return self.prediction == "extrapolate" and self.prediction_order == 2

    def validate(self) -> None:
        """Raises ConfigError when a field is out of its range."""
        rules.at_least("pipeline.num_microbatches", self.num_microbatches, 1)
        rules.at_least("pipeline.num_chunks", self.num_chunks, 1)
        rules.choice("pipeline.recompute", self.recompute, RECOMPUTE_MODES)
        rules.at_least("pipeline.switch_window", self.switch_window, 1)
        rules.fraction("pipeline.switch_threshold", self.switch_threshold)
        rules.choice("pipeline.prediction", self.prediction, PREDICTIONS)
        rules.between("pipeline.prediction_order", self.prediction_order, 1, 2)
        rules.positive("pipeline.prediction_scale", self.prediction_scale, MOST_PREDICTION_SCALE)
        if self.prediction == "none" and (self.prediction_order, self.prediction_scale) != (1, 1.0):
            raise ConfigError(
                f"pipeline.prediction_order={self.prediction_order} and pipeline.prediction_scale="
                f"{self.prediction_scale:g} with pipeline.prediction=none: they change nothing without prediction. "
                "Set both to 1, or use pipeline.prediction=extrapolate or momentum."
            )


@dataclasses.dataclass
class OptimizerConfig(Checked, prefix="config.optimizer."):
    """The update rule, its learning-rate schedule, clipping, and whether its state is sharded."""

    name: str = "adamw"  # adamw | nadamw | adam | adan | lion | muon | lamb | adafactor | sgd
    learning_rate: float = 1e-3
    schedule: str = "cosine"  # shape after the warm-up: cosine | linear | constant
    warmup_steps: int = 0
    decay_steps: int = 0  # length of the whole schedule, warm-up included; 0: train.num_steps
    final_learning_rate: float = 0.0  # reached at decay_steps, and used from then on
    weight_decay: float = 0.0  # applies to matrices only, not to norms and biases
    clip_norm: float = 0.0  # global norm; 0: no clipping
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    beta3: float = 0.99  # used by adan alone
    momentum: float = 0.9  # used by sgd and, for matrices, by muon
    zero1: bool = True  # shards master weights and optimizer state over `data`
    loss_scale: float = 65536.0  # initial loss scale of float16; halved when gradients overflow
    loss_scale_window: int = 1000  # steps without an overflow after which the loss scale doubles

    @property
    def momentum_field(self) -> str:
        """The name of the field that holds the decay of the optimizer's momentum; empty for one without momentum."""
        return {"adafactor": "", "sgd": "momentum", "muon": "momentum"}.get(self.name, "beta1")

    @property
    def decay_of_momentum(self) -> float:
        """The factor by which the optimizer's momentum decays in each update (muon: that of matrices); 0 without."""
        return getattr(self, self.momentum_field) if self.momentum_field else 0.0

    def validate(self) -> None:
        """Raises ConfigError when a field is out of its range."""
        rules.choice("optimizer.name", self.name, OPTIMIZERS)
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


@dataclasses.dataclass
class DataConfig(Checked, prefix="config.data."):
    """Where examples come from and how many make a batch."""

    source: str = "stdlib"  # stdlib, or text:, hf:, array_record:, tokens:, megatron: and a path; labels: tsv:, jsonl:
    eval_source: str = ""  # like source; empty: a held-out share of source; for lm also jsonl:PATH of continuations
    eval_fraction: float = 0.05  # the held-out share of source; unused with eval_source and megatron:PREFIX
    split: str = "969,30,1"  # of megatron:PREFIX: shares to train on, to hold out and to leave out; as eval_fraction
    text_column: str = "text"  # column of hf:PATH that holds the text; of array_record:PATH the key in JSON records
    tokenizer: str = "bytes"  # bytes | path of a JSON file of the `tokenizers` library
    token_dtype: str = "uint16"  # type in files of tokens:PATH; uint16 | uint32
    cache: str = ""  # folder that keeps the tokens of text, shared by all hosts; empty: several processes, the workdir
    sample_cache_gib: float = 0.0  # GiB of fetched samples to keep, which are never evicted; 0: none are kept
    sample_cache_folder: str = ""  # folder that keeps them for all runs of a machine; empty: memory, of each process
    share: str = ""  # folder, best in /dev/shm, by which runs of a machine prepare each batch once for all; empty: none
    num_threads: int = 2  # of each process that prepare batches
    log_samples: bool = False  # writes which samples each step trains on to WORKDIR/samples
    global_batch_size: int = 32  # examples per step, over all replicas and microbatches
    eval_batches: int = 0  # batches per evaluation; 0: all held-out data
    seed: int = 0  # seed of the order of examples and of the masks
    mask_fraction: float = 0.15  # share of an example's tokens to predict; for mlm, mlm_nsp and mlm_sop
    whole_words: bool = False  # masks either all tokens of a word or none
    pack: bool = True  # for mlm: packs short documents, each attending only to itself, into one example; else pads each
    text_fields: str = "sentence1,sentence2"  # columns or keys of the one or two texts of a task
    choices_fields: str = "choices"  # for multiple_choice: one key that holds a list, or a column for each choice
    num_choices: int = 4  # for multiple_choice
    label_field: str = "label"  # column or key of the right answer
    labels: str = ""  # for classification: the classes in order, as in entailment,neutral,contradiction
    truncate: bool = False  # cuts a task's texts that are longer than model.seq_len; else they are an error
    skip_bad_lines: bool = False  # skips and counts bad lines of a task; else they are an error
    eval_stride: int = 0  # for lm: tokens from one evaluation window to the next; 0: model.seq_len, no overlap

    @property
    def classes(self) -> tuple[str, ...]:
        """The labels of classification, in order."""
        return tuple(label.strip() for label in self.labels.split(",")) if self.labels else ()

    def validate(self) -> None:
        """Raises ConfigError when a field is out of its range."""
        for name in ("source", "eval_source"):
            _source(f"data.{name}", getattr(self, name), optional=name == "eval_source")
        rules.fraction("data.mask_fraction", self.mask_fraction)
        rules.positive("data.mask_fraction", self.mask_fraction)
        rules.at_least("data.num_choices", self.num_choices, 2)
        rules.at_least("data.eval_stride", self.eval_stride, 0)
        rules.choice("data.token_dtype", self.token_dtype, ("uint16", "uint32"))
        rules.at_least("data.global_batch_size", self.global_batch_size, 1)
        rules.at_least("data.eval_batches", self.eval_batches, 0)
        rules.at_least("data.seed", self.seed, 0)
        rules.between("data.sample_cache_gib", self.sample_cache_gib, 0, MOST_CACHE_GIB)
        rules.between("data.num_threads", self.num_threads, 1, MOST_THREADS)
        if self.sample_cache_folder and not self.sample_cache_gib:
            raise ConfigError(
                f"data.sample_cache_folder={self.sample_cache_folder} with data.sample_cache_gib=0: nothing would be "
                "kept there. Set data.sample_cache_gib, or leave the folder empty."
            )
        rules.fraction("data.eval_fraction", self.eval_fraction)
        parse_split("data.split", self.split)


@dataclasses.dataclass
class TrainConfig(Checked, prefix="config.train."):
    """Length of the run and its periodic actions. `*_every` fields count steps; 0 turns the action off."""

    num_steps: int = 100
    seed: int = 0  # seed of initial weights and dropout
    log_every: int = 10
    eval_every: int = 0  # the run also ends with an evaluation, unless this is 0
    checkpoint_every: EveryField = 0  # steps, or auto; the run also ends with a checkpoint, unless this is 0
    checkpoint_overhead: float = 0.035  # auto: largest share of the time of steps that checkpoints may add to it
    mean_time_to_failure_h: float = 0.0  # auto: hours between two failures of the run, on average; 0: not known
    keep_last: int = 2  # checkpoints to keep; of the newest it is not known before the next step whether it is good
    keep_every: int = 0  # keep the first checkpoint of every so many steps, however old; 0: none
    on_nonfinite: str = "stop"  # loss or gradient that is not finite: stop | skip (the update) | rollback
    spike_bound: float = 0.0  # loss or gradient this many times as large as usual is a spike, never an update; 0: off
    on_spike: str = "skip"  # stop | skip | rollback (to the last good checkpoint, and leave the batch out)
    max_faults: int = 10  # steps that may be skipped or rolled back in a run before it ends
    init_from: str = ""  # workdir, or hf:DIR, whose weights this run starts from; a head of another kind is initialised
    patience: int = 0  # evaluations without a better one after which the run ends; its best checkpoint is saved
    sample_tokens: int = 0  # length of the text sampled at the end of the run
    peer_timeout_s: int = 60  # of silence after which another process of the run counts as lost, and the run ends
    step_timeout_s: int = 600  # after which a step, evaluation or checkpoint is reported as stuck; 0: never
    topology: str = ""  # whose chip's peak is that of `mfu`: a name or a .toml path; empty: by the kind of the devices
    profile_steps: str = ""  # first and last step of a profile for TensorBoard, as in 10:13; empty: none
    profile_ranks: str = "0"  # processes that write the profile, as in 0,3; or all
    wandb_project: str = ""  # project at Weights & Biases to log to as well; takes the extra wandb

    def validate(self) -> None:
        """Raises ConfigError when a field is out of its range."""
        rules.at_least("train.num_steps", self.num_steps, 1)
        rules.at_least("train.peer_timeout_s", self.peer_timeout_s, 5)
        rules.at_least("train.step_timeout_s", self.step_timeout_s, 0)
        parse_steps("train.profile_steps", self.profile_steps, num_steps=self.num_steps)
        parse_ranks("train.profile_ranks", self.profile_ranks)
        rules.choice("train.on_nonfinite", self.on_nonfinite, ON_FAULT)
        rules.choice("train.on_spike", self.on_spike, ON_FAULT)
        rules.at_least("train.max_faults", self.max_faults, 1)
        if self.spike_bound:
            rules.between("train.spike_bound", self.spike_bound, LEAST_SPIKE, MOST_SPIKE)
        for name in ("on_nonfinite", "on_spike"):
            if getattr(self, name) == "rollback" and not self.checkpoint_every:
                raise ConfigError(
                    f"train.{name}=rollback with train.checkpoint_every=0: there would be no checkpoint to go back to. "
                    "Set train.checkpoint_every, or choose skip or stop."
                )
        rules.at_least("train.keep_last", self.keep_last, 2)
        rules.at_least("train.keep_every", self.keep_every, 0)
        rules.at_least("train.seed", self.seed, 0)
        for name in ("log_every", "eval_every", "sample_tokens", "patience"):
            rules.at_least(f"train.{name}", getattr(self, name), 0)
        if not Every(self.checkpoint_every).is_auto:
            rules.at_least("train.checkpoint_every", int(self.checkpoint_every), 0)
        rules.between("train.checkpoint_overhead", self.checkpoint_overhead, LEAST_OVERHEAD, MOST_OVERHEAD)
        if self.mean_time_to_failure_h:
            rules.between("train.mean_time_to_failure_h", self.mean_time_to_failure_h, LEAST_FAILURE_H, MOST_FAILURE_H)


def _source(name: str, value: str, *, optional: bool) -> None:
    kind, _, path = value.partition(":")
    known = (kind == "stdlib" and not path) or (kind in SOURCE_KINDS and path)
    if not known and not (optional and not value):
        raise ConfigError(
            f"{name}={value!r} is not a data source: use stdlib, text:PATH, hf:PATH, array_record:PATH, tokens:PATH or "
            "megatron:PREFIX; for labelled texts tsv:PATH or jsonl:PATH."
        )
    if kind == "megatron" and len(parse_source(name, value)) > 1 and optional:
        raise ConfigError(f"{name}={value!r} is a blend: evaluate on one dataset at a time, megatron:PREFIX.")
