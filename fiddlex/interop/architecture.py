"""What fiddlex knows of one class of models of Hugging Face's transformers, and the parts that classes share."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fiddlex.config import Config, ModelConfig
from fiddlex.errors import ConfigError
from fiddlex.interop.options import Json, Options


@dataclasses.dataclass(frozen=True)
class Part:
    """One tensor of a folder, and the weight, or the part of a weight, that it is.

    Attributes:
      name: the tensor's name; in a layer, `{}` stands for the layer's number.
      path: the weight's keys.
      transposed: whether the tensor is stored as [outputs, inputs], as PyTorch's linear layers are.
      slice: a dimension of the weight of one layer, and the index in it that the tensor is; None: the whole weight.
      classes_reversed: whether the class numbers its outputs in the opposite order.
    """

    name: str
    path: tuple[str, ...]
    transposed: bool = False
    slice: tuple[int, int] | None = None
    classes_reversed: bool = False


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What fiddlex knows of one class of models.

    Attributes:
      name: the name in `config.json`'s `architectures`.
      model_type: the name in its `model_type`.
      model_of: from the options of a `config.json` to the model section of a config.
      json_of: from a config to the fields of a `config.json` that depend on it.
      parts: the tensors of a model.
      defaults: the values that transformers gives to options that a `config.json` leaves out.
      fixed: options with the values that fiddlex computes; a missing option has the first of them.
      aliases: other names that transformers takes for options, with the option's own name.
      prefix: what the names of tensors begin with in this class and not in the class of the bare network.
      copies: tensors that repeat another one, with the name of that one; some versions of transformers write them too,
        or write them in place of it.
      older_names: ends of names that older versions wrote, with the end that is written now.
      ignored: ends of names of tensors that older versions of transformers wrote and that hold no weights.
      unused: beginnings of names of tensors that folders may have and that this class does not use.
      wider: a tensor that this class does not have, and the class that has it in addition to all tensors of this one.
      classes_of: from a `config.json` to the names of the classes, for a class of models that classifies.
    """

    name: str
    model_type: str
    model_of: Callable[[Options], ModelConfig]
    json_of: Callable[[Config], Json]
    parts: Callable[[ModelConfig], list[Part]]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, tuple[Any, ...]]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefix: str = ""
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    older_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    wider: tuple[str, str] | None = None
    classes_of: Callable[[Json], tuple[str, ...]] | None = None


def in_layers(name: str, parts: Iterable[Part]) -> list[Part]:
    """The parts of a layer with names that begin with that of the layer."""
    return [dataclasses.replace(part, name=f"{name}.{{}}.{part.name}") for part in parts]


def norm(name: str, path: tuple[str, ...]) -> tuple[Part, Part]:
    """The scale and the bias of a LayerNorm."""
    return Part(f"{name}.weight", (*path, "scale")), Part(f"{name}.bias", (*path, "bias"))


def linear(name: str, path: tuple[str, ...], *, transposed: bool) -> tuple[Part, Part]:
    """The kernel and the bias of a matrix product."""
    kernel = Part(f"{name}.weight", (*path, "kernel"), transposed)
    return kernel, Part(f"{name}.bias", (*path, "bias"))


# Options of every class. Quantized tensors hold other numbers than the weights; options of single layers would differ
# from those that fiddlex reads; `transformers_weights` names another file of weights than fiddlex reads.
FIXED: Mapping[str, tuple[Any, ...]] = dict.fromkeys(
    ("quantization_config", "per_layer_config", "transformers_weights"), (None,)
)
GELUS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "erf"}


def gelu(options: Options, name: str) -> str:
    """The value of `model.gelu` for an option.

    Raises:
      ConfigError: when fiddlex does not compute it.
    """
    if (value := options.text(name)) not in GELUS:
        raise ConfigError(f"{options.named(name)}: fiddlex computes {', '.join(GELUS)} here.")
    return GELUS[value]


def gelu_name(model: ModelConfig) -> str:
    """The name that transformers has for a model's GELU."""
    return "gelu_new" if model.gelu == "tanh" else "gelu"


def dropout(options: Options, *names: str) -> float:
    """The rate of dropout, which fiddlex has once for all places.

    Raises:
      ConfigError: when the options have different values, or one is no number.
    """
    rates = {options.number(name) for name in names}
    if len(rates) > 1:
        raise ConfigError(
            f"{', '.join(map(options.named, names))}: fiddlex has one rate of dropout for all of these. Write the same "
            "rate into each; no weight depends on it."
        )
    return rates.pop()
