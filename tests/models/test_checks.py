"""Descriptions that no fold could read rightly are refused with the part at fault."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from fiddlex.config import Config
from fiddlex.config.families import FAMILIES, Family
from fiddlex.errors import ConfigError
from fiddlex.models.descriptions import gpt
from fiddlex.models.registry import make_model, network_of
from fiddlex.models.spec import Attention, Network, Parameter, Product


def with_scale(**changes: Any) -> Callable[[Network], Any]:
    """Another scale of the last norm."""
    scale = Parameter(**{"shape": (128,), "axes": ("hidden",), "value": 1.0} | changes)
    return lambda network: dataclasses.replace(network, head={"norm": {"scale": scale}})


def with_branches(change: Callable[[Any], Any]) -> Callable[[Network], Any]:
    return lambda network: dataclasses.replace(network, branches=tuple(map(change, network.branches)))


def with_scoring(*products: Product) -> Callable[[Network], Any]:
    return lambda network: dataclasses.replace(network, scoring=products)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda network: None, "its description is None; it must be a fiddlex.models.spec.Network"),
        (lambda n: dataclasses.replace(n, num_layers=5), "num_layers=5, and the config model.num_layers=4"),
        (lambda n: dataclasses.replace(n, hidden=7), "hidden=7, and the config model.hidden_size=128"),
        (with_scale(axes=("wide",)), "head.norm.scale has the axis 'wide', which is not one of layers, vocab"),
        (with_scale(axes=()), "head.norm.scale has 1 sizes and 0 axes"),
        (with_scale(shape=(64,)), "head.norm.scale has 64 for its axis 'hidden'; the model has 128"),
        (with_scale(shape=(128.0,)), "head.norm.scale has shape=(128.0,); sizes are integers above 0"),
        (with_scale(std=-1.0), "head.norm.scale has std=-1.0"),
        (lambda n: dataclasses.replace(n, head={"norm": 1}), "head.norm is 1; it must be a Parameter"),
        (lambda n: dataclasses.replace(n, head={"a.b": {}}), "head has the name 'a.b'"),
        (with_branches(lambda branch: ("norm", *branch)), "branches[0] has 'norm', which is no operation"),
        (with_branches(lambda branch: branch[:-1]), "branches[0] must end in Residual()"),
        (
            with_branches(lambda branch: (Product(1, 1, "output"), *branch)),
            "branches[0] has Product(inputs=1, outputs=1",
        ),
        (
            with_branches(lambda branch: (Product(1, 1, made_by="norm"), *branch)),
            "whose made_by must be one of '', 'norms', 'gelu'",
        ),
        (
            with_branches(lambda branch: (Product(1, 1, made_by="gelu"), *branch)),
            "after None; made_by='gelu' needs Activation there",
        ),
        (with_branches(lambda branch: (Attention(1, 1, True), *branch)), "a layer has 3 times Attention"),
        (with_scoring(Product(128, 256, "vocab", "scord")), "whose positions must be one of 'scored', 'first'"),
    ],
)
def test_a_wrong_description_is_refused(
    change: Callable[[Network], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "mine", Family(("lm",), lambda config: change(gpt(config)), "unused:unused"))
    config = Config()
    config.model.family = "mine"
    with pytest.raises(ConfigError) as error:
        network_of(config.validate())
    assert str(error.value).startswith("model.family=mine: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("nowhere:gpt", "its network 'nowhere:gpt' cannot be imported (No module named 'nowhere')"),
        ("fiddlex.models.descriptions:nothing", "its network 'fiddlex.models.descriptions:nothing' cannot be imported"),
        (None, "its network is None; it must be a function of a config"),
    ],
)
def test_what_a_family_names_must_be_there(named: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "mine", Family(("lm",), named, named))
    config = Config()
    config.model.family = "mine"
    for make in (network_of, make_model):
        with pytest.raises(ConfigError) as error:
            make(config)
        assert message.replace("network", "network" if make is network_of else "model") in str(error.value)


def fails(config: Config) -> Network:
    raise KeyError("width")


@pytest.mark.parametrize("function", [fails, lambda: None], ids=["raises", "takes no config"])
def test_a_function_of_a_family_that_fails_is_named_by_its_line(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "mine", Family(("lm",), function, function))
    config = Config()
    config.model.family = "mine"
    for make in (network_of, make_model):
        with pytest.raises(
            ConfigError, match=r"test_checks\.py(, line \d+)?: (KeyError: 'width'|TypeError: .* takes 0)"
        ):
            make(config)


@pytest.mark.parametrize("objectives", [(), "lm", ("lm2",)])
def test_a_family_has_objectives_that_there_are(objectives: Any) -> None:
    with pytest.raises(ConfigError, match="a model family has objectives="):
        Family(objectives, "a:b", "c:d")


def test_a_family_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    config.model.family = "mine"
    with pytest.raises(ConfigError, match=r"there is no such family\. Known: gpt, bert, llama\. A family"):
        config.validate()
    monkeypatch.setitem(FAMILIES, "mine", ("lm", gpt))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="it must be a Family"):
        config.validate()


def test_a_family_of_fiddlex_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "gpt", FAMILIES["llama"])
    with pytest.raises(
        ConfigError, match=r"FAMILIES\['gpt'\] is another than fiddlex's own.*register yours under anoth"
    ):
        Config().validate()
