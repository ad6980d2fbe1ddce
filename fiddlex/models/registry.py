"""The families of models, by name: what each can be trained to do, its description, and what computes it.

A family of your own is one more entry of `FAMILIES` (docs/models.md). Imports neither jax nor configs: the description
and the class of a built-in family are imported when they are first asked for.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from fiddlex import rules

if TYPE_CHECKING:
    from fiddlex.config import Config
    from fiddlex.models.model import Model
    from fiddlex.models.spec import Network


class Family(NamedTuple):
    """One family.

    Attributes:
      objectives: what it can be trained to do (`fiddlex.models.tasks`); the first is meant where `model.objective` is
        empty.
      network: describes the network of a config; or names the function that does, as in `fiddlex.models.families:gpt`.
      model: makes what computes the network of a config; or names the class that does.
      post_norm: whether its norms may stand after the residual sums (`model.post_norm`).
    """

    objectives: tuple[str, ...]
    network: "Callable[[Config], Network] | str"
    model: "Callable[[Config], Model] | str"
    post_norm: bool = False


FAMILIES: dict[str, Family] = {
    "gpt": Family(("lm",), "fiddlex.models.families:gpt", "fiddlex.models.gpt:GPT"),
    "bert": Family(
        ("mlm", "mlm_nsp", "mlm_sop", "classification", "multiple_choice"),
        "fiddlex.models.families:bert",
        "fiddlex.models.bert:BERT",
        post_norm=True,
    ),
}


def family(name: str) -> Family:
    """The family of a name.

    Raises:
      ConfigError: when there is none.
    """
    rules.choice("model.family", name, tuple(FAMILIES))
    return FAMILIES[name]


def describe(config: "Config") -> "Network":
    """The description of the network of a config."""
    return _found(family(config.model.family).network)(config)


def make_model(config: "Config") -> "Model":
    """What computes the network of a config."""
    return _found(family(config.model.family).model)(config)


def _found(named: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(named, str):
        return named
    module, _, name = named.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
