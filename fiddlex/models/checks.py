"""Checks the description of a network: rejects errors that the code that reads the description would not notice."""

import itertools
import math
from typing import Any

from fiddlex.config import Config
from fiddlex.errors import ConfigError
from fiddlex.models.spec import (
    Activation,
    Attention,
    Network,
    Norm,
    Operation,
    Parameter,
    Parameters,
    Product,
    Residual,
)
from fiddlex.models.traced_layer import Traced
from fiddlex.parallel.axes import MESH_AXES

Strings = tuple[str, ...]
MAKERS = {"norms": Norm, "gelu": Activation}  # what makes the input of a product, by `Product.made_by`


def check(network: Any, config: Config) -> None:
    try:
        if not isinstance(network, Network):
            raise ConfigError(f"its description is {network!r}; it must be a fiddlex.models.spec.Network")
        _equal("num_layers", network.num_layers, "model.num_layers", config.model.num_layers)
        _equal("hidden", network.hidden, "model.hidden_size", config.model.hidden_size)
        sizes = {"hidden": network.hidden, "vocab": config.model.vocab_size}
        for part, parameters in network.parts.items():
            _check_parameters(part, parameters, sizes)
        _check_branches(network)
        for product in (each for each in network.scoring if isinstance(each, Product)):
            _check_product(product, "scoring", splits=("vocab", ""), positions=("scored", "first"))
    except ConfigError as error:
        raise ConfigError(
            f"model.family={config.model.family}: {error}. Mend the description (docs/models.md)."
        ) from None


def _check_parameters(path: str, parameters: Parameters, sizes: dict[str, int]) -> None:
    for name, each in parameters.items():
        if not (isinstance(name, str) and f"_{name}".isidentifier()):
            raise ConfigError(f"{path} has the name {name!r}; a name is a word of letters, digits and underscores")
        if isinstance(each, dict):
            _check_parameters(f"{path}.{name}", each, sizes)
        elif isinstance(each, Parameter):
            _check_parameter(f"{path}.{name}", each, sizes)
        else:
            raise ConfigError(f"{path}.{name} is {each!r}; it must be a Parameter or a dictionary of them")


def _check_parameter(path: str, parameter: Parameter, sizes: dict[str, int]) -> None:
    shape, axes = parameter.shape, parameter.axes
    if not all(type(size) is int and size > 0 for size in shape):
        raise ConfigError(f"{path} has shape={shape}; sizes are integers above 0")
    if len(axes) != len(shape):
        raise ConfigError(f"{path} has {len(shape)} sizes and {len(axes)} axes; give one axis for each size")
    for size, axis in zip(shape, axes, strict=True):
        if axis is not None and axis not in MESH_AXES:
            raise ConfigError(f"{path} has the axis {axis!r}, which is not one of {', '.join(MESH_AXES)}, or None")
        if axis in sizes and size != sizes[axis]:
            raise ConfigError(f"{path} has {size} for its axis {axis!r}; the model has {sizes[axis]}")
    if not 0 <= parameter.std < math.inf:
        raise ConfigError(f"{path} has std={parameter.std}, which must be at least 0 and finite")


def _check_branches(network: Network) -> None:
    for number, branch in enumerate(network.branches):
        where = f"branches[{number}]"
        for each in branch:
            if not isinstance(each, Operation):
                raise ConfigError(f"{where} has {each!r}, which is no operation of fiddlex.models.spec")
            if isinstance(each, Product):
                _check_product(each, where, splits=("outputs", "inputs", ""), positions=("",), makers=("", *MAKERS))
        for before, after in itertools.pairwise((None, *branch)):
            if isinstance(after, Product) and after.made_by and not isinstance(before, MAKERS[after.made_by]):
                maker = MAKERS[after.made_by].__name__
                raise ConfigError(f"{where} has {after} after {before}; made_by={after.made_by!r} needs {maker} there")
        if not branch or not isinstance(branch[-1], Residual | Traced):
            raise ConfigError(f"{where} must end in Residual(), where it is added to the residual stream")
    number = sum(isinstance(each, Attention) for each in network.operations)
    if number != 1 and not any(isinstance(each, Traced) for each in network.operations):
        raise ConfigError(f"a layer has {number} times Attention; it must have it once")


def _check_product(
    product: Product, where: str, *, splits: Strings, positions: Strings, makers: Strings = ("",)
) -> None:
    fields = {"split": splits, "positions": positions, "made_by": makers}
    for name, known in fields.items():
        if getattr(product, name) not in known:
            raise ConfigError(f"{where} has {product}, whose {name} must be one of {', '.join(map(repr, known))}")


def _equal(name: str, value: int, field: str, expected: int) -> None:
    if value != expected:
        raise ConfigError(f"its description has {name}={value}, and the config {field}={expected}")
