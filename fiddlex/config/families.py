"""The families of models by name: their objectives, and where their descriptions and their models are defined.

To add a family of your own, add an entry to `FAMILIES` (docs/models.md). Configs are checked against this table, so it
imports no models: it holds names, which `fiddlex.models.registry` imports on first use.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from fiddlex.config import rules
from fiddlex.config.user_code.registries import Registry
from fiddlex.errors import ConfigError

# Fields of `config.model` that only some families read; the others refuse values other than the default.
ROTARY_FIELDS = (
    "rope_base",
    "rope_scaling",
    "rope_factor",
    "rope_low_frequency",
    "rope_high_frequency",
    "rope_original_len",
)
HEAD_FIELDS = ("num_kv_heads", "head_dim", "qk_norm", "qkv_bias")
OBJECTIVES = ("lm", "mlm", "mlm_nsp", "mlm_sop", "classification", "multiple_choice")


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of models."""

    # what its models can be trained to do (`fiddlex.models.task_sizes`); the first is model.objective's default
    objectives: tuple[str, ...]
    # a function from a config to a `fiddlex.models.spec.Network`, or its name (`fiddlex.models.descriptions:gpt`)
    network: Callable[[Any], Any] | str
    # a function from a config to the `fiddlex.models.model.Model` that computes the network, or its name
    model: Callable[[Any], Any] | str
    # those of `config.model` that the family reads, of those with the role `FAMILY` (`fiddlex.config.fields`)
    fields: tuple[str, ...] = ()
    # whether a layer is exact on a part of the sequence (`mesh.sequence_parallel`), as with `fiddlex.models.layers`
    sequence_parallel: bool = False
    collective_matmul: bool = True  # whether such a layer's products run in pieces (`mesh.collective_matmul`)
    # whether a layer attends by `fiddlex.models.attention.attend`: only then it runs in flash kernels, makes parts of
    # attention again (`pipeline.recompute`), and keeps keys and values to generate text
    attends: bool = True
    dropout: bool = False  # whether a layer drops what `fiddlex.models.context.Context.dropout` says (`model.dropout`)

    def __post_init__(self) -> None:
        known = isinstance(self.objectives, tuple) and set(self.objectives) <= set(OBJECTIVES)
        if not (known and self.objectives):
            raise ConfigError(
                f"a model family has objectives={self.objectives!r}; it must be a tuple of one or more of "
                f"{', '.join(OBJECTIVES)}."
            )


FAMILIES: Registry[Family] = Registry(
    "model.family",
    {
        "gpt": Family(
            ("lm",),
            "fiddlex.models.descriptions:gpt",
            "fiddlex.models.gpt:GPT",
            fields=("gelu", "tied_embeddings"),
            sequence_parallel=True,
            dropout=True,
        ),
        "bert": Family(
            ("mlm", "mlm_nsp", "mlm_sop", "classification", "multiple_choice"),
            "fiddlex.models.descriptions:bert",
            "fiddlex.models.bert:BERT",
            fields=("post_norm", "gelu"),
            sequence_parallel=True,
            dropout=True,
        ),
        "llama": Family(
            ("lm",),
            "fiddlex.models.descriptions:llama",
            "fiddlex.models.llama:Llama",
            fields=("tied_embeddings", *HEAD_FIELDS, *ROTARY_FIELDS),
            sequence_parallel=True,
            dropout=True,
        ),
    },
)


def family(name: str) -> Family:
    """The family with this name; ConfigError when there is none, or its entry is not a `Family`."""
    if name not in FAMILIES:
        raise ConfigError(
            f"model.family={name!r}: there is no such family. {rules.nearest(name, FAMILIES)} A family of your own "
            "must be entered in fiddlex.config.families.FAMILIES before a config or workdir that names it is read: if "
            "a config file does so, name it with --config=FILE.py (docs/models.md)."
        )
    if not isinstance(FAMILIES[name], Family):
        raise ConfigError(f"fiddlex.config.families.FAMILIES[{name!r}] is {FAMILIES[name]!r}; it must be a Family.")
    if name in FAMILIES.built_in and name in FAMILIES.origins:  # a workdir tells the family's name alone
        raise ConfigError(
            f"fiddlex.config.families.FAMILIES[{name!r}] is another than fiddlex's own. Programs that read the workdir "
            "would compute its model by fiddlex's: register yours under another name."
        )
    return FAMILIES[name]
