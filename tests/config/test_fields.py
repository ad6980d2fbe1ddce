"""The roles of the model's fields against the network that a config describes."""

import jax
import pytest

from fiddlex.config import Config
from fiddlex.config.fields import FAMILY, MEANING, RUN, SHAPES, WEIGHTS, paths, short_names
from fiddlex.config.overrides import FLUSHED, replaced
from fiddlex.models.registry import network_of
from fiddlex.models.spec import Parameter

BASES = {
    "gpt": {},
    "llama": {"model.family": "llama", "model.num_kv_heads": 2, "model.head_dim": 32, "model.rope_scaling": "llama3"},
    "bert": {"model.family": "bert", "model.objective": "mlm"},
}
OTHERS = {  # by the base in which the field matters: another value
    "gpt": {"family": "llama", "seq_len": 64, "tied_embeddings": False, "dropout": 0.1, "dtype": "bfloat16"},
    "llama": {
        **{"num_layers": 5, "hidden_size": 64, "num_heads": 2, "ffn_size": 100, "vocab_size": 300, "num_kv_heads": 4},
        **{"head_dim": 16, "qk_norm": True, "qkv_bias": True, "layer_norm_epsilon": 1e-6, "rope_base": 5e5},
        **{"rope_scaling": "linear", "rope_factor": 2.0, "rope_low_frequency": 2.0, "rope_high_frequency": 8.0},
        **{"rope_original_len": 64, "init_std": 0.1, "vocab_multiple": 64},
    },
    "bert": {"objective": "mlm_nsp", "post_norm": True, "gelu": "erf"},
}


def shapes(config: Config) -> object:
    network = network_of(config)
    leaves = jax.tree.leaves_with_path(network.parts, is_leaf=lambda x: isinstance(x, Parameter))
    return config.model.num_layers, {jax.tree_util.keystr(path): each.shape for path, each in leaves}


@pytest.mark.parametrize(("base", "name"), [(base, name) for base, others in OTHERS.items() for name in others])
def test_the_fields_that_change_shapes_have_that_role(base: str, name: str) -> None:
    config = replaced(Config(), BASES[base]).validate()
    other = replaced(config, {f"model.{name}": OTHERS[base][name]}).without_unused().validate()
    assert (shapes(other) != shapes(config)) == (f"model.{name}" in paths(Config, SHAPES))


def test_every_field_of_the_model_is_tried() -> None:
    tried = [f"model.{name}" for others in OTHERS.values() for name in others]
    assert sorted(tried) == sorted(f"model.{name}" for name in vars(Config().model))


def test_roles_of_fields() -> None:
    of_model = {path for path in paths(Config, MEANING)}
    assert of_model - {*paths(Config, SHAPES)} == {
        "model.layer_norm_epsilon",
        "model.gelu",
        *(f"model.{name}" for name in vars(Config().model) if name.startswith("rope_")),
    }
    assert paths(Config, SHAPES)["model.head_dim"] == "model.head_size"
    assert paths(Config, RUN)["optimizer.name"] == "optimizer.rule"
    assert "model.num_kv_heads" in paths(Config, FAMILY)
    assert not {*paths(Config, FAMILY)} - {*paths(Config, WEIGHTS)}
    assert FLUSHED["pipeline.semantics"] == "sync"
    assert FLUSHED["optimizer.offload"] is False


def test_short_names_are_those_that_one_field_has_or_is_given() -> None:
    names = short_names(Config)
    assert names["pipe"] == "mesh.pipe"
    assert names["schedule"] == "pipeline.schedule"  # the optimizer has one too
    assert names["optimizer"] == "optimizer.name"
    assert "seed" not in names  # of the data and of the run
