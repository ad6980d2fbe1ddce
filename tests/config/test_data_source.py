from fractions import Fraction

import pytest

from fiddlex.config import Config
from fiddlex.config.values.source import parse_source, parse_split
from fiddlex.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("megatron:/data/a", [("1", "/data/a")]),
        ("megatron:a,b:c", [("1", "a,b:c")]),  # a path like any other
        ("megatron:0.7:/data/a,0.3:b:c", [("0.7", "/data/a"), ("0.3", "b:c")]),
        ("megatron:2:a,1e-3:b", [("2", "a"), ("0.001", "b")]),
        ("megatron:.5:a,2.:b", [("0.5", "a"), ("2", "b")]),
        ("megatron:5:a", [("5", "a")]),
    ],
)
def test_sources(value, expected):
    assert parse_source("data.source", value) == [(Fraction(weight), prefix) for weight, prefix in expected]


@pytest.mark.parametrize("value", ["0.7:a,b", "0:a,1:b", "0.7:a,-1:b", "0.7:a,", "1e999:a", "٣:a,1:b", "1:a,c.d:e"])
def test_wrong_blends(value):
    with pytest.raises(ConfigError, match=r"is not WEIGHT:PREFIX with a weight above 0\. A blend is written"):
        parse_source("data.source", f"megatron:{value}")


def test_splits():
    assert parse_split("data.split", "969,30,1") == (0.969, 0.03, 0.001)
    assert parse_split("data.split", "3, 1") == (0.75, 0.25, 0)
    assert parse_split("data.split", "1") == (1, 0, 0)


@pytest.mark.parametrize("value", ["", "a", "1,2,3,4", "-1,2", "0,1", "nan", "inf,1", "1,nan", "0,0,0", "1_0,1", "٣,1"])
def test_wrong_splits(value):
    with pytest.raises(ConfigError, match=r"data\.split=.* must be the shares .* as in 969,30,1 or 99,1"):
        parse_split("data.split", value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "source",
            "megatron:",
            "'megatron:' is not a data source. megatron needs a path: write megatron:PREFIX.",
        ),
        ("eval_source", "megatron:1:a,1:b", r"data\.eval_source=.* is a blend: evaluate on one dataset at a time"),
        ("split", "0", r"data\.split='0' must be the shares"),
    ],
)
def test_configs_are_checked(field, value, message):
    config = Config()
    setattr(config.data, field, value)
    with pytest.raises(ConfigError, match=message):
        config.validate()


def test_labelled_tasks_take_no_running_text():
    config = Config()
    config.model.family = "bert"
    config.model.objective = "classification"
    config.data.source = "megatron:a"
    with pytest.raises(ConfigError, match="its data is one of tsv:PATH, jsonl:PATH"):
        config.validate()
