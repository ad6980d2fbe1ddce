"""Runs start from what Flax and orbax alone have saved, and plain orbax reads what a run saves."""

import os
import pathlib
import pickle
import subprocess
import sys
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import fiddlex.flax
from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config
from fiddlex.config.families import FAMILIES
from fiddlex.config.overrides import replaced
from fiddlex.errors import CheckpointError
from fiddlex.flax import GPT
from fiddlex.flax.weights import Location
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.transfer.trees import read_tree
from fiddlex.train.run.transfer.weights import pretrained
from fiddlex.train.trainer import Trainer
from tests.flax import modules
from tests.flax.test_models import arrays, drawn, state


def saved(tree: Any, path: pathlib.Path) -> pathlib.Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def weights_in(tree: Any, *, layers: Any) -> Any:
    """Weights of a run, of the state of a module with learned positions and two layers in `layers`."""
    parts = [layer["attention"] for layer in layers]
    fused = [{kind: np.stack([p[name][kind] for name in "qkv"], -3) for kind in ("kernel", "bias")} for p in parts]
    own = [
        layer | {"attention": {"qkv": qkv, "out": p["out"]}} for layer, qkv, p in zip(layers, fused, parts, strict=True)
    ]
    return {
        "embedding": {name: tree[name]["embedding"] for name in ("tokens", "positions")},
        "layers": jax.tree.map(lambda *rows: np.stack(rows), *own),
        "head": {"norm": tree["norm"]},
    }


def test_a_run_starts_from_every_form_of_a_gpt(tiny_config: Config, tmp_path: pathlib.Path) -> None:
    mesh = make_mesh(tiny_config.mesh)
    tiny_config.model.dropout = 0.1  # whose streams are no weights
    module = drawn(GPT(tiny_config.model, rngs=nnx.Rngs(0)))
    pure = arrays(module)
    expected = weights_in(pure, layers=[pure["layers"][0], pure["layers"][1]])
    rows = [jax.tree.map(lambda w, i=i: w[i], expected["layers"]) for i in range(2)]
    forms = {
        "pure": pure,
        "state": nnx.state(module),
        "parameters": nnx.state(module, nnx.Param),
        "train_state": TrainState.create(apply_fn=None, params=pure, tx=optax.adam(1e-3)),
        "variables": {"params": expected},
        "rows": expected | {"layers": rows},
        "half": jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16), expected),
    }
    for name, tree in forms.items():
        found = read_tree(saved(tree, tmp_path / name), tiny_config)
        wanted = jax.tree.map(lambda w: w.astype(jnp.bfloat16), expected) if name == "half" else expected
        assert jax.tree.structure(found) == jax.tree.structure(expected), name
        chex.assert_trees_all_equal(found, jax.tree.map(lambda w: np.asarray(w, np.float32), wanted))

    with ocp.CheckpointManager(tmp_path / "managed") as manager:
        manager.save(3, args=ocp.args.StandardSave(pure))
    with pytest.raises(CheckpointError, match=r"/managed is no directory of a run, .*such as .*/managed/3/default\.$"):
        pretrained(tmp_path / "managed", tiny_config, mesh, fresh=dict)
    with pytest.raises(CheckpointError, match=r"/none is no directory of a run, and is no folder in which orbax has"):
        pretrained(tmp_path / "none", tiny_config, mesh, fresh=dict)
    shorter = replaced(tiny_config, {"model.seq_len": 8})
    expected["embedding"]["positions"] = expected["embedding"]["positions"][:8]
    found = pretrained(tmp_path / "managed" / "3" / "default", shorter, mesh, fresh=dict)
    chex.assert_trees_all_equal(found, expected)


def test_a_family_of_flax_modules_starts_from_their_variables(
    tiny_config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "linen", modules.LINEN)
    config = replaced(tiny_config, {"model.family": "linen", "mesh.pipe": 2, "pipeline.num_microbatches": 2})
    tokens, x = jnp.zeros((1, 16), jnp.int32), jnp.zeros((1, 16, 32))
    keys = jax.random.split(jax.random.key(5), 4)
    embedding = modules.LinenEmbed(config.model).init(keys[0], tokens)
    layers = [modules.LinenBlock(config.model).init(key, x, deterministic=True) for key in keys[1:3]]
    head = modules.LinenHead(config.model).init(keys[3], x)
    path = saved({"embedding": embedding, "layers": layers, "head": head}, tmp_path / "variables")
    trainer = Trainer(config)
    trainer.start_from(str(path))
    stacked = jax.tree.map(lambda *rows: np.stack(rows), *(layer["params"] for layer in layers))
    plain = {"embedding": embedding["params"], "layers": stacked, "head": head["params"]}
    chex.assert_trees_all_equal(trainer.weights(), jax.tree.map(np.asarray, plain))


READ = """
import json, pathlib, pickle, sys
import jax, numpy as np, orbax.checkpoint as ocp

assert jax.device_count() == 1
checkpointer, step = ocp.StandardCheckpointer(), pathlib.Path(sys.argv[1])
arrays = checkpointer.metadata(step / "weights").item_metadata.tree
weights = checkpointer.restore(step / "weights", jax.tree.map(lambda a: np.empty(a.shape, a.dtype), arrays))
rows = json.loads((step / "meta" / "metadata").read_text())["layers"]
pathlib.Path(sys.argv[2]).write_bytes(pickle.dumps((weights, rows)))
"""  # without fiddlex, as docs/flax.md has it


def read_elsewhere(trainer: Trainer, folder: pathlib.Path) -> tuple[Any, list[int]]:
    """What a program on one device reads of a run on several: weights, and the layer of each of their rows."""
    with Checkpoints(folder) as checkpoints:
        trainer.save(checkpoints)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", READ, str(folder / "checkpoints" / "0"), str(folder / "read")]
    subprocess.run(command, check=True, env=environment, cwd=folder)
    found: tuple[Any, list[int]] = pickle.loads((folder / "read").read_bytes())
    return found


def test_plain_orbax_reads_what_a_run_saves(
    tiny_config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "nnx", modules.NNX)
    fields = {"mesh.pipe": 2, "pipeline.num_microbatches": 4, "model.vocab_size": 256, "model.num_layers": 4}
    config = replaced(tiny_config, fields | {"pipeline.schedule": "interleaved_1f1b", "pipeline.num_chunks": 2})
    trainer = Trainer(replaced(config, {"model.family": "nnx"}))
    weights, rows = read_elsewhere(trainer, tmp_path / "own")
    assert rows == [0, 2, 1, 3]
    block = modules.Block(trainer.config.model, rngs=nnx.Rngs(7))
    nnx.update(block, nnx.restore_int_paths(jax.tree.map(lambda w: w[rows.index(1)], weights["layers"])))
    expected = trainer.weights()
    in_order = jax.tree.map(lambda w: w[np.argsort(rows)], weights["layers"])
    chex.assert_trees_all_equal(weights | {"layers": in_order}, expected)
    chex.assert_trees_all_equal(block.norms[1].scale[...], expected["layers"]["norms"]["1"]["scale"][1])
    chex.assert_trees_all_equal(block.up.kernel[...], expected["layers"]["up"]["kernel"][1])

    trainer = Trainer(config)
    weights, rows = read_elsewhere(trainer, tmp_path / "gpt")
    module = GPT(config.model, rngs=nnx.Rngs(7))
    nnx.update(module, fiddlex.flax.state_of(weights, rows))
    chex.assert_trees_all_equal(arrays(module), state(trainer))

    with pytest.raises(CheckpointError, match=rf"is a part of a run's checkpoint, .*directory, {tmp_path / 'own'}\.$"):
        trainer.start_from(str(tmp_path / "own" / "checkpoints" / "0" / "weights"))


def test_what_does_not_fit_is_named(tiny_config: Config, tmp_path: pathlib.Path) -> None:
    tree = arrays(GPT(tiny_config.model, rngs=nnx.Rngs(0)))
    tree["more"] = jnp.zeros((2, 3))
    tree["tokens"]["embedding"] = jnp.zeros((250, 32))
    tree["norm"]["bias"] = jnp.zeros(32, jnp.int32)
    del tree["layers"][1]["mlp"]["up"]["bias"]
    folder = saved(tree, tmp_path / "tree")
    with pytest.raises(CheckpointError) as error:
        read_tree(folder, tiny_config)
    assert str(error.value) == (
        f"The arrays of train.init_from={folder} are not those of the model:\n"
        "  missing: layers.1.mlp.up.bias (128,)\n"
        "  not of this model: more (2, 3)\n"
        "  of another shape: tokens.embedding is (250, 32), must be (257, 32)\n"
        "  not of floating-point numbers: norm.bias is int32\n"
        "It takes arrays by the names of a run's weights, {embedding, layers, head} with the layers stacked or one by "
        "one, or by those of fiddlex.flax.GPT, Llama or Bert (docs/flax.md)."
    )
    (folder / "_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match=rf"^train.init_from={folder} cannot be read: .*\. Copy it again\.$"):
        read_tree(folder, tiny_config)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"layers": {"params": {"w": jnp.zeros(3)}, "w": jnp.zeros(3)}}, "several arrays have one name once levels"),
        (
            {"embedding": {"tokens": jnp.zeros(()), "positions": jnp.zeros(16)}},
            r"positions is \(16,\), must be \(16, 3",
        ),
    ],
    ids=["one name", "dimensions"],
)
def test_other_trees_are_refused(tree: Any, message: str, tiny_config: Config, tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_tree(saved(tree, tmp_path / "tree"), tiny_config)


def test_learned_positions_alone_may_be_more_than_a_model_has() -> None:
    assert Location(("p",), ("embedding", "positions"), None, None, (16, 32)).takes((20, 32))
    assert not Location(("p",), ("layers", "positions"), None, None, (4, 32)).takes((8, 32))
