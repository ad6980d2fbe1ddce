"""Workdirs from folders of Hugging Face's transformers, and back.

A workdir made from a folder has the weights as a checkpoint of step 0, and in `huggingface/` the folder's `config.json`
and tokenizer, which a conversion back starts from.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config
from fiddlex.data.tokenizers import make_tokenizer
from fiddlex.errors import CheckpointError, ConfigError
from fiddlex.interop.huggingface import write_weights
from fiddlex.interop.starting import folder_config
from fiddlex.parallel.sharding import on_devices
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.transfer.importing import converted, warn_of_bytes
from fiddlex.train.run.transfer.new_folder import new_folder, require_absent
from fiddlex.train.run.transfer.original import (
    complete_description,
    copy_description,
    keep_original,
    original_dtype,
    write_tokenizer,
)
from fiddlex.train.run.transfer.result import load_result
from fiddlex.train.run.workdir import OWN_TOKENIZER, write_config
from fiddlex.train.step.program import Program
from fiddlex.train.step.state import SavedState

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")  # that a folder may have


def import_folder(folder: Path, workdir: Path, change: Callable[[Config], Config] = lambda config: config) -> Config:
    """Makes a workdir whose checkpoint of step 0 has the weights of a folder; returns its config.

    `change` maps the config of the folder's model, which has one device, to the config to use.
    """
    config = folder_config(folder)
    with new_folder(workdir) as made:
        if tokenizer := keep_original(folder, made):
            config.data.tokenizer = os.path.abspath(workdir / OWN_TOKENIZER)
        own_tokenizer = config.data.tokenizer
        config = change(config).validate()
        if tokenizer is None:
            warn_of_bytes(folder, config)
        if tokenizer and config.data.tokenizer == own_tokenizer:
            _check_vocabulary(folder, make_tokenizer(str(tokenizer)).vocab_size, config.model.vocab_size)
        program = Program(config, make_mesh(config.mesh))
        config = program.config
        step = on_devices(np.int32(0), NamedSharding(program.mesh, P()))
        with Checkpoints(made) as checkpoints:
            checkpoints.save(
                SavedState(step, converted(folder, program)),
                0,
                layers=program.layout.placement.layers,
                fingerprint="",
                padded_vocab=config.padded_vocab_size,
            )
        write_config(made, config, schedule=program.layout.pipeline.lowered.schedule)
    return config


def export_workdir(
    workdir: Path, folder: Path, dtype: str, change: Callable[[Config], Config] = lambda config: config
) -> int:
    """Writes a folder that transformers loads from the best or newest weights of a run; returns their step.

    `dtype`, that of the tensors, is one of `DTYPES`; empty: that of the folder the run's weights came from, else
    float32. `change` maps the run's config to the config to use.
    """
    require_absent(folder)  # before the weights are read
    program, state = load_result(workdir, change, named_by="--source")
    config = program.config
    if not dtype:
        named = original_dtype(workdir)
        dtype = named if named in DTYPES else "float32"
    with new_folder(folder) as made:
        copy_description(workdir, config, made)
        tokenizer = write_tokenizer(config, workdir, made)
        if tokenizer is None:
            logger.warning("No tokenizer is written: %s has none that transformers knows.", workdir)
        try:
            write_weights(made, config, program.model, state.weights, program.layout.placement.rows, dtype)
        except ConfigError as error:
            raise CheckpointError(f"--source={workdir}: {error}") from error
        complete_description(workdir, made, tokenizer)
    return int(state.step)


def _check_vocabulary(folder: Path, num_tokens: int, vocab_size: int) -> None:
    if num_tokens > vocab_size:
        raise CheckpointError(
            f"The tokenizer of {folder} has {num_tokens} tokens, and its model has vocab_size={vocab_size}: the rest "
            "has no embedding. Remove the added tokens from the tokenizer's files, add embeddings with transformers' "
            "resize_token_embeddings, or leave the tokenizer out with --config.data.tokenizer=bytes."
        )
