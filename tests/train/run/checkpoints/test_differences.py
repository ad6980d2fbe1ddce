"""What is told of two checkpoints that differ: each difference, and nothing else."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fiddlex.config import Config
from fiddlex.schedules.placement import PADDING
from fiddlex.train import loop
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.checkpoints.differences import ArrayDifference, Difference, difference
from fiddlex.train.run.checkpoints.inventory import verify
from fiddlex.train.step.spikes import Usual
from fiddlex.train.step.state import SavedState
from fiddlex.train.trainer import Trainer

LAYERS = (0, 1, 2)


def write(
    workdir: pathlib.Path, weights: Mapping[str, Any], layers: Sequence[int] = LAYERS, step: int = 1, padded: int = 0
) -> pathlib.Path:
    state = SavedState(jnp.int32(0), dict(weights))
    with Checkpoints(workdir) as checkpoints:
        checkpoints.save(state, step, layers=layers, fingerprint="data", padded_vocab=padded)
    return checkpoints.path(step)


def compared(tmp_path: pathlib.Path, one: Any, other: Any, **options: Any) -> tuple[Difference, ArrayDifference]:
    first = write(tmp_path / "a", {"head": {"x": one}})
    found = difference(first, write(tmp_path / "b", {"head": {"x": other}}, **options))
    return found, found.arrays[0]


def test_the_largest_differences_and_their_number_are_told(tmp_path: pathlib.Path) -> None:
    found, array = compared(tmp_path, jnp.float32([1, 2, 100, 0]), jnp.float32([1, 4, 110, -0.0]))
    assert array == ArrayDifference("weights.head.x", ([4], [4]), ("float32", "float32"), 4, 3, 10.0, 0.5)
    assert (found.meta, found.only, array.equal) == ({}, ([], []), False)


@pytest.mark.parametrize(
    ("one", "other", "number", "absolute"),
    [
        (jnp.float32([jnp.nan, 1]), jnp.float32([jnp.nan, 1]), 0, 0.0),
        (jnp.float32([jnp.nan, 1]), jnp.float32([0, 1]), 1, np.inf),
        (jnp.float32([jnp.inf, 1]), jnp.float32([-jnp.inf, 1]), 1, np.inf),
        (jnp.int32([5]), jnp.int32([7]), 1, 2.0),
        (jnp.float32(1e-41), jnp.float32(0), 1, float(np.float32(1e-41))),
    ],
)
def test_numbers_of_all_kinds(one: Any, other: Any, number: int, absolute: float, tmp_path: pathlib.Path) -> None:
    _, array = compared(tmp_path, one, other)
    assert (array.num_different, array.max_absolute, array.equal) == (number, absolute, number == 0)


def test_blocks_of_a_large_array_are_taken_together(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fiddlex.train.run.checkpoints.differences._BLOCK", 4)
    _, array = compared(tmp_path, jnp.arange(10.0), jnp.arange(10.0).at[1].add(3).at[9].add(1))
    assert (array.num_elements, array.num_different, array.max_absolute) == (10, 2, 3.0)


def test_shapes_and_dtypes_and_steps(tmp_path: pathlib.Path) -> None:
    found, array = compared(tmp_path, jnp.zeros((3, 2)), jnp.zeros((3, 4)), step=2)
    assert found.meta == {"step": (1, 2)}
    assert (array.comparable, array.equal, array.num_elements) == (False, False, 0)
    _, array = compared(tmp_path / "dtypes", jnp.float32([1, 2]), jnp.bfloat16([1, 2]))
    assert (array.num_different, array.equal, array.dtypes) == (0, False, ("float32", "bfloat16"))


def test_the_usual_loss_is_compared(tmp_path: pathlib.Path) -> None:
    paths = []
    for name, loss in (("a", 2.0), ("b", 3.0)):
        with Checkpoints(tmp_path / name) as checkpoints:
            usual = Usual(jnp.float32(loss), jnp.float32(1), jnp.int32(5))
            state = SavedState(jnp.int32(0), {"head": {"x": jnp.ones(2)}}, usual=usual)
            checkpoints.save(state, 1, layers=LAYERS, fingerprint="data", padded_vocab=0)
        paths.append(checkpoints.path(1))
    assert difference(*paths).meta == {"usual": ([2.0, 1.0, 5], [3.0, 1.0, 5])}


def test_an_array_on_one_side_only(tmp_path: pathlib.Path) -> None:
    one = write(tmp_path / "a", {"head": {"x": jnp.ones(2), "y": jnp.ones(2)}})
    other = write(tmp_path / "b", {"head": {"x": jnp.ones(2)}, "tail": jnp.ones(2)})
    found = difference(one, other)
    assert found.only == (["weights.head.y"], ["weights.tail"])
    assert [each.equal for each in found.arrays] == [True]


def stacked(layers: Sequence[int], **changed: float) -> dict[str, Any]:
    rows = jnp.float32([[0, 0] if layer == PADDING else [layer, changed.get(f"l{layer}", 9)] for layer in layers])
    return {"layers": {"kernel": rows}}


def test_rows_are_compared_layer_by_layer(tmp_path: pathlib.Path) -> None:
    one, order = write(tmp_path / "a", stacked(LAYERS)), (2, PADDING, 0, 1)
    (array,) = difference(one, write(tmp_path / "b", stacked(order), order)).arrays
    assert (array.equal, array.num_elements) == (True, 6)
    found = difference(one, write(tmp_path / "c", stacked(order, l2=8.0), order))
    assert [(each.num_different, each.max_absolute) for each in found.arrays] == [(1, 1.0)]
    assert found.meta == {"layers": ([0, 1, 2], [2, PADDING, 0, 1])}
    (array,) = difference(one, write(tmp_path / "d", stacked((0, 1)), (0, 1))).arrays
    assert not array.comparable


@pytest.mark.parametrize(("padding", "number"), [([0.0, -0.0], 0), ([0.0, 3.0], 1)])
def test_zero_padding_of_the_vocabulary_does_not_count(
    padding: list[float], number: int, tmp_path: pathlib.Path
) -> None:
    one = write(tmp_path / "a", {"head": {"x": jnp.ones((4, 2))}}, padded=4)
    table = jnp.concatenate([jnp.ones((4, 2)), jnp.float32([[0.0, 0.0], padding])])
    found = difference(one, write(tmp_path / "b", {"head": {"x": table}}, padded=6))
    assert found.meta == {"padded_vocab": (4, 6)}
    assert [(each.num_different, each.num_elements) for each in found.arrays] == [(number, 12)]


@pytest.mark.long
def test_a_run_that_moves_to_another_layout_keeps_each_number(tiny_config: Config, tmp_path: pathlib.Path) -> None:
    """From interleaved layers, ZeRO-1 and a padded vocabulary to none of these; 2bw has older weights, in bfloat16."""
    config = tiny_config
    config.model.num_layers, config.model.dtype = 4, "bfloat16"
    config.mesh.data, config.mesh.pipe, config.mesh.tensor, config.optimizer.zero1 = 2, 2, 2, True
    config.pipeline.schedule, config.pipeline.num_chunks = "interleaved_1f1b", 2
    config.pipeline.num_microbatches, config.pipeline.semantics = 2, "2bw"
    config.train.num_steps = config.train.checkpoint_every = 1
    loop.train(config, tmp_path / "a")
    config.mesh.data, config.mesh.tensor, config.optimizer.zero1 = 1, 1, False
    config.pipeline.schedule, config.pipeline.num_chunks, config.pipeline.layers_per_stage = "1f1b", 1, "3,1"
    other = Trainer(config)
    with Checkpoints(tmp_path / "a") as old, Checkpoints(tmp_path / "b") as new:
        assert other.restore(old)
        other.save(new)
    paths = old.path(1), new.path(1)
    assert all(verify(path).whole for path in paths)
    found = difference(*paths)
    assert {"layers", "padded_vocab"} == found.meta.keys()
    assert found.only == ([], [])
    assert [each.name for each in found.arrays if not each.equal] == []
    older = [each for each in found.arrays if not each.name.startswith(("weights.", "optimizer."))]
    assert {each.dtypes[0] for each in older} == {"bfloat16"}
    assert any(each.shapes[0] != each.shapes[1] for each in found.arrays if "layers" in each.name)
