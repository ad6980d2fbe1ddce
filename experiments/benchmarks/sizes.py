"""The model of the benchmarks, and their batch."""

import copy

from fiddlex.config import Config


def base_config(*, pipe: int = 4) -> Config:
    """A model whose activations outweigh its gradients on each of four stages; matrix products dominate its time."""
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.num_heads = 8, 256, 4
    config.model.seq_len, config.model.vocab_size = 256, 1024
    config.mesh.pipe = pipe
    return config


def with_microbatches(config: Config, num_microbatches: int, *, microbatch_size: int = 1) -> Config:
    """A copy of the config with `num_microbatches` microbatches of `microbatch_size` examples on each replica."""
    config = copy.deepcopy(config)
    config.pipeline.num_microbatches = num_microbatches
    config.data.global_batch_size = config.mesh.data * num_microbatches * microbatch_size
    return config
