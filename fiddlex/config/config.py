"""The typed configuration of a run: what is trained, on which mesh, on what data.

A config file in `configs/` has a plain function that returns a `Config`; the binaries apply
`--config.section.field=value` to it (`fiddlex.terminal.command_line`). The type of a field is checked whenever the
field is set (`fiddlex.config.records.Checked`). Values that follow from several fields, such as
`Config.replica_batch_size`, are computed here and nowhere else.
"""

import copy
import dataclasses
import json
import operator
from typing import Any, cast

from fiddlex.config import rules
from fiddlex.config.data_section import DataConfig
from fiddlex.config.families import family
from fiddlex.config.other_names import answer, fields_meant
from fiddlex.config.records import Checked, from_mapping, no_field
from fiddlex.config.sections import MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig
from fiddlex.config.train_section import TrainConfig
from fiddlex.config.unused import reset_unused, unused
from fiddlex.config.values.every import Every
from fiddlex.config.values.recompute import FULL
from fiddlex.config.values.schedule_source import source_of
from fiddlex.config.values.source import KINDS, forms
from fiddlex.errors import ConfigError
from fiddlex.files.small_files import json_object

PATHS = (  # fields that hold the path of a file or folder, or may
    *("data.source", "data.eval_source", "data.tokenizer", "data.cache", "data.sample_cache_folder", "data.share"),
    *("train.init_from", "train.topology", "train.compilation_cache"),
    *("pipeline.schedule", "pipeline.semantics", "pipeline.semantics_schedule"),
    *("optimizer.name", "optimizer.schedule"),
)
LABELLED = ("classification", "multiple_choice")  # objectives whose data are texts with labels
_LABELLED_HINT = (
    " Labelled texts are for a run with model.objective=classification or multiple_choice, which may start from this "
    "one (train.init_from)."
)


@dataclasses.dataclass
class Config(Checked, prefix="config."):
    """Everything that defines a run; one config gives the same weights, up to rounding, on every layout."""

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
    def sequences_per_example(self) -> int:
        """Sequences in an example: one for each choice in multiple choice, else one."""
        return self.data.num_choices if self.model.task == "multiple_choice" else 1

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step trains on, padding included."""
        return self.data.global_batch_size * self.sequences_per_example * self.model.seq_len

    def validate(self) -> "Config":
        """Checks every section and the rules between them; returns the config itself, or raises ConfigError."""
        for path in PATHS:
            rules.local_path(path, operator.attrgetter(path)(self))
        for section in dataclasses.fields(self):
            getattr(self, section.name).validate()
        for field in unused(self):
            raise ConfigError(field.message)
        self._validate_task()
        self._validate_prediction()
        self._validate_streams()
        mesh, model = self.mesh, self.model
        rules.divides(
            "model.num_heads",
            model.num_heads,
            "mesh.tensor",
            mesh.tensor,
            "attention heads are spread evenly over the tensor axis",
            of=0 if model.head_dim else model.hidden_size,
        )
        if model.kv_heads % mesh.tensor and mesh.tensor % model.kv_heads:
            raise ConfigError(
                f"model.num_kv_heads={model.kv_heads} with mesh.tensor={mesh.tensor}: tensor ranks either hold equally "
                "many heads of keys and values, or share them equally. Use a mesh.tensor that divides num_kv_heads, or "
                "a multiple of it."
            )
        rules.divides(
            "model.ffn_size" if model.ffn_size else "model.ffn_size (4·hidden_size)",
            model.mlp_size,
            "mesh.tensor",
            mesh.tensor,
            "the MLP is cut into equal columns over the tensor axis",
        )
        stages = mesh.pipe * self.pipeline.num_chunks
        if model.num_layers < stages and not source_of(self.pipeline.schedule).is_own:  # else its stages count
            raise ConfigError(
                f"model.num_layers={model.num_layers} is less than the {stages} stages of mesh.pipe={mesh.pipe} × "
                f"pipeline.num_chunks={self.pipeline.num_chunks}: each stage needs a layer. Lower either of them, or "
                "take more layers."
            )
        _check_parts(self)
        _check_layers("mesh.sequence_parallel", mesh.sequence_parallel, model.family, "take a part of the sequence")
        _check_layers("mesh.collective_matmul", mesh.collective_matmul, model.family, "run products in pieces")
        _check_layers("model.dropout", model.dropout, model.family, "drop anything")
        if mesh.sequence_parallel:
            rules.divides(
                "model.seq_len",
                model.seq_len,
                "mesh.tensor",
                mesh.tensor,
                "sequence parallelism gives every tensor rank an equal part of the sequence",
            )
        rules.divides(
            "data.global_batch_size",
            self.data.global_batch_size,
            "mesh.data",
            mesh.data,
            "every replica takes an equal part of the batch",
        )
        self._validate_microbatches()
        return self

    def _validate_microbatches(self) -> None:
        examples, replicas, m = self.replica_batch_size, self.mesh.data, self.pipeline.num_microbatches
        if examples % m:
            raise ConfigError(
                f"data.global_batch_size={self.data.global_batch_size} with mesh.data={replicas} gives a replica "
                f"{examples} example{'s' * (examples > 1)}, which is not a multiple of pipeline.num_microbatches={m}: "
                "a replica's batch is cut into equal microbatches. Use pipeline.num_microbatches "
                f"{rules.near_divisors(examples, m)}, or data.global_batch_size "
                f"{rules.near_multiples(self.data.global_batch_size, replicas * m)}."
            )

    def _validate_task(self) -> None:
        task, data = self.model.task, self.data
        labelled = task in LABELLED
        kinds = [name for name, kind in KINDS.items() if kind.labelled == labelled]
        for name, allowed in (("source", kinds), ("eval_source", (*kinds, "jsonl") if task == "lm" else kinds)):
            source = getattr(data, name)
            if source and source.partition(":")[0] not in allowed:
                hint = "" if labelled or task == "lm" else _LABELLED_HINT
                written = ", ".join(forms(allowed))
                raise ConfigError(
                    f"data.{name}={source!r} with model.objective={task}: its data is one of {written}.{hint}"
                )
        if task == "classification" and len(data.classes) < 2:
            raise ConfigError(
                f"data.labels={data.labels!r} with model.objective=classification: name at least two classes, in order "
                "and separated by commas, as in data.labels=entailment,neutral,contradiction."
            )
        if labelled and data.sample_cache_gib:
            raise ConfigError(
                f"data.sample_cache_gib={data.sample_cache_gib:g} with model.objective={task}: labelled texts are all "
                "in memory, and nothing is fetched. Use 0."
            )
        if len(set(data.classes)) < len(data.classes) or "" in data.classes:
            raise ConfigError(f"data.labels={data.labels!r}: each class has a name of its own, and none is empty.")
        if data.eval_stride and (task != "lm" or data.eval_source.startswith("jsonl:")):
            raise ConfigError(
                f"data.eval_stride={data.eval_stride} with model.objective={task} and data.eval_source="
                f"{data.eval_source!r}: only running text of lm is scored in windows that overlap. Use 0."
            )
        if data.eval_stride > self.model.seq_len:
            raise ConfigError(
                f"data.eval_stride={data.eval_stride} is above model.seq_len={self.model.seq_len}: tokens between two "
                "windows would not be scored. Use a stride of at most model.seq_len, or 0 for windows side by side."
            )
        if self.train.sample_tokens and task != "lm":
            raise ConfigError(
                f"train.sample_tokens={self.train.sample_tokens} with model.objective={task}: only lm can go on with a "
                "text. Use 0."
            )
        if self.train.sample_tokens and not family(self.model.family).attends:
            raise ConfigError(
                f"train.sample_tokens={self.train.sample_tokens} with model.family={self.model.family}: its layers "
                "keep no keys and values of earlier tokens, so they cannot go on with a text. Use 0."
            )
        if self.train.patience and not (self.train.eval_every and self.train.checkpoint_every):
            raise ConfigError(
                f"train.patience={self.train.patience} with train.eval_every={self.train.eval_every} and "
                f"train.checkpoint_every={self.train.checkpoint_every}: what counts is the held-out data, and the best "
                "weights are a checkpoint. Set both above 0, or patience to 0."
            )

    def _validate_prediction(self) -> None:
        """Checks that the optimizer has what a prediction of weights needs."""
        pipeline, optimizer = self.pipeline, self.optimizer
        if optimizer.offload and pipeline.prediction != "none":
            raise ConfigError(
                f"optimizer.offload=true with pipeline.prediction={pipeline.prediction}: a prediction of weights needs "
                "all weights and updates on the devices at once, and offload keeps them on the host. Set one of them "
                "back, pipeline.prediction=none or optimizer.offload=false."
            )
        needs = pipeline.prediction == "momentum" or pipeline.prediction_order > 1
        if not needs or optimizer.decay_of_momentum:
            return
        field = optimizer.momentum_field
        without = f"optimizer.name={optimizer.name}" + (f" and optimizer.{field}=0" if field else "")
        remedy = f"Set optimizer.{field} above 0" if field else "Use another optimizer"
        raise ConfigError(
            f"pipeline.prediction={pipeline.prediction} and pipeline.prediction_order={pipeline.prediction_order} with "
            f"{without}: no momentum of this optimizer is known, from which the next update could be predicted. "
            f"{remedy}, or use pipeline.prediction=extrapolate with pipeline.prediction_order=1."
        )

    def _validate_streams(self) -> None:
        """Checks that nothing else needs the layers' weights on the devices where they wait on the host."""
        pipeline, optimizer = self.pipeline, self.optimizer
        if not pipeline.streams:
            return
        if not optimizer.offload:
            raise ConfigError(
                "pipeline.weights_memory=host with optimizer.offload=False: the master weights and the optimizer's "
                "state would stay on the devices, and take more than what would go. Set optimizer.offload=True too, or "
                "pipeline.weights_memory=device."
            )
        if pipeline.semantics != "sync" or pipeline.semantics_schedule:
            field = "semantics_schedule" if pipeline.semantics_schedule else "semantics"
            raise ConfigError(
                f"pipeline.weights_memory=host with pipeline.{field}={getattr(pipeline, field)}: a chunk's weights "
                "come from the host once for all microbatches of a batch, and batches that overlap would need several "
                "versions of them. Use pipeline.semantics=sync, or pipeline.weights_memory=device."
            )
        if self.model.dtype == "float16":
            raise ConfigError(
                "pipeline.weights_memory=host with model.dtype=float16: gradients that wait on the host cannot be "
                "scaled back. Use model.dtype=bfloat16, or pipeline.weights_memory=device."
            )
        if self.train.sample_tokens:
            raise ConfigError(
                f"pipeline.weights_memory=host with train.sample_tokens={self.train.sample_tokens}: sampling keeps all "
                "weights on the devices. Use train.sample_tokens=0, or pipeline.weights_memory=device."
            )

    def without_unused(self) -> "Config":
        """A copy in which each field that other fields make the run ignore has its default.

        A workdir's config may have such fields: earlier versions saved them, and an override may have made them so.
        """
        config = copy.deepcopy(self)
        reset_unused(config)
        return config

    def to_json(self) -> str:
        """The resolved config as indented JSON, as it is saved in a workdir."""
        return json.dumps(dataclasses.asdict(self, dict_factory=_for_json), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Config":
        """Reads what `to_json` wrote; ConfigError on an unknown field or a value of the wrong type."""
        try:
            values = json_object(text)
        except ValueError as error:
            raise ConfigError(f"not JSON: {error}") from error
        return from_mapping(cls, _renamed(values), "config.")


def _check_layers(field: str, value: float, name: str, what: str) -> None:
    """Checks that the layers of the family `name` do what a field asks for, which they would ignore silently."""
    fact = field.partition(".")[2]
    if value and not getattr(family(name), fact):
        raise ConfigError(
            f"{field}={value} with model.family={name}: this family does not say that its layers {what}. Use {field}="
            f"{type(value)(0)}, or register it with Family(…, {fact}=True) if they do (docs/models.md)."
        )


def _check_parts(config: Config) -> None:
    """Checks that nothing is asked of the parts of layers that are known as wholes only."""
    name, parts = config.model.family, config.pipeline.recomputed - {FULL}
    if parts and not family(name).attends:
        raise ConfigError(
            f"pipeline.recompute={config.pipeline.recompute} with model.family={name}: no part of this family's layers "
            f"is known by that name. Use none or {FULL}, or jax.checkpoint inside the layer."
        )


def _renamed(values: Any) -> Any:
    """The values of a config with today's names; versions before 2026-11-24 had others."""
    match values:
        case {"train": {"keep_checkpoints": int(others), **train}}:
            return values | {"train": {**train, "keep_last": others + 1}}
    return values


def check_field(path: str) -> None:
    """Raises ConfigError, with the nearest name, when the dotted `path` (`mesh.pipe`) names no field of a `Config`."""
    holder: Any = Config
    seen: list[str] = []
    for part in path.split("."):
        if not dataclasses.is_dataclass(holder):
            raise ConfigError(f"config.{path}: config.{'.'.join(seen)} is a value and has no field {part!r}.")
        fields = {f.name: f.type for f in dataclasses.fields(holder)}
        if part not in fields:
            prefix = ".".join(["config", *seen])
            raise ConfigError(no_field(cast(type, holder), part, fields, prefix=prefix, meant=_meant(part)))
        seen.append(part)
        holder = fields[part]


def field_paths() -> list[str]:
    """The paths of all fields of a `Config`, such as `mesh.pipe`."""
    sections = dataclasses.asdict(Config())
    return [f"{section}.{name}" for section, fields in sections.items() for name in fields]


def _meant(name: str) -> str:
    """The fields of other sections that `name`, which is no field of its section, may stand for; empty: none."""
    paths = " or ".join(f"config.{path}" for path in fields_meant(name, field_paths()))
    return f"Did you mean {paths}?" if paths else answer(name)


def _for_json(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.to_json() if isinstance(value, Every) else value for name, value in fields}
