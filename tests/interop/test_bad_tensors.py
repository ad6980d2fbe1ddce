"""Weights that no model can have, and files that are no tokenizer, are refused with a message that names them."""

import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.errors import CheckpointError
from fiddlex.interop.folder import read_settings
from fiddlex.interop.folder_tokenizer import read_tokenizer
from fiddlex.interop.huggingface import FolderWeights, write_weights
from fiddlex.interop.safetensors_files import TensorFolder
from fiddlex.models.weights import Weights
from fiddlex.parallel.sharding import named
from fiddlex.train.step.program import Program
from tests.interop.folders import make_folder, on_eight

Arrays = dict[str, np.ndarray]
KERNEL, BIAS = "transformer.h.3.attn.c_attn.weight", "transformer.ln_f.bias"
QUERY = "bert.encoder.layer.2.attention.self.query.weight"


def program_of(folder: pathlib.Path) -> Program:
    config = replaced(Config(), read_settings(folder))
    config = on_eight(config)
    return Program(config, make_mesh(config.mesh))


def read(folder: pathlib.Path) -> tuple[Program, Weights]:
    program = program_of(folder)
    layout = program.layout
    stored = FolderWeights(folder, program.model)
    return program, stored.read(layout.shapes, named(program.mesh, layout.master), layout.placement.layers)


def rewrite(folder: pathlib.Path, tensors: Arrays) -> None:
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.bool_])
def test_tensors_of_whole_numbers_are_refused(dtype: Any, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "hf"
    tensors = make_folder(folder, "GPT2LMHeadModel")
    rewrite(folder, tensors | {KERNEL: tensors[KERNEL].astype(dtype)})
    program = program_of(folder)
    with pytest.raises(CheckpointError, match=rf"not floating-point, .*: {KERNEL} is {np.dtype(dtype)}"):
        FolderWeights(folder, program.model)
    copy = {"lm_head.weight": tensors["transformer.wte.weight"].astype(dtype)}
    del tensors["transformer.wte.weight"]
    rewrite(folder, tensors | copy)
    with pytest.raises(CheckpointError, match=r"not floating-point, .*: lm_head\.weight is"):
        FolderWeights(folder, program.model)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize(
    ("name", "tensor"), [("GPT2LMHeadModel", KERNEL), ("GPT2LMHeadModel", BIAS), ("BertForMaskedLM", QUERY)]
)
def test_weights_that_are_not_finite_are_refused(name: str, tensor: str, value: float, tmp_path: pathlib.Path) -> None:
    """One element of one tensor, wherever its shard is, and a float64 that no float32 holds."""
    folder = tmp_path / "hf"
    tensors = make_folder(folder, name)
    found = tensors[tensor].astype(np.float64)
    found[(-1,) * found.ndim] = value
    rewrite(folder, tensors | {tensor: found})
    with pytest.raises(CheckpointError, match=f"{tensor} has NaN, infinity or a number too large for float32"):
        read(folder)
    found[(-1,) * found.ndim] = 3e38
    rewrite(folder, tensors | {tensor: found})
    read(folder)


@pytest.mark.parametrize(
    ("weight", "dtype", "message"),
    [
        (
            1e6,
            "float16",
            r"transformer\.ln_f\.weight has a weight of 1e\+06, and float16 .* --dtype=bfloat16 or float32",
        ),
        (-3.4e38, "bfloat16", r"has a weight of -3\.4e\+38, and bfloat16 .* Use --dtype=float32\.$"),
        (float("nan"), "float32", r"transformer\.ln_f\.weight has NaN or infinity"),
        (65504.0, "float16", ""),
        (3.4e38, "float32", ""),
    ],
)
def test_a_weight_that_a_dtype_does_not_hold_is_not_written(
    weight: float, dtype: str, message: str, tmp_path: pathlib.Path
) -> None:
    make_folder(tmp_path / "hf", "GPT2LMHeadModel")
    program, weights = read(tmp_path / "hf")
    scale = weights["head"]["norm"]["scale"]
    weights["head"]["norm"]["scale"] = scale.at[3].set(jnp.float32(weight))
    (tmp_path / "back").mkdir()
    arguments = (tmp_path / "back", program.config, program.model, weights, program.layout.placement.rows, dtype)
    if not message:
        write_weights(*arguments)
        assert TensorFolder(tmp_path / "back")["transformer.ln_f.weight"][3] == np.asarray(weight, dtype)
        return
    with pytest.raises(CheckpointError, match=message):
        write_weights(*arguments)
    assert not (tmp_path / "back" / "model.safetensors").exists()


def test_frequencies_that_older_versions_wrote_are_no_weights(tmp_path: pathlib.Path) -> None:
    """As transformers 5 ignores them."""
    folder = tmp_path / "hf"
    tensors = make_folder(folder, "LlamaForCausalLM")
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(4)}
    rewrite(folder, tensors | extra)
    FolderWeights(folder, program_of(folder).model)


def test_a_long_name_is_shortened(tmp_path: pathlib.Path) -> None:
    folder, long = tmp_path / "hf", "transformer." + "h" * 3000
    tensors = make_folder(folder, "GPT2LMHeadModel")
    rewrite(folder, tensors | {long: tensors[BIAS]})
    program = program_of(folder)
    with pytest.raises(CheckpointError, match=r"not of this model: transformer\.h+\.\.\.h+$") as error:
        FolderWeights(folder, program.model)
    assert len(str(error.value)) < 500
    rewrite(folder, {long: tensors[BIAS]})
    whole = (folder / "model.safetensors").read_bytes()
    for before, after in ((b"[32]", b"[-2]"), (b"[32]", b"[31]"), (b"[0,128]", b"[9,128]")):
        (folder / "model.safetensors").write_bytes(whole.replace(before, after))
        with pytest.raises(CheckpointError, match="is not a safetensors file") as error:
            TensorFolder(folder)
        assert len(str(error.value)) < 500
    (folder / "model.safetensors").write_bytes(whole.replace(b'"F32"', b'"X32"'))
    with pytest.raises(CheckpointError, match=r"h+ has dtype 'X32', as in quantized models") as error:
        TensorFolder(folder)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "vocab.txt", "tokenizer_config.json"])
def test_a_file_of_a_tokenizer_that_is_none_is_refused(name: str, tmp_path: pathlib.Path) -> None:
    assert read_tokenizer(tmp_path) is None
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=rf"{name} is not a file\. Copy"):
        read_tokenizer(tmp_path)
    (tmp_path / name).rmdir()
    (tmp_path / name).symlink_to(tmp_path / "blobs" / "none")
    with pytest.raises(CheckpointError, match=rf"{name} is a link to a file that does not exist\. Copy"):
        read_tokenizer(tmp_path)
