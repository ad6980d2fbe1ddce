"""The families of models by name: what each can be trained to do, and where its description and its computation are.

A family of your own is one more entry of `FAMILIES` (docs/models.md). Configs are checked against this table, so it
imports no models: it names what is imported when it is first asked for (`fiddlex.models.registry`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from fiddlex.config import rules


class Family(NamedTuple):
    """One family.

    Attributes:
      objectives: what it can be trained to do (`fiddlex.models.task_sizes`); the first is the default of
        `model.objective`.
      network: a function of a config that describes its network (`fiddlex.models.spec.Network`), or the name of one, as
        in `fiddlex.models.families:gpt`.
      model: a function of a config that makes what computes the network (`fiddlex.models.model.Model`), or the name of
        one.
      post_norm: whether its norms may stand after the residual sums (`model.post_norm`).
    """

    objectives: tuple[str, ...]
    network: Callable[[Any], Any] | str
    model: Callable[[Any], Any] | str
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
