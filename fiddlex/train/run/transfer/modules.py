"""Workdirs as Flax modules for one device (`fiddlex.flax.models`), and such modules as workdirs."""

import os
from pathlib import Path

import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config, MeshConfig, PipelineConfig
from fiddlex.config.overrides import replaced
from fiddlex.errors import ConfigError
from fiddlex.flax.models import CLASSES, GPT, Bert, Llama
from fiddlex.flax.weights import module_locations, shapes_of, state_of, weights_of
from fiddlex.parallel.sharding import on_devices
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.transfer.new_folder import new_folder
from fiddlex.train.run.transfer.original import inherit_original
from fiddlex.train.run.transfer.result import load_result
from fiddlex.train.run.transfer.trees import check_arrays
from fiddlex.train.run.transfer.weights import placed, whole
from fiddlex.train.run.workdir import read_config, write_config
from fiddlex.train.step.program import Program
from fiddlex.train.step.state import SavedState

_ONE_DEVICE = {"mesh": MeshConfig(), "pipeline": PipelineConfig()}


def load(workdir: str | os.PathLike[str], step: int | None = None) -> GPT | Llama | Bert:
    """The model of a run as a module for one device, which drops no activations until its `train()` is called.

    Args:
      workdir: the run's directory, trained on any layout.
      step: that of the checkpoint to read. None: the run's best weights if it keeps them (`train.patience`), else its
        newest, which `fiddlex evaluate` takes.

    Raises:
      CheckpointError: when there is no such run or checkpoint, or it cannot be read.
      ConfigError: when the model is of a family that has no module here.
    """
    program, state = load_result(Path(workdir), lambda config: replaced(config, _ONE_DEVICE), step=step)
    config = program.config
    made = CLASSES.get(config.model.family)
    if made is None:
        raise ConfigError(
            f"{workdir} has a model of model.family={config.model.family}; fiddlex.flax.load knows "
            f"{', '.join(CLASSES)}. Make its own modules, and give them the arrays of the checkpoint (docs/flax.md)."
        )
    classes = {"num_classes": program.model.network.task.num_outputs} if made is Bert else {}
    # Initial weights would take time and memory.
    module = nnx.eval_shape(lambda: made(config.model, **classes, rngs=nnx.Rngs(params=0, dropout=0)))
    nnx.update(module, state_of(whole(state.weights, program.model, program.layout), range(config.model.num_layers)))
    nnx.reseed(module, dropout=config.train.seed)
    module.eval()
    return module


def save(module: GPT | Llama | Bert, target: str | os.PathLike[str], *, like: str | os.PathLike[str] = "") -> None:
    """Writes a workdir with the weights of a module, as the checkpoint of step 0.

    It can be evaluated and sampled from, and named as `train.init_from` of a run.

    Args:
      module: one of this package, of any weights.
      target: the directory to make, which must not be there or be empty.
      like: a workdir whose data and tokenizer (the section `data` of its config) the target names; without it, those
        of the default config. Labels (`model.objective=classification`) come from it alone.

    Raises:
      CheckpointError: when the target is there or cannot be written, or the module has other parameters than its
        config describes.
      ConfigError: when the data does not fit the model.
    """
    target = Path(target)
    config = replaced(Config(), {"model": module.config})
    if like:
        config.data = read_config(Path(like), named_by="like").data
    config.validate()
    program = Program(config, make_mesh(config.mesh))
    places = module_locations(shapes_of(program.model.network))
    leaves = nnx.to_flat_state(nnx.state(module, nnx.Param))
    arrays = {tuple(map(str, path)): leaf.get_value() for path, leaf in leaves}
    check_arrays(arrays, places, f"the {type(module).__name__}")
    weights = placed(weights_of(arrays, places), program.model, program.layout, program.mesh)
    with new_folder(target) as made:
        if like:
            inherit_original(os.fspath(like), made)
        with Checkpoints(made) as checkpoints:
            checkpoints.save(
                SavedState(on_devices(np.int32(0), NamedSharding(program.mesh, P())), weights),
                0,
                layers=program.layout.placement.layers,
                fingerprint="",
                padded_vocab=config.padded_vocab_size,
            )
        write_config(made, program.config, schedule=program.layout.pipeline.lowered.schedule)
