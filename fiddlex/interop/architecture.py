"""What fiddlex knows of one class of models of Hugging Face's transformers, and the parts that classes share."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fiddlex.config import Config, ModelConfig
from fiddlex.errors import ConfigError
from fiddlex.interop.options import Json, Options


@dataclasses.dataclass(frozen=True)
class Part:
    """One tensor of a folder, and the weight, or the part of a weight, that it is."""

    name: str  # the tensor's name; in a layer, `{}` stands for the layer's number
    path: tuple[str, ...]  # the weight's keys
    transposed: bool = False  # stored as [outputs, inputs], as PyTorch's linear layers are
    # a dimension of one layer's weight, and the index in it; None: the whole weight
    slice: tuple[int, int] | None = None
    classes_reversed: bool = False  # the class numbers its outputs in the opposite order


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What fiddlex knows of one class of models of transformers."""

    name: str  # the name in `config.json`'s `architectures`
    model_type: str  # the name in its `model_type`
    model_of: Callable[[Options], ModelConfig]
    json_of: Callable[[Config], Json]  # the fields of a `config.json` that depend on a config
    parts: Callable[[ModelConfig], list[Part]]
    defaults: Mapping[str, Any]  # values that transformers gives to options that a `config.json` leaves out
    fixed: Mapping[str, tuple[Any, ...]]  # the values of options that fiddlex computes; a missing option has the first
    # other names that transformers takes for options, with the option's own name
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefix: str = ""  # what names of tensors begin with in this class, and not in the class of the bare network
    # tensors that repeat another, with its name; some versions of transformers write both, or only the repetition
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # ends of names that older versions wrote, with the end that is written now
    older_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # ends of names of tensors without weights, which older versions of transformers wrote
    ignored: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()  # beginnings of names of tensors that folders may have and this class does not use
    # a tensor that this class lacks, and the class that has it in addition to all tensors of this one
    wider: tuple[str, str] | None = None
    # from a classifier's `config.json` to the names of its classes
    classes_of: Callable[[Json], tuple[str, ...]] | None = None


def in_layers(name: str, parts: Iterable[Part]) -> list[Part]:
    """The parts of a layer, with the layer's name and number before their own."""
    return [dataclasses.replace(part, name=f"{name}.{{}}.{part.name}") for part in parts]


def norm(name: str, path: tuple[str, ...]) -> tuple[Part, Part]:
    return Part(f"{name}.weight", (*path, "scale")), Part(f"{name}.bias", (*path, "bias"))


def linear(name: str, path: tuple[str, ...], *, transposed: bool) -> tuple[Part, Part]:
    kernel = Part(f"{name}.weight", (*path, "kernel"), transposed)
    return kernel, Part(f"{name}.bias", (*path, "bias"))


# Options of every class. Quantized tensors hold other numbers than the weights; options of single layers would differ
# from those that fiddlex reads; `transformers_weights` names another file of weights than fiddlex reads.
FIXED: Mapping[str, tuple[Any, ...]] = dict.fromkeys(
    ("quantization_config", "per_layer_config", "transformers_weights"), (None,)
)
GELUS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "erf"}


def gelu(options: Options, name: str) -> str:
    """The value of `model.gelu` for an option."""
    if (value := options.text(name)) not in GELUS:
        raise ConfigError(f"{options.named(name)}: fiddlex computes {', '.join(GELUS)} here.")
    return GELUS[value]


def gelu_name(model: ModelConfig) -> str:
    return "gelu_new" if model.gelu == "tanh" else "gelu"


def dropout(options: Options, *names: str) -> float:
    """The rate of dropout, which fiddlex has once for all places."""
    rates = {options.number(name) for name in names}
    if len(rates) > 1:
        raise ConfigError(
            f"{', '.join(map(options.named, names))}: fiddlex has one rate of dropout for all of these. Write the same "
            "rate into each; no weight depends on it."
        )
    return rates.pop()
