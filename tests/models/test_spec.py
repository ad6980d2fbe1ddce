"""What descriptions promise besides the numbers that are folded from them."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from fiddlex.config import Config
from fiddlex.errors import ConfigError
from fiddlex.models.registry import make_model, network_of
from fiddlex.models.spec import leaves
from tests.train.bert import of_task

TASKS = ("lm", "mlm_nsp", "classification", "multiple_choice")


def test_descriptions_import_no_jax() -> None:
    code = (
        "import sys\n"
        "from fiddlex.config import Config\n"
        "from fiddlex.config.families import FAMILIES\n"
        "from fiddlex.models.registry import network_of\n"
        "config = Config()\n"
        "for config.model.family in FAMILIES: network_of(config)\n"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("task", TASKS)
def test_weights_have_the_padded_shapes_and_the_axes_of_their_description(task: str, tiny_config: Config) -> None:
    config = tiny_config if task == "lm" else of_task(tiny_config, task)
    config.mesh.pipe = config.mesh.tensor = 2
    model, rows = make_model(config.validate()), config.padded_vocab_size
    assert rows > config.model.vocab_size
    weights, axes = jax.eval_shape(lambda key: model.init(key, (0, -1, 1)), jax.random.key(0)), model.axes()
    for part, parameters in network_of(config).parts.items():
        before = ((3,), ("layers",)) if part == "layers" else ((), ())
        shapes = [leaf.shape for leaf in jax.tree.leaves(weights[part])]
        assert shapes == [(*before[0], *each.padded(rows)) for each in jax.tree.leaves(parameters)]
        found = jax.tree.leaves(axes[part], is_leaf=lambda x: isinstance(x, tuple))
        assert found == [(*before[1], *each.axes) for each in jax.tree.leaves(parameters)]
        assert len(list(leaves(parameters))) == len(shapes)


@pytest.mark.parametrize("task", TASKS)
def test_initial_values_have_the_standard_deviations_of_their_description(task: str, tiny_config: Config) -> None:
    config = tiny_config if task == "lm" else of_task(tiny_config, task)
    model, network = make_model(config.validate()), network_of(config)
    weights = jax.jit(lambda key: model.init(key, range(2)))(jax.random.key(0))
    for part, parameters in network.parts.items():
        for (path, each), leaf in zip(
            jax.tree.leaves_with_path(parameters), jax.tree.leaves(weights[part]), strict=True
        ):
            name, values = jax.tree_util.keystr(path), np.asarray(leaf)
            if each.std:
                values = values[: each.shape[0]] if "vocab" in each.axes else values  # without padding
                assert np.sqrt(np.mean(values**2)) == pytest.approx(each.std, rel=5 / np.sqrt(2 * values.size)), name
            else:
                assert (values == (1 if "scale" in name else 0)).all(), name
    into_stream = network.layer["mlp"]["down"]["kernel"].std
    assert into_stream == pytest.approx(0.02 / 2 if task == "lm" else 0.02)  # 1/√(2·layers), pre-LN alone
    assert network.layer["mlp"]["up"]["kernel"].std == network.embedding["tokens"].std == 0.02


def test_a_family_that_is_not_registered_is_told(tiny_config: Config) -> None:
    tiny_config.model.family = "gbt"
    for ask in (tiny_config.validate, lambda: network_of(tiny_config), lambda: make_model(tiny_config)):
        with pytest.raises(ConfigError, match=r"model\.family='gbt': there is no such family\. Did you mean 'gpt'"):
            ask()
