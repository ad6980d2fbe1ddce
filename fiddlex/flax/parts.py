"""One Flax module as two pure functions: one makes its weights, one applies them.

Weights are nested dictionaries of arrays, whose names are those of the module's parameters. A module of NNX is made in
a trace, so that its parameters have no values. What it keeps besides, such as a mask, is computed then.
"""

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, linen, nnx

from fiddlex.config import ModelConfig
from fiddlex.errors import ConfigError
from fiddlex.flax.alone import Trace
from fiddlex.models.weights import Weights
from fiddlex.pipeline import layer_losses

Tree = Any
Path = tuple[str, ...]
MODES = ("deterministic", "train")  # arguments of a call that say whether the module drops anything
LOSSES = "losses"  # the collection of Linen modules whose values are added to the objective


class Loss(nnx.Variable):
    """What a NNX block sows as a part of the objective: `self.sow(fiddlex.flax.Loss, "balance", value)`."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A module of one of the three roles `embed`, `block` and `head`.

    `apply(weights, key, *inputs)` is the module's output; `key` is None where it drops nothing. `bound(weights)` is
    the module with its weights, to be given to another one.
    """

    role: str
    init: Callable[[jax.Array], Weights]  # float32 weights, from a key
    apply: Callable[..., Any]
    bound: Callable[[Weights], Any]
    takes_embed: bool  # whether its call takes the module `embed`, to score with the embedding's table
    axes: dict[Path, tuple[Any, ...]]  # logical axes of the dimensions of parameters that have such names


def make_part(
    role: str, made: Callable[..., Any], config: ModelConfig, given: jax.ShapeDtypeStruct, embed: "Part | None" = None
) -> Part:
    """The module that `made(config, rngs=…)` or `made(config)` returns, of NNX or Linen.

    `given` has the shape of the array that its call gets. The head may be called with the module `embed` too.

    Raises:
      ConfigError: when it is no module, or one that a pipeline cannot run.
    """
    if isinstance(made, nnx.Module | linen.Module):
        raise ConfigError(f"{role} is a module; give its class, or a function that makes one from the config.")
    takes_rngs = _takes(made, "rngs") or _takes_all(made)

    def make(key: jax.Array) -> Any:
        return made(config, rngs=nnx.Rngs(key)) if takes_rngs else made(config)

    if takes_rngs:
        return _nnx(role, make, given, embed)
    module = make(jax.random.key(0))
    if isinstance(module, linen.Module):
        return _linen(role, module, given, embed)
    if isinstance(module, nnx.Module):
        raise ConfigError(
            f"{role} is made without `rngs`; let it take them, as in lambda config, rngs: Mine(rngs=rngs)."
        )
    raise _no_module(role, module)


def _no_module(role: str, found: Any) -> ConfigError:
    return ConfigError(
        f"{role} makes {type(found).__name__}; it must make a flax.nnx.Module from the config and `rngs`, or a "
        "flax.linen.Module from the config."
    )


def _nnx(role: str, make: Callable[[jax.Array], Any], given: jax.ShapeDtypeStruct, embed: Part | None) -> Part:
    made, sows = list[Any](), set[type]()

    def split(key: jax.Array) -> Any:
        with jax.ensure_compile_time_eval():  # in a trace, of all that does not follow from the key
            module = make(key)
        if not isinstance(module, nnx.Module):
            raise _no_module(role, module)
        graph, params, rest = nnx.split(module, nnx.Param, ...)  # type: ignore[misc]
        made[:] = module, graph, rest
        return params

    first, second = map(jax.random.key, (0, 1))
    with nnx.use_eager_sharding(False):  # its annotations name logical axes, and there is no mesh yet
        params = jax.eval_shape(split, first)
        other = made[2]
        if _holds_tracers(made[1], other):  # made with two keys, what is random differs
            split(second)
            other = made[2]
            split(first)
    module, graph, rest = made
    _check_rest(role, rest, other)
    rest = jax.tree.map(_without_trace, rest)
    for path, each in nnx.to_flat_state(params):
        if not hasattr(value := _value(each), "shape"):
            raise ConfigError(
                f"{role} has {'.'.join(_path(path))}, a nnx.Param that holds a {type(value).__name__} in place of an "
                "array. Make a nnx.Param of each array, in a module or a nnx.Dict."
            )
    paths = [_path(path) for path, _ in nnx.to_flat_state(params)]
    _check_leaves(role, zip(paths, jax.tree.leaves(params), strict=True))
    structure = jax.tree.structure(params)
    modes = _modes(role, type(module).__call__)
    _check_streams(role, module)
    tags = sorted({each.tag for _, each in nnx.iter_graph(module) if isinstance(each, nnx.RngStream)})

    def init(key: jax.Array) -> Weights:
        with nnx.use_eager_sharding(False):
            return _nested(zip(paths, jax.tree.leaves(nnx.state(make(key), nnx.Param)), strict=True))

    def bound(weights: Weights) -> Any:
        state = jax.tree.unflatten(structure, [_at(weights, path) for path in paths])
        called = nnx.merge(graph, state, rest, copy=True)  # without a copy a call would write into `rest`
        called.eval()
        return called

    def apply(weights: Weights, key: jax.Array | None, *inputs: Any, **others: Any) -> Any:
        called = bound(weights)
        if key is not None:
            called.train()
            keys: dict[str, Any] = {tag: jax.random.fold_in(key, number) for number, tag in enumerate(tags)}
            nnx.reseed(called, **keys)
        others |= modes(key is not None)
        if not sows:  # flax 0.12.8 cannot capture in a module that has a nnx.List inside nnx.remat
            return _with_losses(role, called(*inputs, **others))
        result, *sown = nnx.capture(called, *sows)(*inputs, **others)
        return _with_losses(role, result, sown, nnx.state(called, Loss))

    specs = nnx.to_flat_state(nnx.get_partition_spec(params))
    axes = {_path(path): tuple(_value(spec)) for path, spec in specs if any(_value(spec))}
    part = Part(role, init, apply, bound, _takes(type(module).__call__, "embed"), axes)

    known = {path for path, _ in nnx.to_flat_state(rest)}

    def called(drops: bool, params: Any, rest: Any, x: jax.Array, of_embed: Weights) -> list[tuple[Any, Any]]:
        module = nnx.merge(graph, params, rest, copy=True)
        module.train() if drops else module.eval()
        others = {"embed": embed.bound(of_embed)} if embed and part.takes_embed else {}
        with _reaching_into(others.get("embed")), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of sowing without nnx.capture
            module(x, **others, **modes(drops))
        kept = nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Any(nnx.Param, nnx.RngState))))
        added = {path: type(each) for path, each in kept if path not in known and isinstance(each, Loss)}
        sows.update(added.values())
        return [(path, each) for path, each in kept if path not in added]

    for drops in (False, True):
        call = functools.partial(called, drops)
        _check_unwritten(role, call, params, rest, given, jax.eval_shape(embed.init, first) if embed else {})
    return part


def _linen(role: str, module: linen.Module, given: jax.ShapeDtypeStruct, embed: Part | None) -> Part:
    modes, takes_embed = _modes(role, type(module).__call__), _takes(type(module).__call__, "embed")

    def boxed(key: jax.Array) -> Any:
        keys = {name: jax.random.fold_in(key, number) for number, name in enumerate(("params", "dropout"))}
        others = {"embed": embed.bound(embed.init(key))} if takes_embed and embed else {}
        with _reaching_into(others.get("embed")):
            return module.init(keys, jnp.zeros(given.shape, given.dtype), **others, **modes(False))

    def variables(key: jax.Array) -> Any:
        return linen.unbox(boxed(key))

    found = jax.eval_shape(variables, jax.random.key(0))
    if others := sorted(set(found) - {"params", LOSSES}):
        raise _changing(role, f"the collection {others[0]!r}")
    _check_leaves(role, flat(found.get("params", {})))
    specs = linen.get_partition_spec(jax.eval_shape(boxed, jax.random.key(0)))

    def apply(weights: Weights, key: jax.Array | None, *inputs: Any, **others: Any) -> Any:
        rngs, call = {} if key is None else {"dropout": key}, others | modes(key is not None)
        try:
            result, sown = module.apply({"params": weights}, *inputs, **call, rngs=rngs, mutable=[LOSSES])
        except errors.InvalidRngError as error:
            raise ConfigError(
                f"{role} asks for random numbers that there are not: {error}. The only stream is 'dropout', and there "
                "is none where nothing is dropped: draw by self.make_rng('dropout'), in training alone."
            ) from error
        return _with_losses(role, result, sown)

    return Part(
        role,
        init=lambda key: variables(key).get("params", {}),
        apply=apply,
        bound=lambda weights: module.bind({"params": weights}),
        takes_embed=takes_embed,
        axes={path: tuple(spec) for path, spec in flat(specs.get("params", {})) if any(spec)},
    )


@contextlib.contextmanager
def _reaching_into(embed: Any) -> Iterator[None]:
    """Tells a head what it cannot reach in the module `embed` that it gets, if that is one of Linen."""
    try:
        yield
    except AttributeError as error:
        if not isinstance(embed, linen.Module):
            raise
        raise ConfigError(
            f"head uses what embed has only inside its own call: {error} Let {type(embed).__name__} make its "
            "submodules in `setup`, not in a compact call."
        ) from error


def _with_losses(role: str, result: Any, *sown: Any) -> Any:
    """What a call returned; with a block that returns or sows losses, its array and their sum."""
    leaves = jax.tree.leaves(sown)
    if role != "block":
        if leaves:
            raise ConfigError(f"{role} sows a loss, which only a block may: let the block sow it.")
        return result
    x, losses = layer_losses.split(result)
    losses += leaves
    if wrong := [each for each in losses if not _is_loss(each)]:
        raise ConfigError(
            f"block returns or sows {_described(wrong[0])} beside its activations. All of that is added to the "
            "objective, so it must be floating-point numbers: take the mean of an array, or wrap the block in a module "
            "that returns the activations alone."
        )
    return (x, sum(jnp.asarray(each, jnp.float32) for each in losses)) if losses else x


def _is_loss(x: Any) -> bool:
    return isinstance(x, float) or (isinstance(x, jax.Array) and not x.shape and jnp.issubdtype(x.dtype, jnp.floating))


def _described(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array) else f"a {type(x).__name__}"


def _check_streams(role: str, module: nnx.Module) -> None:
    """Checks that all that drops has random numbers."""
    for path, each in nnx.iter_graph(module):
        if isinstance(each, nnx.Dropout) and each.rngs is None and each.rate:
            raise ConfigError(
                f"{'.'.join([role, *map(str, path)])} is a nnx.Dropout without random numbers, and its call gets none: "
                "make it with rngs, as in nnx.Dropout(rate, rngs=rngs)."
            )


def _holds_tracers(graph: Any, rest: Any) -> bool:
    """Whether arrays of the trace that made a module are among its static attributes, or what it keeps but streams."""
    static = [getattr(attribute, "value", None) for _, attribute in graph.attributes]
    kept = [_value(each) for _, each in nnx.to_flat_state(rest) if not isinstance(each, nnx.RngState)]
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves([static, kept]))


def _without_trace(x: Any) -> Any:
    """In place of a stream's key in a trace any key: calls get their own."""
    if not isinstance(x, jax.core.Tracer):
        return x
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.zeros(x.shape, x.dtype)
    key = jax.random.key(0, impl=jax.random.key_impl(x))
    return jax.random.split(key, x.shape) if x.shape else key


def _check_rest(role: str, rest: Any, other: Any) -> None:
    """Checks what a module keeps besides parameters, as two keys make it."""
    for (path, each), (_, different) in zip(*map(nnx.to_flat_state, (rest, other)), strict=True):
        if isinstance(each, nnx.BatchStat):
            raise _changing(role, f"{'.'.join(_path(path))}, a nnx.BatchStat")
        if isinstance(each, nnx.RngState) or each is different:
            continue
        leaves = zip(*map(jax.tree.leaves, map(_value, (each, different))), strict=True)
        if not all(jnp.array_equal(a, b, equal_nan=True) for a, b in leaves):
            raise ConfigError(
                f"{role} keeps {'.'.join(_path(path))}, random numbers outside a nnx.Param. They would be the same in "
                "all layers, and in no checkpoint: make it a nnx.Param, or compute it from the config."
            )


def _check_unwritten(role: str, called: Callable[..., Any], params: Any, rest: Any, *others: Any) -> None:
    """Checks that a call leaves what a NNX module keeps besides parameters as it was; `called` returns it by path."""
    found: list[Any] = []

    def leaves(*args: Any) -> list[Any]:
        found[:] = called(*args)
        return [_value(each) for _, each in found]

    def numbered(state: Any) -> list[tuple[Path, int]]:
        return [(_path(path), i) for path, each in state for i, _ in enumerate(jax.tree.leaves(_value(each)))]

    trace = Trace.of(leaves, params, rest, *others)
    first = len(jax.tree.leaves(params))
    kept = dict(zip(numbered(nnx.to_flat_state(rest)), trace.jaxpr.invars[first:], strict=False))
    types = {_path(path): type(each).__name__ for path, each in found}
    for leaf, name in zip(numbered(found), trace.jaxpr.outvars, strict=True):
        if kept.get(leaf) is not name:
            raise _changing(role, f"{'.'.join(leaf[0])}, a nnx.{types[leaf[0]]}")


def _changing(role: str, what: str) -> ConfigError:
    return ConfigError(
        f"{role} keeps {what}, which a call changes. A pipeline runs many microbatches at once and would lose the "
        "change: use a module without such state, LayerNorm in place of BatchNorm, and let it sow fiddlex.flax.Loss "
        "only."
    )


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _check_leaves(role: str, leaves: Any) -> None:
    """Checks names and dtypes of parameters."""
    for path, each in leaves:
        if wrong := [name for name in path if not f"_{name}".isidentifier()]:
            raise ConfigError(
                f"{role} has {'.'.join(path)}; names are words of letters, digits and underscores: rename {wrong[0]!r}"
                ", or use no wrapper that names it so, as linen.WeightNorm does."
            )
        if each.dtype != jnp.float32:
            trained = jnp.issubdtype(each.dtype, jnp.floating)
            raise ConfigError(
                f"{role} has {'.'.join(path)} in {each.dtype}. fiddlex keeps weights in float32 and computes with them "
                "in model.dtype: "
                + (
                    "give the module param_dtype=float32 (Flax's default)."
                    if trained
                    else "no parameter is of that kind."
                )
            )


def _modes(role: str, call: Callable[..., Any]) -> Callable[[bool], dict[str, Any]]:
    """The arguments of a call that say whether it drops anything; ConfigError for one that fiddlex cannot give."""
    parameters = list(inspect.signature(call).parameters.values())[2:]  # after `self` and the input
    required = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if unknown := [name for name in required if name not in (*MODES, *["embed"] * (role == "head"))]:
        raise ConfigError(
            f"{role} is called with {', '.join(unknown)} too, which fiddlex cannot give. It gives one array, "
            "`deterministic` or `train` by name, and to the head `embed`: wrap the module in one that gives the rest."
        )
    taken = {each.name for each in parameters if each.name in MODES}
    return lambda drops: {name: drops == (name == "train") for name in taken}


def _takes(function: Callable[..., Any], name: str) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    # The metaclass of NNX modules takes any arguments, and hides those that their class takes.
    called: Any = function
    return name in inspect.signature(called.__init__ if isinstance(function, type) else called).parameters


def _takes_all(function: Callable[..., Any]) -> bool:
    """Whether a function, or a class of NNX, passes any keyword arguments on."""
    called: Any = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(called).parameters.values())


def _path(path: Sequence[Any]) -> Path:
    return tuple(str(each) for each in path)


def _at(weights: Weights, path: Path) -> Any:
    for name in path:
        weights = weights[name]
    return weights


def _nested(leaves: Any) -> Weights:
    nested: Weights = {}
    for path, leaf in leaves:
        inner = nested
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = leaf
    return nested


def flat(weights: Any, before: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of weights, or of a tree like them, with their paths, in the order of jax."""
    for name, each in sorted(weights.items()):
        if isinstance(each, dict):
            yield from flat(each, (*before, name))
        else:
            yield (*before, name), each
