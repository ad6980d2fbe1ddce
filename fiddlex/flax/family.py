"""A family of models made of three Flax modules.

    FAMILIES["mine"] = family(embed=Embed, block=Block, head=Head)

Each is a class, or another function, that makes a module of NNX or Linen from `config.model`, and for NNX with
`rngs=nnx.Rngs`. With B examples of S tokens, H = model.hidden_size and V = model.vocab_size:

    embed(tokens), int32 [B, S]  -> [B, S, H]     before the layers
    block(x), [B, S, H]          -> [B, S, H]     each of model.num_layers layers; they differ in their weights only
    head(x), [B, S, H]           -> [B, S, V]     logits of the next token; it may take the module `embed` too

Activations have the dtype model.dtype, and so have the weights of a call. The modules know nothing of the mesh.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fiddlex.config import Config
from fiddlex.config.families import Family
from fiddlex.flax.model import FlaxModel, Functions
from fiddlex.flax.parts import Part, make_part
from fiddlex.flax.traced import describe, places_of, shapes_of
from fiddlex.models.spec import Network

_MOST_KEPT = 16  # modules and descriptions that are kept; the planner asks for one model on many meshes


class _Made(NamedTuple):
    functions: Functions
    network: Network


def family(
    *, embed: Callable[..., Any], block: Callable[..., Any], head: Callable[..., Any], fields: Sequence[str] = ()
) -> Family:
    """A family for `fiddlex.config.families.FAMILIES`.

    `fields` names those of `config.model` that only some families read, such as `num_kv_heads`, and these modules do.
    """
    kept: dict[Any, Any] = {}

    def once(key: Any, make: Callable[[], Any]) -> Any:
        if key not in kept:
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            kept[key] = make()
        return kept[key]

    def made(config: Config) -> _Made:
        model, tensor = tuple(vars(config.model).values()), config.mesh.tensor

        def make() -> _Made:
            parts = once(model, lambda: _parts(config, embed, block, head))
            functions = Functions(parts, places_of(config, parts))
            return _Made(functions, describe(config, functions))

        found: _Made = once((model, tensor), make)
        return found

    def network(config: Config) -> Network:
        return made(config).network

    def model(config: Config) -> FlaxModel:
        return FlaxModel(config, made(config).functions)

    # An error of the modules names their file (`fiddlex.models.registry.errors_of_family`).
    network.__wrapped__ = model.__wrapped__ = block  # type: ignore[attr-defined]
    return Family(("lm",), network, model, fields=tuple(fields), dropout=True, attends=False)


def _parts(config: Config, *made: Callable[..., Any]) -> dict[str, Part]:
    shapes = shapes_of(config, num_sequences=1)
    embed = make_part("embed", made[0], config.model, shapes.tokens)
    block = make_part("block", made[1], config.model, shapes.activations)
    head = make_part("head", made[2], config.model, shapes.activations, embed)
    return {"embedding": embed, "layers": block, "head": head}
