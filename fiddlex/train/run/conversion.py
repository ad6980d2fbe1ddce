"""Workdirs from folders of Hugging Face's transformers, and back.

A workdir made from a folder has the weights as a checkpoint of step 0, and in `huggingface/` the folder's `config.json`
and tokenizer, which a conversion back starts from.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config
from fiddlex.data.tokenizers import make_tokenizer
from fiddlex.errors import CheckpointError, ConfigError
from fiddlex.interop.folder import copy_tokenizer, described, read_json
from fiddlex.interop.huggingface import write_weights
from fiddlex.interop.starting import folder_config
from fiddlex.train.run.checkpoint import Checkpoints
from fiddlex.train.run.importing import converted
from fiddlex.train.run.result import load_result
from fiddlex.train.run.workdir import writing
from fiddlex.train.step.program import Program
from fiddlex.train.step.state import SavedState

ORIGINAL = "huggingface"  # subdirectory of a workdir
DTYPES = ("float32", "bfloat16", "float16")  # that a folder may have


def import_folder(folder: Path, workdir: Path, change: Callable[[Config], Config] = lambda config: config) -> Config:
    """Makes a workdir whose checkpoint of step 0 has the weights of a folder; returns its config.

    Args:
      folder: the folder.
      workdir: the directory to make.
      change: maps the config of the folder's model, which has one device, to the config to use.

    Raises:
      CheckpointError: when the folder cannot be read, or the workdir is there already.
    """
    config = folder_config(folder)
    _require_absent(workdir)
    temporary = workdir.with_name(f"{workdir.name}.tmp")
    with writing(temporary):
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / ORIGINAL).mkdir(parents=True)
        text = json.dumps(described(folder), indent=2) + "\n"
        (temporary / ORIGINAL / "config.json").write_text(text, encoding="utf-8")
        tokenizer = copy_tokenizer(folder, temporary / ORIGINAL)
        if tokenizer:
            config.data.tokenizer = os.path.abspath(workdir / ORIGINAL / tokenizer.name)
    own_tokenizer = config.data.tokenizer
    config = change(config).validate()
    if tokenizer and config.data.tokenizer == own_tokenizer:
        _check_vocabulary(folder, make_tokenizer(str(tokenizer)).vocab_size, config.model.vocab_size)
    program = Program(config, make_mesh(config.mesh))
    step = jax.device_put(jnp.int32(0), NamedSharding(program.mesh, P()))
    with Checkpoints(temporary) as checkpoints:
        checkpoints.save(
            SavedState(step, converted(folder, program)),
            0,
            layers=program.layout.placement.layers,
            fingerprint="",
            padded_vocab=config.padded_vocab_size,
        )
    with writing(workdir):
        (temporary / "config.json").write_text(config.to_json(), encoding="utf-8")
        os.replace(temporary, workdir)
    return config


def export_workdir(
    workdir: Path, folder: Path, dtype: str, change: Callable[[Config], Config] = lambda config: config
) -> int:
    """Writes a folder that transformers loads from the best or newest weights of a run; returns their step.

    Args:
      workdir: the run's directory.
      folder: the folder to make.
      dtype: dtype of the tensors, of `DTYPES`; empty: that of the folder the run's weights came from, else float32.
      change: maps the run's config to the config to use.

    Raises:
      CheckpointError: when the run has no readable weights, transformers has no such model, or the folder is there.
    """
    _require_absent(folder)
    program, state = load_result(workdir, change, named_by="--source")
    config = program.config
    original = workdir / ORIGINAL
    if not dtype:
        fields = read_json(original) if original.exists() else {}
        named = fields.get("dtype", fields.get("torch_dtype"))
        dtype = named if named in DTYPES else "float32"
    temporary = folder.with_name(f"{folder.name}.tmp")
    with writing(temporary):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        if original.exists():
            shutil.copyfile(original / "config.json", temporary / "config.json")
            copy_tokenizer(original, temporary)
        elif config.data.tokenizer != "bytes":
            shutil.copyfile(os.path.expanduser(config.data.tokenizer), temporary / "tokenizer.json")
        rows = program.layout.placement.rows
        try:
            write_weights(temporary, config, program.model, state.weights, rows, dtype)
        except ConfigError as error:
            raise CheckpointError(f"--source={workdir}: {error}") from error
        os.replace(temporary, folder)
    return int(state.step)


def _require_absent(path: Path) -> None:
    if path.exists():
        raise CheckpointError(f"--target={path} is there already. Name another directory, or move it away.")


def _check_vocabulary(folder: Path, num_tokens: int, vocab_size: int) -> None:
    if num_tokens > vocab_size:
        raise CheckpointError(
            f"The tokenizer of {folder} has {num_tokens} tokens, and its model has vocab_size={vocab_size}: the rest "
            "has no embedding. Remove the added tokens from tokenizer.json, add embeddings with transformers' "
            "resize_token_embeddings, or leave the tokenizer out with --config.data.tokenizer=bytes."
        )
