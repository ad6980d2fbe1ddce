"""The type of a config's field is checked whenever the field is set, and configs stay plain dataclasses."""

import copy
import dataclasses
import pathlib
import pickle
import re
from typing import Any

import numpy as np
import pytest

from fiddlex.config import Config, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig
from fiddlex.errors import ConfigError


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "train.checkpoint_every",
            1.0,
            "config.train.checkpoint_every=1.0 is a float; it must be of type int, or auto.",
        ),
        ("train.log_every", 0.5, "config.train.log_every=0.5 is a float; it must be of type int."),
        ("optimizer.zero1", "False", "config.optimizer.zero1='False' is a str; it must be of type bool."),
        ("optimizer.zero1", 1, "config.optimizer.zero1=1 is an int; it must be of type bool."),
        ("model.num_layers", "4", "config.model.num_layers='4' is a str; it must be of type int."),
        ("model.num_layers", True, "config.model.num_layers=True is a bool; it must be of type int."),
        ("model.num_layers", None, "config.model.num_layers=None is a NoneType; it must be of type int."),
        ("model.num_layers", np.int64(4), "is an int64; it must be of type int: write int(…)."),
        ("model.dropout", np.float32(0.5), "is a float32; it must be of type float: write float(…)."),
        ("model.dropout", np.float64(0.5), "is a float64; it must be of type float: write float(…)."),
        ("model.dropout", False, "config.model.dropout=False is a bool; it must be of type float."),
        ("data.source", pathlib.Path("a"), "is a PosixPath; it must be of type str: write str(…)."),
        ("data.labels", ["a", "b"], "config.data.labels=['a', 'b'] is a list; it must be of type str."),
        ("data.source", "text:\0", "config.data.source='text:\\x00' contains a NUL character, which no path can have"),
        ("train.init_from", "\ud800", "config.train.init_from='\\ud800' contains half of a surrogate pair"),
        ("train.seed", 10**500, "config.train.seed is an integer of 1661 bits; it must have at most 63."),
        ("optimizer.beta1", 10**400, "config.optimizer.beta1 is an integer too large for a float"),
        ("mesh", 3, "config.mesh=3 is an int; it must be of type MeshConfig."),
        ("mesh", {"data": 2}, "config.mesh={'data': 2} is a dict; it must be of type MeshConfig."),
        ("mesh", ModelConfig(), "is a ModelConfig; it must be of type MeshConfig."),
        ("mesh", None, "config.mesh=None is a NoneType; it must be of type MeshConfig."),
        ("model.num_layer", 4, "config.model has no field 'num_layer'. Did you mean 'num_layers'?"),
        ("moddel", ModelConfig(), "config has no field 'moddel'. Did you mean 'model'?"),
        ("train.keep_checkpoints", 3, "config.train has no field 'keep_checkpoints'. It was replaced by keep_last, "),
        ("model.task", "lm", "config.model has no field 'task'. Known: family, "),
    ],
)
def test_a_field_keeps_its_type(path: str, value: Any, message: str) -> None:
    config = Config()
    section, _, field = path.rpartition(".")
    holder = getattr(config, section) if section else config
    with pytest.raises(ConfigError, match=re.escape(message)):
        setattr(holder, field, value)
    assert config == Config()
    if field in {each.name for each in dataclasses.fields(holder)}:
        with pytest.raises(ConfigError, match=re.escape(message)):
            dataclasses.replace(holder, **{field: value})


def test_fields_cannot_be_deleted() -> None:
    with pytest.raises(ConfigError, match=r"^config\.mesh\.data cannot be deleted; every field has a value\."):
        del Config().mesh.data


def test_an_integer_becomes_a_float() -> None:
    config = Config()
    config.optimizer.learning_rate = 1
    assert type(config.optimizer.learning_rate) is float
    assert type(ModelConfig(dropout=0).dropout) is float


def test_a_name_of_a_file_that_is_not_utf8_is_kept() -> None:
    config = Config()
    config.data.source = "text:\udcff"  # as Python has the byte 0xff of a command line
    assert Config.from_json(config.to_json()) == config


def test_configs_are_copied_as_any_dataclass() -> None:
    config = Config(mesh=MeshConfig(data=2), train=TrainConfig(num_steps=7, checkpoint_every="auto"))
    copies = copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))
    assert {each.to_json() for each in copies} == {config.to_json()}
    assert all(each == config for each in copies)
    assert dataclasses.replace(config, mesh=MeshConfig()) == Config(train=config.train)
    assert Config.from_json(config.to_json()) == config
    assert dataclasses.asdict(config)["train"]["num_steps"] == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train": {"seed": ' + "9" * 5000 + "}}", "not JSON: Exceeds the limit"),
        ('{"data": {"source": "text:\\ud800"}}', "config.data.source='text:\\ud800' contains half of a surrogate pair"),
        ('{"data": {"source": "text:\\u0000"}}', "contains a NUL character"),
        ('{"train": {"seed": 1e400}}', "config.train.seed=inf is a float; it must be of type int."),
    ],
)
def test_config_json_at_fault(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config.from_json(text)


@pytest.mark.parametrize(
    ("section", "field", "value", "rule"),
    [
        ("model", "init_std", 1e30, "must be greater than 0 and at most 100."),
        ("model", "init_std", float("nan"), "must be greater than 0 and at most 100."),
        ("model", "layer_norm_epsilon", 1e-50, "must be at least 1.2e-38 and at most 3.4e+38."),
        ("optimizer", "epsilon", 1e-50, "must be at least 1.2e-38 and at most 3.4e+38."),
        ("optimizer", "clip_norm", 1e39, "must be at least 0 and at most 3.4e+38."),
        ("optimizer", "weight_decay", float("nan"), "must be at least 0 and at most 3.4e+38."),
    ],
)
def test_values_that_float32_cannot_hold_are_refused(section: str, field: str, value: float, rule: str) -> None:
    config = Config()
    setattr(getattr(config, section), field, value)
    with pytest.raises(ConfigError, match=re.escape(f"{section}.{field}={value} {rule}")):
        config.validate()


@pytest.mark.parametrize("sizes", [{"hidden_size": 2**31 - 4}, {"hidden_size": 2**29, "vocab_size": 2**31 - 1}])
def test_arrays_on_which_xla_would_abort_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"one array would hold \d\.\de\+\d\d weights; it can hold 2\.9e\+17\."):
        ModelConfig(**sizes).validate()
    ModelConfig(num_layers=1024, hidden_size=2**20).validate()


@pytest.mark.parametrize("value", [-1, -(2**31)])
def test_a_negative_number_of_steps_is_not_auto(value: int) -> None:
    with pytest.raises(ConfigError, match=rf"train\.checkpoint_every={value} must be at least 0"):
        TrainConfig(checkpoint_every=value).validate()


def test_products_in_pieces_take_sequence_parallelism() -> None:
    with pytest.raises(ConfigError, match=r"Set mesh\.sequence_parallel=True too, or neither\."):
        MeshConfig(tensor=2, collective_matmul=True).validate()
    MeshConfig(tensor=2, sequence_parallel=True, collective_matmul=True).validate()


@pytest.mark.parametrize("value", [1.0, 0.9999999999, -0.1, float("nan")])
def test_decays_that_float32_rounds_to_1_are_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="must be at least 0 and below 1"):
        OptimizerConfig(beta1=value).validate()
    OptimizerConfig(beta1=0.9999999).validate()
    OptimizerConfig(beta1=0.99999995).validate()  # the largest float32 below 1
