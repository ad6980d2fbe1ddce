"""Names that other systems give to flags, and to fields and values of a config, for messages that tell fiddlex's."""

from collections.abc import Iterable

# Each name is in use in Megatron-LM, transformers, nanoGPT or torchtitan, or is short for the field's own name.
FIELDS = {
    "lr": "optimizer.learning_rate",
    "min_lr": "optimizer.final_learning_rate",
    "warmup": "optimizer.warmup_steps",
    "warmup_iters": "optimizer.warmup_steps",
    "lr_decay_iters": "optimizer.decay_steps",
    "lr_scheduler_type": "optimizer.schedule",
    "grad_clip": "optimizer.clip_norm",
    "clip_grad": "optimizer.clip_norm",
    "max_grad_norm": "optimizer.clip_norm",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "eps": "optimizer.epsilon",
    "zero": "optimizer.zero1",
    "batch_size": "data.global_batch_size",
    "bs": "data.global_batch_size",
    "dataset": "data.source",
    "data_path": "data.source",
    "num_workers": "data.num_threads",
    "steps": "train.num_steps",
    "max_steps": "train.num_steps",
    "max_iters": "train.num_steps",
    "train_iters": "train.num_steps",
    "eval_interval": "train.eval_every",
    "log_interval": "train.log_every",
    "save_interval": "train.checkpoint_every",
    "save_steps": "train.checkpoint_every",
    "save_every": "train.checkpoint_every",
    "microbatches": "pipeline.num_microbatches",
    "chunks": "pipeline.num_chunks",
    "dp": "mesh.data",
    "pp": "mesh.pipe",
    "tp": "mesh.tensor",
    "data_parallel_size": "mesh.data",
    "pipeline_model_parallel_size": "mesh.pipe",
    "pipeline_parallel_size": "mesh.pipe",
    "tensor_model_parallel_size": "mesh.tensor",
    "tensor_parallel_size": "mesh.tensor",
    "layers": "model.num_layers",
    "n_layer": "model.num_layers",
    "d_model": "model.hidden_size",
    "n_embd": "model.hidden_size",
    "n_head": "model.num_heads",
    "heads": "model.num_heads",
    "num_attention_heads": "model.num_heads",
    "ffn_hidden_size": "model.ffn_size",
    "block_size": "model.seq_len",
    "seq_length": "model.seq_len",
    "max_seq_len": "model.seq_len",
    "context_length": "model.seq_len",
}
_DEVICES = "The devices of a run are mesh.data × mesh.pipe × mesh.tensor: set these three."
# Names for which fiddlex has no field of the same meaning, each with what fiddlex has.
ANSWERS = {
    "epochs": "The length of a run is train.num_steps, in steps of data.global_batch_size examples.",
    "num_train_epochs": "The length of a run is train.num_steps, in steps of data.global_batch_size examples.",
    "betas": "The two are optimizer.beta1 and optimizer.beta2.",
    "micro_batch_size": "It follows from data.global_batch_size, mesh.data and pipeline.num_microbatches.",
    "gradient_accumulation_steps": "Set pipeline.num_microbatches, the microbatches of a replica's batch.",
    "devices": _DEVICES,
    "gpus": _DEVICES,
    "num_gpus": _DEVICES,
    "nproc_per_node": _DEVICES,
    "resume": "A run resumes by itself from its newest checkpoint: give the same --workdir again.",
    "version": "fiddlex --version shows the version.",
}
# Names of flags of commands that have no config, or that name their own flag otherwise.
FLAGS = {
    "gpus": "num_devices",
    "num_gpus": "num_devices",
    "devices": "num_devices",
    "ranks": "pipe",
    "stages": "pipe",
    "stages_per_rank": "chunks",
    "schedule": "name",
    "steps": "rounds",
    "max_new_tokens": "num_tokens",
    "output_dir": "workdir",
    "out_dir": "workdir",
    "save": "workdir",
    "logdir": "workdir",
    "model": "config",
    "cluster": "topology",
    "out": "output",
}
VALUES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def fields_meant(name: str, paths: Iterable[str]) -> list[str]:
    """The fields, of those at `paths`, that are called `name` in another system or, without their section, in fiddlex.

    `name` has no section, or a wrong one, as in `lr` or `train.lr`; dashes count as underscores.
    """
    paths, name = list(paths), name.replace("-", "_").lower()
    last = name.rpartition(".")[2]
    if name in paths:
        return [name]
    if last in FIELDS:
        return [FIELDS[last]]
    return [path for path in paths if path.rpartition(".")[2] == last]


def answer(name: str) -> str:
    """What fiddlex has in place of `name`, in a sentence; empty where it is no known name."""
    return ANSWERS.get(name.replace("-", "_").rpartition(".")[2].lower(), "")
