"""A family of models made of three Flax modules.

    FAMILIES["mine"] = family(embed=Embed, block=Block, head=Head)

Each is a class, or another function, that makes a module of NNX or Linen from `config.model`, and for NNX with
`rngs=nnx.Rngs`. With B examples of S tokens, H = model.hidden_size and V = model.vocab_size:

    embed(tokens), int32 [B, S]  -> [B, S, H]     before the layers
    block(x), [B, S, H]          -> [B, S, H]     each of model.num_layers layers; they differ in their weights only
    head(x), [B, S, H]           -> [B, S, V]     logits of the next token; it may take the module `embed` too

Activations have the dtype model.dtype, and so have the weights of a call. The modules know nothing of the mesh.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fiddlex.config import Config, ModelConfig
from fiddlex.config.families import Family
from fiddlex.errors import ConfigError
from fiddlex.flax.model import FlaxModel, Functions
from fiddlex.flax.operations import Place
from fiddlex.flax.parts import Part, make_part
from fiddlex.flax.places import Rules, places_of, vocabulary_of, warn_of_whole
from fiddlex.flax.traced import call_types, check, describe
from fiddlex.models.spec import Network

_MOST_KEPT = 16  # modules and descriptions that are kept; the planner asks for one model on many meshes


class _Made(NamedTuple):
    functions: Functions
    network: Network


def family(
    *,
    embed: Callable[..., Any],
    block: Callable[..., Any],
    head: Callable[..., Any],
    fields: Sequence[str] = (),
    rules: Rules | None = None,
) -> Family:
    """A family for `fiddlex.config.families.FAMILIES`.

    Args:
      embed: makes the module before the layers.
      block: makes one layer.
      head: makes the module that scores.
      fields: those of `config.model` that only some families read, such as `num_kv_heads`, and these modules do.
      rules: maps each logical axis of the block's parameters, as `nnx.with_partitioning` and
        `linen.with_logical_partitioning` name them, to "tensor" if tensor ranks share it, else to None. Without rules
        a search over the traced layer decides which parameters tensor ranks share, and names are not read.

    Raises:
      ConfigError: when a rule is neither "tensor" nor None.
    """
    _check_rules(rules)
    kept, told = dict[Any, Any](), set[Any]()

    def once(key: Any, make: Callable[[], Any]) -> Any:
        if key not in kept:
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            kept[key] = make()
        return kept[key]

    def made(config: Config) -> _Made:
        model, mesh = tuple(vars(config.model).values()), config.mesh
        has_equal_parts = config.padded_vocab_size == config.model.vocab_size

        def make() -> _Made:
            parts, grown, adds_losses = once(model, lambda: _parts(config, embed, block, head))
            vocabulary = grown if has_equal_parts else {part: [None] * len(places) for part, places in grown.items()}
            functions = Functions(
                parts,
                places_of(config, parts, rules),
                vocabulary,
                adds_losses=adds_losses,
                sequence_parallel=mesh.sequence_parallel,
            )
            return _Made(functions, describe(config, functions))

        found: _Made = once((model, mesh.tensor, mesh.sequence_parallel, has_equal_parts), make)
        return found

    def network(config: Config) -> Network:
        return made(config).network

    def model(config: Config) -> FlaxModel:
        functions = made(config).functions
        if functions not in told:
            told.add(functions)
            warn_of_whole(config, functions, rules)
        return FlaxModel(config, functions)

    # An error of the modules names their file (`fiddlex.models.registry.errors_of_family`).
    network.__wrapped__ = model.__wrapped__ = block  # type: ignore[attr-defined]
    return Family(
        ("lm",),
        network,
        model,
        fields=tuple(fields),
        sequence_parallel=True,
        collective_matmul=False,
        dropout=True,
        attends=False,
    )


def _check_rules(rules: Any) -> None:
    if rules is None:
        return
    if not isinstance(rules, Mapping):
        raise ConfigError(
            f"family(…, rules={rules!r}): rules are a dictionary, as in {{'mlp': 'tensor', 'embed': None}}."
        )
    if wrong := [axis for axis, to in rules.items() if to not in ("tensor", None)]:
        raise ConfigError(
            f"family(…, rules=…) maps {wrong[0]!r} to {rules[wrong[0]]!r}; it maps a logical axis to 'tensor', or to "
            "None. Other mesh axes are fiddlex's own: layers are spread over pipe, examples over data."
        )


def _parts(config: Config, *made: Callable[..., Any]) -> tuple[dict[str, Part], dict[str, list[Place]], bool]:
    """The three modules, which weights of embedding and head grow with the vocabulary, and if the block adds a loss."""
    embed, block, head = made
    parts = _outer_parts(config, config.model, embed, head)
    parts["layers"] = make_part("block", block, config.model, call_types(config, num_sequences=1).activations)
    adds_losses = check(config, parts)
    larger = dataclasses.replace(config.model, vocab_size=2 * config.model.vocab_size)
    try:
        grown = _outer_parts(config, larger, embed, head)
    except Exception:  # of modules that are made for one vocabulary alone
        grown = parts
    return parts, vocabulary_of(parts, grown, (config.model.vocab_size, larger.vocab_size)), adds_losses


def _outer_parts(config: Config, model: ModelConfig, *made: Callable[..., Any]) -> dict[str, Part]:
    """Embedding and head as a config's sections `model` say."""
    shapes = call_types(config, num_sequences=1)
    embed = make_part("embed", made[0], model, shapes.tokens)
    return {"embedding": embed, "head": make_part("head", made[1], model, shapes.activations, embed)}
